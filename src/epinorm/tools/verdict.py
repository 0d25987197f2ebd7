"""A row's outcome in words, with the spread of its runs; no ratio where noise is larger."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from epinorm.tools.results import Row
from epinorm.tools.tables import over_text

PASSES = {"forward": "Forward", "training": "Forward and backward"}
NAMES = {"eager": "eager", "compile": "torch.compile"}


def spreads(samples: Mapping[str, Sequence[float]], over: str = "ours") -> dict[str, list[float]]:
    """For every other [low, high]: in eight of ten rounds its time over that of ``over`` lies
    between.

    ``samples`` are the times of each, round by round. Compared within a round, so that what drifts
    meets both.
    """
    base = samples[over]
    if len(base) < 2:
        return {}
    found = {}
    for name, times in samples.items():
        if name != over:
            ratios = [time / own for time, own in zip(times, base, strict=True)]
            tenths = statistics.quantiles(ratios, n=10, method="inclusive")
            found[name] = [float(f"{tenths[i]:.4g}") for i in (0, -1)]
    return found


def verdict(row: Row) -> str:
    """One sentence: against eager, then against torch.compile."""
    pass_ = PASSES.get(row.pass_, row.pass_)
    if row.ours_us is None:
        return f"{pass_}: not verified, so no speed is given."
    parts = [_against(row, key) for key in NAMES if getattr(row, f"{key}_us")]
    if row.compile_reason:
        parts.append("torch.compile did not run")
    return f"{pass_}: {'; '.join(parts)}."


def _against(row: Row, key: str) -> str:
    name, ratio = NAMES[key], over_text(row, key)
    spread = (row.spreads or {}).get(key)
    if spread is None:
        return f"{ratio} {name} (without a spread)"
    runs = f" over {row.runs} runs" if key == "eager" else ""
    between = f"({spread[0]:.2f} to {spread[1]:.2f}{runs})"
    if row.is_noise(key):
        return f"not distinguishable from {name} {between}"
    if spread[1] < 1:
        return f"slower than {name}, {ratio} {between}"
    return f"{ratio} {name} {between}"
