"""Which problems the Hopper kernel takes, and with which tile.

A small model of a multiprocessor, in clock cycles, ranks the tiles that fit; its constants were
measured on an H200 (internals/hopper.md). `MEASURED` overrides it where a measurement knows better.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch

from epinorm.backends.cuda.plan import tuned
from epinorm.backends.cuda.plan.hopper_tile import (
    STEP_BYTES,
    Tile,
    fp32_input_tiles,
    fp32_weight_tiles,
    largest_stages,
)
from epinorm.backends.cuda.text.instance import Instance, columns_of, instance_of, rows_aligned
from epinorm.backends.memo import memo
from epinorm.problem import Problem

__all__ = [
    "MEASURED",
    "SHORT_SUM",
    "candidates",
    "choose_tile",
    "cycles",
    "fold_steps",
    "instance_for",
    "microseconds",
    "persistent_blocks",
    "planes_of",
    "why_not",
]

LARGEST_GROUP = 2048
"""Channels of a group: a cluster of eight blocks of 256 columns."""
LARGEST_CLUSTER = 8
WIDEST = {1: 256, 2: 128}
"""Columns of a tile by planes."""
SHORT_SUM = 128
"""Terms of an fp32 sum in which each product is folded. Training takes the single kernel for these
(plan.py)."""

# Cycles. A tile's first loads; what passes between two tiles of a warpgroup; a column of a row
# block in the epilogue, with both warpgroups at it and with one alone.
START = 4500
BETWEEN_TILES = 700
EPILOGUE_TOGETHER = 22
EPILOGUE_ALONE = 17
SHARED_BYTES_PER_CYCLE = 128
MEMORY_BYTES_PER_CYCLE = 2400
"""Of the whole chip: 4.2 TB/s at 1.75 GHz."""
CYCLES_PER_MICROSECOND = 1750.0
SHORTEST_STEP = 450
"""A small tile's step waits for its loads, its products and their completion in turn."""
SHORTEST_STEP_OF_FP32 = 1200
"""32 KB of W, from memory, for one block."""
LAUNCH_MICROSECONDS = 2.5

CLUSTER = 1.01
"""Multicast loads never paid on an H200, where power is the limit (decision 5)."""

SHARED_GROUP = 2.0
"""A group that blocks of 64 rows share: 1.7 to 2.7 times the estimate in 16 bit, for 768 and 1024
channels."""
CLUSTERS_AT_ONCE = {2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15}
"""That an H200 with its 132 multiprocessors holds: a cluster stays within a GPC."""
L2_BYTES_PER_CYCLE = 46
"""Of a multiprocessor, where warpgroups with rows of their own share groups with other blocks."""
FEWEST_SHARED_CHANNELS = 640
"""Of such groups: for 512, two warpgroups that split 64 rows' columns were as fast or faster."""
NARROWEST_SHARE = 128
"""Columns of a block's part of such a group: more blocks wait longer for each other."""
FP32_INPUT = 1.25
"""What the kernel that converts x was measured to take of its estimate."""

OPERATION = {
    **dict.fromkeys(("gelu", "gelu_tanh", "mish", "softplus"), 1.6),
    **dict.fromkeys(("identity", "relu", "leaky_relu", "scale", "add", "clamp", "hardtanh"), 0.0),
}
OTHER_OPERATION, ELEMENT_OPERAND = 0.6, 1.0
"""What operations add to an epilogue, as shares of one without."""

NOT_HIDDEN = 0.02
"""What the shorter of computing and memory traffic adds to the longer: it ranks equal ones."""

MOST_STAGES = 12
EVEN_SHARE = 0.9
"""Of the multiprocessors, that must stay at work where tiles are shared out evenly."""
LARGEST_RESIDENT_BYTES = 96 * 1024

FP32_WEIGHT_LAUNCH = 4.0
"""Microseconds more: its kernel does not start early, and its guard waits for it."""
SAMPLE_BYTES = 1024
"""Of a row of W, that estimating its scale moves (sample_rows.cuh)."""

MEASURED: dict[tuple[int, int, int, int, int], Tile] = {
    (1, 32, 16384, 1024, 1024): Tile(64, 256, 0),  # 56.4 us for the model's choice of 58.1
}
"""(planes, channels per group, m, k, n) to the tile that was fastest; stages as many as fit."""


def persistent_blocks(tiles: int, most: int) -> int:
    """How many blocks take the tiles in turn, where ``most`` run at once: as few as need no round
    more, so that blocks which start together read the same rows from L2 together to the end.

    But no fewer than `EVEN_SHARE`: with many blocks less the memory's latency would show.
    """
    if tiles <= most or most < 1:
        return max(tiles, 1)
    even = math.ceil(tiles / math.ceil(tiles / most))
    return even if even >= EVEN_SHARE * most else most


