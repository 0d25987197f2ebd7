"""Which problems the Hopper kernel takes, and with which tile.

The model of hopper_cost.py ranks the tiles that fit; `MEASURED` overrides it where a measurement
knows better.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch

from epinorm.backends.cuda.plan import tuned
from epinorm.backends.cuda.plan.hopper_cost import (
    CLUSTERS_AT_ONCE,
    CYCLES_PER_MICROSECOND,
    LAUNCH_MICROSECONDS,
    cold_cycles,
    cycles,
)
from epinorm.backends.cuda.plan.hopper_tile import (
    STEP_BYTES,
    WIDEST_PRODUCT,
    Tile,
    fp32_input_tiles,
    fp32_weight_tiles,
    largest_stages,
    operand_slots,
    stages_of_fp32,
)
from epinorm.backends.cuda.text.instance import Instance, columns_of, rows_aligned
from epinorm.backends.memo import memo
from epinorm.problem import Problem

LARGEST_GROUP = 2048
"""Channels of a group: a cluster of eight blocks of 256 columns."""
LARGEST_CLUSTER = 8
WIDEST = {1: 256, 2: 128}
"""Columns of a tile by planes."""
SHORT_SUM = 128
"""Terms of an fp32 sum in which each product is folded. Training takes the single kernel for these
(strategy.py)."""

FEWEST_SHARED_CHANNELS = {2: 640, 4: 512}
"""Of such groups, by bytes of x: for 512 in 16 bit, two warpgroups that split 64 rows' columns were
as fast or faster."""
NARROWEST_SHARE = {1: 128, 2: 72}
"""Columns of a block's part of such a group, by planes: more blocks wait longer for each other."""
WIDEST_THAT_KEEPS = 112
"""Columns of such a part, two planes, where z or the sum is written behind a chain that is not
light: or registers spill, hundreds of bytes."""
WIDEST_IN_HALVES = 384
"""Columns of a tile whose warpgroups multiply twice for them: 192 accumulators a thread."""
FEWEST_STAGES_IN_HALVES = 3
MOST_STAGES = 12
EVEN_SHARE = 0.9
"""Of the multiprocessors, that must stay at work where tiles are shared out evenly."""
LARGEST_RESIDENT_BYTES = 96 * 1024
LONGEST_FROM_REGISTERS = 512
"""Terms of a TF32 sum with x out of registers, in training: of longer ones the backward pass mostly
takes planes, which a forward pass by planes leaves to it."""

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


def why_not(problem: Problem) -> str | None:
    """Why the Hopper kernel cannot serve this problem, in a sentence; None where it can."""
    channels = columns_of(problem)
    if problem.dtype == torch.float64:
        return "tensor cores of this kernel take 16-bit and fp32 inputs, not float64"
    if problem.k == 0:
        return "there is nothing to multiply (0 input features)"
    pair = WIDEST[problem.planes] // 2  # of groups that share a chunk of 8 columns
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
                yield Tile(64, width, 0, False, split_columns=True, cluster_n=blocks)
        if planes == 1:
            yield from _shapes_in_halves(problem)
        if planes == 2 or channels >= FEWEST_SHARED_CHANNELS[problem.dtype.itemsize]:
            yield from _cluster_shapes(problem, planes)


def _widths_in_halves(problem: Problem) -> Iterator[tuple[int, int]]:
    """Columns of tiles as wide as registers allow, and blocks of which a group has one or two.
    None for chains whose kernels would spill."""
    kinds, channels = problem.chain.operand_kinds, columns_of(problem)
    at_end = any(op.operand == "element" for op in problem.chain.post)
    others = problem.norm_dtype == torch.float32 and not set(kinds) <= {"element"}
    if kinds.count("element") > 1 or at_end or others or problem.chain.rounding == "eager":
        return
    for blocks in (1, 2):
        width = channels // blocks
        if channels % (16 * blocks) == 0 and WIDEST_PRODUCT < width <= WIDEST_IN_HALVES:
            yield width, blocks


def _shapes_in_halves(problem: Problem) -> Iterator[Tile]:
    """The tiles that read least from L2."""
    for width, blocks in _widths_in_halves(problem):
        tile = _fitted(problem, Tile(128, width, 0, ping_pong=False, cluster_n=blocks))
        kinds = problem.chain.operand_kinds
        held = "element" not in kinds or operand_slots(instance_for(problem, tile))
        if held and tile.stages >= FEWEST_STAGES_IN_HALVES:
            yield tile


def _inputs_in_halves(problem: Problem) -> Iterator[Tile]:
    """The same with x converted on the way: four slots of W's plane, and as many of x as fit.

    Not in training, where it gains little and outliers in each row have x's plane written twice.
    """
    if problem.training:
        return
    for width, blocks in _widths_in_halves(problem):
        if "element" in problem.chain.operand_kinds and width * 4 % STEP_BYTES:
            continue  # it comes in whole lines
        tile = Tile(128, width, 4, False, group=8, fp32_input=True, cluster_n=blocks)
        if stages_of_fp32(instance_for(problem, tile)) >= FEWEST_STAGES_IN_HALVES:
            yield tile


