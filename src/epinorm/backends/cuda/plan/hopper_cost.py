"""What a tile of the Hopper kernels is estimated to take: a small model of a multiprocessor.

In clock cycles; its constants were measured on an H200 (internals/hopper.md).
"""

from __future__ import annotations

import math

import torch

from epinorm.backends.cuda.plan.hopper_tile import STEP_BYTES, Tile
from epinorm.backends.cuda.plan.plane_layout import PlaneLayout
from epinorm.problem import Problem

# Cycles. A tile's first loads; what passes between two tiles of a warpgroup; a column of a row
# block in the epilogue, with both warpgroups at it and with one alone, or alone beside x's
# fragments: heavy chains spill then (65536 x 256 -> 256, GELU before and behind LayerNorm: 101 us
# in turn, 87 together, 84 by planes).
START = 4500
BETWEEN_TILES = 700
EPILOGUE_TOGETHER = 22
EPILOGUE_ALONE, EPILOGUE_FROM_REGISTERS = 17, 24
SHARED_BYTES_PER_CYCLE = 128
MEMORY_BYTES_PER_CYCLE = 2400
"""Of the whole chip: 4.2 TB/s at 1.75 GHz."""
CYCLES_PER_MICROSECOND = 1750.0
SHORTEST_STEP, SHORTEST_STEP_OF_TF32 = 450, 700
"""A small tile's step waits for its loads, its products and their completion in turn; TF32's for
its rounding too, where that is not of all steps in one go."""
NARROW, NARROW_COLUMN = 200, 4
"""The same where a warpgroup has fewer than 64 columns, one plane: without them, and for each."""
COLD_CODE = 27
"""Cycles that the epilogue's instructions take to arrive, a column of a warpgroup: each is used
once a tile, so few tiles wait for all of them."""
OFF_LINES = 1.8
"""A step of operands whose rows do not begin on whole lines of the L2 cache."""
SHORTEST_STEP_OF_FP32 = 1200
"""32 KB of W, from memory, for one block."""
LAUNCH_MICROSECONDS = 2.5

CLUSTER = 1.01
"""Multicast loads never paid on an H200, where power is the limit (decision 5)."""

SHARED_GROUP = {1: 1.1, 2: 2.0}
"""By planes: what blocks whose warpgroups split columns take longer for the exchange."""
SHARED_BY_PLANES = 1.2
"""The same of other tiles of two planes: blocks that share groups, or warpgroups of one block.
Their kernels took 1.28 times the estimate at the median of 58 (23 shapes, by which this was chosen;
0.7 to 1 with few rows, 1.1 to 1.5 with many, up to 1.85 with K of 128 or spills), and strategy.py's
factor for planes comes on top."""
CLUSTERS_AT_ONCE = {2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15}
"""That an H200 with its 132 multiprocessors holds: a cluster stays within a GPC."""
L2_BYTES_PER_CYCLE, L2_BYTES_OF_SPLIT_COLUMNS = 46, 64
"""Of a multiprocessor, where blocks share groups: they read W once for 64 or 128 rows. The latter:
where its warpgroups split columns."""
L2_BYTES_FROM_REGISTERS = 52
"""The same of TF32 with x out of registers, in a cluster or not: its kernels then take 0.95 to 1.25
times the estimate (11 shapes, jobs of 2026-11-27), as those of planes do."""
SHORTEST_STEP_OF_FP32_INPUT = 2300
"""32 KB of fp32 x, from memory, for as many blocks as there are column tiles; before
`FP32_INPUT`."""
FP32_INPUT, TWO_PLANES_OF_FP32 = 1.25, 1.2
"""What kernels that convert x, or W into two planes, were measured to take of their estimates."""
EPILOGUE_BESIDE_FRAGMENTS, ELEMENT_BESIDE_FRAGMENTS = 1.25, 0.7
"""Of kernels that convert x in halves: what their epilogue takes of that of planes in halves, and
what an element operand, which comes a line at a time, adds to it (16384 rows, K = 768 and 3072)."""

OPERATION = {
    **dict.fromkeys(("gelu", "gelu_tanh", "mish", "softplus"), 1.6),
    "dropout": 3.0,
    **dict.fromkeys(("identity", "relu", "leaky_relu", "scale", "add", "clamp", "hardtanh"), 0.0),
}
OTHER_OPERATION, ELEMENT_OPERAND, ELEMENT_IN_HALVES = 0.6, 1.0, 0.45
"""What operations add to an epilogue, as shares of one without."""

