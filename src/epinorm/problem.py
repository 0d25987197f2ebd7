"""The facts of one call, and what passes between what decides and what computes: types alone.

A backend is a module with two functions of the signatures of ``ForwardFunction`` and
``BackwardFunction`` below; they are in epinorm.backends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from epinorm.chain import Chain
from epinorm.precision import Precision

__all__ = [
    "BackwardFunction",
    "Core",
    "Forward",
    "ForwardFunction",
    "Gradients",
    "Inputs",
    "Plan",
    "Problem",
    "Run",
    "StepForward",
    "StepLeftovers",
    "Strategy",
    "Wanted",
    "check_strategy",
]

Strategy = Literal["auto", "single", "epilogue", "cpu", "reference"]


def check_strategy(strategy: str) -> None:
    """Raise ValueError for a name that is no strategy's."""
    if strategy not in get_args(Strategy):
        known = ", ".join(get_args(Strategy))
        raise ValueError(f"unknown strategy {strategy!r}; known are {known}")


Core = Literal["hopper", "portable"]
"""What multiplies in ``single``: wgmma and TMA, or what every GPU since Ampere has."""


@dataclass(frozen=True)
class Problem:
    """The facts of one call that decide how it is computed. Hashable; holds no tensor.

    ``dtype`` is that of x, weight and bias; ``norm_dtype`` that of the norm's parameters and of
    the chain's tensor operands; ``out_dtype`` that of y. They differ under autocast alone: 16 bit,
    fp32 and fp32. ``training``: z, mean and rstd are kept for a backward pass. ``prepacked``: the
    weight is kept converted (``epinorm.prepack``), so that the plan need not count that.
    """

    chain: Chain
    m: int
    k: int
    n: int
    dtype: torch.dtype
    norm_dtype: torch.dtype
    out_dtype: torch.dtype
    has_bias: bool
    has_norm_weight: bool
    has_norm_bias: bool
    training: bool
    device: torch.device
    precision: Precision
    prepacked: bool = False

    @property
    def groups(self) -> int:
        return self.chain.groups(self.n)

    @property
    def stats_dtype(self) -> torch.dtype:
        """The dtype that statistics are computed and kept in."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Plan:
    """How a problem is computed: a strategy and, in one sentence, why this one.

    ``core``: what multiplies where the strategy is ``single``.
    """

    strategy: Strategy
    reason: str
    core: Core | None = None


class Inputs(NamedTuple):
    """The tensors of one call, leading dimensions folded: x (M, K), weight (N, K), the rest (N,),
    element operands (M, N). The last dimension is contiguous; rows may have a stride."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    operands: tuple[Tensor, ...]


class Forward(NamedTuple):
    """y (M, N) in ``out_dtype``; and, where training, what backward needs: z (M, N), the linear's
    output without its bias, in ``dtype``, mean and rstd (M, groups) in ``stats_dtype``.
    Not training: three tensors of shape (0,). RMSNorm has no mean: shape (0,).

    Only the backward of the backend that made them reads z and the statistics, so their values may
    differ between backends (the reference's z includes the bias); shapes and dtypes may not."""

    y: Tensor
    z: Tensor
    mean: Tensor
    rstd: Tensor


class StepForward(Forward):
    """A ``Forward`` whose backend left something more for the backward pass of the same step.

    ``left`` is handed to that backward once, by who keeps it; the gradients are as accurate
    without it. It is no output of the operators.
    """

    left: StepLeftovers


class StepLeftovers(Protocol):
    """What ``StepForward`` holds: it frees its memory when nobody holds it any more."""

    def restrict(self, x: bool, weight: bool) -> None:
        """Free what serves other gradients than those of x or of the weight."""
        ...


class Wanted(NamedTuple):
    """Which gradients backward must compute."""

    x: bool
    weight: bool
    bias: bool
    norm_weight: bool
    norm_bias: bool
    operands: tuple[bool, ...]


class Gradients(NamedTuple):
    """The gradients in the shapes and dtypes of ``Inputs``; None where not wanted."""

    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    operands: tuple[Tensor | None, ...]


class ForwardFunction(Protocol):
    """Computes y, and where training what backward needs."""

    def __call__(self, problem: Problem, plan: Plan, inputs: Inputs) -> Forward: ...


class Run(Protocol):
    """A ``ForwardFunction`` for one problem, given the fields of ``Inputs``.

    The tensors have the sizes, dtypes, device and strides that it was made for; nothing is checked.
    It may have been made for an x of any leading dimensions, which is contiguous then; so has y.
    """

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        operands: tuple[Tensor, ...],
        /,
    ) -> Forward: ...


class BackwardFunction(Protocol):
    """Computes the wanted gradients from what the same backend's forward kept.

    kept: a ``Forward``; backends.cuda also takes it out of a list of one, so that nobody else holds
    z when its memory could be used again. For backends.cuda alone: what the forward left besides
    (``StepForward``), and the tensor that dW may be added to, which is then the weight's gradient.
    """

    def __call__(
        self,
        problem: Problem,
        plan: Plan,
        inputs: Inputs,
        kept: Any,
        dy: Tensor,
        want: Wanted,
        *more: Any,
    ) -> Gradients: ...
