"""The forward pass on a CUDA GPU: the one place that turns a plan's strategy into kernels."""

from __future__ import annotations

from torch.nn.functional import linear

from epinorm.cuda.hopper_forward import hopper_forward
from epinorm.cuda.norm_forward import norm_forward
from epinorm.cuda.portable_forward import portable_forward
from epinorm.plan import Forward, Inputs, Plan, Problem

__all__ = ["forward"]


def forward(problem: Problem, plan: Plan, inputs: Inputs) -> Forward:
    """y and what backward needs, on the inputs' GPU and its current stream.

    Raises ``ValueError`` for a strategy that this backend does not have.
    """
    if plan.strategy == "epilogue":
        return _epilogue(problem, inputs)
    if plan.strategy == "single":
        if plan.core == "portable":
            return portable_forward(problem, inputs)
        return hopper_forward(problem, inputs)
    raise ValueError(
        f"the CUDA backend has no strategy {plan.strategy!r}: expected 'single' or 'epilogue'"
    )


def _epilogue(problem: Problem, inputs: Inputs) -> Forward:
    """A library product, without the bias, in PyTorch's precision setting; then the norm kernel."""
    return norm_forward(problem, linear(inputs.x, inputs.weight), inputs)