POWER_IN_HALVES = 1.1
"""What such tiles' steps take of the tensor cores' cycles: they leave them idle least of all, and
the clock falls (1.0 us a step of 1536 cycles)."""
FP32_IN_HALVES = 1.65
"""What an epilogue of fp32 results takes of one of 16 bits in halves: all multiprocessors read and
write at once, and nobody multiplies."""

NOT_HIDDEN = 0.02
"""What the shorter of computing and memory traffic adds to the longer: it ranks equal ones."""

FP32_WEIGHT_LAUNCH = 4.0
"""Microseconds more: its kernel does not start early, and its guard waits for it."""
SAMPLE_BYTES = 1024
"""Of a row of W, that estimating its scale moves (sample_rows.cuh)."""


def _step_cycles(tile: Tile, planes: int, columns: int) -> float:
    """One step along k: the tensor cores' time or shared memory's. columns: of tiles."""
    if tile.converts:
        # What is converted goes through shared memory, and out of it once; the other's plane twice
        # for each product.
        fp32, plane = tile.block_n, tile.block_m
        if tile.fp32_input:
            fp32, plane = plane, fp32
        products = 3 if planes == 2 else 1
        both = 2 * 4 * fp32 * tile.block_k + (planes + 2 * products) * plane * STEP_BYTES
        tensor = products * tile.block_m * tile.block_n / 32
        loaded = SHORTEST_STEP_OF_FP32_INPUT / columns if tile.fp32_input else 0.0
        return max(tensor, both / SHARED_BYTES_PER_CYCLE, SHORTEST_STEP_OF_FP32, loaded)
    products = 3 if planes == 2 else 1
    row_blocks = tile.block_m // 64 * (2 if tile.split_columns else 1)
    tensor = products * tile.block_m * tile.block_n / 32
    if tile.in_halves:
        tensor *= POWER_IN_HALVES
    read = products * row_blocks * (64 + tile.consumer_n) * STEP_BYTES
    rows = tile.block_m + (0 if tile.resident_steps else tile.block_n)
    written = planes * rows * STEP_BYTES
    loaded = 0.0
    if tile.register_a:  # A is read once, into registers
        read = (tile.block_m + row_blocks * tile.consumer_n) * STEP_BYTES
        loaded = SHORTEST_STEP_OF_FP32_INPUT / columns * tile.block_m / 256
    elif tile.tf32:  # read, rounded and written once more
        written *= 3 if tile.resident_steps else 5
    from_l2 = 0.0
    if tile.cluster_n > 1 or tile.register_a:
        alike = L2_BYTES_FROM_REGISTERS if tile.register_a else L2_BYTES_PER_CYCLE
        from_l2 = written / (L2_BYTES_OF_SPLIT_COLUMNS if tile.split_columns else alike)
    in_smem = tile.tf32 and not (tile.resident_steps or tile.register_a)
    shortest = SHORTEST_STEP_OF_TF32 if in_smem else SHORTEST_STEP
    if planes == 1 and not tile.tf32:
        shortest = min(shortest, NARROW + NARROW_COLUMN * tile.consumer_n)
    return max(tensor, (read + written) / SHARED_BYTES_PER_CYCLE, from_l2, loaded, shortest)


def _off_lines(problem: Problem, tile: Tile) -> bool:
    columns = problem.k
    if problem.dtype == torch.float32 and not tile.tf32:
        columns = PlaneLayout(1, problem.k, 0, 0).padded
    several = columns > tile.block_k
    return several and columns * tile.element_bytes % STEP_BYTES != 0


def _at_once(tile: Tile, sms: int) -> int:
    """Blocks that run together."""
    if tile.cluster_n > 1:
        return CLUSTERS_AT_ONCE[tile.cluster_n] * tile.cluster_n * sms // 132
    return sms // tile.cluster_blocks * tile.cluster_blocks


def _epilogue_weight(problem: Problem, tile: Tile) -> float:
    """How much longer the chain makes the epilogue."""
    weight = 1.0 if problem.matrix_dtype is None else 1.4
    for op in (*problem.chain.pre, *problem.chain.post):
        if op.operand == "element":
            weight += _element_weight(tile)
        elif op.operand != "channel":
            weight += OPERATION.get(op.name, OTHER_OPERATION)
    if tile.in_halves and tile.converts:
        weight *= EPILOGUE_BESIDE_FRAGMENTS
    in_fp32 = problem.out_dtype == torch.float32
    return weight * (FP32_IN_HALVES if tile.in_halves and in_fp32 else 1.0)


def _element_weight(tile: Tile) -> float:
    if not tile.in_halves:
        return ELEMENT_OPERAND
    return ELEMENT_BESIDE_FRAGMENTS if tile.converts else ELEMENT_IN_HALVES


