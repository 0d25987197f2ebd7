"""Rows as tables: all their columns, or the six that README has room for."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from epinorm.tools.results import Row, newest

__all__ = [
    "COMPETITORS",
    "accumulation_table",
    "judged_table",
    "markdown_lines",
    "markdown_table",
    "measured_table",
    "microseconds",
    "over",
    "over_text",
    "provenance",
    "setting",
    "short_table",
    "size",
    "table",
    "times",
]

COMPETITORS = (
    ("ours", "epinorm"),
    ("ours_prepacked", "epinorm, prepacked"),
    ("eager", "eager"),
    ("compile", "torch.compile"),
    ("compile_autotune", "torch.compile max-autotune"),
    ("linear", "linear alone"),
)
"""Each by its key in a row, and its name."""

Cell = Callable[[Row], str]


def microseconds(value: float | None, of: float | None = None) -> str:
    """A time for people: three digits, in ms from 20 ms on, else in µs; a dash for None.

    With ``of``, in the unit of that time, so that what is compared stands in one unit.
    """
    if value is None:
        return "–"
    in_ms = (of or value) >= 20_000
    number = value / 1000 if in_ms else value
    return (
        f"{number:.0f} {'ms' if in_ms else 'µs'}"
        if number >= 100
        else (f"{number:.3g} {'ms' if in_ms else 'µs'}")
    )


def times(value: float | None) -> str:
    """A ratio such as a speed-up; a dash for None."""
    return "–" if value is None else f"{value:.2f}×"


def over(numerator: float | None, denominator: float | None) -> float | None:
    """Their ratio; None where one is missing or zero."""
    return numerator / denominator if numerator and denominator else None


def over_text(row: Row, key: str) -> str:
    """How many times as fast as the competitor ``key`` ours is; "noise" where runs differ more."""
    ratio = over(getattr(row, f"{key}_us"), row.ours_us)
    return "noise" if ratio is not None and row.is_noise(key) else times(ratio)


def setting(row: Row) -> str:
    """The row's dtype, with the precision of its products where PyTorch has a choice."""
    return _setting(vars(row))


def _setting(row: Mapping[str, Any]) -> str:
    return row["dtype"] + ("" if row["precision"] == "native" else f" `{row['precision']}`")


def size(row: Row) -> str:
    """m, k → n and the groups, if there are several."""
    if row.m is None:
        return "–"
    groups = f", {row.groups} groups" if row.groups and row.groups > 1 else ""
    return f"{row.m}, {row.k} → {row.n}{groups}"


def _ours(row: Row) -> str:
    return microseconds(row.ours_us, row.eager_us) if row.verified else "not verified"


def _time(key: str) -> Cell:
    return lambda row: microseconds(getattr(row, f"{key}_us"), row.eager_us)


def _errors(row: Row) -> str:
    if row.ours_error is None or row.eager_error is None:
        return "–"
    ratio = f" ({row.error_ratio:.2f}×)" if row.error_ratio is not None else ""
    return f"{row.ours_error:.1e} / {row.eager_error:.1e}{ratio}"


COLUMNS: tuple[tuple[str, Cell], ...] = (
    ("shape", lambda r: r.shape),
    ("m, k → n", size),
    ("dtype", setting),
    ("pass", lambda r: r.pass_),
    ("epinorm", _ours),
    ("prepacked", _time("ours_prepacked")),
    ("eager", _time("eager")),
    ("compile", _time("compile")),
    ("max-autotune", _time("compile_autotune")),
    ("linear alone", _time("linear")),
    ("copy", _time("copy")),
    ("on the GPU, ours / linear", lambda r: _short(r, r.ours_gpu_us, r.linear_gpu_us)),
    ("in a loop, ours / eager", lambda r: _short(r, r.ours_wall_us, r.eager_wall_us)),
    ("over eager", lambda r: over_text(r, "eager")),
    ("over compile", lambda r: over_text(r, "compile")),
    ("error, ours / eager", _errors),
    ("peak MB, ours / eager", lambda r: _pair(r.ours_peak_mb, r.eager_peak_mb)),
    ("strategy", lambda r: r.strategy or "–"),
)


SHORT_MICROSECONDS = 100.0
WAITS_FOR_HOST = 1.25
"""Times what the GPU needs, from which on a call is known to wait for the host."""


def _short(row: Row, ours: float | None, other: float | None) -> str:
    """What decides short calls, and those that waited for a slow host: the GPU's share, or the time
    from call to call in a loop."""
    if ours is None or other is None:
        return "–"
    waited = (row.ours_us or 0) > WAITS_FOR_HOST * (row.ours_gpu_us or math.inf)
    if not waited and min(row.ours_us or 0, row.linear_us or 0) > SHORT_MICROSECONDS:
        return "–"
    return f"{microseconds(ours, other)} / {microseconds(other)}"


