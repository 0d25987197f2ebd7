"""Strategy `single` on Hopper: the whole forward chain in the product's epilogue.

fp32 takes three launches: x and W are split into planes (planes.py), multiplied, and what planes do
not hold is computed again (rescue.py). Where x has few rows, W is converted on its way into the
product instead (gemm/hopper/fp32_forward.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from epinorm.backends.cuda.fp32.kept_planes import KeptPlanes, make_room
from epinorm.backends.cuda.fp32.planes import VECTOR_BYTES, Planes, splitter
from epinorm.backends.cuda.fp32.rescue import rescue_launch
from epinorm.backends.cuda.gemm.hopper.fp32_forward import Converting, readable
from epinorm.backends.cuda.gemm.hopper.launch import Launch
from epinorm.backends.cuda.gemm.hopper.text import linear_norm_source
from epinorm.backends.cuda.norm.text import matrix_arguments, parameters_at
from epinorm.backends.cuda.plan.gradients import planes_taken
from epinorm.backends.cuda.plan.hopper import (
    choose_tile,
    instance_for,
    persistent_blocks,
    planes_of,
)
from epinorm.backends.cuda.plan.hopper_tile import Tile, shared_bytes
from epinorm.backends.cuda.plan.strategy import LARGEST_GUARDED_GROUP
from epinorm.backends.cuda.runtime.device import sm_count
from epinorm.backends.cuda.runtime.jit import load
from epinorm.backends.cuda.runtime.prepared import new_tensor
from epinorm.backends.cuda.text.instance import columns_of
from epinorm.backends.prepack import marked
from epinorm.problem import Forward, Inputs, Layout, Problem, Run, StepForward

__all__ = ["HopperForward", "bind", "launch_with"]

_SIGNATURE = "mmmm" + "ppppppppp" + "iii"
"""x hi and lo, w hi and lo; y, z or the sum, bias, gamma, beta, row and column scale, mean, rstd;
m, n, k."""


def bind(problem: Problem, layout: Layout) -> Run:
    """The forward pass of tensors of this layout."""
    return HopperForward(problem).bind(*layout)


class HopperForward:
    """y and what backward needs, by one kernel (fp32: and the conversion of x and W to planes)."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.ordinary = _launch_of(problem, prepacked=False)
        self.prepacked: _Launch | None = None

    def __call__(self, inputs: Inputs, weight: Planes | None = None) -> Forward:
        """``weight``: the planes of ``inputs.weight`` where they are known already."""
        if (marked or weight is not None) and self.problem.dtype == torch.float32:
            found = self._with_kept_weight(inputs, weight)
            if found is not None:
                return found
        return self.ordinary(inputs)

    def bind(self, x_stride: int, w_stride: int, y_size: tuple[int, ...]) -> Run:
        ordinary = self.ordinary.bind(x_stride, w_stride, y_size)
        if self.problem.dtype != torch.float32:
            return ordinary
        size, keeping = (self.problem.m, self.problem.k), _keeping(self.problem, self.ordinary)

        def run(
            x: Tensor,
            weight: Tensor,
            bias: Tensor | None,
            norm_weight: Tensor | None,
            norm_bias: Tensor | None,
            operands: tuple[Tensor, ...],
            constants: tuple[float, ...],
        ) -> Forward:
            if id(weight) in marked:
                matrix = x.view(size) if x.dim() != 2 else x
                inputs = Inputs(matrix, weight, bias, norm_weight, norm_bias, operands, constants)
                found = self._with_kept_weight(inputs, None)
                if found is not None:
                    return found._replace(y=found.y.view(y_size))
            if keeping is not None:  # training: x has two dimensions
                inputs = Inputs(x, weight, bias, norm_weight, norm_bias, operands, constants)
                found = self._with_planes_left(keeping, inputs)
                if found is not None:
                    return found
            return ordinary(x, weight, bias, norm_weight, norm_bias, operands, constants)

        return run

    def _with_kept_weight(self, inputs: Inputs, weight: Planes | None) -> Forward | None:
        entry = marked.get(id(inputs.weight))
        if entry is None and weight is None:
            return None
        launch = self.prepacked
        if launch is None:
            launch = self.prepacked = _launch_of(self.problem, prepacked=True)
        if not isinstance(launch, _Split):
            return launch(inputs)
        if weight is None:
            assert entry is not None
            kept = entry.converted(inputs.weight, launch.split_weight)
            return None if kept is None else launch(inputs, launch.weight_in(kept))
        return launch(inputs, _weight_of(weight))

    def _with_planes_left(self, launch: _Leaving, inputs: Inputs) -> Forward | None:
        """The same, and the planes stay for the backward pass where there is room for them, in
        memory that backward gives back before dW is allocated."""
        if not make_room(launch.nbytes_left, self.problem.device):
            return None
        return launch.leaving(inputs)


