"""Draw the pictures of these pages: boxes on a grid and arrows between them, one SVG a page.

python3 docs/internals/draw.py

Ink is the text's colour (the site puts the SVG into the page, ``inline``), or follows the reader's
light or dark setting where a page shows the file.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "drawings"
LETTER, LINE, PAD, GAP_X, GAP_Y = 7.4, 17, 11, 60, 34
STYLE = "<style>svg{color:#1f2328}@media(prefers-color-scheme:dark){svg{color:#d8dee6}}</style>"

# Boxes by (column, row), and arrows between them with what they carry.
DRAWINGS: dict[str, tuple[dict[tuple[int, int], str], list[tuple[Any, Any, str]]]] = {
    "how_it_works": (
        {
            (0, 0): "a model",
            (1, 0): "chain\nwhat is fused",
            (2, 0): "problem\nsizes, dtypes, GPU",
            (3, 0): "plan\nevery launch,\nand its reason",
            (4, 0): "executable\nkernels, bound",
            (4, 1): "y, gradients",
        },
        [
            ((0, 0), (1, 0), "capture"),
            ((1, 0), (2, 0), "call"),
            ((2, 0), (3, 0), "plan"),
            ((3, 0), (4, 0), "compile"),
            ((4, 0), (4, 1), ""),
        ],
    ),
    "capture": (
        {
            (0, 0): "model(x)\nnn.Module",
            (1, 0): "guards\nof TorchDynamo",
            (2, 0): "captured graph\nchains: one\noperation each",
            (1, 1): "Dynamo captures,\nour pass rewrites",
            (0, 1): "the model's\nown code",
        },
        [
            ((0, 0), (1, 0), "call"),
            ((1, 0), (2, 0), "hold"),
            ((1, 0), (1, 1), "do not"),
            ((1, 1), (2, 0), ""),
            ((0, 0), (0, 1), "torch.func, modes, tracers"),
        ],
    ),
    "precision": (
        {
            (0, 0): "x, fp32",
            (1, 0): "hi, lo: fp16\n2^e a row",
            (0, 1): "W, fp32",
            (1, 1): "hi, lo: fp16\n2^e a row",
            (2, 0): "hi·hi\nfolded into fp32",
            (2, 1): "hi·lo + lo·hi\na sum of their own",
            (3, 0): "z = 2^e (…)\nbias, norm, y",
            (3, 1): "range guard:\nflagged rows again,\nin plain fp32",
        },
        [
            ((0, 0), (1, 0), "split"),
            ((0, 1), (1, 1), "split"),
            ((1, 0), (2, 0), ""),
            ((1, 1), (2, 1), ""),
            ((1, 1), (2, 0), ""),
            ((1, 0), (2, 1), ""),
            ((2, 0), (3, 0), ""),
            ((2, 1), (3, 0), "2⁻¹¹"),
            ((3, 0), (3, 1), "flags"),
        ],
    ),
    "hopper": (
        {
            (0, 0): "x, W\nglobal memory",
            (1, 0): "ring of slots\nshared memory",
            (2, 0): "accumulators\nregisters",
            (0, 1): "producer:\none thread",
            (2, 1): "shuffle pass:\nbias, mean, rstd",
            (1, 1): "store pass: gamma,\nbeta, post; 16 rows\nthrough 2 KB",
            (1, 2): "y; z, mean, rstd\nin training",
        },
        [
            ((0, 0), (1, 0), "TMA"),
            ((1, 0), (2, 0), "wgmma"),
            ((0, 1), (1, 0), "empty, full"),
            ((2, 0), (2, 1), "tile done"),
            ((2, 1), (1, 1), ""),
            ((1, 1), (1, 2), "whole lines"),
        ],
    ),
    "portable": (
        {
            (0, 0): "x, W\nglobal memory",
            (1, 0): "ring of slots\nswizzled, 128 bytes",
            (2, 0): "fragments of\nthe next product",
            (3, 0): "accumulators",
            (3, 1): "the Hopper\nkernel's epilogue",
        },
        [
            ((0, 0), (1, 0), "cp.async"),
            ((1, 0), (2, 0), "ldmatrix"),
            ((2, 0), (3, 0), "mma.sync"),
            ((3, 0), (3, 1), "every 32: fold"),
        ],
    ),
    "wide_rows": (
        {
            (0, 0): "x, W\nfp32",
            (1, 0): "product by planes\nbias, pre, residual",
            (2, 0): "range guard\ncorrects z",
            (3, 0): "norm kernel\nreads z from L2\nwhere it fits",
            (3, 1): "y",
            (1, 1): "z: saved in training,\nor the residual stream",
        },
        [
            ((0, 0), (1, 0), "split"),
            ((1, 0), (2, 0), "z"),
            ((2, 0), (3, 0), ""),
            ((3, 0), (3, 1), ""),
            ((1, 0), (1, 1), ""),
        ],
    ),
    "norm_kernels": (
        {
            (0, 0): "z\nthe library's product",
            (1, 0): "team of lanes:\none row, one group",
            (2, 0): "mean; then\ncentred squares",
            (3, 0): "y, mean, rstd",
            (0, 1): "dy, z,\nmean, rstd",
            (1, 1): "the same teams:\nsums of the group",
            (2, 1): "dz; sums over a\nblock's rows",
            (3, 1): "column sums:\ndgamma, dbeta, dbias",
        },
        [
            ((0, 0), (1, 0), ""),
            ((1, 0), (2, 0), "pre"),
            ((2, 0), (3, 0), "post"),
            ((0, 1), (1, 1), ""),
            ((1, 1), (2, 1), ""),
            ((2, 1), (3, 1), "fixed order"),
        ],
    ),
    "training": (
        {
            (0, 0): "dy, z,\nmean, rstd",
            (1, 0): "norm backward",
            (2, 0): "dz: fp32, 16 bit\nor fp16 planes",
            (3, 0): "dX = dZ W",
            (3, 1): "dW = dZᵀ X",
            (1, 1): "column sums:\ndgamma, dbeta, dbias",
            (2, 1): "planes of x and W\nfrom forward",
            (4, 0): "range guard",
            (4, 1): "range guard",
        },
        [
            ((0, 0), (1, 0), ""),
            ((1, 0), (2, 0), ""),
            ((1, 0), (1, 1), ""),
            ((2, 0), (3, 0), ""),
            ((2, 0), (3, 1), ""),
            ((2, 1), (3, 1), ""),
            ((2, 1), (3, 0), ""),
            ((3, 0), (4, 0), "flags"),
            ((3, 1), (4, 1), "flags"),
        ],
    ),
    "prepack": (
        {
            (0, 0): "call",
            (1, 0): "is what was\nconverted still so?",
            (2, 0): "planes of W,\nkept",
            (1, 1): "convert again,\nin this call",
            (3, 0): "product",
        },
        [
            ((0, 0), (1, 0), "W"),
            ((1, 0), (2, 0), "yes"),
            ((1, 0), (1, 1), "no"),
            ((1, 1), (2, 0), ""),
            ((2, 0), (3, 0), ""),
        ],
    ),
    "cpu": (
        {
            (0, 0): "x\nblocks of rows",
            (1, 0): "MKL's product\non one block",
            (2, 0): "C++ kernel: 16 rows,\none a lane",
            (3, 0): "y",
            (1, 1): "W, arranged once\nfor all blocks",
        },
        [
            ((0, 0), (1, 0), "a thread each"),
            ((1, 0), (2, 0), "z, in cache"),
            ((2, 0), (3, 0), ""),
            ((1, 1), (1, 0), ""),
        ],
    ),
    "host": (
        {
            (0, 0): "fused call",
            (1, 0): "Dynamo's guards\nC++",
            (2, 0): "a call like an\nearlier one?",
            (3, 0): "addresses into\nits launches",
            (4, 0): "driver",
            (2, 1): "checks, plan,\ncompile, bind",
        },
        [
            ((0, 0), (1, 0), ""),
            ((1, 0), (2, 0), ""),
            ((2, 0), (3, 0), "yes"),
            ((2, 0), (2, 1), "no"),
            ((2, 1), (3, 0), ""),
            ((3, 0), (4, 0), "ctypes"),
        ],
    ),
}


def draw(name: str) -> str:
    """The SVG of one drawing."""
    boxes, arrows = DRAWINGS[name]
    columns, rows = (max(place[axis] for place in boxes) + 1 for axis in (0, 1))
    widths, heights = [0.0] * columns, [0.0] * rows
    for (column, row), text in boxes.items():
        lines = text.split("\n")
        widths[column] = max(widths[column], max(map(len, lines)) * LETTER + 2 * PAD)
        heights[row] = max(heights[row], len(lines) * LINE + 2 * PAD)
    gaps = [GAP_X] * columns
    for (c, r), (other, row), said in arrows:
        if row == r and abs(c - other) == 1:
            gaps[min(c, other)] = max(gaps[min(c, other)], len(said) * LETTER + 24)
    left = [1 + sum(widths[:c]) + sum(gaps[:c]) for c in range(columns)]
    top = [1 + sum(heights[:r]) + GAP_Y * r for r in range(rows)]
    width, height = left[-1] + widths[-1] + 1, top[-1] + heights[-1] + 1
    # What stands beside a vertical arrow in the last column needs room too.
    for (c, _), (other, _), said in arrows:
        if c == other:
            width = max(width, left[c] + widths[c] / 2 + len(said) * LETTER + 14)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" role="img" '
        f'style="width:100%;min-width:{min(width, 560):.0f}px;max-width:{width:.0f}px;height:auto" '
        f'aria-label="{html.escape(name.replace("_", " "))}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        STYLE,
        f'<defs><marker id="{name}-tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="currentColor"/>'
        "</marker></defs>",
    ]
    for (c, r), text in boxes.items():
        x, y, w, h = left[c], top[r], widths[c], heights[r]
        parts.append(
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{w:.0f}" height="{h:.0f}" rx="5" '
            'fill="currentColor" fill-opacity="0.05" stroke="currentColor" stroke-opacity="0.6"/>'
        )
        lines = text.split("\n")
        first = y + h / 2 - (len(lines) - 1) * LINE / 2 + 4.5
        for number, line in enumerate(lines):
            weight = ' font-weight="600"' if number == 0 else ""
            parts.append(
                f'<text x="{x + w / 2:.0f}" y="{first + number * LINE:.1f}" text-anchor="middle" '
                f'fill="currentColor"{weight}>{html.escape(line)}</text>'
            )
    for (c, r), (other, row), said in arrows:
        middle = [
            (left[a] + widths[a] / 2, top[b] + heights[b] / 2) for a, b in ((c, r), (other, row))
        ]
        (x0, y0), (x1, y1) = middle
        if c == other:
            down = row > r
            y0, y1 = top[r] + heights[r] * down, top[row] + heights[row] * (not down)
            at, anchor = (x0 + 7, (y0 + y1) / 2 + 4), "start"
        else:
            right = other > c
            x0, x1 = left[c] + widths[c] * right, left[other] + widths[other] * (not right)
            at, anchor = ((x0 + x1) / 2, (y0 + y1) / 2 - 5), "middle"
        parts.append(
            f'<path d="M{x0:.0f} {y0:.0f} {x1:.0f} {y1:.0f}" stroke="currentColor" '
            f'stroke-opacity="0.8" marker-end="url(#{name}-tip)"/>'
        )
        if said:
            parts.append(
                f'<text x="{at[0]:.0f}" y="{at[1]:.0f}" text-anchor="{anchor}" fill="currentColor" '
                f'font-size="12" font-style="italic">{html.escape(said)}</text>'
            )
    return "\n".join((*parts, "</svg>\n"))


def on_page_content(content: str, **_: Any) -> str:
    """For mkdocs: the drawings in the place of their <img>, so that they take the page's ink."""

    def inline(found: re.Match[str]) -> str:
        text = draw(found[1]).replace(STYLE, "").replace("\n", "")
        return f'<span style="display:block;overflow-x:auto">{text}</span>'

    return re.sub(r'<img [^>]*src="[^"]*drawings/(\w+)\.svg"[^>]*>', inline, content)


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    for name in DRAWINGS:
        (HERE / f"{name}.svg").write_text(draw(name), "utf-8")
