"""Strategy `single` on Hopper: the whole forward chain in the product's epilogue."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from epinorm.chain import RMSNorm
from epinorm.cuda.device import sm_count
from epinorm.cuda.hopper import THREADS, Tile, linear_norm_source, shared_bytes
from epinorm.cuda.hopper_plan import choose_tile, instance_for, planes_of
from epinorm.cuda.jit import load
from epinorm.cuda.launch import TensorMap, tensor_map
from epinorm.cuda.planes import Planes, split
from epinorm.cuda.prepared import PreparedByProblem
from epinorm.plan import Forward, Inputs, Problem

__all__ = ["hopper_forward"]

_SIGNATURE = "mmmm" + "ppppppppp" + "iii"
"""x hi and lo, w hi and lo; y, z, bias, gamma, beta, row and column scale, mean, rstd; m, n, k."""


def hopper_forward(problem: Problem, inputs: Inputs, weight: Planes | None = None) -> Forward:
    """y and what backward needs, by one kernel (fp32: and the conversion of x and W to planes).

    ``weight``: the planes of ``inputs.weight`` where they are known already.
    """
    return _prepared(problem)(inputs, weight)


class _PreparedForward:
    """Everything about a problem's launch that does not change from call to call."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        tile = choose_tile(problem, sm_count(problem.device))
        if tile is None:
            raise RuntimeError(f"no tile of the Hopper kernel fits {problem}")
        self.tile: Tile = tile
        self.planes = planes_of(problem)
        self.split = problem.dtype == torch.float32 and not tile.tf32
        self.nothing = torch.empty((0,), dtype=torch.float32, device=problem.device)
        self.launch = self._prepare()

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

    def __call__(self, inputs: Inputs, weight: Planes | None) -> Forward:
        problem = self.problem
        device = inputs.x.device
        y = torch.empty((problem.m, problem.n), dtype=problem.out_dtype, device=device)
        kept = self._kept(device)
        if problem.m == 0:
            return Forward(y, *kept)
        if self.split:
            x = split(inputs.x, self.planes)
            w = weight if weight is not None else split(inputs.weight, self.planes)
            maps = (*self._maps_x(x.hi, x.lo), *self._maps_w(w.hi, w.lo))
            scales = (x.scale.data_ptr(), w.scale.data_ptr())
        else:
            x, w = _readable(inputs.x), _readable(inputs.weight)
            maps = (*self._maps_x(x, x), *self._maps_w(w, w))
            scales = (0, 0)
        operands = [operand.contiguous() for operand in inputs.operands]
        self.launch(
            *(m.data for m in maps),
            *(y.data_ptr(), kept[0].data_ptr()),
            *(0 if t is None else t.data_ptr() for t in inputs[2:5]),
            *scales,
            *(kept[1].data_ptr(), kept[2].data_ptr()),
            *(problem.m, problem.n, problem.k),
            *(operand.data_ptr() for operand in operands),
        )
        return Forward(y, *kept)

    def _maps(self, hi: Tensor, lo: Tensor, rows: int) -> tuple[TensorMap, TensorMap]:
        first = tensor_map(hi, rows, self.tile.block_k)
        return first, first if hi is lo else tensor_map(lo, rows, self.tile.block_k)

    def _maps_x(self, hi: Tensor, lo: Tensor) -> tuple[TensorMap, TensorMap]:
        return self._maps(hi, lo, self.tile.load_m or self.tile.block_m)

    def _maps_w(self, hi: Tensor, lo: Tensor) -> tuple[TensorMap, TensorMap]:
        return self._maps(hi, lo, self.tile.box_n)

    def _kept(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        problem, nothing = self.problem, self.nothing
        if not problem.training:
            return nothing, nothing, nothing
        z = torch.empty((problem.m, problem.n), dtype=problem.dtype, device=device)
        rstd = torch.empty((problem.m, problem.groups), dtype=torch.float32, device=device)
        has_mean = not isinstance(problem.chain.norm, RMSNorm)
        return z, torch.empty_like(rstd) if has_mean else nothing, rstd


def _readable(matrix: Tensor) -> Tensor:
    """The matrix itself, or a copy where the copy engine cannot read its rows."""
    if matrix.data_ptr() % 16 or matrix.stride(0) * matrix.element_size() % 16:
        return matrix.clone(memory_format=torch.contiguous_format)
    return matrix


_prepared = PreparedByProblem(_PreparedForward)
