"""What the command line shows: progress, tables and one-sentence errors."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from epinorm.tools.accuracy import Verification
from epinorm.tools.progress import Notify
from epinorm.tools.results import Row
from epinorm.tools.tables import COMPETITORS, microseconds, over_text, setting, size, times

# Without emoji: FILE.py:factory would show one.
out = Console(highlight=False, soft_wrap=True, emoji=False)
err = Console(highlight=False, soft_wrap=True, stderr=True, emoji=False)


def pass_name(training: bool) -> str:
    """What a row's pass is called in a terminal."""
    return "forward + backward" if training else "forward"


def plain_table(left: Sequence[str] = (), right: Sequence[str] = (), **options: Any) -> Table:
    """A table without lines; the heads of columns that align to the left, then of the others."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), **options)
    for head in left:
        table.add_column(head)
    for head in right:
        table.add_column(head, justify="right")
    return table


def print_json(values: Any) -> None:
    """For another program."""
    print(json.dumps(values, indent=1))


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C counts also where the interpreter drops it: the next stage of `progress` raises it.

    It drops what is raised in its own callbacks, of which imports and TorchDynamo have many, and
    would show its traceback.
    """
    main = threading.current_thread() is threading.main_thread()  # others may not set handlers
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def remember(number: int, frame: FrameType | None) -> None:
        _interrupted.set()
        signal.default_int_handler(number, frame)

    show = sys.unraisablehook

    def show_others(dropped: Any) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            show(dropped)

    _interrupted.clear()
    signal.signal(signal.SIGINT, remember)
    sys.unraisablehook = show_others
    try:
        yield
    finally:
        sys.unraisablehook = show
        signal.signal(signal.SIGINT, signal.default_int_handler)


_interrupted = threading.Event()


def _raise_if_interrupted() -> None:
    if _interrupted.is_set():
        raise KeyboardInterrupt


@contextlib.contextmanager
def progress(label: str) -> Iterator[Notify]:
    """A bar on stderr that moves with (stage, share done); on no terminal, a line a stage."""
    if not err.is_terminal:
        last = [""]

        def say(stage: str, share: float) -> None:
            _raise_if_interrupted()
            if stage != last[0]:
                last[0] = stage
                err.print(f"{label}: {stage} ...")

        yield say
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(label, total=1.0)

        def move(stage: str, share: float) -> None:
            _raise_if_interrupted()
            bar.update(task, completed=share, description=f"{label}: {stage}")

        yield move


def bench_table(rows: Sequence[Row]) -> Table:
    """One line a competitor, two columns a pass: the time, and how many times ours is faster."""
    table = plain_table([""])
    for row in rows:
        table.add_column(pass_name(row.pass_ == "training"), justify="right")
        table.add_column("epinorm is", justify="right", style="dim")
    for key, name in COMPETITORS:
        values = [getattr(row, f"{key}_us") for row in rows]
        if all(value is None for value in values):
            continue
        cells = []
        for row, value in zip(rows, values, strict=True):
            ratio = over_text(row, key) if key != "ours" and value is not None else ""
            cells += [microseconds(value, row.eager_us), ratio]
        table.add_row(name, *cells, style="bold" if key == "ours" else None)
    errors = []
    for row in rows:
        assert row.ours_error is not None
        worse = row.error_ratio
        note = "" if worse is None else f"{worse:.2f}× eager's"
        errors += [f"{row.ours_error:.1e}", note]
    table.add_row("error against float64", *errors)
    return table


def headline(row: Row) -> str:
    """What was run: chain, size, dtype, machine, strategy; two lines."""
    sizes = "" if row.m is None else f" at {size(row)}"
    how = f", strategy {row.strategy}" if row.strategy else ""
    return f"Linear → {row.chain}{sizes}\n{setting(row)} on {row.gpu}{how}"


def verification_table(verification: Verification, most: int | None = None) -> Table:
    """Every output and gradient, or the ``most`` that come closest to their limits or lie beyond:
    our error, eager's, their ratio and what is allowed."""
    numbers = ("error", "eager's error", "ratio", "allowed", "")
    table = plain_table(("tensor", "inputs"), numbers)
    comparisons = verification.comparisons
    if most is not None and len(comparisons) > most:
        closest = set(sorted(comparisons, key=lambda c: -c.strain)[:most])
        comparisons = tuple(c for c in comparisons if c in closest)
    for c in comparisons:
        verdict = "[green]ok[/]" if c.passed else f"[red]wrong[/] {c.reason or ''}".rstrip()
        values = (f"{c.ours:.2e}", f"{c.eager:.2e}", times(c.ratio), f"{c.allowed:.2e}")
        table.add_row(c.what, c.inputs, *values, verdict)
    left = len(verification.comparisons) - len(comparisons)
    if left:
        table.add_row(f"and {left} further from their limits: --details")
    return table
