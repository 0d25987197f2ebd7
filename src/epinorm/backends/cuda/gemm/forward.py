"""Strategy `single`: the whole forward chain in the product's epilogue, on either core.

fp32 takes three launches: x and W are split into planes (planes.py), multiplied, and what planes do
not hold is computed again (rescue.py). In training the planes stay for the backward pass, where it
reads planes too and there is room (fp32/kept_planes.py): W's then have a launch and a buffer to
themselves. Where x has few rows, Hopper's core converts W on its way into the product instead
(gemm/hopper/fp32_weight.py). Where nobody reads x afterwards, its planes lie over it
(fp32/split_over.cu).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from epinorm.backends.cuda.fp32.kept_planes import KeptPlanes, make_room
from epinorm.backends.cuda.fp32.planes import VECTOR_BYTES, splitter
from epinorm.backends.cuda.fp32.rescue import rescue_launch
from epinorm.backends.cuda.fp32.rounded_weight import RoundedWeight
from epinorm.backends.cuda.gemm.hopper.fp32_weight import Converting, readable
from epinorm.backends.cuda.gemm.hopper.linear_norm import HopperLinearNorm
from epinorm.backends.cuda.gemm.launch import (
    Bound,
    KeptOperands,
    Launch,
    LinearNorm,
    Operands,
    dense,
)
from epinorm.backends.cuda.gemm.portable.launch import PortableLinearNorm
from epinorm.backends.cuda.norm.text import matrix_arguments, parameters_at
from epinorm.backends.cuda.plan import hopper, portable
from epinorm.backends.cuda.plan.gradients import planes_taken, weight_waits
from epinorm.backends.cuda.plan.hopper_tile import Tile
from epinorm.backends.cuda.plan.planes import over_x
from epinorm.backends.cuda.plan.portable_tile import PortableTile
from epinorm.backends.cuda.plan.strategy import LARGEST_GUARDED_GROUP
from epinorm.backends.cuda.runtime.device import gpu_of, sm_count
from epinorm.backends.cuda.runtime.prepared import new_tensor
from epinorm.backends.cuda.text.instance import columns_of
from epinorm.backends.prepack import Converter, marked
from epinorm.problem import Core, Forward, Inputs, Layout, Problem, StepForward


class SingleForward:
    """y and what backward needs, by one kernel (fp32: and the conversion of x and W to planes);
    whole: the problem whose product it is."""

    def __init__(self, problem: Problem, core: Core, whole: Problem | None = None) -> None:
        self.problem, self.core = problem, core
        self.weight_waits = weight_waits(whole or problem)
        self.ordinary = _launch_of(problem, core, prepacked=False)
        self._prepacked: _Launch | None = None  # of marked weights, made when there is one

    def may_keep(self, weight: Tensor) -> bool:
        """Whether the weight is kept converted where it is marked; before the first that is, it may
        be."""
        splits = self._prepacked is None or isinstance(self._prepacked, _Split)
        return splits and self.problem.dtype == torch.float32 and not weight.is_inference()

    @property
    def converter(self) -> Converter | None:
        """What converts a marked weight; None before there was one, and where none is kept."""
        launch = self._prepacked
        return launch.split_weight if isinstance(launch, _Split) else None

    def bind(self, *layout: Any) -> Bound:
        """The function for tensors of this ``Layout``."""
        ordinary = self.ordinary.bind(*layout)
        if self.problem.dtype != torch.float32:
            return ordinary
        prepacked: tuple[_Launch, Callable[..., Forward]] | None = None
        keeping = self._keeping()
        nbytes_left = 0 if keeping is None else keeping.nbytes_left
        leaving = None if keeping is None else keeping.bind_leaving(*layout)

        def run(inputs: Inputs) -> Forward:
            nonlocal prepacked
            entry = marked.get(id(inputs.weight))
            if entry is not None:
                if prepacked is None:
                    launch = _launch_of(self.problem, self.core, prepacked=True)
                    prepacked = launch, launch.bind(*layout)
                    self._prepacked = launch
                launch, run_prepacked = prepacked
                if not isinstance(launch, _Split):
                    return run_prepacked(inputs)
                kept = entry.converted(inputs.weight, launch.split_weight)
                if kept is not None:
                    return run_prepacked(inputs, launch.weight_in(kept))
            # Planes stay where there is room for them, in memory that backward gives back before
            # dW is allocated.
            if leaving is not None and make_room(nbytes_left, self.problem.device):
                return leaving(inputs)
            return ordinary(inputs)

        return run

    def _keeping(self) -> _Split | _Converting | None:
        """``ordinary`` with its planes left, where the backward pass reads planes too."""
        problem, ordinary = self.problem, self.ordinary
        if not (problem.whole_step and problem.m) or isinstance(ordinary, _Direct):
            return None
        if not planes_taken(problem, True, True, self.core)[0]:
            return None
        problem = ordinary.problem  # without what its kernel cannot do
        if isinstance(ordinary, _Converting):
            return _Converting(problem, ordinary.tile, leaves=True)
        return _Split(
            problem,
            ordinary.kernel,
            prepacked=True,
            leaves=True,
            weight_waits=self.weight_waits,
        )


def _launch_of(problem: Problem, core: Core, prepacked: bool, converts: bool = True) -> _Launch:
    tile: Tile | PortableTile | None
    if core == "portable":
        tile = portable.choose_tile(problem, gpu_of(problem.device))
    else:
        tile = hopper.choose_tile(problem, sm_count(problem.device), prepacked, converts)
    if tile is None:
        raise RuntimeError(f"no tile of the {core} kernel fits {problem}")
    return _launch_with(problem, tile, prepacked)


def launch_with(problem: Problem, tile: Tile, layout: Layout) -> Bound:
    """The forward pass of tensors of this layout, by the kernel with this tile."""
    return _launch_with(problem, tile).bind(*layout)


def _launch_with(problem: Problem, tile: Tile | PortableTile, prepacked: bool = False) -> _Launch:
    kernel: LinearNorm
    if isinstance(tile, PortableTile) or tile.converts:
        problem = replace(problem, column_moments=False)
    if isinstance(tile, PortableTile):
        kernel = PortableLinearNorm(problem, tile)
    elif tile.converts:
        return _Converting(problem, tile)
    else:
        kernel = HopperLinearNorm(problem, tile)
    if kernel.by_planes:
        return _Split(problem, kernel, prepacked)
    return _Direct(problem, kernel, isinstance(tile, Tile) and tile.register_a)


class _Converting(Converting):
    """Converts W or x on the way; as planes where the copy engine cannot read it."""

    def bind(self, x_stride: int, w_stride: int, y_size: tuple[int, ...]) -> Bound:
        run = super().bind(x_stride, w_stride, y_size)
        otherwise: Bound | None = None

        def run_where_readable(inputs: Inputs) -> Forward:
            nonlocal otherwise
            if self.tile.fp32_weight:
                at = inputs.weight.data_ptr(), w_stride
            else:
                at = inputs.x.data_ptr(), x_stride
            if readable(*at):
                return run(inputs)
            if otherwise is None:
                split = _launch_of(self.problem, "hopper", False, converts=False)
                otherwise = split.bind(x_stride, w_stride, y_size)
            return otherwise(inputs)

        return run_where_readable


class _Direct(Launch):
    """x and W go into the product as they are; or W rounded to TF32."""

    def __init__(self, problem: Problem, kernel: LinearNorm, rounds: bool = False) -> None:
        super().__init__(problem)
        self.kernel, self.given = kernel, KeptOperands(kernel.given)
        self.rounded = RoundedWeight(problem.n, problem.k, problem.device) if rounds else None

    def bind(self, x_stride: int, w_stride: int, y_size: tuple[int, ...]) -> Bound:
        outputs, given, kept = self.outputs(y_size), self.given, self.given.kept
        sizes, chain_arguments, problem = self.sizes, self.constants, self.problem
        readable = self.kernel.readable
        keeps_matrix = problem.matrix_dtype is not None
        keeps_statistics = problem.keeps_statistics or problem.column_moments
        held, y_matrix, rounded = self.kernel.held, sizes[:2], self.rounded
        stride = w_stride if rounded is None else rounded.padded

        def run(inputs: Inputs) -> Forward:
            x, weight, bias, gamma, beta, operands, constants = inputs
            out = outputs()
            if rounded is not None:
                weight = rounded(weight, w_stride)
            y, matrix, mean, rstd = out.addresses
            if operands:
                operands = dense(operands, held)
            of_chain = 0 if held is None else operands[held].data_ptr()
            found = kept.get((x.data_ptr(), x_stride, weight.data_ptr(), stride, of_chain))
            if found is None:
                x, w = readable(x.view(-1, x.shape[-1])), readable(weight)
                at = (x.data_ptr(), x.stride(0), w.data_ptr(), w.stride(0), of_chain)
                more = () if held is None else (operands[held].view(y_matrix),)
                found = given(at, lambda: (x, x, w, w, *more))
            launch, first = found
            launch(
                *first,
                *(y, matrix if keeps_matrix else 0),
                *parameters_at(bias, gamma, beta),
                *(0, 0),
                *((mean, rstd) if keeps_statistics else (0, 0)),
                *sizes,
                *[operand.data_ptr() for operand in operands],
                *chain_arguments(constants),
            )
            return out

        return run if self.problem.m else lambda *_: outputs()


class _Split(Launch):
    """fp32 x and W as planes; W's are made in each call, or ``prepacked``. leaves: x's planes, for
    the backward pass; weight_waits: whether W's are left with what belongs to them."""

    def __init__(
        self,
        problem: Problem,
        kernel: LinearNorm,
        prepacked: bool,
        leaves: bool = False,
        weight_waits: bool = True,
    ) -> None:
        super().__init__(problem)
        self.kernel, self.given = kernel, KeptOperands(kernel.given)
        planes, self.prepacked = problem.planes, prepacked
        self.rescued = columns_of(problem) <= LARGEST_GUARDED_GROUP
        self.spends = over_x(problem) and isinstance(kernel, HopperLinearNorm) and self.rescued
        rows = 0 if prepacked else problem.n
        device = problem.device
        self.split = splitter(planes, problem.k, problem.m, rows, device, self.spends, leaves)
        self.split_weight = splitter(planes, problem.k, problem.n, 0, device)
        self.new_buffer = new_tensor((self.split.nbytes,), torch.uint8, device)
        nbytes = self.split_weight.nbytes
        self.dropped = 0 if weight_waits else self.split_weight.spoilt
        self.new_weight = new_tensor((self.dropped or nbytes,), torch.uint8, device)
        self.new_rest = new_tensor((nbytes - self.dropped,), torch.uint8, device)
        self.kernels: dict[bool, tuple[Callable[..., None], Callable[..., None] | None]] = {}
        if problem.m:
            self._load(aligned=True)  # now: a CUDA graph may be captured when it is first needed
            if prepacked:
                self.split_weight.launch(aligned=True)

    def _load(self, aligned: bool) -> tuple[Callable[..., None], Callable[..., None] | None]:
        """Of the splitting kernel and of the range guard's."""
        guard = rescue_launch(self.problem, aligned, spent=self.spends) if self.rescued else None
        found = self.kernels[aligned] = (self.split.launch(aligned), guard)
        return found

    def bind(self, x_stride: int, w_stride: int, y_size: tuple[int, ...]) -> Callable[..., Forward]:
        """The function takes a ``_Weight`` too, and its buffer if the planes are to be left for the
        backward pass."""
        if self.spends and x_stride != self.problem.k:
            return self._sparing().bind(x_stride, w_stride, y_size)
        otherwise: Callable[..., Forward] | None = None
        outputs, new_buffer, given, kept = (
            self.outputs(y_size), self.new_buffer, self.given, self.given.kept
        )  # fmt: skip
        split, kernels, sizes, chain_arguments = (
            self.split, self.kernels, self.sizes, self.constants
        )  # fmt: skip
        m, n, _ = sizes
        held, spends = self.kernel.held, self.spends
        length = self.kernel.length(split.padded)
        stride_bytes = (x_stride | w_stride) * 4

        def run(
            inputs: Inputs, weight: _Weight | None = None, left: Tensor | None = None
        ) -> Forward:
            nonlocal otherwise
            x, w, bias, gamma, beta, operands, constants = inputs
            matrices = x_at, _, w_at, _ = x.data_ptr(), x_stride, w.data_ptr(), w_stride
            aligned = not (x_at | w_at | stride_bytes) % VECTOR_BYTES
            if spends and not aligned:
                if otherwise is None:
                    otherwise = self._sparing().bind(x_stride, w_stride, y_size)
                return otherwise(inputs, weight)
            out, numbers = outputs(), chain_arguments(constants)
            convert, guard = kernels.get(aligned) or self._load(aligned)
            buffer = new_buffer()
            at = buffer.data_ptr()
            scale, flags = at + split.scale, at + split.flags
            lists = () if spends else (at + split.spoilt if split.lists else 0,)
            convert(*matrices, at, at + split.lo, scale, flags, *lists, *split.numbers)
            of_chain = dense(operands, held) if operands else ()
            element = () if held is None else (of_chain[held],)
            if weight is None:
                column_scale, column_flags = scale + 4 * split.second, flags + split.second
                key: Any = (at, spends and x_at, *map(Tensor.data_ptr, element))
            else:
                hi, column_scale, column_flags, _ = weight
                key = (at, spends and x_at, hi, *map(Tensor.data_ptr, element))
            launch, first = kept.get(key) or given(
                key, lambda: (*self._operands(buffer, x, weight), *(t.view(m, n) for t in element))
            )
            parameters = parameters_at(bias, gamma, beta)
            y, z, mean, rstd = targets = out.addresses
            launch(
                *first, y, z, *parameters, scale, column_scale, mean, rstd, m, n, length,
                *[operand.data_ptr() for operand in of_chain], *numbers,
            )  # fmt: skip
            if guard is not None:
                others = matrix_arguments(operands)[0] if operands else ()
                guard(
                    *matrices, *parameters, flags, column_flags, scale, column_scale,
                    *targets, *sizes, *others, *numbers,
                )  # fmt: skip
            if left is None:
                return out
            more = StepForward._make(out)
            more.left = KeptPlanes(buffer, left, scales_alone=self.dropped > 0)
            return more

        return run if self.problem.m else lambda *_: outputs()

    def _sparing(self) -> _Split:
        """The same for an x that cannot be written over, or must not be."""
        return _Split(replace(self.problem, spends_x=False), self.kernel, self.prepacked)

    def _operands(self, buffer: Tensor, x: Tensor, weight: _Weight | None) -> Operands:
        """x's planes, and W's: its own or the second of the buffer."""
        split = self.split
        of_x = split.planes_over(x) if self.spends else split.halves_in(buffer)
        of_w = split.halves_in(buffer, True) if weight is None else weight[3]()
        return *of_x, *of_w

    @property
    def nbytes_left(self) -> int:
        """Bytes of the planes that ``bind_leaving`` leaves."""
        return self.split.nbytes + self.split_weight.nbytes - self.dropped

    def bind_leaving(self, *layout: Any) -> Bound:
        """As ``bind``, and planes are left: W's by a launch and in a buffer of their own; or all
        but W's (``weight_waits``)."""
        run = self.bind(*layout)

        def run_and_leave(inputs: Inputs) -> Forward:
            buffer = self.new_weight()
            left = self.new_rest() if self.dropped else buffer
            self.split_weight(
                buffer.data_ptr(), inputs.weight, None, self.split_weight.origin(left)
            )
            return run(inputs, self.weight_in(buffer, left), left)

        return run_and_leave

    def weight_in(self, kept: Tensor, rest: Tensor | None = None) -> _Weight:
        """Where the parts of a converted weight are; rest: what holds all but the planes."""
        split = self.split_weight
        origin = split.origin(kept if rest is None else rest)
        planes = partial(split.halves_in, kept)
        return kept.data_ptr(), origin + split.scale, origin + split.flags, planes


_Weight = tuple[int, int, int, Callable[[], tuple[Tensor, Tensor]]]
"""Where a weight's hi plane, scales and flags are; and its planes hi and lo."""


_Launch = _Direct | _Split | _Converting
