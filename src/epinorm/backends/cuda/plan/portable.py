"""Which problems the portable kernel takes, and with which tile, on any GPU since Ampere.

A small model of a multiprocessor, in clock cycles, ranks the tiles that fit. What it is right about
was measured on an H200; rates of other GPUs are their documented ones (internals/portable.md).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch

from epinorm.backends.cuda.plan.hopper_product import ProductShape
from epinorm.backends.cuda.plan.portable_tile import PortableTile, largest_stages
from epinorm.backends.cuda.runtime.device import Gpu
from epinorm.backends.cuda.text.instance import Instance, columns_of
from epinorm.backends.memo import memo
from epinorm.problem import Problem

# fp32 accumulators of a thread in the product, by planes: what 255 registers hold beside fragments.
_MOST_ACCUMULATORS = {1: 128, 2: 64}
_WIDEST_WARP = {1: 64, 2: 32}
"""Columns of a warp, unless a group that cannot be shared is wider."""
_WIDEST_GROUP_OF_A_WARP = 256
_MOST_WARPS = 8
_LAYOUTS = ((2, 4), (4, 2), (1, 8), (2, 2), (1, 4), (4, 1), (8, 1))
"""Warps along rows and along columns, where groups are shared by 1, 2, 4 or 8 of them."""
_MOST_STAGES = 8
_FEWEST_STAGES = 2
_RESERVED_BYTES = 1024
"""Of a multiprocessor's shared memory, for each block (CUDA programming guide)."""

# Multiply-adds a cycle of a multiprocessor's tensor cores, 16-bit operands and fp32 accumulators,
# by mma.sync; NVIDIA's whitepapers of GA100, GA102, AD102 and GB202. Hopper's is what mma.sync
# reaches of its 2048 (internals/portable.md). A GPU that is not listed counts as a smaller one.
_MULTIPLY_ADDS = {(8, 0): 1024.0, (9, 0): 1290.0, (10, 0): 1290.0, (10, 3): 1290.0}
_OTHER_MULTIPLY_ADDS = 512.0
# The same in fp32, without tensor cores; and what a library reaches of either.
_PLAIN_MULTIPLY_ADDS = {(8, 0): 64.0}
_OTHER_PLAIN_MULTIPLY_ADDS = 128.0
_LIBRARY = 0.85
_SHARED_BYTES_PER_CYCLE = 128.0
# Bytes a cycle of a multiprocessor's share of global memory.
_MEMORY_BYTES = {(8, 0): 9.0, (9, 0): 15.0, (10, 0): 20.0}
_OTHER_MEMORY_BYTES = 3.0
_CYCLES_PER_MICROSECOND = 1600.0
_LAUNCH_MICROSECONDS = 2.5

# Measured on an H200: a tile's first loads and last stores, in cycles; a column of 16 rows of a
# warp in the epilogue; the share of the rates above that products reach; what two planes' additions
# in fp32, one for each number of two products of 16, add to the tensor cores' own time on Hopper.
_START = 3500.0
_EPILOGUE = 11.0
_EFFICIENCY = 0.94
_ADDITIONS = 0.2 / 1290.0
_ONE_WARP = 0.65
"""With one warp a scheduler in place of two."""
_SHORT_STEPS = 1.03
"""What steps of 32 cost over steps of 64."""
_TWO_BLOCKS = 1.06
_SHALLOW = {32: 1.35, 64: 1.03}
"""What it costs if only so many elements along the summed index are on their way."""

_PRODUCT_TILES = {
    1: (PortableTile(64, 64, 2, 4, 64), PortableTile(64, 64, 2, 4, 32)),
    2: (PortableTile(64, 32, 2, 4, 32),),
}
"""Of a plain product, by planes: the first of which three slots fit."""
_FEWEST_PRODUCT_STAGES, _MOST_PRODUCT_STAGES = 3, 6


def copy_bytes(*numbers: int) -> int:
    """16, 4 or 2: of which addresses, row lengths and strides, all in bytes, are multiples."""
    together = 0
    for number in numbers:
        together |= number
    return 16 if together % 16 == 0 else 4 if together % 4 == 0 else 2


