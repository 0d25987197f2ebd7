"""The forward norm kernel's tiles, the preferred one first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from epinorm.backends.cuda.plan.norm_tile import (
    WARP,
    NormTile,
    ceil_div,
    lanes_for,
    power_of_two_from,
)
from epinorm.problem import Problem

Kind = Literal["registers", "shared", "reread"]

_KERNELS: dict[Kind, tuple[str, str]] = {
    "registers": ("norm_forward", "the least idle lanes for the group's channels"),
    "shared": ("norm_forward_wide", "groups too wide for registers wait in shared memory"),
    "reread": ("norm_forward_wide", "groups too wide for shared memory are read again"),
}
"""By kind: the kernel, whose file and entry have this name, and why it is taken."""

BLOCK_WARPS = 4
MOST_THREADS = 1024
FEW, SPREAD_VALUES = 2048, 8
"""So few rows times groups are all at work at once, by however many warps each: what counts is how
long a lane takes for its values. 1024 rows of 1024 fp32 behind their product: 18.2 us, by warps of
32 values a lane 21.3; 64 rows 12.5 and 17.3 (decision 12)."""


@dataclass(frozen=True)
class ForwardPlan:
    """Where a group's values wait between the passes of its statistics, and the tile."""

    kind: Kind
    tile: NormTile

    def __str__(self) -> str:
        return str(self.tile)

    @property
    def kernel(self) -> str:
        return _KERNELS[self.kind][0]

    @property
    def reason(self) -> str:
        """Why this kernel, in the words of the plan."""
        return _KERNELS[self.kind][1]

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
    wide = ForwardPlan("shared" if cached else "reread", NormTile(vector, MOST_THREADS, 1, 1))
    tile = _warp_teams(problem, channels, vector)
    if tile is not None and tile.values > SPREAD_VALUES and problem.m * problem.groups <= FEW:
        tile = _spread(channels, vector)
    if tile is None:
        tile = _block_team(channels, vector, problem.dtype.itemsize)
    return (wide,) if tile is None else (ForwardPlan("registers", tile), wide)


def _warp_teams(problem: Problem, channels: int, vector: int) -> NormTile | None:
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
        return NormTile(vector, lanes, vectors, rows, warps_x, BLOCK_WARPS // warps_x, values <= 8)
    return None


def _spread(channels: int, vector: int) -> NormTile:
    """A block a row and group, few values a lane."""
    vectors = max(SPREAD_VALUES // vector, 1)
    lanes = max(power_of_two_from(ceil_div(channels, vectors * vector)), 2 * WARP)
    return NormTile(vector, lanes, ceil_div(channels, lanes * vector), 1, keep=True)


def _block_team(channels: int, vector: int, itemsize: int) -> NormTile | None:
    """A block a row and group; in 16 bit, twice the values a thread and the next row on its way.

    LayerNorm over 8192 bf16 channels, 4096 rows: 45 µs so, 54 with 16 values and no prefetch, where
    a copy takes 36. In fp32, prefetching costs a resident block and a third of the speed.
    """
    values = max({2: 32, 4: 16, 8: 8}[itemsize], vector)
    lanes = max(power_of_two_from(ceil_div(channels, values)), 2 * WARP)
    if lanes > (MOST_THREADS // 2 if itemsize == 2 else MOST_THREADS):
        return None
    return NormTile(vector, lanes, ceil_div(channels, lanes * vector), 1, prefetch=itemsize == 2)
