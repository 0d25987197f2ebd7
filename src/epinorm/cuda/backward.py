"""The backward pass on a CUDA GPU: the one place that turns a plan's strategy into kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from epinorm.cuda import hopper_product
from epinorm.cuda.norm_backward import norm_backward
from epinorm.plan import Forward, Gradients, Inputs, Plan, Problem, Wanted

__all__ = ["backward"]

# By planes: floating-point operations a microsecond of our core, and of the library (TF32, fp32)
# for dX and for dW; bytes converted a microsecond; the launches around a product, in microseconds.
_CORE_FLOPS = {1: 700e6, 2: 250e6}
_LIBRARY_FLOPS_X = {1: 400e6, 2: 50e6}
_LIBRARY_FLOPS_W = {1: 240e6, 2: 50e6}
_CONVERTED_BYTES = 3.5e6
_CONVERSION_LAUNCHES = 12.0


def backward(
    problem: Problem, plan: Plan, inputs: Inputs, kept: Forward, dy: Tensor, want: Wanted
) -> Gradients:
    """The wanted gradients from dy (M, N) in ``out_dtype``, on its GPU and current stream.

    Raises ``ValueError`` for a strategy that this backend does not have.
    """
    if plan.strategy in ("epilogue", "single"):
        return _backward(problem, plan, inputs, kept, dy, want)
    raise ValueError(
        f"the CUDA backend has no strategy {plan.strategy!r}: expected 'single' or 'epilogue'"
    )


def _backward(
    problem: Problem, plan: Plan, inputs: Inputs, kept: Forward, dy: Tensor, want: Wanted
) -> Gradients:
    """The norm kernel, then dX = dZ W and dW = dZᵀ X."""
    # A gradient that autograd broadcast, as from y.sum(), has stride 0.
    if dy.stride(1) != 1 and problem.n > 1:
        dy = dy.contiguous()
    norm = norm_backward(problem, inputs, kept, dy, want)
    dx = dw = None
    if norm.dz is not None:
        planes_x, planes_w = _planes(problem, plan)
        dx = _input_gradient(norm.dz, inputs.weight, planes_x) if want.x else None
        dw = _weight_gradient(norm.dz, inputs.x, planes_w) if want.weight else None
    return Gradients(dx, dw, norm.bias, norm.norm_weight, norm.norm_bias, norm.operands)


def _planes(problem: Problem, plan: Plan) -> tuple[int, int]:
    """Planes of dX's and dW's operands on the Hopper core; 0: the library multiplies.

    The core pays where the conversions of dz, W and x cost less than it saves: for fp32, and sizes
    of some hundred channels and more. In 16 bit the library's product is as fast.
    """
    m, k, n = problem.m, problem.k, problem.n
    fp32 = problem.dtype == torch.float32 and plan.strategy == "single"
    if not fp32 or not hopper_product.serves(m, k, n):
        return 0, 0
    planes = 2 if problem.precision == "highest" else 1
    flops = 2.0 * m * n * k

    def pays(values: int, library: dict[int, float]) -> bool:
        converted = values * (4 + 2 * planes) / _CONVERTED_BYTES
        ours = _CONVERSION_LAUNCHES + flops / _CORE_FLOPS[planes] + converted
        return ours < flops / library[planes]

    return (
        planes if pays(m * n + n * k, _LIBRARY_FLOPS_X) else 0,
        planes if pays(m * n + m * k, _LIBRARY_FLOPS_W) else 0,
    )


def _input_gradient(dz: Tensor, weight: Tensor, planes: int) -> Tensor:
    if planes == 0:
        return torch.mm(dz, weight)
    return hopper_product.input_gradient(dz, weight, planes)


def _weight_gradient(dz: Tensor, x: Tensor, planes: int) -> Tensor:
    if planes == 0:
        return torch.mm(dz.t(), x)
    return hopper_product.weight_gradient(dz, x, planes)
