"""Rows as cells: a time, a ratio, a size for people; and all columns of a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from epinorm.tools.results import Row

COMPETITORS = (
    ("ours", "epinorm"),
    ("ours_prepacked", "epinorm, prepacked"),
    ("eager", "eager"),
    ("compile", "torch.compile"),
    ("compile_autotune", "torch.compile max-autotune"),
    ("linear", "linear alone"),
)
"""Each by its key in a row, and its name."""

MARKDOWN = "{} `{}`"
"""A setting's form where the precision is a word of code."""

Cell = Callable[[Row], str]


def microseconds(value: float | None, of: float | None = None) -> str:
    """A time for people: three digits, in ms from 20 ms on, else in µs; a dash for None.

    With ``of``, in the unit of that time, so that what is compared stands in one unit.
    """
    if value is None:
        return "–"
    return (
        three_digits(value / 1000, "ms") if (of or value) >= 20_000 else three_digits(value, "µs")
    )


def three_digits(number: float, unit: str) -> str:
    """A number with its unit, without an exponent."""
    return f"{number:.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"


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


def setting(row: Any, form: str = "{} {}") -> str:
    """The dtype of a row, case or row as JSON holds it, and in this form the precision of its
    products where PyTorch has a choice."""
    of = row if isinstance(row, Mapping) else vars(row)
    dtype = str(of["dtype"]).removeprefix("torch.")
    return dtype if of["precision"] == "native" else form.format(dtype, of["precision"])


def not_run(row: Row) -> list[tuple[str, str]]:
    """The names of competitors that did not run, and why."""
    reasons = ((name, getattr(row, f"{key}_reason", None)) for key, name in COMPETITORS)
    return [(name, reason) for name, reason in reasons if reason]


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
    ratio = f" ({row.error_ratio:.2f}×)" if row.error_ratio is not None else ""
    return pair(row.ours_error, row.eager_error, ".1e") + ratio


COLUMNS: tuple[tuple[str, Cell], ...] = (
    ("shape", lambda r: r.shape),
    ("m, k → n", size),
    ("dtype", lambda r: setting(r, MARKDOWN)),
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
    ("peak MB, ours / eager", lambda r: pair(r.ours_peak_mb, r.eager_peak_mb, ".0f")),
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


def pair(ours: float | None, eager: float | None, form: str) -> str:
    """Ours and eager's in this form; a dash where one is missing."""
    return "–" if ours is None or eager is None else f"{ours:{form}} / {eager:{form}}"


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Heads and cells; a column without a value is left out, and "pass" where there is but one."""
    cells = [[cell(row) for _, cell in COLUMNS] for row in rows]
    used = [i for i in range(len(COLUMNS)) if any(line[i] != "–" for line in cells)]
    if len({row.pass_ for row in rows}) == 1:
        used.remove([head for head, _ in COLUMNS].index("pass"))
    return [COLUMNS[i][0] for i in used], [[line[i] for i in used] for line in cells]


def provenance(measured: Sequence[Any]) -> str:
    """Where, with what and when rows, or what JSON holds of them, were measured, in a line."""
    facts = [one if isinstance(one, Mapping) else vars(one) for one in measured]
    parts = [
        label + " and ".join(sorted({one[key] or "unknown" for one in facts}))
        for label, key in (("", "gpu"), ("PyTorch ", "torch"), ("commit ", "commit"), ("", "date"))
    ]
    return ", ".join(parts) + ". Medians of interleaved runs."
