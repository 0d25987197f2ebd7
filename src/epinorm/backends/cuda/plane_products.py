"""dX and dW of an fp32 chain by fp16 planes: whose planes, and how they are computed.

The planes of W and x are those of the forward pass where it kept them (fp32/kept_planes.py). The
norm kernel writes dz as planes (fp32/norm_planes.py); or, where no cluster holds whole rows or just
one of the products is computed here, it writes dz, and what the scales of its planes are made from,
and one kernel splits it. Each product is followed by the range guard, which computes flagged rows
again in plain fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from epinorm.backends.cuda.fp32.gradient_planes import GradientPlanes, GradientSplitter
from epinorm.backends.cuda.fp32.kept_planes import KeptPlanes
from epinorm.backends.cuda.fp32.norm_planes import DzPlanes, PlanesRead
from epinorm.backends.cuda.fp32.planes import Splitter, splitter
from epinorm.backends.cuda.fp32.rescue_gradient import prepare_rescue
from epinorm.backends.cuda.gemm.hopper.product import AddingProduct, prepare_adding
from epinorm.backends.cuda.gemm.launch import Operands
from epinorm.backends.cuda.gemm.product import Product, prepare_product
from epinorm.backends.cuda.norm.backward import Factors, NormBackward, NormGradients
from epinorm.backends.cuda.norm.batch_backward import BatchBackward
from epinorm.backends.cuda.plan.gradients import BackwardChoice, residual_has_dz
from epinorm.backends.cuda.plan.hopper_product import Choice, choose, gradient_shape
from epinorm.backends.cuda.plan.portable import choose_product_tile
from epinorm.backends.cuda.plan.portable_tile import PortableTile
from epinorm.backends.cuda.plan.steps import dz_alone
from epinorm.backends.cuda.runtime.device import gpu_of, sm_count
from epinorm.problem import Forward, Inputs, Later, Problem, Rest, Wanted


class PlaneProducts:
    """The two products of one problem, or one of them, ready to launch."""

    def __init__(
        self, problem: Problem, choice: BackwardChoice, norm: NormBackward | BatchBackward
    ) -> None:
        self.problem, self.choice, self.norm = problem, choice, norm
        m, k, n, planes, device = problem.m, problem.k, problem.n, problem.planes, problem.device
        self.split_weight = splitter(planes, k, n, 0, device)
        self.split_x = splitter(planes, k, m, 0, device)
        self.split_gradient = GradientSplitter(problem, choice.x, choice.weight)
        self.dz_alone = dz_alone(problem)
        self.adds_loaded = False
        self.dz_planes: DzPlanes | None = None
        if choice.writes_planes:
            self.dz_planes = DzPlanes(problem, self.split_x, self.split_weight)
        self.dx = self._product(False) if choice.x else None
        self.dw = self._product(True) if choice.weight else None

    def _product(self, of_weight: bool) -> Product:
        device, shape = self.problem.device, gradient_shape(self.problem, of_weight)
        choice: Choice | PortableTile = (
            choose_product_tile(shape.planes, gpu_of(device))
            if self.choice.core == "portable"
            else choose(shape, sm_count(device))
        )
        return prepare_product(shape, choice, not of_weight, device)

    def __call__(
        self,
        inputs: Inputs,
        kept: list[Forward],
        dy: Tensor,
        want: Wanted,
        left: KeptPlanes | None,
        into: Tensor | None,
        later: Later | None = None,
    ) -> tuple[NormGradients, Tensor | None, Tensor | None]:
        """The norm's gradients with dz, dX and dW; the arguments are those of `backward`."""
        if residual_has_dz(self.problem, want) or self.problem.chain.is_linear:
            later = None  # dz is a gradient, or dy, which others may write over
        operands = [self.operands(inputs, left)]
        beside = into is None and self.choice.beside_dx
        found = None
        if self.dz_planes is not None:
            found = self.dz_planes(inputs, kept[0], dy, want, operands[0], beside)
        if found is None:
            norm = self.norm(inputs, kept[0], dy, want, operands[0].factors)
            kept.clear()
            whole, largest = norm.dz, norm.largest
            assert whole is not None
            assert largest is not None
            parts = list(self.split_gradient(whole, operands[0].factors, largest))
            largest.scratch.clear()
            return norm, *self.multiply(inputs, operands, lambda: whole, parts, into, later)
        norm, written = found
        # Added to, dW takes no memory, and its kernels are to be at hand before any of them runs.
        over_x = self.choice.dz_over_x and into is None
        planes_of_x = operands[0].x if over_x else None
        over = None if planes_of_x is None else self._dz_over(planes_of_x)
        if not written.beside_dx:
            written.finish()

        def dz() -> Tensor:
            if written.beside_dx:
                written.finish()
            gradient = norm.operands[0] if residual_has_dz(self.problem, want) else None
            if gradient is not None:
                kept.clear()
                return gradient
            # For the range guard: computed where anything is flagged, else never filled.
            only, wanted = self.dz_alone, written.any_flag
            in_fp32 = self.norm(inputs, kept[0], dy, only, if_wanted=wanted, dz=over).dz
            assert in_fp32 is not None
            kept.clear()
            return in_fp32

        by: list[GradientPlanes | None] = [written.by_row, written.by_column]
        if written.beside_dx or over_x:
            return norm, *self.multiply(inputs, operands, dz, by, into, later, planes_of_x)
        now = dz()
        return norm, *self.multiply(inputs, operands, lambda: now, by, into, later)

    def operands(self, inputs: Inputs, kept: KeptPlanes | None) -> PlanesRead:
        """The planes that were kept, taken over, or new ones."""
        weight = x = None
        columns = rows = 0
        if self.choice.x:
            weight = None if kept is None else kept.take_weight()
            if weight is None:
                weight = _split(self.split_weight, inputs.weight, not self.choice.dz_over_x)
            columns = self.split_weight.origin(weight) + self.split_weight.scale
        if self.choice.weight:
            x = None if kept is None else kept.take_x()
            if x is None:
                x = _split(self.split_x, inputs.x)
            rows = x.data_ptr() + self.split_x.scale
        return PlanesRead(weight, x, Factors(columns, rows))

    def _dz_over(self, x: Tensor) -> Tensor:
        """The memory of x's planes, but for what else their buffer holds, as a dz."""
        m, n = self.problem.m, self.problem.n
        return x[: 4 * m * n].view(torch.float32).view(m, n)

    def multiply(
        self,
        inputs: Inputs,
        operands: list[PlanesRead],
        dz: Callable[[], Tensor],
        by: list[GradientPlanes | None],
        into: Tensor | None = None,
        later: Later | None = None,
        dz_in: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """dX (m, k) and dW (n, k), fp32, where they are computed here.

        operands: one, taken out of the list, so that the planes of the product that comes first are
        free before the other's result is allocated. dz: launches what fills it, asked for behind
        the first product; by: its planes for dX and for dW, taken out of the list
        too. into: (n, k) fp32, contiguous, that dW may be added to; where it was, it is returned
        for dW. later: where dX is left if it comes second. dz_in: x's planes, if dz is over them.
        """
        weight, x, _ = operands.pop()
        of_weight, of_x = [by.pop(), x], [by.pop(), weight]
        del weight, x
        in_fp32 = cache(dz)
        first = self.choice.weight_first
        dw = self._dw(inputs, of_weight, in_fp32, into) if first else None
        if later is not None and first:
            there = in_fp32()
            later.append(self._left(of_x, there if dz_in is None else dz_in))
            return None, dw
        dx = self._dx(inputs.weight, of_x, in_fp32)
        return dx, dw if first else self._dw(inputs, of_weight, in_fp32, into)

    def _left(self, of: list[Any], dz: Tensor) -> Rest:
        """dX for later; of: as for ``_dx``; dz: in fp32, or x's planes that it is over."""
        weight, by_row = of.pop(), of.pop()
        scale = by_row.scale - by_row.buffer.data_ptr()
        flags = by_row.flags - by_row.held.data_ptr()

        def compute(carried: list[Tensor], w: Tensor) -> Tensor | None:
            dz, weight, held, buffer = (carried.pop() for _ in range(4))
            at = buffer.data_ptr() + scale, held.data_ptr() + flags
            of = [GradientPlanes(buffer, *at, held), weight]
            del buffer, held, weight
            in_fp32 = dz if dz.dtype == torch.float32 else self._dz_over(dz)
            return self._dx(w, of, lambda: in_fp32)

        return Rest([by_row.buffer, by_row.held, weight, dz], compute)

    def _dx(self, w: Tensor, of: list[Any], dz: Callable[[], Tensor]) -> Tensor | None:
        """of: dz's planes and W's, taken out."""
        weight, by_row = of.pop(), of.pop()
        if self.dx is None or weight is None or by_row is None:
            return None
        if weight.numel() < self.split_weight.nbytes:  # its planes did not wait
            weight = _split(self.split_weight, w)
        dx = self.dx(*self._given(by_row, weight, self.split_weight))
        flags = by_row.flags, *_flags_in(weight, self.split_weight), by_row.scale
        prepare_rescue(dx, dz(), w, False, *flags)()
        return dx

    def _dw(
        self, inputs: Inputs, of: list[Any], dz: Callable[[], Tensor], into: Tensor | None
    ) -> Tensor | None:
        """of: dz's planes and x's, taken out."""
        x, by_column = of.pop(), of.pop()
        if self.dw is None or x is None or by_column is None:
            return None
        given = self._given(by_column, x, self.split_x)
        flags = by_column.flags, *_flags_in(x, self.split_x), by_column.scale
        adding = None if into is None else self._adding()
        if into is None or adding is None:
            dw = self.dw(*given)
            prepare_rescue(dw, dz(), inputs.x, True, *flags)()
            return dw
        rescue = prepare_rescue(into, dz(), inputs.x, True, *flags, adds=True)
        self.adds_loaded = True
        adding(*given, into, *flags[:2])
        rescue()
        return into

    def _adding(self) -> AddingProduct | None:
        """What adds dW to a gradient that is there already, where our core can.

        Its kernels are loaded when first used, which a CUDA graph that is being captured forbids.
        """
        if self.choice.core != "hopper":
            return None
        if not self.adds_loaded and torch.cuda.is_current_stream_capturing():
            return None
        return prepare_adding(gradient_shape(self.problem, True), False, self.problem.device)

    def _given(
        self, a: GradientPlanes, b: Tensor, of_b: Splitter
    ) -> tuple[Any, Callable[[], Operands], int]:
        """A product's arguments: what its operands' maps are kept under, the operands, the scales
        of a's rows."""

        def operands() -> Operands:
            m, n, count = self.problem.m, self.problem.n, self.problem.planes
            stored = a.buffer[: count * 2 * m * n].view(torch.float16).view(count, m, n)
            return stored[0], stored[-1], *of_b.halves_in(b)

        return (a.buffer.data_ptr(), b.data_ptr()), operands, a.scale


def _flags_in(buffer: Tensor, split: Splitter) -> tuple[int, int]:
    """The addresses of the rows' flags and of what columns they spoilt."""
    at = buffer.data_ptr()
    return at + split.flags, at + split.spoilt


def _split(split: Splitter, matrix: Tensor, keeps_planes: bool = True) -> Tensor:
    """A buffer of the planes and what belongs to them, or without the planes."""
    kind: Any = {"dtype": torch.uint8, "device": matrix.device}
    if keeps_planes:
        buffer = torch.empty(split.nbytes, **kind)
        split(buffer.data_ptr(), matrix)
        return buffer
    planes, rest = (torch.empty(n, **kind) for n in (split.spoilt, split.nbytes - split.spoilt))
    split(planes.data_ptr(), matrix, None, split.origin(rest))
    return rest
