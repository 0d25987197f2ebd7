"""Strategy `single` on Hopper: the whole forward chain in the product's epilogue.

fp32 takes three launches: x and W are split into planes (planes.py), multiplied, and what planes do
not hold is computed again (rescue.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from epinorm.chain import RMSNorm
from epinorm.cuda.device import sm_count
from epinorm.cuda.hopper import THREADS, Tile, linear_norm_source, shared_bytes
from epinorm.cuda.hopper_plan import choose_tile, instance_for, planes_of
from epinorm.cuda.jit import load
from epinorm.cuda.launch import tensor_map
from epinorm.cuda.planes import Planes, splitter
from epinorm.cuda.prepared import PreparedByProblem
from epinorm.cuda.rescue import LARGEST_GROUP, rescue_at
from epinorm.plan import Forward, Inputs, Problem
from epinorm.prepack import marked

__all__ = ["hopper_forward"]

_SIGNATURE = "mmmm" + "ppppppppp" + "iii"
"""x hi and lo, w hi and lo; y, z, bias, gamma, beta, row and column scale, mean, rstd; m, n, k."""

MOST_MAPS = 512


def hopper_forward(problem: Problem, inputs: Inputs, weight: Planes | None = None) -> Forward:
    """y and what backward needs, by one kernel (fp32: and the conversion of x and W to planes).

    ``weight``: the planes of ``inputs.weight`` where they are known already.
    """
    return _prepared(problem)(inputs, weight)


class _PreparedForward:
    """How a problem is computed, with its weight as it is or prepacked."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.ordinary = _launch_of(problem, prepacked=False)
        self.prepacked: _Direct | _Split | None = None

    def __call__(self, inputs: Inputs, weight: Planes | None) -> Forward:
        if (marked or weight is not None) and self.problem.dtype == torch.float32:
            found = self._with_kept_weight(inputs, weight)
            if found is not None:
                return found
        return self.ordinary(inputs)

    def _with_kept_weight(self, inputs: Inputs, weight: Planes | None) -> Forward | None:
        entry = marked.get(id(inputs.weight))
        if entry is None and weight is None:
            return None
        launch = self.prepacked
        if launch is None:
            launch = self.prepacked = _launch_of(self.problem, prepacked=True)
        if isinstance(launch, _Direct):
            return launch(inputs)
        if weight is None:
            assert entry is not None
            kept = entry.converted(inputs.weight, launch.split_weight)
            return None if kept is None else launch(inputs, launch.weight_in(kept))
        return launch(inputs, _addresses(weight))


def _launch_of(problem: Problem, prepacked: bool) -> _Direct | _Split:
    tile = choose_tile(problem, sm_count(problem.device), prepacked)
    if tile is None:
        raise RuntimeError(f"no tile of the Hopper kernel fits {problem}")
    scaled = problem.dtype == torch.float32 and not tile.tf32
    return _Split(problem, tile, prepacked) if scaled else _Direct(problem, tile)


