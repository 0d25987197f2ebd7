"""A plan on a CUDA GPU, its kernels loaded and bound: the one place that follows its strategy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from epinorm.backends.cuda.fp32.kept_planes import KeptPlanes
from epinorm.backends.cuda.gemm.forward import SingleForward
from epinorm.backends.cuda.gemm.launch import Bound
from epinorm.backends.cuda.norm.backward import NormBackward
from epinorm.backends.cuda.norm.batch_backward import BatchBackward
from epinorm.backends.cuda.norm.batch_forward import BatchForward
from epinorm.backends.cuda.norm.forward import NormForward
from epinorm.backends.cuda.plan.gradients import BackwardChoice, backward_choice
from epinorm.backends.cuda.plan.planes import product_of, rest_of, sum_is_z
from epinorm.backends.cuda.plane_products import PlaneProducts
from epinorm.backends.cuda.replayed import ReplayedBackward, ReplayedForward
from epinorm.backends.cuda.text.backward_chain import backward_problem
from epinorm.backends.memo import memo
from epinorm.backends.native_passes import NativePasses
from epinorm.problem import (
    CUDA_STRATEGIES,
    Forward,
    Gradients,
    Inputs,
    Later,
    Layout,
    Plan,
    Problem,
    StepForward,
    Wanted,
)


class CudaExecutable:
    """Both passes of a problem, on the inputs' GPU and its current stream.

    Raises ``ValueError`` for a strategy that this backend does not have.
    """

    def __init__(self, problem: Problem, plan: Plan, layout: Layout) -> None:
        if plan.strategy not in CUDA_STRATEGIES:
            raise ValueError(
                f"the CUDA backend has no strategy {plan.strategy!r}: expected one of "
                f"{', '.join(map(repr, CUDA_STRATEGIES))}"
            )
        self.problem, self.plan = problem, plan
        run, product = _forward(problem, plan, layout)
        # In training the activations of all layers lie beside what a graph would hold.
        self.forward = ReplayedForward(run, holds=not problem.training, product=product)
        self._backward: dict[bool, _Backward] = {}  # by whether the sum has a gradient
        # Under autocast, where nothing widened the sum; before what is recorded of a pass.
        self._converts_dsum = problem.sum_dtype != problem.norm_dtype

    def backward(
        self,
        inputs: Inputs,
        kept: list[Forward],
        dy: Tensor,
        want: Wanted,
        left: KeptPlanes | None = None,
        into: Tensor | None = None,
        dsum: Tensor | None = None,
        later: Later | None = None,
    ) -> Gradients:
        """The norm kernel, then dX = dZ W and dW = dZᵀ X; by then, ``kept`` is empty.

        left: planes of x and W, which are used up. into: contiguous; it is returned in dW's place
        where adding there is as fast. dsum: read by the norm kernel, as one more operand.
        """
        backward = self._backward_of(dsum is not None)
        if dsum is None:
            return backward(inputs, kept, dy, want, left, into, later)
        dsum = dsum.to(self.problem.norm_dtype)
        inputs = inputs._replace(operands=(*inputs.operands, dsum))
        found = backward(inputs, kept, dy, _with_dsum(want), left, into, later)
        return found._replace(operands=found.operands[:-1])

    def _backward_of(self, has_dsum: bool) -> _Backward:
        backward = self._backward.get(has_dsum)
        if backward is None:
            problem = backward_problem(self.problem, has_dsum)
            backward = self._backward[has_dsum] = _Backward(problem, self.plan)
        return backward

    def native(self, constants: tuple[float, ...]) -> NativePasses | None:
        """As ``Executable.native``."""
        forward = self.forward.native(constants)
        if forward is None or not self.problem.training:
            return forward
        found = [self._backward_of(has_dsum).run.native(constants) for has_dsum in (False, True)]
        if not all(found):
            return None
        if self._converts_dsum:
            found[1] = None
        return forward._replace(backward=tuple(found))

    def native_backward(
        self, constants: tuple[float, ...], want: Wanted, has_dsum: bool
    ) -> tuple[Any, int] | None:
        """The backward pass below autograd, as ``ReplayedBackward.program`` gives it; want: of the
        inputs alone."""
        if has_dsum and self._converts_dsum:
            return None
        want = _with_dsum(want) if has_dsum else want
        return self._backward_of(has_dsum).run.program(constants, want)


def _with_dsum(want: Wanted) -> Wanted:
    return want._replace(operands=(*want.operands, False))


class _Backward:
    """The backward pass of one problem, as ``backward_problem`` gives it."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self.problem, self.plan = problem, plan
        chain = problem.chain
        self._dy_is_dz = chain.is_linear
        self._reads_kept = chain.keeps_z or chain.saves_sum or chain.saves_y
        of_batch = chain.returns_statistics
        self._norm = BatchBackward(problem) if of_batch else NormBackward(problem)
        self._products: dict[Wanted, _Products] = {}
        self.run = ReplayedBackward(self._run)

    def __call__(
        self,
        inputs: Inputs,
        kept: list[Forward],
        dy: Tensor,
        want: Wanted,
        left: KeptPlanes | None,
        into: Tensor | None,
        later: Later | None,
    ) -> Gradients:
        """As ``CudaExecutable.backward``."""
        if want not in self._products:
            choice = backward_choice(self.problem, self.plan, want)
            self._products[want] = _Products(self.problem, choice, want, self._norm)
        # A gradient that autograd broadcast, as from y.sum(), has stride 0.
        if dy.stride(1) != 1 and self.problem.n > 1:
            dy = dy.contiguous()
        if self._dy_is_dz:
            dy = dy.contiguous()
        if not self._reads_kept:
            kept[0] = kept[0]._replace(z=dy)  # of its size and dtype; its values are not used
        if into is not None:  # seldom: it is not recorded
            return self._run(inputs, kept, dy, want, left, into, later)
        return self.run(inputs, kept, dy, want, left, later)

    def _run(
        self,
        inputs: Inputs,
        kept: list[Forward],
        dy: Tensor,
        want: Wanted,
        left: KeptPlanes | None,
        into: Tensor | None = None,
        later: Later | None = None,
    ) -> Gradients:
        products = self._products[want]
        by_planes = products.by_planes
        if by_planes is None:
            norm = self._norm(inputs, kept[0], dy, want)
            kept.clear()
            dx = dw = None
        else:
            norm, dx, dw = by_planes(inputs, kept, dy, want, left, into, later)
        dz = norm.dz
        if dz is not None:
            if products.library_has_x:
                dx = torch.mm(dz, inputs.weight)
            if products.library_has_weight:  # it adds as fast as it stores
                of = dz.t(), inputs.x
                dw = torch.mm(*of) if into is None else into.addmm_(*of)
        return Gradients(dx, dw, norm.bias, norm.norm_weight, norm.norm_bias, norm.operands)


