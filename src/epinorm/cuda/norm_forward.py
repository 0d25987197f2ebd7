"""The fused norm-activation kernel, forward: z → y and, in training, mean and rstd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from epinorm.chain import RMSNorm
from epinorm.cuda.device import arch_of, max_shared_bytes, sm_count
from epinorm.cuda.jit import KernelSource, load
from epinorm.cuda.norm_text import (
    OPERAND_SIGNATURE,
    norm_text,
    operand_arguments,
    parameter_addresses,
)
from epinorm.cuda.norm_tile import (
    WARP,
    Tile,
    ceil_div,
    lanes_for,
    power_of_two_from,
    vector_width,
)
from epinorm.cuda.prepared import PreparedByProblem
from epinorm.plan import Forward, Inputs, Problem

__all__ = ["ForwardPlan", "forward_plan", "forward_source", "norm_forward"]

Kind = Literal["registers", "shared", "reread"]

SIGNATURE = "pl" + "pppppp" + "li"
"""z and its row stride, bias, gamma, beta, y, mean, rstd, rows, groups."""

LARGEST_GRID_Y = 65535
BLOCK_WARPS = 8
WAVES = 2
"""Blocks for this many rounds over the GPU: one evens out badly, many read parameters too often."""


@dataclass(frozen=True)
class ForwardPlan:
    """Where a group's values wait between the passes of its statistics, and the tile."""

    kind: Kind
    tile: Tile

    @property
    def kernel(self) -> str:
        return "norm_forward" if self.kind == "registers" else "norm_forward_wide"

    def shared_bytes(self, problem: Problem) -> int:
        """Dynamic shared memory of a block."""
        if self.kind != "shared":
            return 0
        return problem.n // problem.groups * problem.stats_dtype.itemsize


def forward_plan(problem: Problem, vector: int, shared_limit: int) -> ForwardPlan:
    """The tile for vectors of ``vector`` values; ``shared_limit``: bytes that a block can have."""
    channels = problem.n // problem.groups
    wide_type = problem.stats_dtype == torch.float64
    itemsize = problem.dtype.itemsize
    team = lanes_for(channels, vector, itemsize, most_values=16 if wide_type else 32)
    if team is not None:
        lanes, vectors = team
        values = vectors * vector
        warps_needed = ceil_div(problem.groups * lanes, WARP)
        warps_x = min(power_of_two_from(warps_needed), BLOCK_WARPS)
        rows = max(1, min(8, (8 if wide_type else 16 if itemsize == 4 else 32) // values))
        tile = Tile(vector, lanes, vectors, rows, warps_x, BLOCK_WARPS // warps_x, values <= 8)
        return ForwardPlan("registers", tile)
    for values in (8,) if wide_type else (16, 32):
        lanes = max(power_of_two_from(ceil_div(channels, max(values, vector))), 2 * WARP)
        if lanes <= 1024:
            return ForwardPlan(
                "registers", Tile(vector, lanes, ceil_div(channels, lanes * vector), 1)
            )
    cached = channels * problem.stats_dtype.itemsize + 4096 <= shared_limit
    return ForwardPlan("shared" if cached else "reread", Tile(vector, 1024, 1, 1))


def forward_source(problem: Problem, plan: ForwardPlan, arch: str) -> KernelSource:
    """The kernel of this problem and plan for one architecture."""
    more = {"kKeepStatistics": problem.training, "kCached": plan.kind == "shared"}
    return KernelSource(plan.kernel, norm_text(plan.kernel, problem, plan.tile, more), arch)


def norm_forward(problem: Problem, z: Tensor, inputs: Inputs) -> Forward:
    """y, z, mean and rstd from z (M, N) in ``dtype``, the linear's output without its bias.

    z may have a row stride; of ``inputs``, bias, the norm's parameters and operands are read. The
    result is described at ``epinorm.plan.Forward``.
    """
    return _prepared(problem)(z, inputs)


class _PreparedForward:
    """Everything about a problem's launch that does not change from call to call."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.groups = problem.groups
        self.out_shape = (problem.m, problem.n)
        stats_shape = (problem.m, self.groups) if problem.training else (0,)
        self.rstd_shape = stats_shape
        self.mean_shape = (0,) if isinstance(problem.chain.norm, RMSNorm) else stats_shape
        self.widest = vector_width(problem.n // self.groups, problem.dtype.itemsize, ())
        self.launches: dict[tuple[int, int], Callable[..., None]] = {}

    def __call__(self, z: Tensor, inputs: Inputs) -> Forward:
        problem = self.problem
        device = z.device
        y = torch.empty(self.out_shape, dtype=problem.out_dtype, device=device)
        mean = torch.empty(self.mean_shape, dtype=problem.stats_dtype, device=device)
        rstd = torch.empty(self.rstd_shape, dtype=problem.stats_dtype, device=device)
        if problem.m:
            vector = self._vector(z, inputs)
            launch = self.launches.get((device.index, vector))
            if launch is None:
                launch = self._prepare(device, vector)
            launch(
                z.data_ptr(),
                z.stride(0),
                *parameter_addresses(inputs),
                y.data_ptr(),
                mean.data_ptr(),
                rstd.data_ptr(),
                problem.m,
                self.groups,
                *operand_arguments(inputs.operands),
            )
        kept = z if problem.training else torch.empty((0,), dtype=problem.dtype, device=device)
        return Forward(y, kept, mean, rstd)

    def _vector(self, z: Tensor, inputs: Inputs) -> int:
        if self.widest == 1:
            return 1
        tensors = (z, *inputs[2:5], *inputs.operands)
        return vector_width(self.problem.n // self.groups, z.element_size(), tensors)

    def _prepare(self, device: torch.device, vector: int) -> Callable[..., None]:
        problem = self.problem
        plan = forward_plan(problem, vector, max_shared_bytes(device))
        kernel = load(forward_source(problem, plan, arch_of(device)), device)
        shared_bytes = plan.shared_bytes(problem)
        tile = plan.tile
        resident = kernel.blocks_per_sm(tile.threads, shared_bytes) * sm_count(device)
        strips = ceil_div(self.groups, tile.groups_per_block)
        passes = ceil_div(problem.m, tile.rows_per_pass)
        grid_y = max(1, min(passes, ceil_div(WAVES * resident, strips), LARGEST_GRID_Y))
        signature = SIGNATURE + OPERAND_SIGNATURE * len(problem.chain.operand_kinds)
        launch = kernel.prepare(
            signature, (strips, grid_y), tile.threads, shared_bytes=shared_bytes
        )
        self.launches[device.index, vector] = launch
        return launch


_prepared = PreparedByProblem(_PreparedForward)
