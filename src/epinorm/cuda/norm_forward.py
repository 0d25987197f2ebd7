"""The fused norm-activation kernel, forward: z → y and, in training, mean and rstd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from epinorm.chain import RMSNorm
from epinorm.cuda.device import arch_of, max_shared_bytes, sm_count
from epinorm.cuda.jit import KernelSource, compiled, load
from epinorm.cuda.norm_text import (
    OPERAND_SIGNATURE,
    matrix_arguments,
    norm_text,
    parameter_addresses,
)
from epinorm.cuda.norm_tile import (
    LARGEST_ACCESS_BYTES,
    WARP,
    Tile,
    ceil_div,
    lanes_for,
    power_of_two_from,
    vector_width,
)
from epinorm.cuda.prepared import PreparedByProblem, starts_early
from epinorm.plan import Forward, Inputs, Problem

__all__ = ["ForwardPlan", "forward_plan", "forward_plans", "forward_source", "norm_forward"]

Kind = Literal["registers", "shared", "reread"]

SIGNATURE = "pl" + "pppppp" + "li"
"""z and its row stride, bias, gamma, beta, y, mean, rstd, rows, groups."""

LARGEST_GRID_Y = 65535
BLOCK_WARPS = 4
MOST_THREADS = 1024
WAVES = {2: 2, 4: 8, 8: 8}
"""By bytes of a value: blocks for this many rounds over the GPU. Few even out badly; many read the
parameters too often, which costs more the smaller the values are (measured on an H200)."""


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


def forward_plans(problem: Problem, vector: int, shared_limit: int) -> tuple[ForwardPlan, ...]:
    """The plans for vectors of ``vector`` values: the preferred one first, one that fits last.

    ``shared_limit``: bytes of shared memory that a block can have.
    """
    channels = problem.n // problem.groups
    cached = channels * problem.stats_dtype.itemsize + 4096 <= shared_limit
    wide = ForwardPlan("shared" if cached else "reread", Tile(vector, MOST_THREADS, 1, 1))
    tile = _warp_teams(problem, channels, vector)
    if tile is None:
        tile = _block_team(channels, vector, problem.dtype.itemsize)
    return (wide,) if tile is None else (ForwardPlan("registers", tile), wide)


def forward_plan(problem: Problem, vector: int, shared_limit: int, arch: str) -> ForwardPlan:
    """The first plan that ptxas compiles without spilling, else the last one."""
    plans = forward_plans(problem, vector, shared_limit)
    for plan in plans[:-1]:
        if compiled(forward_source(problem, plan, arch)).spill_bytes <= 0:
            return plan
    return plans[-1]


def _warp_teams(problem: Problem, channels: int, vector: int) -> Tile | None:
    """Teams inside warps, with few values a lane, else with more; None for larger groups."""
    itemsize = problem.dtype.itemsize
    for most_values in (8, 16) if itemsize == 8 else (16, 32):
        team = lanes_for(channels, vector, itemsize, most_values)
        if team is None:
            continue
        lanes, vectors = team
        values = vectors * vector
        warps_needed = ceil_div(problem.groups * lanes, WARP)
        warps_x = min(power_of_two_from(warps_needed), BLOCK_WARPS)
        rows = max(1, min(4, (8 if itemsize >= 4 else 16) // values))
        return Tile(vector, lanes, vectors, rows, warps_x, BLOCK_WARPS // warps_x, values <= 8)
    return None


def _block_team(channels: int, vector: int, itemsize: int) -> Tile | None:
    """A block a row and group; in 16 bit, twice the values a thread and the next row on its way.

    LayerNorm over 8192 bf16 channels, 4096 rows: 45 µs so, 54 with 16 values and no prefetch, where
    a copy takes 36. In fp32, prefetching costs a resident block and a third of the speed.
    """
    values = max({2: 32, 4: 16, 8: 8}[itemsize], vector)
    lanes = max(power_of_two_from(ceil_div(channels, values)), 2 * WARP)
    if lanes > (MOST_THREADS // 2 if itemsize == 2 else MOST_THREADS):
        return None
    return Tile(vector, lanes, ceil_div(channels, lanes * vector), 1, prefetch=itemsize == 2)


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
        self.channels = problem.n // self.groups
        self.itemsize = problem.dtype.itemsize
        self.has_mean = not isinstance(problem.chain.norm, RMSNorm)
        self.same_dtype = problem.out_dtype == problem.dtype
        self.widest = vector_width(self.channels, self.itemsize, ())
        self.launches: dict[int, Callable[..., None]] = {}
        self.nothing: tuple[Tensor, Tensor, Tensor] | None = None

    def __call__(self, z: Tensor, inputs: Inputs) -> Forward:
        problem = self.problem
        # Of z's sizes; in z's own strides or, where its rows have gaps, contiguous.
        y = torch.empty_like(z) if self.same_dtype else torch.empty_like(z, dtype=problem.out_dtype)
        kept = self._kept(z) if problem.training else self.nothing or self._make_nothing(z)
        if problem.m:
            address, stride = z.data_ptr(), z.stride(0)
            bias, gamma, beta = parameter_addresses(inputs)
            operands, aligned = matrix_arguments(inputs.operands) if inputs.operands else ((), 0)
            aligned |= address | stride * self.itemsize | bias | gamma | beta
            vector = self.widest
            if aligned % LARGEST_ACCESS_BYTES:
                tensors = (z, *inputs[2:5], *inputs.operands)
                vector = vector_width(self.channels, self.itemsize, tensors)
            launch = self.launches.get(vector) or self._prepare(z.device, vector)
            launch(
                *(address, stride, bias, gamma, beta),
                *(y.data_ptr(), kept[1].data_ptr(), kept[2].data_ptr()),
                *(problem.m, self.groups, *operands),
            )
        return Forward(y, *kept)

    def _kept(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        stats = self.problem.stats_dtype
        rstd = torch.empty((self.problem.m, self.groups), dtype=stats, device=z.device)
        return z, torch.empty_like(rstd) if self.has_mean else rstd.new_empty((0,)), rstd

    def _make_nothing(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Three empty tensors, made once: making them takes as long as a launch."""
        stats = self.problem.stats_dtype
        mean, rstd = (torch.empty((0,), dtype=stats, device=z.device) for _ in range(2))
        self.nothing = (z.new_empty((0,)), mean, rstd)
        return self.nothing

    def _prepare(self, device: torch.device, vector: int) -> Callable[..., None]:
        problem = self.problem
        arch = arch_of(device)
        plan = forward_plan(problem, vector, max_shared_bytes(device), arch)
        kernel = load(forward_source(problem, plan, arch), device)
        shared_bytes = plan.shared_bytes(problem)
        tile = plan.tile
        resident = kernel.blocks_per_sm(tile.threads, shared_bytes) * sm_count(device)
        strips = ceil_div(self.groups, tile.groups_per_block)
        waves = WAVES[problem.dtype.itemsize]
        passes = ceil_div(problem.m, tile.rows_per_pass)
        grid_y = max(1, min(passes, ceil_div(waves * resident, strips), LARGEST_GRID_Y))
        signature = SIGNATURE + OPERAND_SIGNATURE * len(problem.chain.operand_kinds)
        launch = kernel.prepare(
            signature,
            (strips, grid_y),
            tile.threads,
            shared_bytes=shared_bytes,
            dependent=starts_early(device),
        )
        self.launches[vector] = launch
        return launch


_prepared = PreparedByProblem(_PreparedForward)