def _forward(problem: Problem, plan: Plan, layout: Layout) -> tuple[Bound, SingleForward | None]:
    """The pass, and its product where that is no library's."""
    if plan.strategy == "single":
        product = SingleForward(problem, plan.core or "hopper")
        return product.bind(*layout), product
    if plan.strategy == "planes":
        product = SingleForward(product_of(problem), plan.core or "hopper", problem)
        return _planes(problem, product, layout), product
    return _epilogue(problem, layout), None


def _epilogue(problem: Problem, layout: Layout) -> Bound:
    z_is_sum = sum_is_z(problem)
    normalise = _normalising(rest_of(problem) if z_is_sum else problem)
    normalise_rows = normalise.bind(problem.n, layout.y_size, _y_over_z(problem))
    bias_in_z = problem.bias_in_z
    # PyTorch takes other kernels where a bias is added in fp32: zeros, so that z's error is eager's
    # (without: 1.85 times as large for 16 rows of 8192).
    nothing = torch.empty((0,), dtype=problem.dtype, device=problem.device)
    adds_zeros = problem.dtype == torch.float32 and problem.has_bias and not bias_in_z
    # What is allocated during a capture belongs to the graph.
    captured = problem.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    zeros = _zeros(problem.n, problem.device) if adds_zeros and not captured else None
    new_zeros = adds_zeros and captured

    def run(inputs: Inputs) -> Forward:
        x, weight, bias, *rest = inputs
        added = bias if bias_in_z else zeros
        if new_zeros:
            added = torch.zeros(problem.n, device=problem.device)
        z = linear(x, weight, added)
        if not z_is_sum:
            return normalise_rows(z, bias, *rest)
        out = normalise_rows(z, None, *rest)
        return Forward(out.y, nothing, out.mean, out.rstd, z)

    return run


