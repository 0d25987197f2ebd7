"""The command line: ``epinorm bench | check | explain | tune | judge | export | info | cache``.

Exit code 0: verified (or nothing to verify and all well); 1: verification failed, or the model has
no chain to fuse; 2: bad input. What is wrong is one sentence on stderr; EPINORM_TRACEBACK=1 shows
the traceback too.
"""

from __future__ import annotations

import contextlib
import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from epinorm_cli import kernelbench, machine, options, tune  # noqa: F401  (they add commands)
from epinorm_cli.models import bench_models, bench_suite, is_whole_model
from epinorm_cli.options import (
    INTERRUPTED,
    UsageError,
    app,
    one_of,
    one_sentence,
    options_of,
    passes_of,
)

ON_A_CPU = (
    "On a CPU the product is PyTorch's own, and what is gained is what stands around it: "
    "epinorm is for GPUs."
)

SHOWN = 12
"""Lines of a verification without --details, so that both passes fit a screen."""


@app.command()
@one_sentence()
def bench(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A problem FILE.py with one chain; or a whole model: FILE.py:factory or "
            "package.module:factory (which returns a model and its inputs), or a name: bert_base, "
            "bert_base_dropout, vit_b, llama_4, mlp_2048, tdmpc2, dreamer.",
        ),
    ] = None,
    suite: Annotated[
        Path | None,
        typer.Option(
            "--kernelbench",
            metavar="FOLDER",
            help="In place of MODEL: all problems of KernelBench's level 2 that begin with a "
            "product, from your copy of it, by its rules, forward in fp32.",
        ),
    ] = None,
    problems: Annotated[
        str | None, typer.Option(help="With --kernelbench: these alone, such as 12,62.")
    ] = None,
    exported: Annotated[
        bool,
        typer.Option(
            "--exported",
            help="With --kernelbench: export each, hold the file against the rule too, time it.",
        ),
    ] = False,
    judged: Annotated[
        bool,
        typer.Option("--judged", help="As --exported, and judge each file, gradients included."),
    ] = False,
    dtype: options.Dtype = "float32",
    precision: options.Precision = None,
    device: options.Device = None,
    training: options.Training = None,
    scale: options.Scale = 1,
    strategy: options.Strategy = "auto",
    out_folder: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where results are written.")
    ] = Path("epinorm-results"),
    compile_: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Time torch.compile as well.")
    ] = True,
    autotune: Annotated[
        bool, typer.Option(help="Time torch.compile's max-autotune as well (slow to compile).")
    ] = False,
    settings: Annotated[
        str,
        typer.Option(
            help="A whole model's, in place of --dtype and --precision: of highest, high, bf16 "
            "and bf16-autocast, with commas between."
        ),
    ] = "highest",
    small: Annotated[
        bool, typer.Option("--small", help="A named model at a small size, as a CPU can do.")
    ] = False,
    runs: Annotated[
        int | None, typer.Option(min=2, help="How often each way of a whole model is timed.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Fuse MODEL, verify it, time it against PyTorch; write JSON, page and, of FILE, picture."""
    if (model is None) == (suite is None):
        raise UsageError("expected either MODEL or --kernelbench FOLDER")
    how = device, compile_, runs, out_folder, as_json
    of_file = (dtype, precision, strategy, autotune) != ("float32", None, "auto", False)
    of_whole = small or settings != "highest"
    if problems is not None and suite is None:
        raise UsageError("--problems goes with --kernelbench FOLDER")
    if (exported or judged) and suite is None:
        raise UsageError("--exported and --judged go with --kernelbench FOLDER")
    if suite is not None:
        if of_file or of_whole or training is not None:
            raise UsageError(
                "--kernelbench runs forward in fp32 at highest: of the options it takes "
                "--problems, --exported, --judged, --scale, --device, --runs, --compile, --out and "
                "--json alone"
            )
        done = bench_suite(suite, problems, scale, *how, exported=exported, judged=judged)
        raise typer.Exit(0 if done else 1)
    assert model is not None
    if is_whole_model(model):
        if of_file or scale != 1:
            raise UsageError(
                "--dtype, --precision, --scale, --strategy and --autotune are for a problem FILE; "
                f"{model} is a whole model: --settings highest, high, bf16 or bf16-autocast"
            )
        raise typer.Exit(0 if bench_models(model, settings, training, small, *how) else 1)
    if of_whole or runs is not None:
        raise UsageError(
            f"--settings, --small and --runs are for a whole model; {model} is a problem FILE: "
            f"--dtype and --precision, or {model}:Model to bench it as a whole model"
        )
    from epinorm.tools.bench import bench as run_case
    from epinorm.tools.console import pass_name, print_json, progress

    file = Path(model)
    cases = _cases(file, dtype, precision, device, training, scale, strategy)
    competitors = ["compile"] * compile_ + ["compile_autotune"] * autotune
    rows, verifications = [], []
    for case in cases:
        with progress(pass_name(case.training)) as notify:
            row, verification = run_case(case, competitors=competitors, notify=notify)
        rows.append(row)
        verifications.append(verification)
    if as_json:
        print_json([row.as_json() for row in rows])
    else:
        _show_bench(rows)
    _write_results(out_folder, file.stem, rows, show=not as_json)
    raise typer.Exit(0 if all(v.passed for v in verifications) else 1)


def _cases(
    file: Path,
    dtype: str,
    precision: str | None,
    device: str | None,
    training: bool | None,
    scale: int,
    strategy: str,
) -> list[Any]:
    from epinorm.tools.console import progress
    from epinorm.tools.kernelbench.problem import load_problem
    from epinorm.tools.kernelbench.protocol import make_case

    chosen, products, where, how = options_of(dtype, precision, device, strategy)
    with progress(file.name) as notify:
        notify("making and fusing the model", 0.3)
        problem = load_problem(file, scale)
        name = problem.name if scale == 1 else f"{problem.name} (1/{scale})"
        of = (name, *problem.make(chosen, where), chosen, products, where)
        return [make_case(*of, training, how) for training in passes_of(training)]


def _show_bench(rows: list[Any]) -> None:
    from epinorm.tools.console import bench_table, headline, out
    from epinorm.tools.tables import not_run
    from epinorm.tools.verdict import verdict

    out.print(headline(rows[0]), markup=False)
    out.print()
    out.print(bench_table(rows))
    out.print()
    for row in rows:
        for name, reason in not_run(row):
            out.print(f"{name} did not run ({row.pass_}): {reason}", markup=False)
        if row.verified:
            out.print(
                f"[green]verified[/] {row.pass_}: closest to its limit is {row.error_of}, error "
                f"{row.ours_error:.1e}, eager's {row.eager_error:.1e}"
            )
        else:
            out.print(f"[red]not verified[/] {row.pass_}, so no times: ", end="")
            out.print(row.reason, markup=False)
    out.print()
    for row in rows:
        out.print(verdict(row), style="bold", markup=False)
    if rows[0].gpu.startswith("CPU"):
        out.print(ON_A_CPU, markup=False)


def _write_results(folder: Path, name: str, rows: list[Any], show: bool) -> None:
    """Write NAME.json, with the rows of all runs in NAME.runs.json, NAME.png, .svg and .html; where
    that cannot be, print and say so."""
    from epinorm.tools.console import err, out, print_json, progress
    from epinorm.tools.page import write_report
    from epinorm.tools.results import add_run, merge_rows

    try:
        with progress("results") as notify:
            notify("writing JSON, picture and page", 0.5)
            path = folder / f"{name}.json"
            merge_rows(path, rows)
            earlier = add_run(folder / f"{name}.runs.json", rows)
            written = [path, *write_report(folder, name, rows, name, earlier)]
    except (OSError, ValueError) as error:  # ValueError: the file there holds something else
        reason = error.strerror if isinstance(error, OSError) else str(error)
        err.print(
            f"results were not written to {folder}: {reason}; name another folder with --out",
            markup=False,
        )
        if show:
            print_json([row.as_json() for row in rows])
        return
    if show:
        others = ", ".join(p.suffix for p in written[:-1])
        out.print(f"page: {written[-1]} (beside it {others})", markup=False)


@app.command()
@one_sentence()
def check(
    file: options.File,
    dtype: options.Dtype = "float32",
    precision: options.Precision = None,
    device: options.Device = None,
    training: options.Training = None,
    scale: options.Scale = 1,
    strategy: options.Strategy = "auto",
    details: options.Details = False,
    as_json: options.Json = False,
) -> None:
    """Fuse the model of FILE and compare output and all gradients with eager and float64."""
    from epinorm.tools import console
    from epinorm.tools.bench import fp32_precision_set, verify_case
    from epinorm.tools.console import out, pass_name
    from epinorm.tools.tables import setting

    cases = _cases(file, dtype, precision, device, training, scale, strategy)
    results = []
    for case in cases:
        label = pass_name(case.training)
        with console.progress(label) as notify, fp32_precision_set(case.precision):
            results.append(verify_case(case, progress=partial(notify, "verifying")))
    passed = all(result.passed for result in results)
    if as_json:
        console.print_json([r.as_json() for r in results])
    else:
        for case, result in zip(cases, results, strict=True):
            pass_, how = pass_name(case.training), setting(case)
            out.print(f"[bold]{pass_}[/], {how} on {case.device}, strategy {case.strategy}")
            out.print(console.verification_table(result, None if details else SHOWN))
            out.print()
        out.print("[green]verified[/]" if passed else "[red]not verified[/]")
    raise typer.Exit(0 if passed else 1)


@app.command()
@one_sentence()
def explain(
    file: Annotated[
        Path,
        typer.Argument(metavar="MODEL", help="A problem FILE.py, or a whole model as bench's."),
    ],
    dtype: options.Dtype = "float32",
    precision: options.Precision = None,
    device: options.Device = None,
    scale: options.Scale = 1,
    plan: Annotated[
        bool, typer.Option("--plan", help="Every launch of a training step, and why it is so.")
    ] = False,
    gpu: Annotated[
        str | None,
        typer.Option(help="As on a GPU that is not here: h200, h100, a100, l40s, b200, rtx5090."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Say which chains MODEL holds, what is fused and how, and why the rest is not."""
    from epinorm.backends.cuda.runtime.recorder import planning
    from epinorm.capture import explain as explain_model
    from epinorm.tools.bench import fp32_precision_set
    from epinorm.tools.console import out, progress
    from epinorm.tools.export.dump import GPUS
    from epinorm.tools.kernelbench.problem import load_problem
    from epinorm.tools.plans import plans_of
    from epinorm.tools.results import device_name

    if gpu is not None:
        one_of("--gpu", gpu, tuple(GPUS))
        if device is not None or plan:
            raise UsageError(
                "--gpu estimates for a GPU that need not be here: --device and --plan, which run "
                "the model, do not go with it"
            )
    chosen, products, where, _ = options_of(dtype, precision, device, "auto", gpu)
    there = contextlib.nullcontext() if gpu is None else planning(GPUS[gpu])
    with progress(file.name) as notify, fp32_precision_set(products), there:
        notify("making the model", 0.3)
        if is_whole_model(str(file)):
            from epinorm.tools.models.subject import Setting, load_subject

            setting = Setting(str(chosen), chosen, products)
            model, inputs = load_subject(str(file)).make(setting, where)
        else:
            model, inputs = load_problem(file, scale).make(chosen, where)
        notify("looking for chains", 0.6)
        explained = explain_model(model, *inputs)
    if as_json:
        print(explained.to_json())
    else:
        place = device_name(where) if gpu is None else f"{gpu}, by estimates, as it is not here"
        out.print(f"plans for {place}, {dtype}", markup=False, highlight=False)
        out.print(str(explained), markup=False)
    if plan and not as_json:
        with fp32_precision_set(products):
            plans = plans_of(model, inputs)
            if not plans:
                out.print("\nno launches of epinorm's: all of it is left to PyTorch's layers here")
            for problem, planned in plans:
                shape = f"({problem.m}, {problem.k}) → ({problem.m}, {problem.n})"
                out.print(f"\n{problem.chain}  {shape}", markup=False)
                out.print(str(planned), markup=False, soft_wrap=True)
    raise typer.Exit(0 if explained.fused else 1)


# As a user meets them, not as their modules are imported.
_ORDER = ("bench", "check", "explain", "tune", "judge", "export", "info")
app.registered_commands.sort(key=lambda command: _ORDER.index(command.callback.__name__))  # type: ignore[union-attr]


def main() -> None:
    """Run the command line and exit."""
    try:
        app()
    except SystemExit as done:
        # Python ends by SIGINT itself, whatever we return, if the interrupt passed through Python
        # code that an extension module runs (CPython's unhandled_keyboard_interrupt).
        if done.code == INTERRUPTED:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(INTERRUPTED)
        raise
