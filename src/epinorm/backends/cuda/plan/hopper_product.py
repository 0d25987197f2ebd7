"""Which tile the Hopper core multiplies a plain product with, and how it splits a sum."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from epinorm.backends.cuda.plan.hopper import fold_steps
from epinorm.backends.cuda.plan.hopper_tile import STEP_BYTES, Tile
from epinorm.backends.memo import memo
from epinorm.problem import Problem

BLOCK_K = STEP_BYTES // 2
MOST_PARTS = 32


@dataclass(frozen=True)
class TileCost:
    """A tile and what it costs, in cycles, measured on an H200 (decision 10): a step along the
    summed index, and what it costs besides."""

    tile: Tile
    step: float
    epilogue: float
    splits: bool = True
    """False where a part of a sum would make registers spill."""


TILES: dict[int, tuple[TileCost, ...]] = {
    1: (
        TileCost(Tile(128, 256, 4, ping_pong=False), 1050, 5800),
        TileCost(Tile(64, 256, 5), 565, 1200),
        TileCost(Tile(128, 192, 5), 800, 2100, splits=False),
        TileCost(Tile(128, 128, 6), 565, 1700),
    ),
    2: (TileCost(Tile(128, 128, 3, ping_pong=False), 1565, 2500),),
}
"""By planes. Two need all registers of both warpgroups for one tile."""
START = 6000
CYCLES_PER_MICROSECOND = 1550.0
"""What the clock falls to while tensor cores are busy."""
FOLDED = 1.12
"""Of a step of two planes: each product of 16 folded by itself (decision 2)."""
ADD_LAUNCH, ADD_BYTES = 3.0, 3.0e6
"""Of add_splits, in microseconds and bytes a microsecond."""


@dataclass(frozen=True)
class ProductShape:
    """c (rows, columns) = a · b over ``length``, in fp32; planes of each operand. cancels: next to
    nothing is left of the sums' terms, so that each product of 16 is folded."""

    rows: int
    columns: int
    length: int
    planes: int
    cancels: bool = False

    @property
    def steps(self) -> int:
        return -(-self.length // BLOCK_K)


def gradient_shape(problem: Problem, of_weight: bool) -> ProductShape:
    """The product of dz's planes that dW, or dX, is. Behind a BatchNorm dz's columns sum to 0."""
    rows, length = (problem.n, problem.m) if of_weight else (problem.m, problem.n)
    cancels = of_weight and problem.planes == 2 and problem.chain.returns_statistics
    return ProductShape(rows, problem.k, length, problem.planes, cancels)


@dataclass(frozen=True)
class Choice:
    """A tile, into how many parts each sum is split, and the estimated time."""

    tile: Tile
    parts: int
    microseconds: float

    def __str__(self) -> str:
        return str(self.tile) + f", K in {self.parts} parts" * (self.parts > 1)


def tiles_of(shape: ProductShape, tile: Tile) -> int:
    """How many tiles cover the result."""
    return -(-shape.rows // tile.block_m) * -(-shape.columns // tile.block_n)


def _choices(shape: ProductShape, sms: int) -> Iterator[Choice]:
    for cost in TILES[shape.planes]:
        tile = cost.tile
        step_cycles = cost.step * (FOLDED if shape.cancels else 1.0)
        if shape.planes == 2:
            # Each step costs nothing here, but for long sums in the forward kernel (decision 2).
            fold = 0 if shape.cancels else min(fold_steps(shape.length), 1)
            tile = dataclasses.replace(tile, fold_steps=fold)
        tiles = tiles_of(shape, tile)
        tried = set()
        most = min(MOST_PARTS, shape.steps // 4, 2 * sms // tiles) if cost.splits else 1
        for wanted in (1, *range(2, most + 1)):
            steps = -(-shape.steps // wanted)
            parts = -(-shape.steps // steps)
            if parts in tried:
                continue
            tried.add(parts)
            rounds = -(-tiles * parts // sms)
            cycles = START + rounds * (steps * step_cycles + cost.epilogue)
            microseconds = cycles / CYCLES_PER_MICROSECOND
            if parts > 1:
                moved = shape.rows * shape.columns * 4 * (parts + 1)
                microseconds += ADD_LAUNCH + moved / ADD_BYTES
            yield Choice(tile, parts, microseconds)


@memo()
def choose(shape: ProductShape, sms: int) -> Choice:
    """The tile and the parts of least estimated time."""
    return min(_choices(shape, sms), key=lambda choice: choice.microseconds)
