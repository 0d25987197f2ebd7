"""Time a training step whose gradients are added to existing ones, as gradient accumulation does.

    PYTHONPATH=src python3 benchmarks/accumulation.py --shapes kb62,mid

For each dtype and precision, in one process, interleaved: the fused model within
`epinorm.accumulate_in_place()` and without it, eager and torch.compile. Before it is timed, each
gradient of two micro-batches is compared with float64, and with what autograd's addition makes of
it. Rows go into OUT as soon as they are measured, each in place of the one that measured the same.
The exit code is 0 only if every row was verified.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import epinorm
from epinorm.tools.accuracy import allowed_error, relative_error
from epinorm.tools.bench import fp32_precision_set
from epinorm.tools.results import commit, device_name, device_slug, put_values, today
from epinorm.tools.timing import Runner, Settings, peak_memory_mb, time_interleaved
from shapes import SHAPES, Shape

RESULTS = Path(__file__).resolve().parent / "results" / "accumulation"
SETTINGS = {
    "highest": (torch.float32, "highest"),
    "high": (torch.float32, "high"),
    "bfloat16": (torch.bfloat16, "native"),
}
KEY = ("shape", "dtype", "precision", "gpu")

Batch = tuple[Tensor, Tensor]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="kb62,mid")
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
    chosen = parser.parse_args(arguments)
    device = torch.device("cuda", 0)
    path = chosen.out / f"{device_slug(device_name(device))}.json"
    passed = True
    for name in chosen.shapes.split(","):
        for setting in chosen.settings.split(","):
            row = measure(SHAPES[name], *SETTINGS[setting], device)
            print(json.dumps(row), flush=True)
            passed &= row["verified"]
            put_values(path, row, KEY)
            torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()
    return 0 if passed else 1


def measure(
    shape: Shape, dtype: torch.dtype, precision: str, device: torch.device
) -> dict[str, Any]:
    model, (x,) = shape.make(dtype, device)
    for parameter in (model.norm.weight, model.norm.bias):
        nn.init.normal_(parameter, 1.0, 0.2)
    batches = [(torch.rand_like(x), torch.randn(shape.m, shape.n, device=device).to(dtype))
               for _ in range(2)]  # fmt: skip
    fused = epinorm.fuse(copy.deepcopy(model), strict=True)
    row: dict[str, Any] = {
        "shape": shape.name,
        "dtype": str(dtype).removeprefix("torch."),
        "precision": precision,
        "gpu": device_name(device),
        "torch": torch.__version__,
        "commit": commit(),
        "date": today(),
    }
    with fp32_precision_set(precision):
        row |= verified(model, fused, batches)
        if not row["verified"]:
            return row
        compiled = torch.compile(copy.deepcopy(model), dynamic=False)
        runners = {
            "in_place": Runner(in_place(step_of(fused, batches[0]))),
            "ours": Runner(step_of(copy.deepcopy(fused), batches[0])),
            "eager": Runner(step_of(model, batches[0])),
            "compile": Runner(step_of(compiled, batches[0])),
        }
        for name, us in time_interleaved(runners, device, Settings()).items():
            row[f"{name}_us"] = us
        for name, runner in runners.items():
            row[f"{name}_peak_mb"] = peak_memory_mb(runner, device)
    return row


def step_of(model: Callable[[Tensor], Tensor], batch: Batch) -> Callable[[], None]:
    """Forward and backward with all gradients; nothing is set to None before."""
    x, dy = batch[0].clone().requires_grad_(), batch[1]

    def step() -> None:
        model(x).backward(dy)
        x.grad = None  # an activation's gradient, made anew for each micro-batch

    return step


def in_place(step: Callable[[], None]) -> Callable[[], None]:
    def within() -> None:
        with epinorm.accumulate_in_place():
            step()

    return within


def verified(model: nn.Module, fused: nn.Module, batches: list[Batch]) -> dict[str, Any]:
    """Of each parameter's gradient after two micro-batches: in place it is no less accurate than
    added by autograd; run.py's rows verify one step. The row's errors are the weight's."""
    exact = copy.deepcopy(model).double()
    wide = [(x.double(), dy.double()) for x, dy in batches]
    truth = sums(exact, wide, False)
    usual, ours, eager = (
        sums(candidate, batches, inside)
        for candidate, inside in ((fused, False), (fused, True), (model, False))
    )
    passed, row = True, {}
    for name, right in truth.items():
        errors = [relative_error(found[name], right) for found in (usual, ours, eager)]
        passed &= errors[1] <= allowed_error(errors[0], ours[name].dtype)
        if right.dim() == 2:
            finite = [error if math.isfinite(error) else None for error in errors]
            row = {"ours_error": finite[1], "eager_error": finite[2]}
    return {"verified": bool(passed), **row}


def sums(model: nn.Module, batches: list[Batch], inside: bool) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    for batch in batches:
        step = step_of(model, batch)
        (in_place(step) if inside else step)()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


if __name__ == "__main__":
    sys.exit(main())