def planes_of(problem: Problem) -> int:
    """16-bit planes of each operand: two for fp32 at full accuracy, else one."""
    return 2 if problem.precision == "highest" else 1


def why_not(problem: Problem) -> str | None:
    """Why the Hopper kernel cannot serve this problem, in a sentence; None where it can."""
    channels = columns_of(problem)
    if problem.dtype == torch.float64:
        return "tensor cores of this kernel take 16-bit and fp32 inputs, not float64"
    if problem.k == 0:
        return "there is nothing to multiply (0 input features)"
    pair = WIDEST[planes_of(problem)] // 2  # of groups that share a chunk of 8 columns
    straddles = channels % 8 == 4 and channels <= pair
    if channels > LARGEST_GROUP or (channels != 2 and channels % 8 and not straddles):
        return (
            f"a group of {channels} channels is none of 2, a multiple of 4 up to {pair} or of 8 up "
            f"to {LARGEST_GROUP}, which fit a tile or a cluster of them"
        )
    if problem.dtype != torch.float32 and problem.k % 8:
        return f"rows of {problem.k} input features are not a multiple of 16 bytes (TMA)"
    if problem.chain.norm is not None and not rows_aligned(problem):
        return f"rows of {problem.n} output features are not a multiple of 16 bytes"
    return None


def _widths(problem: Problem, most: int) -> Iterator[int]:
    unit = math.lcm(columns_of(problem), 8)
    for width in range(unit, most + 1, unit):
        yield width
        if width >= problem.n:
            return


def fold_steps(k: int) -> int:
    """Steps between two folds of a product of two planes over k: a short sum, whose error PyTorch's
    product keeps small too, folds more often. 0: after each product of 16."""
    return 0 if k <= SHORT_SUM else 1 if k <= 4096 else 4


def _shapes(problem: Problem, planes: int) -> Iterator[Tile]:
    """Tiles whose accumulators fit the registers; their stages are not yet known."""
    together, in_turn, in_turn_low = WIDEST[planes], *((128, 256) if planes == 1 else (0, 64))
    channels, keeps = columns_of(problem), problem.training or problem.chain.returns_sum
    tight = planes == 2 and keeps and channels == 2
    for width in _widths(problem, 112 if tight else together):  # or registers spill
        yield Tile(128, width, 0, ping_pong=False)
    for width in _widths(problem, in_turn):
        yield Tile(128, width, 0)
    for width in _widths(problem, in_turn_low):
        yield Tile(64, width, 0)
    for width in (64, 128):  # more warps to hide a short product's epilogues behind each other
        if planes == 1 and width % math.lcm(channels, 8) == 0:
            yield Tile(64, width, 0, consumers=3 if width == 128 else 4)
    if channels > together:  # two warpgroups or more, in one block or several, share a group
        widest = 128 if planes == 2 and keeps else 256  # or registers spill
        for blocks in (1, 2, 4, LARGEST_CLUSTER):
            if channels % (16 * blocks) == 0 and 64 <= channels // blocks <= widest:
                width = channels // blocks
                yield Tile(64, width, 0, False, split_columns=True, group_blocks=blocks)
        if problem.dtype != torch.float32 and channels >= FEWEST_SHARED_CHANNELS:
            yield from _cluster_shapes(problem)


def _cluster_shapes(problem: Problem) -> Iterator[Tile]:
    """Tiles of blocks that share a group, each block's warpgroups with rows of their own."""
    channels = columns_of(problem)
    elements = problem.chain.operand_kinds.count("element")
    keeps = problem.keeps_z or problem.chain.returns_sum
    many = elements > 1 or (elements and keeps) or problem.chain.rounding == "eager"
    widest = 192 if many else 256  # or registers spill
    for blocks, at_once in CLUSTERS_AT_ONCE.items():
        width = channels // blocks
        if channels % (8 * blocks) or not NARROWEST_SHARE <= width <= widest:
            continue
        groups = problem.n // channels
        for rows, ping_pong in ((128, False), (64, True)):
            if math.ceil(problem.m / rows) * groups >= at_once:  # fewer leave the GPU half empty
                yield Tile(rows, width, 0, ping_pong, group_blocks=blocks)


