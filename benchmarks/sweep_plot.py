"""The picture of the sweep's rows (sweep.py): eager's time over ours, a dot a shape."""

from __future__ import annotations

import math
from typing import Any

from speedups import Theme

LOSS = 0.97
HOST_MATTERS_US = 30.0


def slow_on_gpu(row: dict[str, Any]) -> bool:
    """Whether a verified row is slower than it may be by the GPU's time."""
    return row["eager_us"] / row["ours_us"] < LOSS


def slow_in_a_loop(row: dict[str, Any]) -> bool:
    """The same by the time of calls in a loop, where the GPU takes long enough for it to matter."""
    return row["eager_us"] > HOST_MATTERS_US and row["eager_wall_us"] / row["ours_wall_us"] < LOSS


WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM, GAP = 800, 360, 44, 24, 64, 54, 30


def svg(rows: list[dict[str, Any]], theme: Theme) -> str:
    """Eager's time over ours against eager's, one dot a shape; both axes logarithmic."""
    dots = [
        (row["eager_us"], row["eager_us"] / row["ours_us"], row["training"])
        for row in rows
        if row["verified"]
    ]
    low, high = min(t for t, *_ in dots) / 1.2, max(t for t, *_ in dots) * 1.2
    most = max(2.0, *(ratio for _, ratio, _ in dots)) * 1.2
    least = min(0.8, *(ratio for _, ratio, _ in dots)) / 1.1
    panel = (WIDTH - LEFT - GAP - RIGHT) / 2

    def place(time: float, ratio: float, right: bool) -> tuple[float, float]:
        x = LEFT + right * (panel + GAP) + panel * math.log(time / low) / math.log(high / low)
        share = math.log(ratio / least) / math.log(most / least)
        return x, HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)

    def text(x: float, y: float, words: str, colour: str, size: int = 13, more: str = "") -> str:
        at = f'x="{x:.1f}" y="{y:.1f}"'
        return f'<text {at} font-size="{size}" fill="{colour}" {more}>{words}</text>'

    middle, bold = 'text-anchor="middle"', 'font-weight="600"'
    verified = [row for row in rows if row["verified"]]
    on_gpu, looped = (sum(map(kind, verified)) for kind in (slow_on_gpu, slow_in_a_loop))
    wrong = sum(not r["verified"] for r in rows)
    where = f"{rows[0]['gpu']}, PyTorch {rows[0]['torch']}"
    found = f"below {LOSS}: {on_gpu} by the GPU’s time, {looped} in a loop; {wrong} wrong"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="-apple-system, Segoe UI, Arial, sans-serif" role="img">',
        "<title>Random shapes: times as fast as eager</title>",
        text(8, 22, f"{len(rows)} random shapes, times as fast as eager", theme.text, 17, bold),
        text(8, HEIGHT - 6, f"{where}; {found}.", theme.muted),
    ]  # fmt: skip
    for right, title in ((False, "forward"), (True, "forward + backward")):
        x0, x1 = place(low, 1, right)[0], place(high, 1, right)[0]
        parts.append(text(x0, 46, f"{title}, against eager’s time in µs", theme.text, 14, bold))
        for tick in (0.5, 1, 2, 4, 8, 16, 32, 64):
            y = place(low, tick, right)[1]
            if least < tick < most:
                line = (
                    f'stroke="{theme.muted}" stroke-width="2"'
                    if tick == 1
                    else f'stroke="{theme.grid}"'
                )
                parts.append(f'<path d="M{x0:.1f} {y:.1f}H{x1:.1f}" {line}/>')
                parts.append(text(x0 - 6, y + 4, f"{tick:g}", theme.muted, 12, 'text-anchor="end"'))
        for tick in (10, 30, 100, 300, 1000, 3000, 10000):
            if low < tick < high:
                x = place(tick, 1, right)[0]
                parts.append(text(x, HEIGHT - BOTTOM + 18, f"{tick}", theme.muted, 12, middle))
    for at, ratio, training in dots:
        x, y = place(at, ratio, training)
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{theme.ours}" fill-opacity="0.75"/>'
        )
    return "\n".join([*parts, "</svg>\n"])
