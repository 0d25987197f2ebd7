"""The comparison as a picture: time per competitor, speed-up and error ratio, one line a row.

Dots on a common scale rather than bars, so that a logarithmic axis does not mislead about lengths.
Colours are from Okabe and Ito's set, which colour-blind readers tell apart; each competitor has its
own marker as well. Vermilion is epinorm everywhere.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from epinorm.tools.results import Row
from epinorm.tools.tables import setting

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Series:
    """How one competitor is drawn: the row's key without _us, its name, colour and marker."""

    key: str
    name: str
    colour: str
    marker: str


OURS = "#D55E00"

SERIES = (
    Series("linear", "linear alone", "#009E73", "|"),
    Series("copy", "copy of the same bytes", "#CC79A7", "|"),
    Series("eager", "eager", "#4D4D4D", "s"),
    Series("compile", "torch.compile", "#0072B2", "^"),
    Series("compile_autotune", "torch.compile max-autotune", "#56B4E9", "v"),
    Series("ours_prepacked", "epinorm, prepacked", OURS, "D"),
    Series("ours", "epinorm", OURS, "o"),
)

ROW_INCHES = 0.5
LABEL_SIZE = 9


def _label(row: Row) -> str:
    return f"{row.shape}\n{setting(row)}, {row.pass_}"