class _Leaving(Protocol):
    """A launch that can leave planes for the backward pass, of ``nbytes_left`` bytes."""

    @property
    def nbytes_left(self) -> int: ...

    def leaving(self, inputs: Inputs) -> Forward: ...


def _keeping(problem: Problem, ordinary: _Launch) -> _Leaving | None:
    """``ordinary`` with its planes left, where the backward pass reads planes too."""
    if not (problem.whole_step and problem.m) or isinstance(ordinary, _Direct):
        return None
    if not planes_taken(problem, True, True)[0]:
        return None
    if isinstance(ordinary, _Converting):
        return _Converting(problem, ordinary.tile, leaves=True)
    return _Split(problem, ordinary.tile, prepacked=True)


def _launch_of(problem: Problem, prepacked: bool, converts: bool = True) -> _Launch:
    tile = choose_tile(problem, sm_count(problem.device), prepacked, converts)
    if tile is None:
        raise RuntimeError(f"no tile of the Hopper kernel fits {problem}")
    return launch_with(problem, tile, prepacked)


def launch_with(problem: Problem, tile: Tile, prepacked: bool = False) -> _Launch:
    """A function from ``Inputs`` to ``Forward``, by the kernel with this tile."""
    if tile.converts:
        return _Converting(problem, tile)
    scaled = problem.dtype == torch.float32 and not tile.tf32
    return _Split(problem, tile, prepacked) if scaled else _Direct(problem, tile)


class _Converting(Converting):
    """Converts W or x on the way; as planes where the copy engine cannot read it."""

    def bind(self, x_stride: int, w_stride: int, y_size: tuple[int, ...]) -> Callable[..., Forward]:
        run = super().bind(x_stride, w_stride, y_size)
        otherwise: Callable[..., Forward] | None = None

        def run_where_readable(x: Tensor, weight: Tensor, *more: Any) -> Forward:
            nonlocal otherwise
            at = (
                (weight.data_ptr(), w_stride) if self.tile.fp32_weight else (x.data_ptr(), x_stride)
            )
            if readable(*at):
                return run(x, weight, *more)
            if otherwise is None:
                split = _launch_of(self.problem, False, converts=False)
                otherwise = split.bind(x_stride, w_stride, y_size)
            return otherwise(x, weight, *more)

        return run_where_readable