class _Launch:
    """Everything about a problem's launch that does not change from call to call."""

    def __init__(self, problem: Problem, tile: Tile) -> None:
        self.problem = problem
        self.tile = tile
        self.sizes = (problem.m, problem.n, problem.k)
        self.nothing = torch.empty((0,), dtype=torch.float32, device=problem.device)
        self.new = partial(torch.empty, device=problem.device)
        self.launch = self._prepare()
        self.maps: dict[Any, tuple[bytes, ...]] = {}

    def _prepare(self) -> Callable[..., None]:
        problem, tile = self.problem, self.tile
        instance = instance_for(problem, tile)
        dynamic = shared_bytes(instance)
        kernel = load(linear_norm_source(instance), problem.device, dynamic)
        rows = -(-problem.m // (tile.block_m * tile.cluster))
        tiles = rows * -(-problem.n // (tile.block_n * tile.group_blocks))
        together = tile.cluster_blocks
        blocks = min(sm_count(problem.device) // together, max(tiles, 1)) * together
        return kernel.prepare(
            _SIGNATURE + "p" * len(problem.chain.operand_kinds),
            blocks,
            THREADS,
            shared_bytes=dynamic,
            cluster=together if together > 1 else None,
            dependent=True,
        )

    def _outputs(self) -> Forward:
        problem, nothing = self.problem, self.nothing
        y = self.new(self.sizes[:2], dtype=problem.out_dtype)
        if not problem.training:
            return Forward(y, nothing, nothing, nothing)
        z = self.new(self.sizes[:2], dtype=problem.dtype)
        rstd = self.new((problem.m, problem.groups), dtype=torch.float32)
        has_mean = not isinstance(problem.chain.norm, RMSNorm)
        return Forward(y, z, torch.empty_like(rstd) if has_mean else nothing, rstd)

    def _multiply(
        self, maps: tuple[bytes, ...], scales: tuple[int, int], inputs: Inputs, out: Forward
    ) -> None:
        y, z, mean, rstd = out
        bias, gamma, beta = inputs[2:5]
        operands = [operand.contiguous() for operand in inputs.operands] if inputs.operands else ()
        self.launch(
            *maps,
            *(y.data_ptr(), z.data_ptr()),
            0 if bias is None else bias.data_ptr(),
            0 if gamma is None else gamma.data_ptr(),
            0 if beta is None else beta.data_ptr(),
            *scales,
            *(mean.data_ptr(), rstd.data_ptr()),
            *self.sizes,
            *[operand.data_ptr() for operand in operands],
        )

    def _keep_maps(
        self, key: Any, x: tuple[Tensor, ...], w: tuple[Tensor, ...]
    ) -> tuple[bytes, ...]:
        """Encode the maps of x's and W's planes; the key holds what differs between calls."""
        tile = self.tile
        if len(self.maps) >= MOST_MAPS:
            self.maps.clear()
        maps = self.maps[key] = tuple(
            tensor_map(plane, rows, tile.block_k).data
            for planes, rows in ((x, tile.load_m or tile.block_m), (w, tile.box_n))
            for plane in planes
        )
        return maps


class _Direct(_Launch):
    """x and W go into the product as they are."""

    def __call__(self, inputs: Inputs) -> Forward:
        out = self._outputs()
        if self.problem.m:
            x, w = inputs.x, inputs.weight
            key = (x.data_ptr(), x.stride(0), w.data_ptr(), w.stride(0))
            maps = self.maps.get(key)
            if maps is None:
                x, w = _readable(x), _readable(w)
                at = (x.data_ptr(), x.stride(0), w.data_ptr(), w.stride(0))
                maps = self.maps.get(at) or self._keep_maps(at, (x, x), (w, w))
            self._multiply(maps, (0, 0), inputs, out)
        return out


class _Split(_Launch):
    """fp32 x and W as planes; W's are made in each call, or ``prepacked``."""

    def __init__(self, problem: Problem, tile: Tile, prepacked: bool) -> None:
        super().__init__(problem, tile)
        self.planes = planes_of(problem)
        # Wider groups come here in tests alone: plan.py leaves them to the library's product.
        self.rescued = problem.chain.channels_per_group(problem.n) <= LARGEST_GROUP
        rows = 0 if prepacked else problem.n
        device = problem.device
        self.split = splitter(self.planes, problem.k, problem.m, rows, device)
        if problem.m:
            self.split.prepare(aligned=True)  # stale planes under capture are made by this one
        self.split_weight = splitter(self.planes, problem.k, problem.n, 0, device)
        self.new_buffer = partial(self.new, self.split.nbytes, dtype=torch.uint8)

    def __call__(self, inputs: Inputs, weight: _Addresses | None = None) -> Forward:
        out = self._outputs()
        if not self.problem.m:
            return out
        split = self.split
        buffer = self.new_buffer()
        at = buffer.data_ptr()
        if weight is None:
            split(at, inputs.x, inputs.weight)
            second = split.second
            column_scale = at + split.scale + 4 * second
            column_flags = at + split.flags + second
            maps = self.maps.get(at) or self._own_maps(at, buffer)
        else:
            split(at, inputs.x)
            hi, column_scale, column_flags = weight[:3]
            maps = self.maps.get((at, hi)) or self._mixed_maps((at, hi), buffer, weight[3]())
        self._multiply(maps, (at + split.scale, column_scale), inputs, out)
        if self.rescued:
            rescue_at(self.problem, inputs, at + split.flags, column_flags, out)
        return out

    def weight_in(self, kept: Tensor) -> _Addresses:
        """Where the parts of a converted weight are."""
        at, split = kept.data_ptr(), self.split_weight
        return at, at + split.scale, at + split.flags, partial(split.planes_in, kept)

    def _own_maps(self, key: Any, buffer: Tensor) -> tuple[bytes, ...]:
        return self._mixed_maps(key, buffer, self.split.planes_in(buffer, second=True))

    def _mixed_maps(self, key: Any, buffer: Tensor, w: Planes) -> tuple[bytes, ...]:
        x = self.split.planes_in(buffer)
        return self._keep_maps(key, (x.hi, x.lo), (w.hi, w.lo))


_Addresses = tuple[int, int, int, Callable[[], Planes]]
"""Of a weight's hi plane, scales and flags; and the planes themselves for new tensor maps."""


def _addresses(w: Planes) -> _Addresses:
    return w.hi.data_ptr(), w.scale.data_ptr(), w.flags.data_ptr(), lambda: w


def _readable(matrix: Tensor) -> Tensor:
    """The matrix itself, or a copy where the copy engine cannot read its rows."""
    if matrix.data_ptr() % 16 or matrix.stride(0) * matrix.element_size() % 16:
        return matrix.clone(memory_format=torch.contiguous_format)
    return matrix


_prepared = PreparedByProblem(_PreparedForward)