def _normalising(problem: Problem) -> NormForward | BatchForward:
    return BatchForward(problem) if problem.chain.returns_statistics else NormForward(problem)


def _y_over_z(problem: Problem) -> bool:
    """Whether the norm kernel alone reads z, which is of y's size, and y is of its dtype."""
    is_kept = problem.training or problem.chain.returns_sum
    return not is_kept and problem.out_dtype == problem.dtype


def _planes(problem: Problem, product: SingleForward, layout: Layout) -> Bound:
    """Strategy `planes`: an fp32 product by fp16 planes, then the norm kernel, for groups of any
    width.

    The product is the single kernel of the chain without a norm (gemm/forward.py), its range guard
    included, so prepacked weights, tuned tiles and planes kept for the backward pass are the same.
    z goes through memory once; the norm kernel starts early behind the guard, and writes y over it
    where nothing else reads it. A sum that is a result is the matrix between the two, where
    backward needs no z besides.
    """
    pre, keeps_z, returns_sum = problem.chain.pre, problem.keeps_z, problem.chain.returns_sum
    of_pre = sum(op.operand is not None for op in pre)
    constants_of_pre = sum(len(op.arguments) for op in pre)
    multiply = product.bind(*layout)
    normalise = _normalising(rest_of(problem)).bind(problem.n, layout.y_size, _y_over_z(problem))

    def normalised(made: Forward, *rest: Any) -> Forward:
        moments = (made.mean,) if made.mean.numel() else ()
        return normalise(made.y, *rest, *moments)

    def run(inputs: Inputs) -> Forward:
        x, weight, bias, norm_weight, norm_bias, operands, constants = inputs
        if keeps_z:
            made = multiply(Inputs(x, weight, None, None, None, ()))
            return _with_left(normalised(made, *inputs[2:]), made)
        before = operands[:of_pre], constants[:constants_of_pre]
        behind = operands[of_pre:], constants[constants_of_pre:]
        made = multiply(Inputs(x, weight, bias, None, None, *before))
        out = normalised(made, None, norm_weight, norm_bias, *behind)
        if not returns_sum:
            return out
        return _with_left(Forward(out.y, made.z, out.mean, out.rstd, made.y), made)

    return run


def _with_left(out: Forward, made: Forward) -> Forward:
    """``out`` with the planes that the product left for the backward pass, if it did."""
    if not isinstance(made, StepForward):
        return out
    more = StepForward._make(out)
    more.left = made.left
    return more


@memo()
def _zeros(n: int, device: torch.device) -> Tensor:
    return torch.zeros(n, device=device)


class _Products:
    """What computes dX and dW: planes, and the library what they do not and is wanted."""

    def __init__(
        self,
        problem: Problem,
        choice: BackwardChoice,
        want: Wanted,
        norm: NormBackward | BatchBackward,
    ) -> None:
        self.by_planes: PlaneProducts | None = None
        if choice.x or choice.weight:
            self.by_planes = PlaneProducts(problem, choice, norm)
        self.library_has_x = want.x and not choice.x
        self.library_has_weight = want.weight and not choice.weight
