"""When dz is written once, as the planes of both products, and with which tiles: fp32 chains whose
rows a cluster holds (fp32/norm_planes.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from epinorm.backends.cuda.plan.norm_tile import (
    WARP,
    NormTile,
    ceil_div,
    lanes_for,
    power_of_two_from,
)
from epinorm.backends.cuda.text.backward_chain import backward_elements
from epinorm.problem import Problem

MOST_STRIPS = 8
"""Blocks of a cluster of any GPU that has clusters."""
BLOCK_WARPS = 8
MOST_WARPS = 16
MOST_RESIDENT = 16
MOST_VALUES_OF_THREAD = 8
"""Of a row in a thread: each takes eleven registers, seven of them from row to row."""
STAGES, FEWEST_STAGES = 3, 2
RING_BYTES = 40 * 1024
"""Of the 48 KB that a block has without asking."""
MOST_VALUES = (1 << 31) - 1
"""Of dz, and units of x's planes, so that 32 bits count them."""
_LAUNCH, _BYTES = 4.0, 3.5e6
"""Microseconds that two more small launches cost; bytes that a conversion moves in one."""


@dataclass(frozen=True)
class RowsPlan:
    """``strips`` blocks side by side hold a row; the ring has room for ``stages`` rows, the one
    worked on and those on their way."""

    tile: NormTile
    strips: int
    stages: int

    def __str__(self) -> str:
        return f"{self.tile}, {self.strips} blocks a row"


def rows_plans(problem: Problem, vector: int) -> Iterator[RowsPlan]:
    """The plans for vectors of ``vector`` values, the preferred one first; none where rows or
    groups are too wide, or not all is fp32."""
    kinds = (problem.dtype, problem.norm_dtype, problem.out_dtype, problem.stats_dtype)
    if any(kind != torch.float32 for kind in kinds):
        return
    tiles = list(_tiles(problem, vector))
    # A block fewer at once leaves more registers, for chains that need them.
    fewer = [
        (dataclasses.replace(tile, resident=tile.resident - 1), strips)
        for tile, strips in tiles
        if tile.resident > 1
    ]
    fewer.sort(key=lambda plan: -plan[0].resident * plan[0].threads)
    for tile, strips in tiles + fewer:
        streams = 2 + len(backward_elements(problem.chain))
        stage = tile.threads * 4 * streams * tile.values
        stages = min(RING_BYTES // stage, STAGES)
        if strips <= MOST_STRIPS and tile.threads <= MOST_WARPS * WARP and stages >= FEWEST_STAGES:
            yield RowsPlan(tile, strips, stages)


def _tiles(problem: Problem, vector: int) -> Iterator[tuple[NormTile, int]]:
    """Tiles of one row, and how many side by side span it."""
    channels, groups = problem.n // problem.groups, problem.groups
    itemsize = problem.dtype.itemsize
    team = lanes_for(channels, vector, itemsize, MOST_VALUES_OF_THREAD)
    if team is None:
        lanes = max(power_of_two_from(ceil_div(channels, MOST_VALUES_OF_THREAD)), 2 * WARP)
        vectors = ceil_div(channels, lanes * vector)
        resident = _resident(lanes, MOST_VALUES_OF_THREAD)
        yield NormTile(vector, lanes, vectors, 1, resident=resident), groups
        return
    lanes, vectors = team
    warps = ceil_div(groups, WARP // lanes)
    strips = ceil_div(warps, BLOCK_WARPS)
    if strips > MOST_STRIPS:
        strips = ceil_div(warps, MOST_WARPS)
    across = ceil_div(warps, strips)
    resident = _resident(WARP * across, vectors * vector)
    for keep in (True, False):
        yield NormTile(vector, lanes, vectors, 1, across, 1, keep, resident), strips


def _resident(threads: int, values: int) -> int:
    """Blocks that a multiprocessor must hold: as many as an ordinary chain has the registers for.
    `rows_plans` also tries one fewer."""
    return min(max((512 if values > 4 else 768) // threads, 1), MOST_RESIDENT)


def worthwhile(problem: Problem, planes: int) -> bool:
    """Whether this is faster than to split an fp32 dz, and takes no more memory at its peak.

    dz's planes are written once instead of twice, and dz is neither written nor read in fp32. z
    still waits for the range guard when dz is allocated, so with one plane, and n beyond 2 k, more
    would be held than when dX is computed.
    """
    m, k, n = problem.m, problem.k, problem.n
    saved = (8 + 2 * planes) * m * n
    small = planes == 2 or n <= 2 * k
    return small and saved > _LAUNCH * _BYTES and m * max(n, ceil_div(k, 8)) <= MOST_VALUES


def beside_dx(problem: Problem, planes: int) -> bool:
    """Whether `rescale_planes.cu` may wait until dX's last tiles leave multiprocessors idle.

    z then waits for the range guard while dX is there, which must not be the peak: later W's planes
    make room for dW. Only where dW is allocated: added into a gradient, dX itself is the peak.
    """
    return 4 * problem.m * problem.n <= (4 - 2 * planes) * problem.n * problem.k
