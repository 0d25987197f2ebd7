"""Draw docs/precision.png and .svg from docs/precision.json (benchmarks/precision.py measures it).

python3 docs/plot_precision.py
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
NEVER = 10**6
CHOSEN = 4
GREY, BLUE, VERMILION = "#4D4D4D", "#0072B2", "#D55E00"
STYLES = {"randn": ("-", "o"), "rand": ("--", "s")}


def main() -> None:
    """Draw both pictures into this folder."""
    facts = json.loads((HERE / "precision.json").read_text())
    by_way: dict[tuple[str, str], dict[int, float]] = {}
    for row in facts["errors"]:
        by_way.setdefault((row["inputs"], row["way"]), {})[row["k"]] = row["error"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    draw_lengths(left, by_way)
    draw_intervals(right, by_way, facts["step_columns"], max(row["k"] for row in facts["errors"]))
    figure.suptitle(
        f"Error of the linear's output against float64, {facts['gpu']}", fontsize=10, color=GREY
    )
    plt.rcParams["svg.hashsalt"] = "epinorm"
    figure.savefig(HERE / "precision.png", dpi=150, metadata={"Software": None})
    figure.savefig(HERE / "precision.svg", metadata={"Date": None})


def draw_lengths(axes: plt.Axes, by_way: dict[tuple[str, str], dict[int, float]]) -> None:
    """Error against K, epinorm and eager in both settings."""
    ways = {
        "eager high": ("eager, TF32", BLUE, 0.5),
        "high": ("epinorm, high", VERMILION, 0.5),
        f"highest {NEVER}": ("epinorm, never promoted", GREY, 0.5),
        "eager highest": ("eager, highest", BLUE, 1.0),
        f"highest {CHOSEN}": ("epinorm, highest", VERMILION, 1.0),
    }
    for (inputs, way), points in by_way.items():
        if way not in ways:
            continue
        label, colour, alpha = ways[way]
        line, marker = STYLES[inputs]
        name = label if inputs == "randn" else None
        axes.loglog(
            list(points), list(points.values()), line, color=colour, alpha=alpha, marker=marker,
            markersize=4, label=name, base=2,
        )  # fmt: skip
    axes.set_yscale("log", base=10)
    axes.set_xlabel("K")
    axes.set_ylabel("relative error (solid: randn, dashed: rand)")
    axes.legend(fontsize=8, frameon=False)


def draw_intervals(
    axes: plt.Axes, by_way: dict[tuple[str, str], dict[int, float]], step: int, longest: int
) -> None:
    """Error of `highest` against the interval of promotion, by K."""
    lengths = [k for k in (1024, 8192, longest) if k in by_way["randn", "eager highest"]]
    for k, alpha in zip(dict.fromkeys(lengths), (0.35, 0.65, 1.0), strict=False):
        for inputs, (line, marker) in STYLES.items():
            points = {
                min(int(way.split()[1]) * step, k): errors[k]
                for (kind, way), errors in by_way.items()
                if kind == inputs and way.startswith("highest ")
            }
            name = f"K = {k}" if inputs == "randn" else None
            axes.plot(
                sorted(points), [points[x] for x in sorted(points)], line, marker=marker,
                color=VERMILION, alpha=alpha, markersize=4, label=name,
            )  # fmt: skip
        eager = by_way["randn", "eager highest"][k]
        axes.axhline(eager, color=BLUE, alpha=alpha, linewidth=1)
    axes.axvline(CHOSEN * step, color=GREY, linewidth=0.8, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=10)
    axes.set_xlabel("columns between promotions (dotted: taken; blue: eager)")
    axes.legend(fontsize=8, frameon=False)


if __name__ == "__main__":
    main()