def why_not(problem: Problem) -> str | None:
    """Why the portable kernel cannot serve this problem, in a sentence; None where it can."""
    channels = columns_of(problem)
    if problem.dtype == torch.float64:
        return "tensor cores of this kernel take 16-bit and fp32 inputs, not float64"
    if problem.k == 0:
        return "there is nothing to multiply (0 input features)"
    pair = _WIDEST_WARP[problem.planes] // 2  # of groups that share a chunk of 8 columns
    if channels != 2 and channels % 8 and (channels % 4 or channels > pair):
        return f"a group of {channels} channels is none of 2, a multiple of 4 up to {pair} or of 8"
    if not any(True for _ in _warp_columns(channels, problem.planes)):
        return f"a group of {channels} channels does not fit the warps of a block"
    return None


def _warp_columns(channels: int, planes: int) -> Iterator[tuple[int, int]]:
    """A warp's columns and the warps that share a group of so many channels."""
    widest = _WIDEST_WARP[planes]
    if channels <= widest:
        unit = math.lcm(channels, 8)
        for columns in dict.fromkeys((widest, widest // 2, widest // 4)):
            if columns >= unit:
                yield columns // unit * unit, 1
        return
    for several in ((2, 4, 8), (3, 5, 6, 7)):  # the others fit fewer blocks, or spill
        found = [p for p in several if channels % (8 * p) == 0 and channels // p <= widest]
        yield from ((channels // parts, parts) for parts in found)
        if found:
            break
    if channels <= _WIDEST_GROUP_OF_A_WARP:
        yield channels, 1


def _layouts(parts: int) -> Iterator[tuple[int, int]]:
    """Warps along rows and along columns, of which whole numbers of groups."""
    for along_rows, along_columns in _LAYOUTS:
        if along_columns % parts == 0:
            yield along_rows, along_columns
    if parts & (parts - 1):
        for along_rows in range(1, _MOST_WARPS // parts + 1):
            yield along_rows, parts


def _shapes(channels: int, planes: int) -> Iterator[PortableTile]:
    """Tiles whose accumulators fit the registers; their stages are not yet known."""
    for columns, parts in _warp_columns(channels, planes):
        for rows in (64, 32, 16):
            if rows * columns // 32 > _MOST_ACCUMULATORS[planes] and rows > 16:
                continue
            for along_rows, along_columns in _layouts(parts):
                tile = PortableTile(rows, columns, along_rows, along_columns, parts=parts)
                yield tile
                if tile.warps == 4:
                    yield dataclasses.replace(tile, blocks=2)


def candidates(problem: Problem, gpu: Gpu) -> Iterator[PortableTile]:
    """The tiles that fit the registers and the shared memory of this GPU."""
    # Two planes in steps of 64 spill registers from Blackwell on.
    long_steps = problem.planes == 1 or gpu.capability < (10, 0)
    for shape in _shapes(columns_of(problem), problem.planes):
        each = gpu.shared_of_multiprocessor // shape.blocks - _RESERVED_BYTES
        limit = min(gpu.shared_of_block, each)
        for block_k in (64, 32) if long_steps else (32,):
            tile = dataclasses.replace(shape, block_k=block_k)
            stages = largest_stages(instance_for(problem, tile), limit)
            if stages >= _FEWEST_STAGES + (block_k == 64):
                yield dataclasses.replace(tile, stages=min(stages, _MOST_STAGES))


def _product_cycles(planes: int, k: int, tile: PortableTile, gpu: Gpu) -> float:
    """All steps along k of the tiles that a multiprocessor holds at once."""
    rate = _MULTIPLY_ADDS.get(gpu.capability, _OTHER_MULTIPLY_ADDS)
    products = 3 if planes == 2 else 1
    tensor = products * tile.block_m * tile.block_n * 16 / rate
    read = tile.warps * (tile.warp_m + tile.warp_n)
    written = tile.block_m + tile.block_n
    shared = planes * (read + written) * 32 / _SHARED_BYTES_PER_CYCLE
    steps = math.ceil(k / 16) * tile.blocks
    time = steps * max(tensor, shared) / _EFFICIENCY
    time += steps * tensor * _ADDITIONS * rate * (planes - 1)
    time *= _SHALLOW.get((tile.stages - 1) * tile.block_k, 1.0)
    time *= _SHORT_STEPS if tile.block_k == 32 else 1.0
    time *= _TWO_BLOCKS if tile.blocks == 2 else 1.0
    return time if tile.warps * tile.blocks > 4 else time / _ONE_WARP


def _rounds(m: int, n: int, tile: PortableTile, gpu: Gpu) -> int:
    return max(1, math.ceil(tile.tiles(m, n) / (gpu.multiprocessors * tile.blocks)))


def choose_product_tile(planes: int, gpu: Gpu) -> PortableTile:
    """A plain product's tile for operands of so many planes, with the slots that fit this GPU."""
    for tile in _PRODUCT_TILES[planes]:
        stages = min(gpu.shared_of_block // tile.stage_bytes(planes), _MOST_PRODUCT_STAGES)
        if stages >= _FEWEST_PRODUCT_STAGES:
            return dataclasses.replace(tile, stages=stages)
    raise RuntimeError(f"{gpu.shared_of_block} bytes of shared memory are too few for any tile")


def product_microseconds(shape: ProductShape, gpu: Gpu) -> float:
    """Estimated time of a plain product."""
    tile = choose_product_tile(shape.planes, gpu)
    each = _product_cycles(shape.planes, shape.length, tile, gpu) + _START
    return _rounds(shape.rows, shape.columns, tile, gpu) * each / _CYCLES_PER_MICROSECOND


def cycles(problem: Problem, tile: PortableTile, gpu: Gpu) -> float:
    """Estimated time of the product and its epilogue with this tile."""
    planes, size = problem.planes, problem.out_dtype.itemsize
    products = _product_cycles(planes, problem.k, tile, gpu)
    beside = problem.dtype if problem.training else None
    beside = problem.matrix_dtype if problem.chain.returns_sum else beside
    kept = 1.0 if beside is None else 1.4
    epilogue = _EPILOGUE * kept * tile.blocks * tile.warps / 4 * tile.warp_n * tile.warp_m / 16
    hidden = 0.5 if tile.blocks > 1 else 1.0  # behind the other block's products
    rounds = _rounds(problem.m, problem.n, tile, gpu)
    total = rounds * (products + hidden * (epilogue + _START))
    moved = (problem.m + problem.n) * problem.k * 2 * planes
    moved += problem.m * problem.n * (size + (0 if beside is None else beside.itemsize))
    # Where memory is the limit, the rest still tells better tiles from worse.
    return max(total, _START + moved / _memory_bytes(gpu)) + 0.02 * total


def _memory_bytes(gpu: Gpu) -> float:
    """Of the whole chip, a cycle."""
    return gpu.multiprocessors * _MEMORY_BYTES.get(gpu.capability, _OTHER_MEMORY_BYTES)


def _split_cycles(problem: Problem, gpu: Gpu) -> float:
    """The conversion of fp32 operands to planes, and the range guard's look at its flags."""
    if problem.dtype != torch.float32:
        return 0.0
    moved = (problem.m + problem.n) * problem.k * (4 + 2 * problem.planes)
    launches = 2 * _LAUNCH_MICROSECONDS * _CYCLES_PER_MICROSECOND
    return launches + moved / _memory_bytes(gpu)


@memo(4096)
def choose_tile(problem: Problem, gpu: Gpu) -> PortableTile | None:
    """The tile of the least estimated time; None if none fits."""
    tiles = list(candidates(problem, gpu))
    return min(tiles, key=lambda tile: cycles(problem, tile, gpu), default=None)


def microseconds(problem: Problem, gpu: Gpu) -> float:
    """Estimated time of the whole forward pass by this kernel, conversions included."""
    tile = choose_tile(problem, gpu)
    if tile is None:
        return math.inf
    total = cycles(problem, tile, gpu) + _split_cycles(problem, gpu)
    return _LAUNCH_MICROSECONDS + total / _CYCLES_PER_MICROSECOND


def library_flops(problem: Problem, gpu: Gpu) -> float:
    """Operations a microsecond of a library product on a GPU before or after Hopper."""
    rate = _MULTIPLY_ADDS.get(gpu.capability, _OTHER_MULTIPLY_ADDS)
    if problem.precision == "high":
        rate /= 2  # TF32
    elif problem.precision == "highest":
        rate = _PLAIN_MULTIPLY_ADDS.get(gpu.capability, _OTHER_PLAIN_MULTIPLY_ADDS)
    return 2 * gpu.multiprocessors * rate * _LIBRARY * _CYCLES_PER_MICROSECOND


def bytes_per_microsecond(gpu: Gpu) -> float:
    """What global memory moves."""
    return _memory_bytes(gpu) * _CYCLES_PER_MICROSECOND


def instance_for(problem: Problem, tile: PortableTile) -> Instance[PortableTile]:
    """The kernel of this problem with this tile."""
    return Instance(problem, tile, problem.dtype == torch.float32)