def _rounds(problem: Problem, tile: Tile, sms: int) -> int:
    """Tiles that a block computes."""
    tiles = math.ceil(problem.m / tile.block_m) * math.ceil(problem.n / tile.block_n)
    return max(math.ceil(tiles / _at_once(tile, sms)), 1)


def _kernel_cycles(problem: Problem, tile: Tile, sms: int) -> float:
    planes = problem.planes
    rounds = _rounds(problem, tile, sms)
    columns = math.ceil(problem.n / tile.block_n)
    steps = math.ceil(problem.k / tile.block_k)
    if tile.in_halves and tile.converts:
        steps = -(-steps // 2) * 2  # as many half steps as there are slots
    products = steps * _step_cycles(tile, planes, columns)
    if _off_lines(problem, tile):
        products *= OFF_LINES
    wide = 1.3 if tile.consumer_n * problem.out_dtype.itemsize % 64 else 1.0  # narrow stores
    weight = wide * _epilogue_weight(problem, tile)
    if tile.ping_pong:
        alone = EPILOGUE_FROM_REGISTERS if tile.register_a else EPILOGUE_ALONE
        epilogue = alone * weight * tile.block_n * tile.block_m / 64
        turns = tile.consumers
        each_once = max(turns * products, products + epilogue + BETWEEN_TILES)
        total = START + rounds / turns * each_once + epilogue
    else:
        epilogue = EPILOGUE_TOGETHER * weight * tile.consumer_n
        total = START + rounds * (products + epilogue + BETWEEN_TILES)
    itemsize = planes * tile.element_bytes
    moved = (problem.m + problem.n) * problem.k * itemsize
    if tile.converts:
        converted = problem.n if tile.fp32_weight else problem.m
        written = itemsize if problem.training else 0  # as a plane
        moved += converted * problem.k * (4 - itemsize + written)
    elements = 1 + problem.chain.operand_kinds.count("element")
    moved += elements * problem.m * problem.n * problem.out_dtype.itemsize
    if problem.matrix_dtype is not None:
        moved += problem.m * problem.n * problem.matrix_dtype.itemsize
    memory = START + moved / MEMORY_BYTES_PER_CYCLE
    in_cluster = tile.cluster_n > 1
    if in_cluster and tile.split_columns:
        total *= SHARED_GROUP[planes]
    elif planes == 2 and (in_cluster or tile.split_columns):
        total *= SHARED_BY_PLANES
    if tile.fp32_input:
        total *= FP32_INPUT
    elif tile.converts and planes == 2:
        total *= TWO_PLANES_OF_FP32
    return max(total, memory) + NOT_HIDDEN * min(total, memory)


def _split_cycles(problem: Problem, tile: Tile, prepacked: bool) -> float:
    """The conversion of x, and of W where it is not prepacked, and what surrounds it; a kernel that
    converts on the way reads no prepacked planes."""
    if tile.register_a:
        moved = problem.n * problem.k * 8
        return LAUNCH_MICROSECONDS * CYCLES_PER_MICROSECOND + moved / MEMORY_BYTES_PER_CYCLE
    if problem.dtype != torch.float32 or tile.tf32:
        return 0.0
    of_x = 0 if tile.fp32_input else problem.m
    of_w = 0 if (prepacked and not tile.converts) or tile.fp32_weight else problem.n
    moved = (of_x + of_w) * problem.k * (4 + 2 * problem.planes)
    if tile.converts and not tile.in_halves:
        sampled = problem.n if tile.fp32_weight else problem.m
        moved += sampled * min(problem.k * 4, SAMPLE_BYTES)
    launches = 2 * LAUNCH_MICROSECONDS * CYCLES_PER_MICROSECOND
    launches += FP32_WEIGHT_LAUNCH * CYCLES_PER_MICROSECOND * tile.converts
    return launches + moved / MEMORY_BYTES_PER_CYCLE


def cold_cycles(problem: Problem, tile: Tile, sms: int) -> float:
    """What a kernel that has not run lately takes more. It ranks no tiles: not part of `cycles`."""
    return (
        COLD_CODE * tile.consumer_n * _epilogue_weight(problem, tile) / _rounds(problem, tile, sms)
    )


def cycles(problem: Problem, tile: Tile, sms: int, prepacked: bool = False) -> float:
    """Estimated time of the whole forward pass with this tile, but for the launch itself."""
    kernel = _kernel_cycles(problem, tile, sms) * (CLUSTER if tile.cluster > 1 else 1.0)
    return kernel + _split_cycles(problem, tile, prepacked)
