"""Random shapes, `auto` against eager: none may be wrong, nor slower than 0.97 times eager.

By the GPU's time; and by the time of calls in a loop where the GPU takes sweep_plot.py's
`HOST_MATTERS_US` or more. `make report` draws the rows.

    python benchmarks/sweep.py    # 200 forward, 100 training: results/sweep/<gpu>.json

A row whose output or gradients are further off than eager's allow (epinorm.tools.verify) has no
times.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from epinorm.backends.cuda.runtime.native import native, settle
from epinorm.backends.engine import plan_for
from epinorm.chain import Chain
from epinorm.chain.reference import epilogue
from epinorm.operator import calls
from epinorm.operator.functional import apply_chain
from epinorm.problem import Plan
from epinorm.tools.accuracy import Verification
from epinorm.tools.bench import model_runner
from epinorm.tools.results import commit, device_name, device_slug, write_atomic
from epinorm.tools.timing import Runner, Settings, gpu_times, wall_times
from epinorm.tools.verify import verify
from sweep_plot import LOSS, slow_in_a_loop, slow_on_gpu

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "sweep"
NORMS = ("layer_norm", "rms_norm(1e-06)", "group_norm({groups})", None)
AFTER = ("", "|silu", "|gelu", "|relu", "|leaky_relu(0.01)|scale(2)")
BEFORE = ("", "", "add_residual|", "silu|")
KINDS = ((torch.float32, "highest"), (torch.float32, "high"), (torch.bfloat16, "native"))
WIDTHS = (256, 384, 512, 768, 1000, 1024, 1536, 2048, 3072, 4096, 8192)
MOST_FLOPS = 2.0e11
DEVICE = torch.device("cuda", 0)
BEGAN = time.perf_counter()


@dataclass(frozen=True)
class Shape:
    """One random problem; ``precision``: of float32 products."""

    m: int
    k: int
    n: int
    chain: str
    dtype: str
    precision: str
    training: bool


def shapes(forward: int = 200, training: int = 100, seed: int = 7) -> list[Shape]:
    """The same for the same seed."""
    rng, found = random.Random(seed), []
    for index in range(forward + training):
        dtype, precision = rng.choice(KINDS)
        channels = rng.choice((8, 12, 16, 32, 40, 64, 100, 128, 256))
        norm = rng.choice(NORMS)
        grouped = norm is not None and "group" in norm
        n = channels * rng.randint(2, 64) if grouped else rng.choice(WIDTHS)
        k = rng.choice((64, 128, 256, 512, 768, 1000, 1024, 2048, 3072, 4096, 8192))
        m = round(2 ** rng.uniform(3, 15.5))
        while 2.0 * m * n * k > MOST_FLOPS:
            m //= 2
        text = rng.choice(BEFORE) + (norm or "identity") + rng.choice(AFTER)
        name = str(dtype).removeprefix("torch.")
        text = text.format(groups=n // channels)
        found.append(Shape(m, k, n, text, name, precision, index >= forward))
    rng.shuffle(found)  # so that a run that is cut has both
    return found


class Layers(nn.Module):
    """A shape's chain by PyTorch's layers, or ``fused``."""

    def __init__(self, shape: Shape, fused: bool) -> None:
        super().__init__()
        self.text, self.chain, self.fused = shape.chain, Chain.parse(shape.chain), fused
        dtype, n = getattr(torch, shape.dtype), shape.n

        def draw(*size: int, around: float = 0.0, width: float = 1.0) -> nn.Parameter:
            drawn = torch.randn(size, device=DEVICE) * width + around
            return nn.Parameter(drawn.to(dtype))

        self.weight, self.bias = draw(n, shape.k, width=shape.k**-0.5), draw(n)
        normed = self.chain.norm is not None
        self.norm_weight = draw(n, around=1, width=0.25) if normed else None
        self.norm_bias = draw(n, width=0.5) if normed and "rms" not in shape.chain else None

    def forward(self, x: Tensor, *operands: Tensor) -> Any:
        affine = self.norm_weight, self.norm_bias
        if self.fused:
            return apply_chain(x, self.weight, self.bias, *affine, operands, self.text)
        return epilogue(F.linear(x, self.weight, self.bias), self.chain, *affine, operands)


class Case:
    """A shape's layers and inputs, and both ways to compute it."""

    def __init__(self, shape: Shape) -> None:
        torch.set_float32_matmul_precision("high" if shape.precision == "high" else "highest")
        self.shape, dtype = shape, getattr(torch, shape.dtype)
        self.eager, self.ours = Layers(shape, False), Layers(shape, True)
        self.ours.load_state_dict(self.eager.state_dict())
        sizes = [shape.k, *(shape.n for _ in self.ours.chain.operand_kinds)]
        self.inputs = tuple(torch.randn(shape.m, width, device=DEVICE).to(dtype) for width in sizes)

    def ways(self) -> dict[str, Runner]:
        return {
            name: model_runner(getattr(self, name), self.inputs, self.shape.training)
            for name in ("ours", "eager")
        }

    def verification(self) -> Verification:
        """Of the output and, in training, of every gradient."""
        training = self.shape.training
        return verify(self.eager, self.ours, self.inputs, training=training, kinds=("randn",))


