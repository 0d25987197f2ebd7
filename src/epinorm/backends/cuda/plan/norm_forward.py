"""The forward norm kernel's tiles, the preferred one first."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
MOST_THREADS, MOST_VALUES = 1024, 32
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
    few = problem.m * problem.groups <= FEW
    tile = _warp_teams(problem, channels, vector)
    if few and channels <= MOST_VALUES * WARP and (tile is None or tile.values > SPREAD_VALUES):
        tile = _spread(channels, vector)
    tiles = [tile] if tile is not None else _block_teams(problem, channels, vector, few)
    return *(ForwardPlan("registers", tile) for tile in tiles), wide


def _warp_teams(problem: Problem, channels: int, vector: int) -> NormTile | None:
    """Teams inside warps, with few values a lane, else with more; None for larger groups."""
    itemsize = problem.dtype.itemsize
    for most_values in {2: (16, 32), 4: (16, 24), 8: (8, 16)}[itemsize]:
        team = lanes_for(channels, vector, itemsize, most_values)
        if team is None:
            continue
        lanes, vectors = team
        values = vectors * vector
        warps_needed = ceil_div(problem.groups * lanes, WARP)
        warps_x = min(power_of_two_from(warps_needed), BLOCK_WARPS)
        if values > SPREAD_VALUES and lanes == WARP:
            warps_x = 1  # 8 groups of 1024 bf16: 68 us, beside each other 73
        rows = max(1, min(4, (8 if itemsize >= 4 else 16) // values))
        return NormTile(vector, lanes, vectors, rows, warps_x, BLOCK_WARPS // warps_x, values <= 8)
    return None


def _spread(channels: int, vector: int) -> NormTile:
    """A block a row and group, few values a lane."""
    vectors = max(SPREAD_VALUES // vector, 1)
    lanes = max(power_of_two_from(ceil_div(channels, vectors * vector)), 2 * WARP)
    return NormTile(vector, lanes, ceil_div(channels, lanes * vector), 1, keep=True)


def _block_teams(problem: Problem, channels: int, vector: int, few: bool) -> list[NormTile]:
    """A block a row and group, with the next row on its way; then tiles for chains that need more
    registers.

    A lane has 32 values, in fp32 16 where rows are few, and keeps the parameters too where a value
    of 16 bit leaves registers (decision 12).
    """
    itemsize = problem.dtype.itemsize
    found = []
    if itemsize <= 4:
        values = max(MOST_VALUES // (2 if few and itemsize == 4 else 1), vector)
        lanes = max(ceil_div(ceil_div(channels, values), WARP), 2) * WARP
        vectors = ceil_div(channels, lanes * vector)
        if lanes <= MOST_THREADS // 2:
            keeps = (itemsize == 4 or vectors * vector < MOST_VALUES, False)
            ahead = itemsize == 4 or not few
            tile = NormTile(vector, lanes, vectors, 1, prefetch=ahead)
            found = [replace(tile, keep=keep) for keep in dict.fromkeys(k and ahead for k in keeps)]
    if itemsize >= 4:
        values = max({4: 16, 8: 8}[itemsize], vector)
        lanes = max(power_of_two_from(ceil_div(channels, values)), 2 * WARP)
        if lanes <= MOST_THREADS:
            found.append(NormTile(vector, lanes, ceil_div(channels, lanes * vector), 1))
    return found
