"""Where a model's derivative jumps: elements too close to a kink to be compared in a gradient.

LeakyReLU's derivative jumps at 0. Where the truth is 1e-9 there and eager's rounding gives -1e-9,
eager's gradient is off by all of that element's share: one such element in a million makes an error
of 4e-4 in fp32, a thousand times that of all roundings together. Which side a result falls on is
luck, so the gradient that backward starts from is set to zero at these elements, for truth, eager
and candidate alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from epinorm.chain.pointwise import of_call

MARGIN = 8.0
"""Elements closer to a kink than this many times eager's typical error there are left out."""


def _kinks(func: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> tuple[float, ...]:
    """Where the derivative of one ATen operation jumps."""
    if func.overloadpacket is torch.ops.aten.abs:
        return (0.0,)
    operation = of_call(func, arguments, named)
    return () if operation is None else operation.kinks


class _Recorder(TorchDispatchMode):
    """Note, for each operation with kinks, its input's distance from the nearest over its RMS."""

    def __init__(self) -> None:
        super().__init__()
        self.distances: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kinks = _kinks(func, args, kwargs or {})
        if kinks and isinstance(args[0], Tensor):
            x = args[0].detach().double()
            scale = torch.linalg.vector_norm(x) / max(1, x.numel()) ** 0.5
            self.distances += [(x - kink).abs() / scale for kink in kinks]
        return func(*args, **(kwargs or {}))


def _distances(exact_model: nn.Module, inputs: Sequence[Any]) -> list[Tensor]:
    with torch.no_grad(), _Recorder() as recorder:
        exact_model(*inputs)
    return recorder.distances


def away_from_kinks(
    exact_model: nn.Module, inputs: Sequence[Any], shapes: Sequence[torch.Size], error: float
) -> list[Tensor | None]:
    """For each output shape, True where no kink is near; None where every element is kept.

    ``exact_model`` and ``inputs`` are in float64; ``error`` is eager's relative error. Looks at the
    operations whose input has the output's shape. A kink before the norm is not taken out: the
    norm spreads its gradient over the group.
    """
    distances = _distances(exact_model, inputs)
    kept: list[Tensor | None] = []
    for shape in shapes:
        near = [d < MARGIN * error for d in distances if d.shape == shape]
        kept.append(~torch.stack(near).any(0) if near else None)
    return kept


MOST_LEFT_OUT = 0.5
"""Of an output's rows; with more of them near a kink eager's error is no matter of luck."""


def rows_away_from_kinks(
    exact_model: nn.Module, inputs: Sequence[Any], shapes: Sequence[torch.Size], error: float
) -> list[Tensor | None]:
    """As ``away_from_kinks`` for a model of many layers, whose rows do not mix: for each output
    shape (..., C), False in rows where any operation of as many rows comes near a kink."""
    distances = _distances(exact_model, inputs)
    kept: list[Tensor | None] = []
    for shape in shapes:
        rows = [d for d in distances if d.shape[:-1] == shape[:-1]]
        near = [(d < MARGIN * error).any(-1, keepdim=True) for d in rows]
        away = ~torch.stack(near).any(0) if near else None
        few = away is not None and away.double().mean() < MOST_LEFT_OUT
        kept.append(None if away is None or few else away.expand(shape))
    return kept
