"""What the second result costs: y and what enters the norm, against y alone, on one GPU.

    python benchmarks/sums.py [--runs 40] [--forward] [--out rows.json]

GPU time by events with the L2 cache flushed and the host ahead, all competitors interleaved; a row
has medians in µs: forward without gradients (one, two), a training step with gradients of every
result (train_one, train_two), eager and torch.compile computing both, and the linear alone.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from epinorm.operator.functional import apply_chain
from epinorm.tools.results import commit, today

SHAPES = {"bert_out": (16384, 768, 768), "bert_ffn": (16384, 3072, 768)}
KINDS = {"highest": torch.float32, "high": torch.float32, "bf16": torch.bfloat16}
ONE = "add_residual|layer_norm(1e-05)"
TWO = ONE + "|returns(sum)"
FLUSHED_BYTES = 256 * 2**20
HOST_AHEAD_CYCLES = 400_000
WARM_UP = 4


def medians(competitors: dict[str, Callable[[], Any]], runs: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in competitors}
    cache = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    for i in range(WARM_UP + runs):
        for name, run in competitors.items():
            cache.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(HOST_AHEAD_CYCLES)
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            if i >= WARM_UP:
                times[name].append(start.elapsed_time(end) * 1e3)
    return {name: round(median(found), 1) for name, found in times.items()}


def layers(
    x: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, residual: Tensor
) -> tuple[Tensor, Tensor]:
    total = F.linear(x, weight, bias) + residual
    return F.layer_norm(total, total.shape[-1:], gamma, beta), total


def fused(chain: str) -> Callable[..., Any]:
    return lambda *t: apply_chain(*t[:5], t[5:], chain)


def row(name: str, kind: str, runs: int, training: bool) -> dict[str, Any]:
    """One shape in one precision; each competitor's times under its name."""
    torch.set_float32_matmul_precision("high" if kind == "high" else "highest")
    torch._dynamo.reset()
    m, k, n = SHAPES[name]

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=KINDS[kind])

    given = [draw(m, k), draw(n, k) / math.sqrt(k), draw(n), draw(n), draw(n), draw(m, n)]
    leaves = [t.detach().requires_grad_() for t in given]
    gradients = draw(m, n), draw(m, n)
    functions = {"one": fused(ONE), "two": fused(TWO), "eager": layers}
    functions["compile"] = torch.compile(layers)

    def step(function: Callable[..., Any]) -> Callable[[], Any]:
        def run() -> None:
            results = function(*leaves)
            results = results if isinstance(results, tuple) else (results,)
            torch.autograd.grad(results, leaves, gradients[: len(results)])

        return run

    forward: dict[str, Callable[[], Any]] = {
        key: lambda function=function: function(*given) for key, function in functions.items()
    }
    with torch.no_grad():
        found = medians(forward | {"linear": lambda: F.linear(*given[:3])}, runs)
    if not training:
        return {"shape": name, "kind": kind, **found}
    trained = medians({f"train_{key}": step(f) for key, f in functions.items()}, runs)
    return {"shape": name, "kind": kind, **found, **trained}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--out")
    parser.add_argument("--forward", action="store_true", help="no training steps")
    options = parser.parse_args()
    rows = []
    for name in SHAPES:
        for kind in KINDS:
            rows.append(row(name, kind, options.runs, not options.forward))
            print(json.dumps(rows[-1]), flush=True)
    if options.out:
        facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        facts |= {"commit": commit(), "date": today()}
        with open(options.out, "w") as file:
            json.dump([row | facts for row in rows], file, indent=1)


if __name__ == "__main__":
    main()