def _cluster_shapes(problem: Problem, planes: int) -> Iterator[Tile]:
    """Tiles of blocks that share a group, each block's warpgroups with rows of their own."""
    elements = problem.chain.operand_kinds.count("element")
    keeps = problem.keeps_z or problem.chain.returns_sum
    many = elements > 1 or (elements and keeps) or problem.chain.rounding == "eager"
    widest = 192 if many else 256  # or registers spill
    if planes == 2:
        alone = any(op.operand is None for op in problem.chain.pre)
        heavy = elements > 1 or alone or "seed" in problem.chain.operand_kinds
        widest = WIDEST_THAT_KEEPS if keeps and heavy else WIDEST[2]
    channels = columns_of(problem)
    for blocks, at_once in CLUSTERS_AT_ONCE.items():
        width = channels // blocks
        if channels % (8 * blocks) or not NARROWEST_SHARE[planes] <= width <= widest:
            continue
        groups = problem.n // channels
        for rows, ping_pong in ((128, False), (64, True)):
            # Fewer leave the GPU half empty, but by two planes such tiles in turn were faster than
            # one block's. A residual's slot of the ring is in the next warpgroup's way.
            few = math.ceil(problem.m / rows) * groups < at_once
            if few and not (planes == 2 and ping_pong):
                continue
            if planes == 2 and ping_pong and elements:
                continue
            yield Tile(rows, width, 0, ping_pong, cluster_n=blocks)


def candidates(problem: Problem) -> Iterator[Tile]:
    """The tiles that fit the registers and the shared memory."""
    for shape in _shapes(problem, problem.planes):
        low = shape.block_m == 64 and problem.m < 64
        load_m = -(-max(problem.m, 1) // 8) * 8 if low else None
        # TF32 operands are rounded in shared memory, by the one warpgroup that reads them.
        alone = shape.ping_pong and shape.cluster_n == 1
        kinds = [(False, False)]
        if _may_be_tf32(problem):
            kinds += [(True, False)] * alone
            kinds += [(True, True)] * _may_come_from_registers(problem, shape, load_m)
        for tf32, register_a in kinds:
            tile = dataclasses.replace(shape, load_m=load_m, tf32=tf32, register_a=register_a)
            if problem.planes == 2:  # one plane is not folded
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
        tiles = fp32_weight_tiles(problem.planes)
        if tiles[0].block_n % channels == 0 and rows_aligned(problem):
            yield from tiles
        if problem.planes == 1:
            elements = problem.chain.operand_kinds.count("element")
            yield from fp32_input_tiles(math.lcm(channels, 8), 192 if elements > 1 else 256)
            if problem.chain.norm is not None:
                yield from _inputs_in_halves(problem)


def _may_convert(problem: Problem) -> bool:
    """fp32 throughout, rows that the copy engine can read; at `highest` no short sums, and no
    training, whose backward pass reads planes."""
    fp32 = problem.dtype == problem.norm_dtype == problem.out_dtype == torch.float32
    one_plane = problem.precision == "high"
    return (
        fp32
        and problem.k % 4 == 0
        and (one_plane or (not problem.training and problem.k > SHORT_SUM))
    )


def _may_share_loads(problem: Problem, tile: Tile) -> bool:
    """Two blocks below each other can load W for both: for `epinorm tune` to try, see CLUSTER."""
    alone = tile.cluster_n == 1 and not (tile.resident_steps or tile.tf32 or tile.in_halves)
    one_plane = problem.planes == 1 and tile.block_n % 16 == 0
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
    one = problem.n <= tile.block_n and problem.planes == 1 and tile.cluster_n == 1
    if not one or tile.register_a or tile.in_halves or problem.m < 4 * tile.block_m:
        return 0
    return steps if steps * tile.block_n * STEP_BYTES <= LARGEST_RESIDENT_BYTES else 0


def _may_be_tf32(problem: Problem) -> bool:
    """Rows of fp32 that the copy engine can read, and leave to multiply them as TF32."""
    return problem.precision == "high" and problem.k % 4 == 0


def _may_come_from_registers(problem: Problem, shape: Tile, load_m: int | None) -> bool:
    """64 rows a warpgroup, all of which are loaded: more would not fit the registers."""
    rows_of_one = shape.block_m if shape.ping_pong or shape.split_columns else shape.block_m // 2
    short = problem.k <= LONGEST_FROM_REGISTERS or not problem.training
    return rows_of_one == 64 and load_m is None and short and not shape.in_halves


@memo(4096)
def choose_tile(
    problem: Problem, sms: int, prepacked: bool = False, converts: bool = True
) -> Tile | None:
    """The tile that was measured fastest, else that of the least estimated time; None if none fits.

    converts: W or x may be converted on the way; where W is prepacked its planes are not read then.
    `epinorm tune` clears what is kept here.
    """
    if problem.planes == 2:  # kept planes are as long as W, and converted already
        converts = converts and not prepacked
    # It measures with conversions of W, and they are what decides whether TF32 is faster.
    if not (prepacked and problem.precision == "high"):
        remembered = tuned.choice(problem, candidates)
        tile = None if remembered is None else remembered.tile
        if tile is not None and (converts or not tile.converts):
            return tile
    channels = columns_of(problem)
    key = (problem.planes, channels, problem.m, problem.k, problem.n)
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
    estimate += cold_cycles(problem, tile, sms)
    return LAUNCH_MICROSECONDS + estimate / CYCLES_PER_MICROSECOND


def instance_for(problem: Problem, tile: Tile) -> Instance[Tile]:
    """The kernel of this problem with this tile."""
    scaled = problem.dtype == torch.float32 and not (tile.tf32 or tile.fp32_weight)
    return Instance(problem, tile, scaled)
