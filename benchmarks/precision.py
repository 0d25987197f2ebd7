"""Measure the error of fp32 products against K and against the interval of promotion.

    PYTHONPATH=src python3 benchmarks/precision.py \\
        --out benchmarks/results/precision/nvidia-h200.json
    python3 docs/internals/plot_precision.py

Error is ‖z − truth‖ / ‖truth‖ of the linear's output, truth in float64, for `highest` with each
interval, `high`, and eager in both settings, on uniform and normal inputs. Each is the median of
several draws. Times of `highest` are of the kernel with the conversion of x, W prepacked.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

import epinorm
from epinorm.backends.cuda.gemm.forward import SingleForward
from epinorm.backends.cuda.plan import hopper as hopper_plan
from epinorm.backends.cuda.plan.hopper_tile import Tile
from epinorm.chain import Chain
from epinorm.precision import Precision
from epinorm.problem import Inputs, Layout, Problem
from epinorm.tools.accuracy import relative_error
from epinorm.tools.results import commit

M, N, CHANNELS = 512, 1024, 16
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
INTERVALS = (1, 2, 4, 8, 16, 32, 10**6)
"""Steps of 64 columns between two promotions; the last: never."""
STEP_COLUMNS = 64
DRAWS = 3
TIMED = (1024, 8192, 8192)
"""m, k, n of the timed shape: kb62."""
REPEATS = 30


def problem_of(m: int, k: int, n: int, precision: Precision) -> Problem:
    fp32 = torch.float32
    return Problem(
        chain=Chain.parse(f"group_norm({n // CHANNELS})|leaky_relu(0.01)|scale(2)"),
        m=m,
        k=k,
        n=n,
        dtype=fp32,
        norm_dtype=fp32,
        out_dtype=fp32,
        has_bias=False,
        has_norm_weight=True,
        has_norm_bias=True,
        training=True,
        device=torch.device("cuda", torch.cuda.current_device()),
        precision=precision,
    )


def inputs_of(problem: Problem, kind: str) -> Inputs:
    """x uniform in [0, 1) or normal; W normal over the square root of k."""
    draw = torch.rand if kind == "rand" else torch.randn
    m, k, n = problem.m, problem.k, problem.n
    vectors = (torch.randn(n, device="cuda") for _ in range(2))
    weight = torch.randn(n, k, device="cuda") / k**0.5
    return Inputs(draw(m, k, device="cuda"), weight, None, *vectors, ())


Run = Callable[[Inputs], Tensor]


def kernel(problem: Problem, fold_steps: int | None = None) -> Run:
    """The linear's output by our kernel; with the plan's tile, or folding at another interval."""

    def chosen(problem: Problem, sms: int, *rest: Any, **named: Any) -> Tile | None:
        tile = planned(problem, sms, *rest, **named)
        if tile is None or fold_steps is None:
            return tile
        return dataclasses.replace(tile, fold_steps=fold_steps)

    planned = hopper_plan.choose_tile
    with mock.patch.object(hopper_plan, "choose_tile", chosen):
        layout = Layout(problem.k, problem.k, (problem.m, problem.n))
        forward = SingleForward(problem, "hopper").bind(*layout)

    def run(inputs: Inputs) -> Tensor:
        with mock.patch.object(hopper_plan, "choose_tile", chosen):
            return forward(inputs).z

    return run


def eager(inputs: Inputs, precision: Precision) -> Tensor:
    torch.set_float32_matmul_precision(precision)
    try:
        return F.linear(inputs.x, inputs.weight)
    finally:
        torch.set_float32_matmul_precision("highest")


def errors_at(k: int, kind: str) -> dict[str, float]:
    """Median error of every way at one length, by name."""
    highest, high = (problem_of(M, k, N, p) for p in ("highest", "high"))
    ways: dict[str, Callable[[Inputs], Tensor]] = {
        "eager highest": lambda inputs: eager(inputs, "highest"),
        "eager high": lambda inputs: eager(inputs, "high"),
        "high": kernel(high),
    }
    for steps in INTERVALS:
        ways[f"highest {steps}"] = kernel(highest, steps)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for seed in range(DRAWS):
        torch.manual_seed(seed)
        inputs = inputs_of(highest, kind)
        truth = F.linear(inputs.x.double(), inputs.weight.double())
        for name, way in ways.items():
            found[name].append(relative_error(way(inputs), truth))
    return {name: statistics.median(values) for name, values in found.items()}


def times() -> Iterator[tuple[str, float]]:
    """Median microseconds of the kernel on the timed shape, by interval, interleaved."""
    problem = problem_of(*TIMED, "highest")
    inputs = inputs_of(problem, "randn")
    epinorm.prepack(inputs.weight)
    runs = {steps: kernel(problem, steps) for steps in INTERVALS}
    found: dict[int, list[float]] = {steps: [] for steps in INTERVALS}
    flush = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    for repeat in range(REPEATS + 5):
        for steps, run in runs.items():
            flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run(inputs)
            end.record()
            end.synchronize()
            if repeat >= 5:
                found[steps].append(begin.elapsed_time(end) * 1000)
    for steps, values in found.items():
        yield str(steps), statistics.median(values)


def main(out: Annotated[Path, typer.Option(help="JSON file to write")]) -> None:
    """Measure and write OUT."""
    rows = []
    for kind in ("rand", "randn"):
        for k in LENGTHS:
            for name, error in errors_at(k, kind).items():
                rows.append({"inputs": kind, "k": k, "way": name, "error": error})
            print(kind, k, {row["way"]: f"{row['error']:.2e}" for row in rows if row["k"] == k})
    result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": commit(),
        "m": M,
        "n": N,
        "step_columns": STEP_COLUMNS,
        "errors": rows,
        "timed": TIMED,
        "highest_us": dict(times()),
    }
    print(result["highest_us"])
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
