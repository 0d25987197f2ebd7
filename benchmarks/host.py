"""Host time of small blocks, from call to call in a loop: eager, fuse, Inductor, backend="epinorm".

    python benchmarks/host.py [--blocks 1 4] [--out rows.json]

Blocks so small that the host decides. Each setting's runs are interleaved; a row has medians of the
best runs in µs a call: forward without gradients, and a training step (forward and backward).
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn

import epinorm
from epinorm.backends.cuda.runtime.replay import settle
from epinorm.capture.backend import compile_graph

ROUNDS, CALLS, WARM_UP = 15, 100, 8

# name: rows, features in and out (equal for several blocks), groups (None: LayerNorm)
SHAPES: dict[str, tuple[int, int, int, int | None]] = {
    "blocks_512": (1024, 512, 512, 32),
    "blocks_512_layer_norm": (1024, 512, 512, None),
    "blocks_64": (32, 64, 64, 4),
    "kb62_v0": (128, 512, 256, 8),
}


def blocks(count: int, k: int, n: int, groups: int | None) -> nn.Sequential:
    def norm() -> nn.Module:
        return nn.LayerNorm(n) if groups is None else nn.GroupNorm(groups, n)

    layers = [(nn.Linear(k, n), norm(), nn.LeakyReLU()) for _ in range(count)]
    return nn.Sequential(*(layer for block in layers for layer in block))


def competitors(model: nn.Module, names: list[str]) -> dict[str, Callable[..., Any]]:
    known = {
        "eager": model,
        "fuse": epinorm.fuse(copy.deepcopy(model)),
        "fuse_reference": epinorm.fuse(copy.deepcopy(model), strategy="reference"),
        "inductor": torch.compile(copy.deepcopy(model)),
        "backend": torch.compile(copy.deepcopy(model), backend=compile_graph),
        "inductor_graphs": torch.compile(copy.deepcopy(model), mode="reduce-overhead"),
        "backend_graphs": torch.compile(
            copy.deepcopy(model), backend=compile_graph, mode="reduce-overhead"
        ),
    }
    return {name: run for name, run in known.items() if name in names or not names}


def wall_times(
    runs: dict[str, Callable[[], Any]], synchronize: Callable[[], Any]
) -> dict[str, Any]:
    found: dict[str, list[float]] = {name: [] for name in runs}
    if torch.cuda.is_available():
        settle()
    for run in runs.values():
        for _ in range(WARM_UP):
            run()
    for _ in range(ROUNDS):
        for name, run in runs.items():
            synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                run()
            synchronize()
            found[name].append((time.perf_counter() - start) / CALLS * 1e6)
    return {name: round(median(sorted(times)[: ROUNDS // 2]), 2) for name, times in found.items()}


def rows(
    count: int, name: str, dtype: torch.dtype, device: torch.device, names: list[str]
) -> list[dict[str, Any]]:
    torch._dynamo.reset()
    m, k, n, groups = SHAPES[name]
    model = blocks(count, k, n, groups).to(device, dtype)
    x = torch.randn(m, k, device=device, dtype=dtype)
    dy = torch.randn(m, n, device=device, dtype=dtype)
    made = competitors(model, names)
    if device.type != "cuda":
        made = {key: run for key, run in made.items() if not key.endswith("_graphs")}

    def forward(run: Callable[..., Any]) -> Callable[[], Any]:
        return torch.no_grad()(lambda: run(x))

    def step(run: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: run(x).backward(dy)

    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    facts = {"shape": name, "blocks": count, "dtype": str(dtype).removeprefix("torch.")}
    return [
        {**facts, "pass": what, **wall_times({k: way(run) for k, run in made.items()}, synchronize)}
        for what, way in (("forward", forward), ("step", step))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--only", nargs="+", default=[], help="of the competitors")
    parser.add_argument("--out")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = []
    for name in given.shapes:
        for dtype in given.dtypes:
            for count in given.blocks:
                for row in rows(count, name, getattr(torch, dtype), device, given.only):
                    print(json.dumps(row), flush=True)
                    found.append(row)
    if given.out:
        with open(given.out, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
