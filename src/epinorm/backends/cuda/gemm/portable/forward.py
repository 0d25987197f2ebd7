"""Strategy `single` on any GPU since Ampere: the whole forward chain in the product's epilogue.

fp32 takes three launches: x and W are split into planes (planes.py), multiplied, and what planes do
not hold is computed again (rescue.py). In training the planes stay for the backward pass, where it
reads planes too and there is room (fp32/kept_planes.py): W's then have a launch and a buffer to
themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from epinorm.backends.cuda.fp32.kept_planes import KeptPlanes, make_room
from epinorm.backends.cuda.fp32.planes import VECTOR_BYTES, Planes, Splitter, splitter
from epinorm.backends.cuda.fp32.rescue import rescue_launch
from epinorm.backends.cuda.gemm.portable.text import linear_norm_source
from epinorm.backends.cuda.norm.text import matrix_arguments, parameter_addresses
from epinorm.backends.cuda.plan.gradients import planes_taken
from epinorm.backends.cuda.plan.portable import choose_tile, copy_bytes, instance_for, planes_of
from epinorm.backends.cuda.plan.portable_tile import PortableTile, shared_bytes
from epinorm.backends.cuda.plan.strategy import LARGEST_GUARDED_GROUP
from epinorm.backends.cuda.runtime.device import arch_of, gpu_of
from epinorm.backends.cuda.runtime.jit import load
from epinorm.backends.cuda.runtime.prepared import starts_early
from epinorm.backends.cuda.text.chain_text import ChainArguments
from epinorm.backends.cuda.text.instance import columns_of
from epinorm.backends.prepack import marked
from epinorm.problem import Forward, Inputs, Layout, Problem, Run, StepForward

__all__ = ["PortableForward", "bind"]

_SIGNATURE = "ppppll" + "ppppppppp" + "iii"
"""x hi and lo, w hi and lo, their strides in numbers; y, z, bias, gamma, beta, row and column
scale, mean, rstd; m, n, k."""


def bind(problem: Problem, layout: Layout) -> Run:
    """The forward pass of tensors of this layout."""
    forward, y_size = PortableForward(problem), layout.y_size
    if len(y_size) == 2:
        return lambda *tensors: forward(Inputs(*tensors))

    def folded(x: Tensor, *rest: Any) -> Forward:
        found = forward(Inputs(x.view(problem.m, problem.k), *rest))
        return found._replace(y=found.y.view(y_size))

    return folded


class PortableForward:
    """y and what backward needs, by one kernel (fp32: and the conversion of x and W to planes)."""

    def __init__(self, problem: Problem) -> None:
        tile = choose_tile(problem, gpu_of(problem.device))
        if tile is None:
            raise RuntimeError(f"no tile of the portable kernel fits {problem}")
        self.problem = problem
        self.tile: PortableTile = tile
        self.nothing = torch.empty((0,), dtype=torch.float32, device=problem.device)
        self.launches: dict[int, Callable[..., None]] = {}
        self.guards: dict[bool, Callable[..., None]] = {}
        self.by_planes = problem.dtype == torch.float32
        self.constants = ChainArguments(problem.chain, torch.float32)
        if self.by_planes:
            count, device = planes_of(problem), problem.device
            self.split = splitter(count, problem.k, problem.m, problem.n, device)
            self.split_x = splitter(count, problem.k, problem.m, 0, device)
            self.split_weight = splitter(count, problem.k, problem.n, 0, device)
        self.keeps = problem.whole_step and planes_taken(problem, True, True, "portable")[0]
        # Wider groups come here in tests alone: plan.py leaves them to the library's product.
        self.guarded = self.by_planes and columns_of(problem) <= LARGEST_GUARDED_GROUP
        if problem.m:  # now: a CUDA graph may be captured when it is first needed
            width = 16 if self.by_planes else copy_bytes(problem.k * problem.dtype.itemsize)
            self._load(width)
            if self.by_planes:
                for split in (self.split, self.split_x, self.split_weight):
                    split.launch(aligned=True)
            if self.guarded:
                self.guards[True] = rescue_launch(problem, True)

    def __call__(self, inputs: Inputs, weight: Planes | None = None) -> Forward:
        """``weight``: the planes of ``inputs.weight`` where they are known already."""
        out = self._outputs()
        if not self.problem.m:
            return out
        if not self.by_planes:
            self._multiply_numbers(inputs, out)
            return out
        if weight is None and marked:
            weight = self._prepacked(inputs.weight)
        kept = self._split_to_keep(inputs.weight) if self.keeps and weight is None else None
        if kept is not None:
            weight = self.split_weight.planes_in(kept)
        x = self._multiply_planes(inputs, weight, out)
        if kept is None:
            return out
        more = StepForward._make(out)
        more.left = KeptPlanes(x, kept)
        return more

    def _split_to_keep(self, weight: Tensor) -> Tensor | None:
        """W's planes in a buffer of their own, where they may wait for the backward pass."""
        device = self.problem.device
        if not make_room(self.split_x.nbytes + self.split_weight.nbytes, device):
            return None
        buffer = torch.empty(self.split_weight.nbytes, dtype=torch.uint8, device=device)
        self.split_weight(buffer.data_ptr(), weight)
        return buffer

    def _outputs(self) -> Forward:
        problem, nothing, device = self.problem, self.nothing, self.problem.device
        size = (problem.m, problem.n)
        y = torch.empty(size, dtype=problem.out_dtype, device=device)
        if problem.matrix_dtype is None:
            return Forward(y, nothing, nothing, nothing)
        matrix = torch.empty(size, dtype=problem.matrix_dtype, device=device)
        mean = rstd = nothing
        if problem.keeps_statistics:
            rstd = torch.empty((problem.m, problem.groups), dtype=torch.float32, device=device)
            mean = torch.empty_like(rstd) if problem.keeps_mean else nothing
        if problem.chain.returns_sum:
            return Forward(y, nothing, mean, rstd, matrix)
        return Forward(y, matrix, mean, rstd)

    def _load(self, width: int) -> Callable[..., None]:
        """The kernel that copies ``width`` bytes at a time."""
        problem, tile = self.problem, self.tile
        instance = instance_for(problem, tile)
        dynamic = shared_bytes(instance)
        source = linear_norm_source(instance, arch_of(problem.device), width, instance.aligned_rows)
        launch = self.launches[width] = load(source, problem.device, dynamic).prepare(
            _SIGNATURE + "p" * len(problem.chain.operand_kinds) + self.constants.signature,
            tile.tiles(problem.m, problem.n),
            tile.threads,
            shared_bytes=dynamic,
            dependent=starts_early(problem.device),
        )
        return launch

    def _multiply_numbers(self, inputs: Inputs, out: Forward) -> None:
        """16-bit x and W as they are."""
        x, w, problem = inputs.x, inputs.weight, self.problem
        size = problem.dtype.itemsize
        at = (x.data_ptr(), x.data_ptr(), w.data_ptr(), w.data_ptr(), x.stride(0), w.stride(0))
        width = copy_bytes(at[0], at[2], at[4] * size, at[5] * size, problem.k * size)
        self._launch(width, at, (0, 0), problem.k, inputs, out)

    def _multiply_planes(self, inputs: Inputs, weight: Planes | None, out: Forward) -> Tensor:
        """fp32 x and W as planes; W's are made now, unless they are known. The buffer of x's."""
        split = self.split if weight is None else self.split_x
        buffer = torch.empty(split.nbytes, dtype=torch.uint8, device=self.problem.device)
        split(buffer.data_ptr(), inputs.x, inputs.weight if weight is None else None)
        x = _Addresses(buffer.data_ptr(), split, 0)
        if weight is None:
            w = _Addresses(buffer.data_ptr(), split, split.second)
            at = (x.hi, x.lo, w.hi, w.lo)
            scales, flags = (x.scale, w.scale), (x.flags, w.flags)
        else:
            at = (x.hi, x.lo, weight.hi.data_ptr(), weight.lo.data_ptr())
            scales = (x.scale, weight.scale.data_ptr())
            flags = (x.flags, weight.flags.data_ptr())
        # The padding is of zeros in both, and whole units can be copied with it.
        strides = (split.padded, split.padded)
        self._launch(16, (*at, *strides), scales, split.padded, inputs, out)
        if self.guarded:
            self._guard(inputs, flags, out)
        return buffer

    def _guard(self, inputs: Inputs, flags: tuple[int, int], out: Forward) -> None:
        """What the planes do not hold, once more in plain fp32."""
        problem, x, weight = self.problem, inputs.x, inputs.weight
        at = (x.data_ptr(), x.stride(0), weight.data_ptr(), weight.stride(0))
        aligned = (at[0] | at[2] | (at[1] | at[3]) * 4) % VECTOR_BYTES == 0
        guard = self.guards.get(aligned)
        if guard is None:
            guard = self.guards[aligned] = rescue_launch(problem, aligned)
        guard(
            *at,
            *parameter_addresses(inputs),
            *flags,
            *out.addresses,
            *(problem.m, problem.n, problem.k, *matrix_arguments(inputs.operands)[0]),
            *self.constants(inputs.constants),
        )

    def _prepacked(self, weight: Tensor) -> Planes | None:
        entry = marked.get(id(weight))
        if entry is None:
            return None
        kept = entry.converted(weight, self.split_weight)
        return None if kept is None else self.split_weight.planes_in(kept)

    def _launch(
        self,
        width: int,
        operands: tuple[int, ...],
        scales: tuple[int, int],
        k: int,
        inputs: Inputs,
        out: Forward,
    ) -> None:
        launch = self.launches.get(width) or self._load(width)
        y, matrix, mean, rstd = out.addresses
        chain = [operand.contiguous() for operand in inputs.operands]
        launch(
            *operands,
            *(y, matrix, *parameter_addresses(inputs), *scales, mean, rstd),
            *(self.problem.m, self.problem.n, k),
            *[operand.data_ptr() for operand in chain],
            *self.constants(inputs.constants),
        )


class _Addresses:
    """Where the planes, scales and flags of the rows from ``first`` on lie in a split buffer."""

    def __init__(self, buffer: int, split: Splitter, first: int) -> None:
        plane = 2 * first * split.padded
        self.hi, self.lo = buffer + plane, buffer + split.lo + plane
        self.scale, self.flags = buffer + split.scale + 4 * first, buffer + split.flags + first
