"""What eager's roundings cost: ``rounding="eager"`` beside "once" in 16 bit, on one GPU.

    python benchmarks/rounding.py [--runs 60] [--out benchmarks/results/rounding/nvidia-h200.json]

The GPU's time with the L2 cache flushed and the host ahead, both interleaved; medians in µs of the
forward pass without gradients and of a training step with gradients of every tensor.
"""

from __future__ import annotations

import argparse
import json
import math
from datetime import date
from pathlib import Path
from typing import Any

import torch

import epinorm
from epinorm.tools.results import commit, device_name, write_atomic
from epinorm.tools.timing import Settings
from sides import rows_of_passes

KB62 = {"post": "leaky_relu(0.01)|scale(2)"}
CASES: dict[str, tuple[int, int, int, int, Any]] = {
    "kb62": (1024, 8192, 8192, 512, KB62),
    "kb30": (1024, 8192, 8192, 16, {"post": "hardtanh(-2,2)"}),
    "kb94": (1024, 8192, 8192, 256, {"pre": "add_channel|hardtanh(-1,1)|mish"}),
    "mid": (16384, 1024, 1024, 32, KB62),
    "skinny": (65536, 128, 128, 32, KB62),
}
"""Rows, K, N, groups and the operations; those of KernelBench's problems first."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def rows_of(name: str, dtype: str, settings: Settings) -> list[dict[str, Any]]:
    m, k, n, groups, sides = CASES[name]

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda").to(DTYPES[dtype])

    weight = draw(n, k) / math.sqrt(k)
    vectors = [draw(n) for _ in range(3 + ("pre" in sides))]
    leaves = [t.requires_grad_() for t in (draw(m, k), weight, *vectors)]
    dy = draw(m, n)

    def forward(rounding: Any) -> torch.Tensor:
        return epinorm.linear_norm(
            *leaves[:3], norm=epinorm.GroupNorm(groups), norm_weight=leaves[3],
            norm_bias=leaves[4], operands=leaves[5:], rounding=rounding, **sides,
        )  # fmt: skip

    facts = {"shape": name, "m": m, "k": k, "n": n, "groups": groups, "dtype": dtype}
    sides_of = {"once": "once", "eager": "eager"}
    return [facts | row for row in rows_of_passes(forward, sides_of, leaves, dy, settings)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    about = {"gpu": device_name(torch.device("cuda")), "torch": torch.__version__}
    about |= {"commit": commit() or "", "date": date.today().isoformat()}
    rows = []
    for name in chosen.only:
        for dtype in chosen.dtypes:
            for row in rows_of(name, dtype, Settings(runs=chosen.runs)):
                change = row["eager_us"] / row["once_us"] - 1
                print(f"{name:7} {dtype} {row['pass']:9} once {row['once_us']:8.2f} µs, "
                      f"eager {row['eager_us']:8.2f} ({change:+.1%})", flush=True)  # fmt: skip
                rows.append({**row, **about})
    if chosen.out:
        write_atomic(chosen.out, json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
