"""The backward pass on a CUDA GPU: the one place that turns a plan's strategy into kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from epinorm.cuda.norm_backward import norm_backward
from epinorm.plan import Forward, Gradients, Inputs, Plan, Problem, Wanted

__all__ = ["backward"]


def backward(
    problem: Problem, plan: Plan, inputs: Inputs, kept: Forward, dy: Tensor, want: Wanted
) -> Gradients:
    """The wanted gradients from dy (M, N) in ``out_dtype``, on its GPU and current stream.

    Raises ``ValueError`` for a strategy that this backend does not have.
    """
    if plan.strategy in ("epilogue", "single"):
        return _epilogue(problem, inputs, kept, dy, want)
    raise ValueError(f"the CUDA backend has no strategy {plan.strategy!r}: expected 'epilogue'")


def _epilogue(
    problem: Problem, inputs: Inputs, kept: Forward, dy: Tensor, want: Wanted
) -> Gradients:
    """The norm kernel, then dX = dZ W and dW = dZᵀ X by the library."""
    # A gradient that autograd broadcast, as from y.sum(), has stride 0.
    if dy.stride(1) != 1 and problem.n > 1:
        dy = dy.contiguous()
    norm = norm_backward(problem, inputs, kept, dy, want)
    dx = dw = None
    if norm.dz is not None:
        dx = torch.mm(norm.dz, inputs.weight) if want.x else None
        dw = torch.mm(norm.dz.t(), inputs.x) if want.weight else None
    return Gradients(dx, dw, norm.bias, norm.norm_weight, norm.norm_bias, norm.operands)
