"""README's picture: how many times as fast as eager epinorm and torch.compile are, as SVG.

Whole models first, by the faster of ``fuse`` and ``backend="epinorm"``; then single chains.

Text stays text, so that the file is small, the same everywhere, and drawn in the reader's own font.
Colours and markers are those of ``plots``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from epinorm.tools.models.rows import COMPILED, ModelRow
from epinorm.tools.plots import OURS, SERIES
from epinorm.tools.results import Row
from readme_tables import SHORT_SHAPES, newest

MODELS = {
    "bert_base": "BERT-base, 16 × 512 tokens",
    "vit_b": "ViT-B/16, 32 images of 224 × 224",
    "llama_4": "4 layers of a Llama, 2048 and 5504 wide, 8 × 1024 tokens",
    "mlp_2048": "4 × (Linear 2048 → 2048, ReLU), 4096 rows",
    "tdmpc2": "4 × (Linear 512 → 512, LayerNorm, Mish), 1280 rows",
    "dreamer": "5 × (Linear 1024 → 1024, RMSNorm, SiLU), 1024 rows",
}
"""The whole models that are drawn where they were measured, in this order."""

PICTURED = SHORT_SHAPES
"""The shapes that are drawn where they were measured, in this order; docs/results.md has all."""

SETTINGS = {
    ("float32", "highest"): "fp32",
    ("float32", "high"): "TF32",
    ("bfloat16", "native"): "bf16",
    ("float32", "autocast"): "autocast",
}
PASSES = {"forward": "Inference: forward", "training": "Training: forward + backward"}
NORMS = {"group_norm": "GroupNorm", "layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}

WIDTH = 800
"""Pixels, as wide as GitHub shows it; the sizes below are pixels too."""
LABELS_END, PANEL, GAP = 82, 332, 26
TOP, HEADING, LINE, BOTTOM = 104, 30, 20, 62
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)


@dataclass(frozen=True)
class Theme:
    """The colours of a picture on GitHub's page, whose own background (``page``) shows through."""

    page: str
    text: str
    muted: str
    grid: str
    ours: str
    compile: str


_COMPILE = next(series.colour for series in SERIES if series.key == "compile")
_BRIGHT = next(series.colour for series in SERIES if series.key == "compile_autotune")

THEMES = {
    "light": Theme("#ffffff", "#1f2328", "#59636e", "#d1d9e0", OURS, _COMPILE),
    "dark": Theme("#0d1117", "#f0f6fc", "#9198a1", "#3d444d", "#F0803C", _BRIGHT),
}


def speedup_svg(rows: Iterable[Row], theme: Theme, models: Iterable[ModelRow] = ()) -> str:
    """The picture of the verified rows of MODELS and PICTURED; raises ValueError if there is none.

    Of rows of several strategies the newest is drawn.
    """
    whole = [row for model in models if model.model in MODELS and (row := model.as_row()).speedup]
    chains = [r for r in newest(rows) if r.shape in PICTURED and r.speedup and r.pass_ in PASSES]
    groups = [[r for r in whole if r.shape == name] for name in MODELS]
    groups += [[r for r in chains if r.shape == name] for name in PICTURED]
    drawn = [*whole, *chains]
    if not drawn:
        raise ValueError(f"no verified row of {', '.join(PICTURED)} to draw")
    axis = _Axis.over([ratio for row in drawn for ratio in _ratios(row)])
    body, y = [], float(TOP)
    for of_shape in groups:
        if of_shape:
            body += _heading(of_shape[0], y + HEADING - 9, theme)
            y += HEADING
            lines = [
                (name, line)
                for setting, name in SETTINGS.items()
                if (line := [r for r in of_shape if (r.dtype, r.precision) == setting])
            ]
            body += _grid(y, LINE * len(lines), axis, theme)
            for name, line in lines:
                body += _line(line, name, y + LINE / 2, axis, theme)
                y += LINE
    height = round(y + BOTTOM)
    return "\n".join([*_opening(height, drawn), *_frame(drawn, y, axis, theme), *body, "</svg>\n"])


def _ratios(row: Row) -> list[float]:
    """Eager's time over ours, and over torch.compile's where it ran."""
    assert row.eager_us
    assert row.ours_us
    times = (row.ours_us, row.compile_us)
    return [row.eager_us / time for time in times if time]


@dataclass(frozen=True)
class _Axis:
    """A logarithmic axis: ratios from ``low`` to ``high`` on PANEL pixels."""

    low: float
    high: float

    @staticmethod
    def over(ratios: Sequence[float]) -> _Axis:
        """Room for every ratio, and for its number at either side."""
        return _Axis(min(1.0, *ratios) / 1.9, max(2.0, *ratios) * 2.0)

    def x(self, left: float, ratio: float) -> float:
        return left + PANEL * math.log(ratio / self.low) / math.log(self.high / self.low)

    @property
    def ticks(self) -> list[float]:
        return [t for t in TICKS if self.low * 1.1 < t < self.high / 1.1]


def _panels() -> dict[str, float]:
    """Each pass and where its panel begins."""
    left = LABELS_END + 14
    return {pass_: left + i * (PANEL + GAP) for i, pass_ in enumerate(PASSES)}