def candidates(problem: Problem) -> Iterator[Tile]:
    """The tiles that fit the registers and the shared memory."""
    for shape in _shapes(problem, planes_of(problem)):
        low = shape.block_m == 64 and problem.m < 64
        load_m = -(-max(problem.m, 1) // 8) * 8 if low else None
        # TF32 operands are rounded in shared memory, by the one warpgroup that reads them.
        kinds = (False, True) if shape.ping_pong and _may_be_tf32(problem) else (False,)
        for tf32 in kinds:
            tile = dataclasses.replace(shape, load_m=load_m, tf32=tf32)
            if planes_of(problem) == 2:  # one plane is not folded
                tile = dataclasses.replace(tile, fold_steps=fold_steps(problem.k))
            tile = dataclasses.replace(tile, resident_steps=_resident_steps(problem, tile))
            fitted = _fitted(problem, tile)
            if fitted.stages < 2:
                continue
            yield fitted
            if _may_share_loads(problem, fitted):
                yield dataclasses.replace(fitted, cluster=2)
    if _may_convert(problem):
        channels = columns_of(problem)
        tiles = fp32_weight_tiles()
        if tiles[0].block_n % channels == 0 and rows_aligned(problem):
            yield from tiles
        elements = problem.chain.operand_kinds.count("element")
        yield from fp32_input_tiles(math.lcm(channels, 8), 192 if elements > 1 else 256)


def _may_convert(problem: Problem) -> bool:
    """fp32 at `high` throughout, rows that the copy engine can read."""
    fp32 = problem.dtype == problem.norm_dtype == problem.out_dtype == torch.float32
    return fp32 and problem.precision == "high" and problem.k % 4 == 0


def _may_share_loads(problem: Problem, tile: Tile) -> bool:
    """Two blocks below each other can load W for both: for `epinorm tune` to try, see CLUSTER."""
    alone = tile.group_blocks == 1 and not tile.resident_steps and not tile.tf32
    one_plane = planes_of(problem) == 1 and tile.block_n % 16 == 0
    return alone and one_plane and problem.m > tile.block_m and not tile.ping_pong


def _fitted(problem: Problem, tile: Tile) -> Tile:
    """The tile with as many stages as fit, where it does not say how many.

    With W resident, a tile of A for each consumer is enough: more takes longer to begin with.
    """
    if tile.stages:
        return tile
    most = min(largest_stages(instance_for(problem, tile)), MOST_STAGES)
    if tile.resident_steps:
        most = min(most, max(tile.consumers * tile.resident_steps, 2))
    return dataclasses.replace(tile, stages=most)


def _resident_steps(problem: Problem, tile: Tile) -> int:
    """The steps of W where it is one column tile that a block uses again and again."""
    steps = math.ceil(problem.k / tile.block_k)
    one = problem.n <= tile.block_n and planes_of(problem) == 1 and tile.group_blocks == 1
    if not one or problem.m < 4 * tile.block_m:
        return 0
    return steps if steps * tile.block_n * STEP_BYTES <= LARGEST_RESIDENT_BYTES else 0


def _may_be_tf32(problem: Problem) -> bool:
    """Rows of fp32 that the copy engine can read, and leave to multiply them as TF32."""
    return problem.precision == "high" and problem.k % 4 == 0


def _step_cycles(tile: Tile, planes: int) -> float:
    """One step along k: the tensor cores' time or shared memory's."""
    if tile.converts:
        # What is converted goes through shared memory, and out of it once; the other's plane twice.
        fp32, plane = tile.block_n, tile.block_m
        if tile.fp32_input:
            fp32, plane = plane, fp32
        both = 2 * 4 * fp32 * tile.block_k + 3 * plane * STEP_BYTES
        tensor = tile.block_m * tile.block_n / 32
        return max(tensor, both / SHARED_BYTES_PER_CYCLE, SHORTEST_STEP_OF_FP32)
    products = 3 if planes == 2 else 1
    row_blocks = tile.block_m // 64 * (2 if tile.split_columns else 1)
    tensor = products * tile.block_m * tile.block_n / 32
    read = products * row_blocks * (64 + tile.consumer_n) * STEP_BYTES
    rows = tile.block_m + (0 if tile.resident_steps else tile.block_n)
    written = planes * rows * STEP_BYTES
    if tile.tf32:  # read, rounded and written once more
        written *= 3 if tile.resident_steps else 5
    from_l2 = written / L2_BYTES_PER_CYCLE if _own_rows(tile) else 0.0
    return max(tensor, (read + written) / SHARED_BYTES_PER_CYCLE, from_l2, SHORTEST_STEP)


def _own_rows(tile: Tile) -> bool:
    """Whether blocks share groups, and each of their warpgroups has rows of its own."""
    return tile.group_blocks > 1 and not tile.split_columns


def _at_once(tile: Tile, sms: int) -> int:
    """Blocks that run together."""
    if _own_rows(tile):
        return CLUSTERS_AT_ONCE[tile.group_blocks] * tile.group_blocks * sms // 132
    return sms // tile.cluster_blocks * tile.cluster_blocks


def _epilogue_weight(problem: Problem) -> float:
    """How much longer the chain makes the epilogue."""
    weight = 1.0 if problem.matrix_dtype is None else 1.4
    for op in (*problem.chain.pre, *problem.chain.post):
        if op.operand == "element":
            weight += ELEMENT_OPERAND
        elif op.operand != "channel":
            weight += OPERATION.get(op.name, OTHER_OPERATION)
    return weight


def _kernel_cycles(problem: Problem, tile: Tile, sms: int) -> float:
    planes = planes_of(problem)
    tiles = math.ceil(problem.m / tile.block_m) * math.ceil(problem.n / tile.block_n)
    rounds = math.ceil(tiles / _at_once(tile, sms))
    products = math.ceil(problem.k / tile.block_k) * _step_cycles(tile, planes)
    wide = 1.3 if tile.consumer_n * problem.out_dtype.itemsize % 64 else 1.0  # narrow stores
    weight = wide * _epilogue_weight(problem)
    if tile.ping_pong:
        epilogue = EPILOGUE_ALONE * weight * tile.block_n * tile.block_m / 64
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
        moved += converted * problem.k * (4 if problem.training else 2)  # fp32, and a plane
    elements = 1 + problem.chain.operand_kinds.count("element")
    moved += elements * problem.m * problem.n * problem.out_dtype.itemsize
    if problem.matrix_dtype is not None:
        moved += problem.m * problem.n * problem.matrix_dtype.itemsize
    memory = START + moved / MEMORY_BYTES_PER_CYCLE
    if tile.group_blocks > 1 and tile.split_columns:
        total *= SHARED_GROUP
    if tile.fp32_input:
        total *= FP32_INPUT
    return max(total, memory) + NOT_HIDDEN * min(total, memory)


def _split_cycles(problem: Problem, tile: Tile, prepacked: bool) -> float:
    """The conversion of x, and of W where it is not prepacked, and what surrounds it."""
    if problem.dtype != torch.float32 or tile.tf32:
        return 0.0
    of_x = 0 if tile.fp32_input else problem.m
    of_w = 0 if prepacked or tile.fp32_weight else problem.n
    moved = (of_x + of_w) * problem.k * (4 + 2 * planes_of(problem))
    if tile.converts:
        sampled = problem.n if tile.fp32_weight else problem.m
        moved += sampled * min(problem.k * 4, SAMPLE_BYTES)
    launches = 2 * LAUNCH_MICROSECONDS * CYCLES_PER_MICROSECOND
    launches += FP32_WEIGHT_LAUNCH * CYCLES_PER_MICROSECOND * tile.converts
    return launches + moved / MEMORY_BYTES_PER_CYCLE


def cycles(problem: Problem, tile: Tile, sms: int, prepacked: bool = False) -> float:
    """Estimated time of the whole forward pass with this tile, but for the launch itself."""
    kernel = _kernel_cycles(problem, tile, sms) * (CLUSTER if tile.cluster > 1 else 1.0)
    return kernel + _split_cycles(problem, tile, prepacked)


@memo(4096)
def choose_tile(
    problem: Problem, sms: int, prepacked: bool = False, converts: bool = True
) -> Tile | None:
    """The tile that was measured fastest, else that of the least estimated time; None if none fits.

    converts: W or x may be converted on the way; neither is where W is prepacked. `epinorm tune`
    clears what is kept here.
    """
    converts = converts and not prepacked
    # It measures with conversions of W, and they are what decides whether TF32 is faster.
    if not (prepacked and problem.precision == "high"):
        remembered = tuned.choice(problem, candidates)
        tile = None if remembered is None else remembered.tile
        if tile is not None and (converts or not tile.converts):
            return tile
    channels = columns_of(problem)
    key = (planes_of(problem), channels, problem.m, problem.k, problem.n)
    if key in MEASURED:
        return _fitted(problem, MEASURED[key])
    tiles = [tile for tile in candidates(problem) if converts or not tile.converts]
    if not tiles:
        return None
    return min(tiles, key=lambda tile: cycles(problem, tile, sms, prepacked))


def microseconds(problem: Problem, sms: int) -> float:
    """Estimated time of the whole forward pass by this kernel, conversions included."""
    tile = choose_tile(problem, sms, problem.prepacked)
    if tile is None:
        return math.inf
    estimate = cycles(problem, tile, sms, problem.prepacked)
    return LAUNCH_MICROSECONDS + estimate / CYCLES_PER_MICROSECOND


def instance_for(problem: Problem, tile: Tile) -> Instance[Tile]:
    """The kernel of this problem with this tile."""
    scaled = problem.dtype == torch.float32 and not (tile.tf32 or tile.fp32_weight)
    return instance_of(problem, tile, planes_of(problem), scaled)