class _WithTile(Launch):
    """By `hopper_linear_norm.cu` with this tile."""

    def __init__(self, problem: Problem, tile: Tile) -> None:
        super().__init__(problem)
        self.tile = tile
        self.launch = self._prepare()

    def _prepare(self) -> Callable[..., None]:
        problem, tile = self.problem, self.tile
        instance = instance_for(problem, tile)
        dynamic = shared_bytes(instance)
        kernel = load(linear_norm_source(instance), problem.device, dynamic)
        rows = -(-problem.m // (tile.block_m * tile.cluster))
        tiles = rows * -(-problem.n // (tile.block_n * tile.cluster_n))
        together = tile.cluster_blocks
        most = sm_count(problem.device) // together
        if tile.cluster_n > 1:  # a GPC's multiprocessors need not be a multiple of a cluster's
            most = kernel.clusters_at_once(together, tile.threads, dynamic)
        blocks = persistent_blocks(tiles, most) * together
        return kernel.prepare(
            _SIGNATURE + self.chain_signature,
            blocks,
            tile.threads,
            shared_bytes=dynamic,
            cluster=together if together > 1 else None,
            dependent=True,
        )

    def _keep_maps(
        self, key: Any, x: tuple[Tensor, ...], w: tuple[Tensor, ...]
    ) -> tuple[bytes, ...]:
        """The maps of x's and W's planes."""
        tile = self.tile
        rows_of = ((x, tile.load_m or tile.block_m), (w, tile.box_n))
        return self.keep_maps(
            key, [(plane, rows, tile.block_k) for planes, rows in rows_of for plane in planes]
        )


class _Direct(_WithTile):
    """x and W go into the product as they are."""

    def bind(self, x_stride: int, w_stride: int, y_size: tuple[int, ...]) -> Callable[..., Forward]:
        outputs, launch, maps = self.outputs(y_size), self.launch, self.maps
        sizes, chain_arguments, problem = self.sizes, self.constants, self.problem
        keeps_matrix = problem.matrix_dtype is not None
        keeps_statistics = problem.keeps_statistics

        def run(
            x: Tensor,
            weight: Tensor,
            bias: Tensor | None,
            gamma: Tensor | None,
            beta: Tensor | None,
            operands: tuple[Tensor, ...],
            constants: tuple[float, ...],
        ) -> Forward:
            out = outputs()
            y, matrix, mean, rstd = out.addresses
            found = maps.get((x.data_ptr(), x_stride, weight.data_ptr(), w_stride))
            if found is None:
                x, weight = _readable(x.view(-1, x.shape[-1])), _readable(weight)
                at = (x.data_ptr(), x.stride(0), weight.data_ptr(), weight.stride(0))
                found = maps.get(at) or self._keep_maps(at, (x, x), (weight, weight))
            if operands:
                operands = tuple([operand.contiguous() for operand in operands])
            launch(
                *found,
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


class _Split(_WithTile):
    """fp32 x and W as planes; W's are made in each call, or ``prepacked``."""

    def __init__(self, problem: Problem, tile: Tile, prepacked: bool) -> None:
        super().__init__(problem, tile)
        self.planes = planes_of(problem)
        # Wider groups come here in tests alone: plan.py leaves them to the library's product.
        self.rescued = columns_of(problem) <= LARGEST_GUARDED_GROUP
        rows = 0 if prepacked else problem.n
        device = problem.device
        self.split = splitter(self.planes, problem.k, problem.m, rows, device)
        self.split_weight = splitter(self.planes, problem.k, problem.n, 0, device)
        self.new_buffer = new_tensor((self.split.nbytes,), torch.uint8, device)
        self.new_weight = new_tensor((self.split_weight.nbytes,), torch.uint8, device)
        self.kernels: dict[bool, tuple[Callable[..., None], Callable[..., None] | None]] = {}
        if problem.m:
            self._load(aligned=True)  # now: a CUDA graph may be captured when it is first needed

    def _load(self, aligned: bool) -> tuple[Callable[..., None], Callable[..., None] | None]:
        """Of the splitting kernel and of the range guard's."""
        guard = rescue_launch(self.problem, aligned) if self.rescued else None
        found = self.kernels[aligned] = (self.split.launch(aligned), guard)
        return found

    def bind(self, x_stride: int, w_stride: int, y_size: tuple[int, ...]) -> Callable[..., Forward]:
        """As ``Launch.bind``; the function takes a ``_Weight`` too, and its buffer if the planes
        are to be left for the backward pass."""
        outputs, new_buffer, launch, maps = (
            self.outputs(y_size), self.new_buffer, self.launch, self.maps
        )  # fmt: skip
        split, kernels, sizes, chain_arguments = (
            self.split, self.kernels, self.sizes, self.constants
        )  # fmt: skip
        stride_bytes = (x_stride | w_stride) * 4

        def run(
            x: Tensor,
            w: Tensor,
            bias: Tensor | None,
            gamma: Tensor | None,
            beta: Tensor | None,
            operands: tuple[Tensor, ...],
            constants: tuple[float, ...],
            weight: _Weight | None = None,
            left: Tensor | None = None,
        ) -> Forward:
            out, numbers = outputs(), chain_arguments(constants)
            matrices = x_at, _, w_at, _ = x.data_ptr(), x_stride, w.data_ptr(), w_stride
            aligned = not (x_at | w_at | stride_bytes) % VECTOR_BYTES
            convert, guard = kernels.get(aligned) or self._load(aligned)
            buffer = new_buffer()
            at = buffer.data_ptr()
            scale, flags = at + split.scale, at + split.flags
            convert(
                *matrices, at, at + split.lo, scale, flags, at + split.spoilt, *split.numbers
            )  # fmt: skip
            if weight is None:
                column_scale, column_flags = scale + 4 * split.second, flags + split.second
                found = maps.get(at)
                if found is None:
                    found = self._new_maps(at, buffer, split.planes_in(buffer, True))
            else:
                hi, column_scale, column_flags, planes = weight
                found = maps.get((at, hi)) or self._new_maps((at, hi), buffer, planes())
            parameters = parameters_at(bias, gamma, beta)
            y, z, mean, rstd = targets = out.addresses
            dense = [operand.contiguous() for operand in operands] if operands else ()
            launch(
                *found, y, z, *parameters, scale, column_scale, mean, rstd, *sizes,
                *[operand.data_ptr() for operand in dense], *numbers,
            )  # fmt: skip
            if guard is not None:
                given = matrix_arguments(operands)[0] if operands else ()
                guard(
                    *matrices, *parameters, flags, column_flags, *targets, *sizes, *given, *numbers
                )
            if left is None:
                return out
            more = StepForward._make(out)
            more.left = KeptPlanes(buffer, left)
            return more

        return run if self.problem.m else lambda *_: outputs()

    @property
    def nbytes_left(self) -> int:
        """Bytes of the planes that ``leaving`` leaves."""
        return self.split.nbytes + self.split_weight.nbytes

    def leaving(self, inputs: Inputs) -> Forward:
        """As a call, and planes are left: W's by a launch and in a buffer of their own."""
        buffer = self.new_weight()
        self.split_weight(buffer.data_ptr(), inputs.weight)
        return self(inputs, self.weight_in(buffer), buffer)

    def weight_in(self, kept: Tensor) -> _Weight:
        """Where the parts of a converted weight are."""
        at, split = kept.data_ptr(), self.split_weight
        return at, at + split.scale, at + split.flags, partial(split.planes_in, kept)

    def _new_maps(self, key: Any, buffer: Tensor, w: Planes) -> tuple[bytes, ...]:
        x = self.split.planes_in(buffer)
        return self._keep_maps(key, (x.hi, x.lo), (w.hi, w.lo))


_Weight = tuple[int, int, int, Callable[[], Planes]]
"""Where a weight's hi plane, scales and flags are; and the planes themselves, for tensor maps."""


def _weight_of(w: Planes) -> _Weight:
    return w.hi.data_ptr(), w.scale.data_ptr(), w.flags.data_ptr(), lambda: w


def _readable(matrix: Tensor) -> Tensor:
    """The matrix itself, or a copy where the copy engine cannot read its rows."""
    if matrix.data_ptr() % 16 or matrix.stride(0) * matrix.element_size() % 16:
        return matrix.clone(memory_format=torch.contiguous_format)
    return matrix


_Launch = _Direct | _Split | _Converting
