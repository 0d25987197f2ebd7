"""Sides of one chain beside each other: the passes that rounding.py and constants.py time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from epinorm.tools.timing import Runner, Settings, gpu_times


def rows_of_passes(
    forward: Callable[[Any], Tensor],
    sides: dict[str, Any],
    leaves: Sequence[Tensor],
    dy: Tensor,
    settings: Settings,
) -> list[dict[str, Any]]:
    """A row for the forward pass without gradients and one for a training step.

    forward: of what ``sides`` has by name. Their GPU times, interleaved, are ``<name>_us``.
    """

    def inference(side: Any) -> None:
        with torch.no_grad():
            forward(side)

    def step(side: Any) -> None:
        torch.autograd.grad(forward(side), leaves, dy)

    passes: dict[str, Callable[[Any], None]] = {"forward": inference, "training": step}
    rows = []
    for pass_, run in passes.items():
        runners = {name: Runner(partial(run, side)) for name, side in sides.items()}
        for runner in runners.values():
            for _ in range(settings.warmup):
                runner.run()
        times = gpu_times(runners, torch.device("cuda"), settings)
        rounded = {f"{name}_us": value and round(value, 2) for name, value in times.items()}
        rows.append({"pass": pass_, **rounded})
    return rows
