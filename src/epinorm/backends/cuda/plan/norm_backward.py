"""The backward norm kernel's outputs, and its tiles, the preferred one first."""

from __future__ import annotations

from dataclasses import dataclass

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
    double = problem.stats_dtype == torch.float64
    light = sum(outputs.sums) <= 3 and not outputs.channels and not double
    cost = (2 if double else 1) * (4 + sum(outputs.sums))
    most = max(vector, power_of_two_from(112 // cost // 2 + 1))
    main = NormTile(vector, 1, 1, 1, 1, BLOCK_WARPS, vector <= 8)
    twice = BackwardPlan(main, NormTile(vector, 1024, 1, 1))
    team = lanes_for(channels, vector, problem.dtype.itemsize, most)
    if team is not None:
        return BackwardPlan(_warp_teams(vector, *team, light)), twice
    if light:
        # Fewer values and two rows: LayerNorm over 1024 channels, 16384 rows, 64 µs for 72 in fp32
        # and 54 for 63 in bf16.
        lanes = max(power_of_two_from(ceil_div(channels, most if vector == 8 else most // 2)), 64)
        if lanes <= (128 if vector == 8 else 256):
            vectors = ceil_div(channels, lanes * vector)
            return BackwardPlan(NormTile(vector, lanes, vectors, 2, keep=True)), twice
    lanes = max(power_of_two_from(ceil_div(channels, most)), 2 * WARP)
    if lanes <= MOST_LANES:
        return BackwardPlan(NormTile(vector, lanes, ceil_div(channels, lanes * vector), 1)), twice
    return (twice,)


def _warp_teams(vector: int, lanes: int, vectors: int, light: bool) -> NormTile:
    """Teams inside warps; as many rows in flight as leave the registers for two blocks or more."""
    values = vectors * vector
    if values <= 4:
        return NormTile(
            vector, lanes, vectors, 4 if light and lanes <= 2 else 2, 1, BLOCK_WARPS, True
        )
    if values <= 8 and light:
        return NormTile(vector, lanes, vectors, 2, 1, BLOCK_WARPS // 2, True)
    return NormTile(vector, lanes, vectors, 1, 1, BLOCK_WARPS, values <= 8)