def _compile(shape: Shape) -> None:
    runner = Case(shape).ways()["ours"]
    runner.prepare()
    runner.run()
    torch.cuda.synchronize()


FIRST_CALLS = 4
"""Until a step is recorded and repeated by native code."""
WALL_US = 2000.0


def _times(ways: dict[str, Runner]) -> dict[str, float | None]:
    """By the GPU's time, and in a loop of as many calls as fit `WALL_US`."""
    for way in ways.values():
        for _ in range(FIRST_CALLS):
            way.prepare()
            way.run()
    on_gpu = gpu_times(ways, DEVICE, Settings(runs=9))
    calls = max(2, min(20, round(WALL_US / (on_gpu["eager"] or WALL_US))))
    looped = wall_times(ways, DEVICE, Settings(wall_calls=calls, wall_blocks=5))
    found = {f"{name}_us": time for name, time in on_gpu.items()}
    found |= {f"{name}_wall_us": time for name, time in looped.items()}
    return {name: time and round(time, 1) for name, time in found.items()}


def compile_all(chosen: list[Shape], processes: int) -> None:
    """By as many processes; none of them: as they are needed."""
    native()  # is built meanwhile
    if processes:
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            for _ in pool.imap_unordered(_compile, chosen, chunksize=2):
                pass
    settle()
    print(f"compiled after {time.perf_counter() - BEGAN:.0f} s", flush=True)


def measure(chosen: list[Shape]) -> Iterator[dict[str, Any]]:
    """A row of each."""
    plans: list[Plan] = []
    calls.planned.append(lambda problem, _: plans.append(plan_for(problem)))
    where = {"gpu": device_name(DEVICE), "torch": torch.__version__, "commit": commit()}
    for shape in chosen:
        case = Case(shape)
        found = case.verification()
        row: dict[str, Any] = {**asdict(shape), "verified": found.passed}
        row |= _times(case.ways()) if found.passed else {"worst": str(found.worst)}
        row |= {"strategy": plans[-1].strategy, "reason": plans[-1].reason}
        print(json.dumps(row), flush=True)
        yield row | where
    print(f"measured after {time.perf_counter() - BEGAN:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--forward", type=int, default=200)
    parser.add_argument("--training", type=int, default=100)
    parser.add_argument("--processes", type=int, default=14, help="that compile")
    parser.add_argument("--compile-only", action="store_true", help="so that a later run need not")
    parser.add_argument("--out", type=Path, help="instead of benchmarks/results/sweep/<gpu>.json")
    options = parser.parse_args()
    chosen = shapes(options.forward, options.training)
    compile_all(chosen, options.processes)
    if options.compile_only:
        return
    out = options.out or RESULTS / f"{device_slug(device_name(DEVICE))}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for row in measure(chosen):  # each is kept at once: a lent GPU may be taken away
        rows.append(row)
        write_atomic(out, "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    wrong = [row for row in rows if not row["verified"]]
    verified = [row for row in rows if row["verified"]]
    late = [row for row in verified if slow_on_gpu(row) or slow_in_a_loop(row)]
    print(f"{len(rows)} shapes: {len(wrong)} wrong, {len(late)} slower than {LOSS} x eager")
    sys.exit(bool(wrong or late))


if __name__ == "__main__":
    main()
