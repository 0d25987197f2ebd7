"""From the facts of one call to how it is computed, and the interface of every backend.

A backend is a module with two functions of the signatures of ``ForwardFunction`` and
``BackwardFunction`` below: ``epinorm.reference_backend`` (plain PyTorch), ``epinorm.cpu.backend``,
and ``epinorm.cuda.forward`` / ``epinorm.cuda.backward``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from epinorm.chain import Chain
from epinorm.precision import Precision

__all__ = ["BackwardFunction", "ForwardFunction", "Forward", "Gradients", "Inputs", "Plan"]
__all__ += ["Problem", "Strategy", "Wanted"]

Strategy = Literal["auto", "single", "epilogue", "cpu", "reference"]


@dataclass(frozen=True)
class Problem:
    """The facts of one call that decide how it is computed. Hashable; holds no tensor.

    ``dtype`` is that of x, weight and bias; ``norm_dtype`` that of the norm's parameters and of
    the chain's tensor operands; ``out_dtype`` that of y. They differ under autocast alone: 16 bit,
    fp32 and fp32. ``training``: z, mean and rstd are kept for a backward pass.
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

    @property
    def groups(self) -> int:
        return self.chain.groups(self.n)

    @property
    def stats_dtype(self) -> torch.dtype:
        """The dtype that statistics are computed and kept in."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Plan:
    """How a problem is computed: a strategy and, in one sentence, why this one."""

    strategy: Strategy
    reason: str


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
    Not training: three tensors of shape (0,). RMSNorm has no mean: shape (0,)."""

    y: Tensor
    z: Tensor
    mean: Tensor
    rstd: Tensor


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
    def __call__(self, problem: Problem, plan: Plan, inputs: Inputs) -> Forward: ...


class BackwardFunction(Protocol):
    def __call__(
        self, problem: Problem, plan: Plan, inputs: Inputs, kept: Forward, dy: Tensor, want: Wanted
    ) -> Gradients: ...
