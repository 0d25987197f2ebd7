"""The backward norm kernel's outputs, and its tiles, the preferred one first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from epinorm.backends.cuda.plan.norm_tile import (
    WARP,
    NormTile,
    ceil_div,
    lanes_for,
    power_of_two_from,
)
from epinorm.problem import Problem, Wanted

BLOCK_WARPS = 8
MOST_LANES = 512
MOST_IN_WARPS, VALUES_IN_BLOCKS, MOST_AHEAD = 24, 8, 640
"""Values of a group in a lane of a warp, and of a block, where twice as many do not take more lanes
than the last number: 768 have 80 registers each, and LayerNorm over 6144 bf16 channels took 162 us,
in 384 lanes 109."""
FEW = 2048
"""Rows that blocks work on four at a time, all at once, rather than one ahead: 1024 rows of 1024
bf16 8.3 us, 9.2 ahead; 8192 of 2048 45.5 and 38.8."""


@dataclass(frozen=True)
class Outputs:
    """Which outputs a launch has: dz, sums over rows, gradients of element operands, and the
    largest magnitudes of dz's rows and columns. ``if_wanted``: just where a word on the GPU is not
    0, which the launch is given."""

    dz: bool
    gamma: bool
    beta: bool
    bias: bool
    channels: tuple[bool, ...]
    elements: tuple[bool, ...]
    row_largest: bool = False
    column_largest: bool = False
    if_wanted: bool = False

    @staticmethod
    def of(
        problem: Problem,
        want: Wanted,
        row_largest: bool = False,
        column_largest: bool = False,
        if_wanted: bool = False,
    ) -> Outputs:
        pairs = list(zip(problem.chain.operand_kinds, want.operands, strict=True))
        return Outputs(
            dz=(want.x or want.weight) and not problem.chain.is_linear,
            gamma=want.norm_weight and problem.has_norm_weight,
            beta=want.norm_bias and problem.has_norm_bias,
            bias=want.bias and problem.has_bias,
            channels=tuple(wanted and kind == "channel" for kind, wanted in pairs),
            elements=tuple(wanted and kind == "element" for kind, wanted in pairs),
            row_largest=row_largest,
            column_largest=column_largest,
            if_wanted=if_wanted,
        )

    @property
    def sums(self) -> tuple[bool, ...]:
        """Gamma, beta, bias, then every operand: is its sum over rows wanted?"""
        return (self.gamma, self.beta, self.bias, *self.channels)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing for the kernel to write."""
        largest = self.row_largest or self.column_largest
        return not (self.dz or any(self.sums) or any(self.elements) or largest)

    @property
    def places(self) -> tuple[int, ...]:
        """The place of each of ``sums`` among the wanted ones, -1 for one that is not."""
        taken = [sum(self.sums[:i]) for i in range(len(self.sums))]
        return tuple(p if wanted else -1 for p, wanted in zip(taken, self.sums, strict=True))

    def sum_dtypes(self, problem: Problem) -> list[torch.dtype]:
        """The dtype of each wanted sum, in their order."""
        norm = problem.norm_dtype
        dtypes = (norm, norm, problem.dtype, *(norm for _ in self.channels))
        return [dtype for dtype, wanted in zip(dtypes, self.sums, strict=True) if wanted]


@dataclass(frozen=True)
class BackwardPlan:
    """The main kernel's tile; and, for groups that it cannot hold, that of norm_backward_sums."""

    tile: NormTile
    row_sums: NormTile | None = None

    def __str__(self) -> str:
        return str(self.tile)


def backward_plans(problem: Problem, vector: int, outputs: Outputs) -> tuple[BackwardPlan, ...]:
    """The plans for vectors of ``vector`` values: the preferred one first, one that fits last.

    Each value that a thread holds costs it three registers, two while it waits for its group's sums
    and one for each sum over rows: that bounds how many it can hold. The last plan reads dy and z a
    second time.
    """
    channels = problem.n // problem.groups
    normalises, double = problem.chain.norm is not None, problem.stats_dtype == torch.float64
    cost = (2 if double else 1) * (4 + sum(outputs.sums))
    most = max(vector, power_of_two_from(112 // cost // 2 + 1))
    main = NormTile(vector, 1, 1, 1, 1, BLOCK_WARPS, vector <= 8)
    plans = [BackwardPlan(main, NormTile(vector, 1024, 1, 1))]
    team = lanes_for(channels, vector, problem.dtype.itemsize, most)
    lanes = max(power_of_two_from(ceil_div(channels, most)), 2 * WARP)
    if team is not None:
        plans.insert(0, BackwardPlan(_in_warps(vector, *team, normalises)))
    elif lanes <= MOST_LANES:
        vectors = ceil_div(channels, lanes * vector)
        plans.insert(0, BackwardPlan(NormTile(vector, lanes, vectors, 1)))
    if normalises and not double:
        plans[:0] = map(BackwardPlan, _ahead(problem, vector, team))
    return tuple(dict.fromkeys(plans))


def _in_warps(vector: int, lanes: int, vectors: int, normalises: bool) -> NormTile:
    """Teams inside warps; as many rows in flight as leave the registers for two blocks or more."""
    values = vectors * vector
    rows = 2 if values <= 4 or not normalises else 1
    return NormTile(vector, lanes, vectors, rows, 1, BLOCK_WARPS, values <= 8)


def _ahead(problem: Problem, vector: int, team: tuple[int, int] | None) -> Iterator[NormTile]:
    """Tiles whose threads have their next rows on the way and the parameters in registers, the last
    one without: inside warps as many values a lane as there are registers for, in blocks eight
    (decision 12)."""
    channels, groups = problem.n // problem.groups, problem.groups
    team = team or lanes_for(channels, vector, problem.dtype.itemsize, MOST_IN_WARPS)
    tile: NormTile | None = None
    if team is not None:
        lanes, vectors = team
        warps = BLOCK_WARPS if groups * lanes <= WARP else BLOCK_WARPS // 2
        rows = 4 if vectors * vector <= 4 else 1
        tile = NormTile(vector, lanes, vectors, rows, 1, warps, True, prefetch=True)
        yield tile
    twice = channels > MOST_AHEAD * VALUES_IN_BLOCKS
    vectors = ceil_div(VALUES_IN_BLOCKS * (1 + twice), vector)
    lanes = ceil_div(ceil_div(channels, vectors * vector), WARP) * WARP
    vectors = ceil_div(channels, lanes * vector)
    if WARP < lanes <= (MOST_LANES if twice else MOST_AHEAD):
        few = problem.m * groups <= FEW and not twice
        tile = NormTile(vector, lanes, vectors, 4 if few else 1, keep=True, prefetch=not few)
        yield tile
    if tile is not None:
        yield replace(tile, rows=1, keep=False, prefetch=False)