def _text(x: float, y: float, text: str, colour: str, size: int = 14, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" {more}>{text}</text>'


_END, _MIDDLE, _BOLD = 'text-anchor="end"', 'text-anchor="middle"', 'font-weight="600"'


def _opening(height: int, rows: Sequence[Row]) -> list[str]:
    fonts = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
    said = "; ".join(
        f"{r.shape} {SETTINGS.get((r.dtype, r.precision), r.dtype)} {r.pass_} "
        + " against ".join(f"{ratio:.2f}" for ratio in _ratios(r))
        for r in rows
    )
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="{fonts}" role="img">',
        "<title>Times as fast as eager: epinorm and torch.compile</title>",
        f"<desc>{escape(said)}</desc>",
    ]


def _frame(rows: Sequence[Row], bottom: float, axis: _Axis, theme: Theme) -> list[str]:
    """Title, legend, both panels' titles and axes, and where it was measured."""
    parts = [
        _text(8, 24, "How many times as fast as eager PyTorch", theme.text, 18, _BOLD),
        f'<circle cx="16" cy="46" r="6" fill="{theme.ours}"/>',
        _text(28, 51, "epinorm", theme.text),
        _triangle(108, 46, theme.compile),
        _text(120, 51, "torch.compile", theme.text),
        _text(
            228,
            51,
            "(logarithmic scale; the line at 1 is eager; no number: within noise of it)",
            theme.muted,
        ),
    ]
    for pass_, left in _panels().items():
        parts.append(_text(left, 80, PASSES[pass_], theme.text, 15, _BOLD))
        for tick in axis.ticks:
            for y in (TOP - 4, bottom + 18):
                parts.append(_text(axis.x(left, tick), y, f"{tick:g}", theme.muted, 13, _MIDDLE))
    gpus = " and ".join(sorted({row.gpu for row in rows}))
    torches = " and ".join(sorted({row.torch for row in rows}))
    dates = sorted({row.date for row in rows})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    where = f"{gpus}, PyTorch {torches}, {when}; medians, verified against float64."
    return [*parts, _text(8, bottom + 46, escape(where), theme.muted, 13)]


def _grid(y: float, height: float, axis: _Axis, theme: Theme) -> list[str]:
    """The ticks' lines through one shape's lines, that of eager the strongest."""
    return [
        f'<path d="M{axis.x(left, tick):.1f} {y:.1f}v{height}" '
        + (
            f'stroke="{theme.muted}" stroke-width="2"/>'
            if tick == 1
            else f'stroke="{theme.grid}"/>'
        )
        for left in _panels().values()
        for tick in axis.ticks
    ]


def _heading(row: Row, y: float, theme: Theme) -> list[str]:
    norm = NORMS.get(row.norm or "", row.norm or "")
    channels = row.n // row.groups if row.n and row.groups else row.n
    wide = f"groups of {channels} channels" if (row.groups or 1) > 1 else f"{channels} channels"
    chain = f"{row.m} rows, {row.k} → {row.n}, {norm}, {wide}"
    sizes = MODELS[row.shape] if row.m is None else chain
    return [
        f'<text x="8" y="{y:.1f}" font-size="14" fill="{theme.text}"><tspan {_BOLD}>'
        f'{escape(row.shape)}</tspan> <tspan fill="{theme.muted}" dx="6">{sizes}</tspan></text>'
    ]


def _line(rows: Sequence[Row], name: str, y: float, axis: _Axis, theme: Theme) -> list[str]:
    """One setting of a shape: in each panel both markers, joined, with their numbers outside, but
    for what noise does not tell from eager."""
    parts = [_text(LABELS_END, y + 5, name, theme.text, 14, _END)]
    for pass_, left in _panels().items():
        for row in (row for row in rows if row.pass_ == pass_):
            ours, *others = _ratios(row)
            noise = row.is_noise("eager"), row.is_noise(COMPILED)
            x = axis.x(left, ours)
            for other in others:
                x_other = axis.x(left, other)
                parts += [
                    f'<path d="M{x:.1f} {y:.1f}H{x_other:.1f}" stroke="{theme.muted}"/>',
                    _triangle(x_other, y, theme.compile),
                    *(
                        []
                        if noise[1]
                        else [_number(x_other, y, other, theme.compile, other > ours, theme)]
                    ),
                ]
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="{theme.ours}"/>')
            right = not others or ours >= others[0]
            if not noise[0]:
                parts.append(_number(x, y, ours, theme.ours, right, theme, _BOLD))
    return parts


def _number(
    x: float, y: float, ratio: float, colour: str, right: bool, theme: Theme, more: str = ""
) -> str:
    text = f"{ratio:.0f}×" if ratio >= 9.95 else f"{ratio:.1f}×"
    # A rim in the page's colour, so that no line of the grid runs through a digit.
    rim = f'stroke="{theme.page}" stroke-width="4" paint-order="stroke"'
    more = " ".join([rim, *([more] if more else []), *([] if right else [_END])])
    return _text(x + (11 if right else -11), y + 5, text, colour, 13, more)


def _triangle(x: float, y: float, colour: str) -> str:
    return f'<path d="M{x - 6.5:.1f} {y + 5:.1f}h13l-6.5 -11z" fill="{colour}"/>'
