"""Time the CPU kernels against eager, torch.compile and the linear alone, and check the limits.

    PYTHONPATH=src python3 benchmarks/cpu.py [--shapes skinny,kb62_v0] [--dtypes float32] [--check]

Rows go into benchmarks/results/cpu.json, of which `make report` writes the tables of
docs/internals/cpu.md. With --check the exit code says whether the limits that the project set
itself are met (LIMITS below); without it, whether every row was verified.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from epinorm.tools.bench import bench
from epinorm.tools.kernelbench.protocol import make_case
from epinorm.tools.results import Row, merge_rows
from epinorm.tools.timing import Settings
from run import summary
from shapes import SHAPES, Shape

RESULTS = Path(__file__).resolve().parent / "results" / "cpu.json"
CPU_SHAPES = {
    shape.name: shape
    for shape in (
        SHAPES["skinny"],
        Shape("skinny_4096", 4096, 128, 128, 32, "overhead and memory"),
        Shape("square_1024", 1024, 1024, 1024, 64, "arithmetic"),
        SHAPES["kb62_v0"],
        SHAPES["layer_norm_512"],
    )
}


@dataclass(frozen=True)
class Limit:
    """How many times faster than eager and than torch.compile a row must be; 0: no limit."""

    eager: float
    compile: float = 0.0


LIMITS = {
    ("skinny", "float32", "forward"): Limit(3.0, 1.7),
    ("skinny_4096", "float32", "forward"): Limit(3.0, 1.1),
    ("square_1024", "float32", "forward"): Limit(1.3, 1.0),
    ("kb62_v0", "float32", "forward"): Limit(1.0),
    ("skinny", "float32", "training"): Limit(2.0),
    ("skinny_4096", "float32", "training"): Limit(2.0),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default=",".join(CPU_SHAPES))
    parser.add_argument("--dtypes", default="float32,bfloat16,float64")
    parser.add_argument("--passes", default="forward,training")
    parser.add_argument("--seconds", type=float, default=10.0, help="of timing for each row")
    parser.add_argument("--check", action="store_true", help="fail where a limit is missed")
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args(arguments)
    failed = missed = 0
    for name in chosen.shapes.split(","):
        for dtype in chosen.dtypes.split(","):
            for pass_ in chosen.passes.split(","):
                row = measure(CPU_SHAPES[name], getattr(torch, dtype), pass_, chosen.seconds)
                merge_rows(chosen.out, [row])
                verdict = judge(row)
                print(f"{name} {dtype} {pass_}: {summary(row)}{verdict}", flush=True)
                failed += not row.verified
                missed += "MISSED" in verdict
    print(f"{failed} rows not verified, {missed} limits missed; results in {chosen.out}")
    return int(failed > 0 or (chosen.check and missed > 0))


def measure(shape: Shape, dtype: torch.dtype, pass_: str, seconds: float) -> Row:
    torch._dynamo.reset()
    model, inputs = shape.make(dtype, "cpu")
    precision = "highest" if dtype == torch.float32 else "native"
    case = make_case(
        *(shape.name, model, inputs, dtype, precision, torch.device("cpu"), pass_ == "training"),
        strategy="auto",
    )
    row, _ = bench(case, Settings(runs=2000, cpu_runs=9, cpu_seconds=seconds))
    return row


def judge(row: Row) -> str:
    """What the row's limits are and whether it meets them; nothing where it has none."""
    limit = LIMITS.get((row.shape, row.dtype, row.pass_))
    if limit is None or row.ours_us is None or row.eager_us is None:
        return ""
    parts = [(row.eager_us / row.ours_us, limit.eager, "eager")]
    if limit.compile and row.compile_us is not None:
        parts.append((row.compile_us / row.ours_us, limit.compile, "compile"))
    words = [
        f"{ratio:.2f}x {than} (at least {least:g}: {'met' if ratio >= least else 'MISSED'})"
        for ratio, least, than in parts
    ]
    return "; " + ", ".join(words)


if __name__ == "__main__":
    sys.exit(main())
