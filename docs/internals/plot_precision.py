"""Draw docs/internals/precision.png and .svg from a results file (benchmarks/precision.py measures
it).

python3 docs/internals/plot_precision.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

from epinorm.backends.cuda.plan.hopper import fold_steps

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from marked import replace_marked

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks" / "results" / "precision" / "nvidia-h200.json"
NEVER = 10**6
GREY, BLUE, VERMILION = "#4D4D4D", "#0072B2", "#D55E00"
STYLES = {"randn": ("-", "o"), "rand": ("--", "s")}


def main() -> None:
    """Draw both pictures into this folder."""
    facts = json.loads(RESULTS.read_text())
    by_way: dict[tuple[str, str], dict[int, float]] = {}
    for row in facts["errors"]:
        by_way.setdefault((row["inputs"], row["way"]), {})[row["k"]] = row["error"]
    for inputs in STYLES:
        lengths = by_way[inputs, "eager highest"]
        by_way[inputs, "chosen"] = {
            k: by_way[inputs, f"highest {fold_steps(k)}"][k] for k in lengths
        }
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    draw_lengths(left, by_way)
    draw_intervals(right, by_way, facts["step_columns"], max(row["k"] for row in facts["errors"]))
    figure.suptitle(
        f"Error of the linear's output against float64, {facts['gpu']}", fontsize=10, color=GREY
    )
    plt.rcParams["svg.hashsalt"] = "epinorm"
    figure.savefig(HERE / "precision.png", dpi=150, metadata={"Software": None})
    figure.savefig(HERE / "precision.svg", metadata={"Date": None})
    write_table(facts, by_way)


def write_table(facts: dict[str, Any], by_way: dict[tuple[str, str], dict[int, float]]) -> None:
    """Put picture and table between the markers of precision.md."""
    lengths = [k for k in (256, 1024, 4096, 8192, 32768) if k in by_way["randn", "eager highest"]]
    ways = {"eager `highest`": "eager highest", "epinorm `highest`": "chosen"}
    steps = sorted(
        int(way.split()[1]) for i, way in by_way if i == "randn" and "highest " in way[:8]
    )
    for step in steps:
        columns = f"{step * facts['step_columns']} columns" if step < NEVER else "never"
        ways[f"promoted every {columns}".replace("every never", "never")] = f"highest {step}"
    ways |= {"eager TF32": "eager high", "epinorm `high`": "high"}
    lines = [
        "![error against K and against the interval of promotion](precision.svg)",
        "",
        f"Error of z, m = {facts['m']}, n = {facts['n']}, normal inputs, {facts['gpu']}, "
        f"PyTorch {facts['torch']}, commit {facts['commit'][:7]}:",
        "",
        "| K | " + " | ".join(map(str, lengths)) + " |",
        "|---" * (len(lengths) + 1) + "|",
    ]
    for name, way in ways.items():
        cells = " | ".join(f"{by_way['randn', way][k]:.1e}" for k in lengths)
        lines.append(f"| {name} | {cells} |")
    replace_marked(HERE / "precision.md", "precision", lines)


def draw_lengths(axes: plt.Axes, by_way: dict[tuple[str, str], dict[int, float]]) -> None:
    """Error against K, epinorm and eager in both settings."""
    ways = {
        "eager high": ("eager, TF32", BLUE, 0.5),
        "high": ("epinorm, high", VERMILION, 0.5),
        f"highest {NEVER}": ("epinorm, never promoted", GREY, 0.5),
        "eager highest": ("eager, highest", BLUE, 1.0),
        "chosen": ("epinorm, highest", VERMILION, 1.0),
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
        taken = fold_steps(k) * step, by_way["randn", "chosen"][k]
        axes.plot(*taken, marker="o", markersize=11, fillstyle="none", color=GREY)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=10)
    axes.set_xlabel("columns between promotions (ringed: taken; blue: eager)")
    axes.legend(fontsize=8, frameon=False)


if __name__ == "__main__":
    main()
