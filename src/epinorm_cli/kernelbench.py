"""The command line for files of the KernelBench community: ``epinorm judge | export``."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from epinorm_cli import options
from epinorm_cli.options import UsageError, app, one_of, one_sentence, options_of

if TYPE_CHECKING:
    from epinorm.tools.judge.facts import Status, Verdict


LARGEST_SEED = 2**31


@app.command()
@one_sentence()
def judge(
    problem: options.File,
    solution: Annotated[
        Path, typer.Argument(metavar="SOLUTION", help="Python file that defines ModelNew.")
    ],
    dtype: options.Dtype = "float32",
    precision: options.Precision = None,
    device: options.Device = None,
    forward_only: Annotated[
        bool, typer.Option("--forward", help="Judge the forward pass alone, no gradients.")
    ] = False,
    scale: options.Scale = 1,
    timing: Annotated[
        bool, typer.Option("--timing/--no-timing", help="Time a solution that is right.")
    ] = True,
    time_limit: Annotated[
        float, typer.Option(help="Seconds that the solution's process may take in all.")
    ] = 600.0,
    seed: Annotated[
        int | None,
        typer.Option(help="Decides every input and parameter; by default a new one each time."),
    ] = None,
    details: options.Details = False,
    as_json: options.Json = False,
) -> None:
    """Judge the ModelNew of SOLUTION against the Model of FILE: right, honest, and how fast."""
    from epinorm.tools.console import print_json, progress
    from epinorm.tools.judge.facts import JudgeOptions
    from epinorm.tools.judge.judge import judge as run

    chosen, products, where, _ = options_of(dtype, precision, device, "auto")
    if not time_limit > 0:
        raise UsageError(f"--time-limit must be a number of seconds > 0, got {time_limit:g}")
    asked = JudgeOptions(
        dtype=str(chosen).removeprefix("torch."),
        precision=products,
        device=str(where),
        training=not forward_only,
        timing=timing,
        scale=scale,
        seed=secrets.randbelow(LARGEST_SEED) if seed is None else seed,
        time_limit=time_limit,
    )
    with progress(solution.name) as notify:
        verdict = run(problem, solution, asked, notify)
    if as_json:
        print_json(verdict.as_json())
    else:
        _show(verdict, details)
    raise typer.Exit(0 if verdict.clean else 1)


_MARKS = {"passed": "[green]passed[/]", "failed": "[red]failed[/]", "skipped": "[dim]skipped[/]"}


def _show(verdict: Verdict, details: bool) -> None:
    from rich.markup import escape

    from epinorm.tools.console import out, plain_table

    table = plain_table()
    for name in ("check", "", "reason"):
        table.add_column(name, overflow="fold")
    lines: dict[tuple[Status, str], list[str]] = {}  # what several checks say is said once
    passed = [check.name for check in verdict.checks if check.status == "passed"]
    for check in verdict.checks:
        if check.status == "passed" and not details:
            continue
        lines.setdefault((check.status, check.reason), []).append(check.name)
    for (status, reason), names in lines.items():
        table.add_row(", ".join(names), _MARKS[status], escape(reason))
    if passed and not details:
        table.add_row(f"{len(passed)} checks", _MARKS["passed"], ", ".join(dict.fromkeys(passed)))
    out.print(table)
    out.print()
    for note in verdict.notes:
        out.print(f"note: {verdict.solution} {note}", markup=False)
    for held in verdict.not_held:
        out.print(f"not held: {held}", markup=False)
    for timing in verdict.timings:
        out.print(f"[bold]{escape(str(timing))}[/]")
    if verdict.failures and not verdict.timings:
        out.print("not timed: what is wrong has no speed; docs/judging.md says what a check tries")
    facts = verdict.facts
    where = f"{facts['dtype']} {facts['precision']} on {facts['gpu']}, seed {facts['seed']}"
    if facts["scale"] != 1:
        where += f", sizes divided by {facts['scale']}"
    if details:
        out.print(f"SHA-256 of {verdict.solution}: {facts['solution_sha256']}", markup=False)
    if verdict.clean:
        out.print(f"[bold green]clean[/] {escape(where)}")
    else:
        count = len(verdict.failures)
        said = f"{count} check{'s' if count != 1 else ''} failed"
        out.print(f"[bold red]not clean[/]: {said}, {escape(where)}")


@app.command()
@one_sentence()
def export(
    file: options.File,
    out_file: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="Where to write the file.")
    ] = Path("model_new.py"),
    strategy: Annotated[
        str,
        typer.Option(help="single, planes (our product), epilogue (PyTorch's), auto: the fastest."),
    ] = "auto",
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            help="h200, h100, a100, l40s, b200, rtx5090; repeatable. By default h200 (serves an "
            "H100) and a100."
        ),
    ] = None,
    rounding: Annotated[
        str,
        typer.Option(help="16 bit: eager (each layer's result, as PyTorch) or once (y alone)."),
    ] = "eager",
) -> None:
    """Write FILE's Model as ModelNew: one file that needs nothing but torch and a compiler."""
    from epinorm.chain import Rounding
    from epinorm.problem import Strategy
    from epinorm.tools.console import out, progress
    from epinorm.tools.export.dump import GPUS
    from epinorm.tools.export.export import DEFAULT_GPUS, STRATEGIES
    from epinorm.tools.export.export import export as run
    from epinorm.tools.results import write_atomic

    one_of("--strategy", strategy, STRATEGIES)
    for name in gpu or ():
        one_of("--gpu", name, tuple(GPUS))
    one_of("--rounding", rounding, get_args(Rounding))
    if out_file.exists() and file.exists() and out_file.samefile(file):
        raise UsageError(f"--out {out_file} is FILE itself, which would be lost; name another file")
    with progress(file.name) as notify:
        notify("reading and writing", 0.3)
        chosen = cast("Strategy", strategy), cast("Rounding", rounding)
        exported = run(file, *chosen, tuple(gpu or DEFAULT_GPUS))
    try:
        write_atomic(out_file, exported.text)
    except OSError as error:
        raise UsageError(f"{out_file} cannot be written: {error.strerror}") from error
    out.print(f"wrote {out_file}: Linear → {exported.chain.replace('|', ' → ')}", markup=False)
    for remark in exported.remarks:
        out.print(f"note: {remark}", markup=False)
    out.print(f"judge it on a GPU: epinorm judge {file} {out_file}", markup=False)
