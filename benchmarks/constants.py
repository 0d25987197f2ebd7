"""What it costs that a chain's constants are arguments of its kernels, on one GPU.

    python benchmarks/constants.py [--runs 60] [--out benchmarks/results/constants/nvidia-h200.json]

Beside each chain one of the same operations whose constants are compiled in. The GPU's time with
the L2 cache flushed and the host ahead, all interleaved; medians in µs of the forward pass without
gradients and of a training step. ``again_us`` is the first competitor once more: what noise is.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from epinorm.chain.pointwise import DEFINITIONS, Pointwise, define
from epinorm.operator.functional import apply_chain
from epinorm.tools.results import commit, device_name, write_atomic
from epinorm.tools.timing import Settings
from sides import rows_of_passes

LEAKY = ("leaky_relu(0.01)", "scale(1.7)")
CASES: dict[str, tuple[int, int, int, int, tuple[str, ...]]] = {
    "kb62": (1024, 8192, 8192, 512, LEAKY),
    "kb30": (1024, 8192, 8192, 16, ("hardtanh(-2,2)",)),
    "mid": (16384, 1024, 1024, 32, LEAKY),
    "skinny": (65536, 128, 128, 32, LEAKY),
}
"""Rows, K, N, groups and the operations behind the norm."""
KINDS = {"bf16": torch.bfloat16, "high": torch.float32, "highest": torch.float32}


def compiled_in(text: str) -> str:
    """The operation under another name, to whose kernels these constants are no arguments."""
    operation = Pointwise(text.partition("(")[0], _numbers(text))
    names = operation.definition.parameters
    values = {n: c for n, c in zip(names, operation.constants, strict=True) if isinstance(c, float)}
    own = replace(
        operation.definition, name=f"{operation.name}_compiled_in", shorter_at=values,
        modules={}, functions=(), partial={},
    )  # fmt: skip
    if own.name not in DEFINITIONS:
        define(own)
    return text.replace(operation.name, own.name)


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.partition("(")[2].rstrip(")").split(",")))


def rows_of(name: str, kind: str, settings: Settings) -> list[dict[str, Any]]:
    torch.set_float32_matmul_precision("high" if kind == "high" else "highest")
    m, k, n, groups, operations = CASES[name]

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda").to(KINDS[kind])

    weight = draw(n, k) / math.sqrt(k)
    leaves = [t.requires_grad_() for t in (draw(m, k), weight, draw(n), draw(n), draw(n))]
    dy = draw(m, n)
    chains = {
        side: "|".join((f"group_norm({groups},1e-05)", *texts))
        for side, texts in (
            ("arguments", operations),
            ("compiled_in", tuple(map(compiled_in, operations))),
            ("again", operations),
        )
    }

    def forward(chain: str) -> Any:
        return apply_chain(*leaves, (), chain)

    facts = {"shape": name, "m": m, "k": k, "n": n, "groups": groups, "kind": kind}
    return [facts | row for row in rows_of_passes(forward, chains, leaves, dy, settings)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    about = {"gpu": device_name(torch.device("cuda")), "torch": torch.__version__}
    about |= {"commit": commit() or "", "date": date.today().isoformat()}
    rows: list[dict[str, Any]] = []
    for name in chosen.only:
        for kind in chosen.kinds:
            for row in rows_of(name, kind, Settings(runs=chosen.runs)):
                base = row["compiled_in_us"]
                more, noise = (row[f"{side}_us"] / base - 1 for side in ("arguments", "again"))
                print(f"{name:7} {kind:7} {row['pass']:9} compiled in {base:8.2f} µs, "
                      f"arguments {more:+.1%}, again {noise:+.1%}", flush=True)  # fmt: skip
                rows.append({**row, **about})
            if chosen.out:  # as far as it has come
                write_atomic(chosen.out, json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