def _pair(ours: float | None, eager: float | None) -> str:
    return "–" if ours is None or eager is None else f"{ours:.0f} / {eager:.0f}"


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Heads and cells; a column without a value is left out, and "pass" where there is but one."""
    cells = [[cell(row) for _, cell in COLUMNS] for row in rows]
    used = [i for i in range(len(COLUMNS)) if any(line[i] != "–" for line in cells)]
    if len({row.pass_ for row in rows}) == 1:
        used.remove([head for head, _ in COLUMNS].index("pass"))
    return [COLUMNS[i][0] for i in used], [[line[i] for i in used] for line in cells]


def markdown_table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table, with the machine, torch and commit below it."""
    return measured_table(*table(rows), rows) if rows else NOT_MEASURED


SHORT = ("shape", "dtype", "epinorm", "eager", "compile", "over eager")
SHORT_SHAPES = ("kb62", "mid", "skinny", "bert_out")
_SETTINGS = ("highest", "high", "native")


def short_table(rows: Sequence[Row]) -> str:
    """As ``markdown_table``, but the columns SHORT, for SHORT_SHAPES, and of several strategies the
    newest row."""
    chosen = [row for row in newest(rows) if row.shape in SHORT_SHAPES]
    chosen.sort(key=lambda r: (SHORT_SHAPES.index(r.shape), _SETTINGS.index(r.precision)))
    columns = dict(COLUMNS)
    cells = [[columns[head](row) for head in SHORT] for row in chosen]
    return measured_table(SHORT, cells, chosen)


def markdown_lines(heads: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return [*lines, *("| " + " | ".join(line) + " |" for line in cells)]


def provenance(measured: Sequence[Any]) -> str:
    """Where, with what and when rows, or what JSON holds of them, were measured, in a line."""
    facts = [one if isinstance(one, Mapping) else vars(one) for one in measured]
    parts = [
        label + " and ".join(sorted({one[key] or "unknown" for one in facts}))
        for label, key in (("", "gpu"), ("PyTorch ", "torch"), ("commit ", "commit"), ("", "date"))
    ]
    return ", ".join(parts) + ". Medians of interleaved runs."


NOT_MEASURED = "Not measured yet."


def measured_table(
    heads: Sequence[str], cells: Sequence[Sequence[str]], measured: Sequence[Any]
) -> str:
    """A Markdown table, with the machine, torch and commit of what was ``measured`` below it."""
    if not measured:
        return NOT_MEASURED
    return "\n".join([*markdown_lines(heads, cells), "", provenance(measured)])


def judged_table(folder: Path) -> str:
    """A line for each verdict's pass, with the machine, torch and commit below; a verdict that is
    not clean has no times."""
    verdicts = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    heads = ("problem", "dtype", "pass", "exported file", "eager", "over eager", "verdict")
    lines = []
    for verdict in verdicts:
        said = "clean" if verdict["clean"] else "not clean"
        timings = verdict["timings"] or [dict.fromkeys(("pass", "solution_us", "eager_us"))]
        for timing in timings:
            ours, eager = timing["solution_us"], timing["eager_us"]
            cells = [verdict["problem"], _setting(verdict), timing["pass"] or "–"]
            cells += [microseconds(ours), microseconds(eager, ours), times(over(eager, ours)), said]
            lines.append(cells)
    return measured_table(heads, lines, verdicts)


def accumulation_table(folder: Path) -> str:
    """A line for each row of ``benchmarks/accumulation.py``."""
    files = sorted(folder.glob("*.json"))
    measured = [row for path in files for row in json.loads(path.read_text())]
    heads = (
        *("shape", "dtype", "in place", "added by autograd", "eager", "compile"),
        *("over eager", "over compile", "peak MB, in place / added / eager"),
    )
    names = ("in_place", "ours", "eager", "compile")
    lines = []
    for row in measured:
        cells = [row["shape"], _setting(row)]
        if row["verified"]:
            cells += [microseconds(row[f"{name}_us"]) for name in names]
            cells += [times(over(row[f"{name}_us"], row["in_place_us"])) for name in names[2:]]
            cells.append(" / ".join(f"{row[f'{name}_peak_mb']:.0f}" for name in names[:3]))
        else:
            cells += ["not verified", *["–"] * 6]
        lines.append(cells)
    return measured_table(heads, lines, measured)