def figure(rows: Sequence[Row]) -> Figure:
    """Draw the verified rows; raises ValueError if there is none."""
    from matplotlib.figure import Figure  # here: it takes a third of a second to import

    rows = [row for row in rows if row.ours_us is not None]
    if not rows:
        raise ValueError("no verified row to draw")
    height = 2.3 + ROW_INCHES * len(rows)
    drawing = Figure(figsize=(13, height), layout="constrained")
    axes = drawing.subplots(1, 3, sharey=True, width_ratios=(5, 3.2, 2.2))
    _draw_times(axes[0], rows)
    _draw_speedups(axes[1], rows)
    _draw_errors(axes[2], rows)
    for axis in axes:
        axis.grid(axis="x", which="major", color="#dddddd", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.tick_params(axis="y", length=0)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
        for line in range(len(rows) - 1):
            axis.axhline(line + 0.5, color="#eeeeee", linewidth=0.8, zorder=0)
    axes[0].set_yticks(range(len(rows)), [_label(row) for row in rows], fontsize=LABEL_SIZE)
    axes[0].set_ylim(len(rows) - 0.5, -0.5)
    handles, names = axes[0].get_legend_handles_labels()
    drawing.legend(
        handles[::-1], names[::-1], loc="outside lower center", ncols=len(names), frameon=False
    )
    gpus = " and ".join(sorted({row.gpu for row in rows}))
    drawing.suptitle(f"Linear → norm → activation on {gpus}", x=0.01, ha="left", fontsize=12)
    return drawing


def _plain_log(axis: Any, values: Sequence[float]) -> None:
    """A logarithmic x axis with plain numbers at 1, 2, 5 and room for labels at both ends."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    low, high = min(values), max(values)
    axis.set_xscale("log")
    axis.set_xlim(low / 1.35, high * 1.6)
    wide = high / low > 60
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.10g}"))


def _draw_times(axis: Any, rows: Sequence[Row]) -> None:
    timed = [
        {s: t for s in SERIES if (t := getattr(row, f"{s.key}_us")) is not None} for row in rows
    ]
    every = [t for times in timed for t in times.values()]
    unit, unit_us = ("ms", 1000) if max(every) >= 20_000 and min(every) >= 500 else ("µs", 1)
    for line, times in enumerate(timed):
        ends = [end(times.values()) / unit_us for end in (min, max)]
        axis.plot(ends, [line, line], color="#cccccc", lw=1.2, zorder=1)
    for series in SERIES:
        points = [(t[series] / unit_us, line) for line, t in enumerate(timed) if series in t]
        if points:
            hollow = series.key == "ours_prepacked"
            line_like = series.marker == "|"
            axis.scatter(
                [t for t, _ in points],
                [i for _, i in points],
                s=140 if line_like else 52,
                marker=series.marker,
                c=None if hollow else series.colour,
                facecolors="white" if hollow else None,
                edgecolors=series.colour if hollow else None,
                linewidths=2.2 if line_like else 1.4 if hollow else 0,
                label=series.name,
                zorder=3 if series.key.startswith("ours") else 2,
            )
    for line, row in enumerate(rows):
        assert row.ours_us is not None
        value = row.ours_us / unit_us
        _note(axis, value, line, f"{value:.3g}" if value < 1000 else f"{value:,.0f}")
    _plain_log(axis, [time / unit_us for time in every])
    axis.set_title(f"Time, {unit} (less is better)", fontsize=10, loc="left")


def _note(axis: Any, x: float, y: float, text: str) -> None:
    """A value in epinorm's colour above its marker, where no other marker of the row lies."""
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    axis.annotate(
        text,
        (x, y),
        xytext=(0, 7),
        textcoords="offset points",
        ha="center",
        fontsize=LABEL_SIZE,
        color=OURS,
        fontweight="bold",
        bbox=behind,
        zorder=4,
    )


def _draw_speedups(axis: Any, rows: Sequence[Row]) -> None:
    series = {s.key: s for s in SERIES}
    drawn = [1.0]
    for line, row in enumerate(rows):
        for offset, key in ((-0.18, "eager"), (0.18, "compile")):
            base, ours = getattr(row, f"{key}_us"), row.ours_us
            if base is None or ours is None:
                continue
            ratio, y, of = base / ours, line + offset, series[key]
            drawn.append(ratio)
            axis.plot([1, ratio], [y, y], color=of.colour, lw=2, zorder=2)
            axis.scatter([ratio], [y], s=40, marker=of.marker, c=of.colour, zorder=3)
            axis.annotate(
                "noise" if row.is_noise(key) else f"{ratio:.2f}×",
                (ratio, y),
                xytext=(7 if ratio >= 1 else -7, 0),
                textcoords="offset points",
                ha="left" if ratio >= 1 else "right",
                va="center",
                fontsize=LABEL_SIZE - 1,
            )
    axis.axvline(1, color="#888888", linewidth=1.2, linestyle="--", zorder=1)
    if max(drawn) / min(drawn) > 8:
        _plain_log(axis, drawn)
        axis.set_xlim(min(drawn) / (1.35 if min(drawn) == 1 else 2), max(drawn) * 2)
    else:
        axis.set_xlim(min(0.8, 0.6 * min(drawn)), 1 + 1.3 * (max(max(drawn), 1.2) - 1))
    axis.set_title("Speed-up over eager, over torch.compile", fontsize=10, loc="left")


def _draw_errors(axis: Any, rows: Sequence[Row]) -> None:
    ratios = [row.error_ratio for row in rows]
    known = [r for r in ratios if r is not None]
    for line, ratio in enumerate(ratios):
        if ratio is None:
            axis.text(0.05, line, "eager is exact", va="center", fontsize=LABEL_SIZE - 1)
            continue
        axis.plot([0, ratio], [line, line], color="#cccccc", lw=1.2, zorder=1)
        axis.scatter([ratio], [line], s=52, c=OURS, zorder=3)
        _note(axis, ratio, line, f"{ratio:.2f}×")
    axis.axvline(1, color="#888888", linewidth=1.2, linestyle="--")
    axis.set_xlim(0, max([1.0, *known]) * 1.25)
    axis.set_title("Error / eager's error", fontsize=10, loc="left")


def draw(rows: Sequence[Row], kind: str) -> bytes:
    """The picture as the bytes of a ``png`` (150 dots an inch) or ``svg`` file."""
    import matplotlib

    buffer = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else {}
    # Without a salt and a date of their own, the same rows would give another file each time.
    with matplotlib.rc_context({"svg.hashsalt": "epinorm"}):
        figure(rows).savefig(buffer, format=kind, dpi=150, metadata=metadata, facecolor="white")
    return buffer.getvalue() if kind != "svg" else _same_names(buffer.getvalue())


def _same_names(svg: bytes) -> bytes:
    """Number the clip paths, which matplotlib names after addresses in memory."""
    names: dict[bytes, bytes] = {}
    return re.sub(
        rb"\bp[0-9a-f]{10}\b", lambda m: names.setdefault(m[0], b"clip%d" % len(names)), svg
    )
