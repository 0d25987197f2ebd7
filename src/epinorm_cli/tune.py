"""The command line for the user's own shapes: ``epinorm tune``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from epinorm_cli import options
from epinorm_cli.options import Refusal, UsageError, app, one_sentence

if TYPE_CHECKING:
    from epinorm.tools.tune import Trial, Tuning


@app.command()
@one_sentence()
def tune(
    file: options.MaybeFile = None,
    dtype: options.Dtype = "float32",
    precision: options.Precision = None,
    device: options.Device = None,
    training: options.Training = None,
    scale: options.Scale = 1,
    clear: Annotated[
        bool, typer.Option("--clear", help="Forget what was measured, for every GPU.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Measure every tile for the shapes of FILE on this Hopper GPU, and remember the fastest."""
    if clear:
        _clear(file)
        return
    if file is None:
        raise UsageError("epinorm tune takes a FILE, or --clear to forget what was measured")
    from epinorm.tools.console import print_json
    from epinorm.tools.tune import why_not

    where = options.device_of(device)
    if (refusal := why_not(where)) is not None:
        raise Refusal(refusal)
    chosen, products, where, _ = options.options_of(dtype, precision, str(where), "auto")
    tunings = _tune(file, scale, chosen, products, where, training)
    if as_json:
        print_json([tuning.as_json() for tuning in tunings])
    else:
        _show(tunings)


def _clear(file: Path | None) -> None:
    from epinorm.backends.cuda.plan import tuned
    from epinorm.tools.console import out

    if file is not None:
        raise UsageError(f"--clear forgets every shape and takes no FILE, got {file}")
    removed = tuned.clear()
    out.print(f"forgot {removed} tuned shape{'' if removed == 1 else 's'}", markup=False)


def _tune(
    file: Path, scale: int, dtype: Any, precision: Any, device: Any, training: bool | None
) -> list[Tuning]:
    import torch

    from epinorm.tools.bench import fp32_precision_set
    from epinorm.tools.console import pass_name, progress
    from epinorm.tools.kernelbench.problem import load_problem
    from epinorm.tools.kernelbench.protocol import fused_copy
    from epinorm.tools.tune import recorded
    from epinorm.tools.tune import tune as run

    tunings = []
    with fp32_precision_set(precision):
        with progress(file.name) as notify:
            notify("making and fusing the model", 0.3)
            problem_file = load_problem(file, scale)
            model, inputs = problem_file.make(dtype, device)
            candidate, _ = fused_copy(problem_file.name, model, inputs)
            with recorded() as found:
                for backward in options.passes_of(training):
                    with torch.set_grad_enabled(backward):
                        candidate(*inputs)
        for problem, tensors in found:
            kind = pass_name(problem.training)
            with progress(f"{problem.m}, {problem.k} → {problem.n} {kind}") as notify:
                tuning = run(problem, tensors, notify=notify)
            if tuning is not None:
                tunings.append(tuning)
    return tunings


def _show(tunings: list[Tuning]) -> None:
    from epinorm.tools.console import out

    if not tunings:
        out.print("nothing to tune: no chain here can be computed in more than one way")
    for tuning in tunings:
        p, best = tuning.problem, tuning.best
        kind = "forward of training" if p.training else "forward"
        dtype = str(p.dtype).removeprefix("torch.")
        out.print(f"Linear → {p.chain}", markup=False)
        out.print(f"{p.m}, {p.k} → {p.n}, {dtype} {p.precision}, {kind}", markup=False)
        out.print(_table(tuning))
        before, time = tuning.before_microseconds, best.microseconds
        if best.way == tuning.before:
            out.print(f"the plan's choice is the fastest: {_name(best)}, {time:.1f} µs")
        else:
            out.print(f"[bold green]{_name(best)}[/]: {time:.1f} µs, was {before:.1f}")
        if tuning.not_kept is None:
            out.print("remembered for this GPU; `epinorm tune --clear` forgets it")
        else:
            out.print(f"not kept for later: {tuning.not_kept}", markup=False)
        out.print()


def _name(trial: Trial) -> str:
    tile = trial.tile
    if tile is None:
        return "epilogue (a library product)"
    kind = "in turn" if tile.ping_pong else "columns shared" if tile.split_columns else "together"
    more = ", TF32" if tile.tf32 else ""
    if tile.cluster_n > 1:
        more += f", {tile.cluster_n} blocks a group"
    return f"single {tile.block_m} x {tile.block_n}, {tile.stages} stages, {kind}{more}"


def _table(tuning: Tuning) -> Any:
    """The trials, the fastest first and those that do not count last."""
    from rich.markup import escape

    from epinorm.tools.console import plain_table

    table = plain_table(["way"], ("µs", "ratio", "error"))
    table.add_column("")
    ordered = sorted(tuning.trials, key=lambda t: (t.microseconds is None, t.microseconds or 0))
    for trial in ordered:
        time, error = trial.microseconds, trial.error
        note = trial.refused or ("plan's choice" if trial.way == tuning.before else "")
        table.add_row(
            _name(trial),
            "–" if time is None else f"{time:.1f}",
            "–" if time is None else f"{time / tuning.before_microseconds:.2f}",
            "–" if error is None else f"{error:.2e}",
            escape(note),
            style="bold" if trial is tuning.best else None,
        )
    return table
