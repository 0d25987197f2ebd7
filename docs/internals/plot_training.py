"""Draw docs/internals/training.png and .svg from a training run, and put its table into
training.md.

python3 docs/internals/plot_training.py        (examples/train_blocks.py --out writes the run)
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from marked import replace_marked

HERE = Path(__file__).parent
RUN = HERE.parents[1] / "benchmarks" / "results" / "training" / "nvidia-h200.json"
GREY, BLUE, VERMILION = "#4D4D4D", "#0072B2", "#D55E00"
NAMES = {"highest": "fp32, highest", "high": "fp32, high (TF32)", "bfloat16": "bf16 autocast"}
LAST = 10

sys.path.insert(0, str(HERE.parents[1] / "examples"))
from train_blocks import Run, spread  # noqa: E402 (it lies in a folder of its own)


def main() -> None:
    """Draw both pictures into this folder."""
    facts = json.loads(RUN.read_text())
    runs = [Run(**run) for run in facts["runs"]]
    by_precision = {p: [r for r in runs if r.precision == p] for p in NAMES}
    by_precision = {p: found for p, found in by_precision.items() if found}
    draw(facts, by_precision)
    write_table(facts, by_precision)


def draw(facts: dict[str, Any], by_precision: dict[str, list[Run]]) -> None:
    """Loss above, distance from eager below; a column a precision."""
    count = len(by_precision)
    figure, axes = plt.subplots(
        2, count, figsize=(3.6 * count + 0.6, 5.4), sharex=True, sharey="row", layout="constrained"
    )
    for column, (precision, found) in enumerate(by_precision.items()):
        draw_losses(axes[0][column], found, facts["noise"] ** 2)
        draw_distances(axes[1][column], found)
        axes[0][column].set_title(NAMES[precision], fontsize=10)
        axes[1][column].set_xlabel("step")
        for row in range(2):
            axes[row][column].set_yscale("log")
            axes[row][column].grid(axis="y", color="#dddddd", linewidth=0.8)
            axes[row][column].spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("loss")
    axes[1][0].set_ylabel("|loss / eager's − 1|")
    for row in range(2):
        axes[row][0].legend(fontsize=8, frameon=False)
    figure.suptitle(f"The same training run by eager and by epinorm, {facts['gpu']}", fontsize=10)
    plt.rcParams["svg.hashsalt"] = "epinorm"
    figure.savefig(HERE / "training.png", dpi=150, metadata={"Software": None})
    figure.savefig(HERE / "training.svg", metadata={"Date": None})


def draw_losses(axis: plt.Axes, found: list[Run], floor: float) -> None:
    """Eager's curve wide, epinorm's dashed on top of it."""
    eager, ours = found[:2]
    axis.plot(eager.losses, color=BLUE, linewidth=2.5, alpha=0.5, label="eager")
    axis.plot(ours.losses, color=VERMILION, linewidth=1, linestyle="--", label="epinorm")
    axis.axhline(floor, color=GREY, linewidth=0.8, linestyle=":", label="best possible")


def draw_distances(axis: plt.Axes, found: list[Run]) -> None:
    """Epinorm and the reordered runs, each against eager; single steps cross zero."""
    eager, ours, *reordered = found
    for index, run in enumerate(reordered):
        name = "eager, reordered" if index == 0 else None
        axis.plot(*distances(run, eager), color=BLUE, linewidth=1, alpha=0.6, label=name)
    axis.plot(*distances(ours, eager), color=VERMILION, linewidth=1.5, label="epinorm")


def distances(run: Run, eager: Run, window: int = 10) -> tuple[list[int], list[float]]:
    """Steps, and the median over a window of steps of how far the losses are apart."""
    differences = [abs(a / b - 1) for a, b in zip(run.losses, eager.losses, strict=True)]
    steps = list(range(0, len(differences) - window + 1, window))
    return [s + window // 2 for s in steps], [
        statistics.median(differences[s : s + window]) for s in steps
    ]


def write_table(facts: dict[str, Any], by_precision: dict[str, list[Run]]) -> None:
    """Put picture and table between the markers of training.md."""
    config = facts["config"]
    lines = [
        "![loss curves of eager and epinorm, and their distance](training.svg)",
        "",
        f"{config['depth']} blocks of {config['width']} channels in groups of "
        f"{config['channels']}, batches of {config['batch']}, {config['steps']} steps of AdamW, "
        f"{facts['gpu']}, PyTorch {facts['torch']}, commit {facts['commit'][:7]}:",
        "",
        "| precision | eager, s | epinorm, s | last losses, eager and epinorm | epinorm "
        "from eager | eager from itself |",
        "|---|---|---|---|---|---|",
    ]
    for precision, found in by_precision.items():
        eager, ours = found[:2]
        last = [f"{statistics.fmean(run.losses[-LAST:]):.4f}" for run in (eager, ours)]
        distance, itself = spread(found)
        lines.append(
            f"| {NAMES[precision]} | {eager.seconds:.2f} | {ours.seconds:.2f} "
            f"({eager.seconds / ours.seconds:.2f}×) | {last[0]}, {last[1]} | {distance:.1e} | "
            f"{itself:.1e} |"
        )
    replace_marked(HERE / "training.md", "training", lines)


if __name__ == "__main__":
    main()
