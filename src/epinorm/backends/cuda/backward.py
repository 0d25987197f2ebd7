"""The backward pass on a CUDA GPU: the one place that turns a plan's strategy into kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from epinorm.backends.cuda.fp32.kept_planes import KeptPlanes
from epinorm.backends.cuda.gemm.hopper.product import Product, prepare_product
from epinorm.backends.cuda.norm.backward import norm_backward
from epinorm.backends.cuda.plan.gradients import planes_taken, product_in_16_bit
from epinorm.backends.cuda.plane_products import PlaneProducts
from epinorm.backends.cuda.runtime.prepared import PreparedByProblem
from epinorm.problem import CUDA_STRATEGIES, Core, Forward, Gradients, Inputs, Plan, Problem, Wanted

__all__ = ["backward"]

ALIGNMENT = 16
"""Bytes at which rows must begin for the copy engine."""

MatrixProduct = Callable[[Tensor, Tensor], Tensor]
"""dX from dz and W, or dW from dz and x."""


def backward(
    problem: Problem,
    plan: Plan,
    inputs: Inputs,
    kept: Forward | list[Forward],
    dy: Tensor,
    want: Wanted,
    planes: KeptPlanes | None = None,
    into: Tensor | None = None,
) -> Gradients:
    """The wanted gradients from dy (M, N) in ``out_dtype``, on its GPU and current stream.

    kept: what forward returned, or a list of it, which is emptied. planes: those of x and W, where
    the forward pass left them; they are used up. into: a tensor like the weight, contiguous, that
    dW may be added to: where that is as fast, it is returned in dW's place.
    Raises ``ValueError`` for a strategy that this backend does not have.
    """
    if plan.strategy not in CUDA_STRATEGIES:
        raise ValueError(
            f"the CUDA backend has no strategy {plan.strategy!r}: expected one of "
            f"{', '.join(map(repr, CUDA_STRATEGIES))}"
        )
    # A gradient that autograd broadcast, as from y.sum(), has stride 0.
    if dy.stride(1) != 1 and problem.n > 1:
        dy = dy.contiguous()
    if problem.chain.is_linear:
        dy = dy.contiguous()  # it is dz itself
    holder = kept if isinstance(kept, list) else [kept]
    if not problem.keeps_z:
        holder[0] = holder[0]._replace(z=dy)  # of its size and dtype; its values are not used
    return _prepared(problem)(_core_of(plan), inputs, holder, dy, want, planes, into)


def _core_of(plan: Plan) -> Core | None:
    """What multiplies planes; a core that nobody named is Hopper's."""
    return plan.core or "hopper" if plan.strategy in ("single", "planes") else None


class _Backward:
    """How one problem's gradients are computed, for each set of them that was wanted so far."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.found: dict[tuple[Core | None, Wanted], _Products] = {}

    def __call__(
        self,
        core: Core | None,
        inputs: Inputs,
        kept: list[Forward],
        dy: Tensor,
        want: Wanted,
        planes: KeptPlanes | None,
        into: Tensor | None,
    ) -> Gradients:
        """The norm kernel, then dX = dZ W and dW = dZᵀ X; by then, ``kept`` is let go of."""
        products = self.found.get((core, want))
        if products is None:
            products = self.found[core, want] = _Products(self.problem, core, want)
        by_planes = products.by_planes
        if by_planes is None:
            norm = norm_backward(self.problem, inputs, kept[0], dy, want)
            kept.clear()
            dx = dw = None
        else:
            norm, dx, dw = by_planes(inputs, kept, dy, want, planes, into)
        if norm.dz is not None:
            if products.dx is not None:
                dx = products.dx(norm.dz, inputs.weight)
            if products.dw is not None:
                if into is not None and products.library_adds:
                    dw = into.addmm_(norm.dz.t(), inputs.x)
                else:
                    dw = products.dw(norm.dz, inputs.x)
        return Gradients(dx, dw, norm.bias, norm.norm_weight, norm.norm_bias, norm.operands)


class _Products:
    """Who computes dX and dW: planes, or a function each; None for what is not wanted."""

    def __init__(self, problem: Problem, core: Core | None, want: Wanted) -> None:
        m, n = problem.m, problem.n
        x = weight = False
        self.by_planes: PlaneProducts | None = None
        if core is not None:
            x, weight = planes_taken(problem, want.x, want.weight, core)
            if x or weight:
                self.by_planes = PlaneProducts(problem, x, weight, core)
        self.dx: MatrixProduct | None = None
        self.dw: MatrixProduct | None = None
        self.library_adds = False
        if want.x and not x:
            self.dx = _InSixteenBits.where_faster(problem, core, m, n, True) or torch.mm
        if want.weight and not weight:
            own = _InSixteenBits.where_faster(problem, core, n, m, False)
            self.dw = own or _transposed_mm
            # It adds as fast as it stores; where sums are better split, dW is small, and so is what
            # adding it costs.
            self.library_adds = own is None or own.product.parts == 1


def _transposed_mm(dz: Tensor, x: Tensor) -> Tensor:
    return torch.mm(dz.t(), x)


class _InSixteenBits:
    """A product of 16-bit matrices on our own core."""

    def __init__(self, product: Product, major_k_a: bool) -> None:
        self.product = product
        self.library: MatrixProduct = torch.mm if major_k_a else _transposed_mm

    def __call__(self, dz: Tensor, other: Tensor) -> Tensor:
        a, b, stride = dz.data_ptr(), other.data_ptr(), other.stride(0)
        if (a | b | stride * 2) % ALIGNMENT:
            return self.library(dz, other)
        return self.product((a, b, stride), lambda: (dz, dz, other, other), 0)

    @staticmethod
    def where_faster(
        problem: Problem, core: Core | None, rows: int, length: int, major_k_a: bool
    ) -> _InSixteenBits | None:
        found = product_in_16_bit(problem, core, rows, length)
        if found is None:
            return None
        dtype, device = problem.dtype, problem.device
        product = prepare_product(found[0], dtype, dtype, False, major_k_a, device)
        return _InSixteenBits(product, major_k_a)


_prepared = PreparedByProblem(_Backward)
