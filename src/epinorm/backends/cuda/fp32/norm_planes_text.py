"""The backward norm kernel that writes dz as planes: where it can, its tile and its text.

A cluster of blocks holds whole rows of dz, since their planes' scale is known only when all of a
row is (`fp32/norm_backward_planes.cu`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from epinorm.backends.cuda.fp32.planes import TOLERANCE
from epinorm.backends.cuda.norm.backward_text import Outputs, output_text
from epinorm.backends.cuda.norm.text import norm_text
from epinorm.backends.cuda.norm.tile import WARP, Tile, ceil_div, lanes_for, power_of_two_from
from epinorm.backends.cuda.runtime.jit import KernelSource, compiled
from epinorm.backends.cuda.text.source import kernel_text
from epinorm.problem import Problem

__all__ = [
    "RowsPlan",
    "faint_rows",
    "planes_source",
    "rescale_source",
    "rows_plan",
]

MOST_STRIPS = 8
"""Blocks of a cluster of any GPU that has clusters."""
BLOCK_WARPS = 8
MOST_WARPS = 16
MOST_RESIDENT = 16
MOST_VALUES = 8
"""Of a row in a thread: each takes eleven registers, seven of them from row to row."""
STAGES, FEWEST_STAGES = 3, 2
RING_BYTES = 40 * 1024
"""Of the 48 KB that a block has without asking."""


@dataclass(frozen=True)
class RowsPlan:
    """``strips`` blocks side by side hold a row; the ring has room for ``stages`` rows, the one
    worked on and those on their way."""

    tile: Tile
    strips: int
    stages: int


def rows_plans(problem: Problem, vector: int) -> Iterator[RowsPlan]:
    """The plans for vectors of ``vector`` values, the preferred one first; none where rows or
    groups are too wide."""
    tiles = list(_tiles(problem, vector))
    # A block fewer at once leaves more registers, for chains that need them.
    fewer = [
        (dataclasses.replace(tile, resident=tile.resident - 1), strips)
        for tile, strips in tiles
        if tile.resident > 1
    ]
    fewer.sort(key=lambda plan: -plan[0].resident * plan[0].threads)
    for tile, strips in tiles + fewer:
        streams = 2 + problem.chain.operand_kinds.count("element")
        stage = tile.threads * 4 * streams * tile.values
        stages = min(RING_BYTES // stage, STAGES)
        if strips <= MOST_STRIPS and tile.threads <= MOST_WARPS * WARP and stages >= FEWEST_STAGES:
            yield RowsPlan(tile, strips, stages)


def _tiles(problem: Problem, vector: int) -> Iterator[tuple[Tile, int]]:
    """Tiles of one row, and how many side by side span it."""
    channels, groups = problem.n // problem.groups, problem.groups
    itemsize = problem.dtype.itemsize
    team = lanes_for(channels, vector, itemsize, MOST_VALUES)
    if team is None:
        lanes = max(power_of_two_from(ceil_div(channels, MOST_VALUES)), 2 * WARP)
        vectors = ceil_div(channels, lanes * vector)
        resident = _resident(lanes, MOST_VALUES)
        yield Tile(vector, lanes, vectors, 1, resident=resident), groups
        return
    lanes, vectors = team
    warps = ceil_div(groups, WARP // lanes)
    strips = ceil_div(warps, BLOCK_WARPS)
    if strips > MOST_STRIPS:
        strips = ceil_div(warps, MOST_WARPS)
    across = ceil_div(warps, strips)
    resident = _resident(WARP * across, vectors * vector)
    for keep in (True, False):
        yield Tile(vector, lanes, vectors, 1, across, 1, keep, resident), strips


def _resident(threads: int, values: int) -> int:
    """Blocks that a multiprocessor must hold: as many as an ordinary chain has the registers for.
    `rows_plans` also tries one fewer."""
    return min(max((512 if values > 4 else 768) // threads, 1), MOST_RESIDENT)


@lru_cache(maxsize=1024)
def rows_plan(
    problem: Problem, vector: int, outputs: Outputs, planes: int, arch: str
) -> RowsPlan | None:
    """The first plan whose kernel ptxas compiles without spilling; None where there is none."""
    kinds = (problem.dtype, problem.norm_dtype, problem.out_dtype, problem.stats_dtype)
    if any(kind != torch.float32 for kind in kinds):
        return None
    for plan in rows_plans(problem, vector):
        if compiled(planes_source(problem, plan, outputs, planes, arch)).spill_bytes <= 0:
            return plan
    return None


def planes_source(
    problem: Problem, plan: RowsPlan, outputs: Outputs, planes: int, arch: str
) -> KernelSource:
    """The kernel of this problem, plan and outputs, whose largest magnitudes must be among them."""
    elements = [i for i, kind in enumerate(problem.chain.operand_kinds) if kind == "element"]
    places = "".join(f"i == {i} ? {2 + at} : " for at, i in enumerate(elements))
    more = {
        "kSumsGiven": 0,
        "kRaggedRows": 0,
        "kEveryGroup": plan.strips * plan.tile.groups_per_block == problem.groups,
        "kStrips": plan.strips,
        "kStages": plan.stages,
        "kStreams": 2 + len(elements),
        "kPlanes": planes,
    }
    extra = (
        output_text(outputs)
        + f"constexpr float kTolerance = {TOLERANCE[planes]};\n"
        + f"EPINORM_FUNCTION constexpr int element_stream(int i) {{ return {places}0; }}\n"
    )
    text = norm_text("fp32/norm_backward_planes", problem, plan.tile, more, extra)
    return KernelSource("norm_backward_planes", text, arch)


def rescale_source(planes: int, sums: int, beside_dx: bool, arch: str) -> KernelSource:
    """The kernel between this one and the products, with ``sums`` sums over rows; compiles without
    a GPU. beside_dx: it is launched behind dX."""
    stores = " ".join(f"case {i}: sum{i}[column] = sum; break;" for i in range(sums))
    prelude = (
        f"constexpr int kPlanes = {planes}, kSums = {sums};\n"
        f"constexpr bool kBesideDx = {str(beside_dx).lower()};\n"
        f"#define SUM_PARAMETERS {''.join(f', float* sum{i}' for i in range(sums))}\n"
        f"#define SUM_STORES {stores}\n"
    )
    text = kernel_text("fp32/rescale_planes.cu", prelude)
    return KernelSource("rescale_planes", text, arch)


def faint_rows(m: int, k: int) -> tuple[int, int, int]:
    """`Faint` of rescale_planes.cu for x (m, k): exponents (docs/precision.md, Faint rows)."""
    root_k = ((k - 1).bit_length() + 1) // 2
    log_m = (m - 1).bit_length()
    return root_k - 25, log_m + root_k - 9, (log_m + 1) // 2 - 9
