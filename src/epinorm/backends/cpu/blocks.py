"""How the rows of one call are cut into blocks, tiles and chunks.

Only the shape and the dtype decide, never the number of threads: so the same bits come out of any
number of threads. The numbers were measured on two cores each of an AMD EPYC and an Intel Xeon
(internals/cpu.md).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from epinorm.problem import Problem

DOUBLE_BLOCK_ROWS = ((1024, 256), (512, 128), (0, 64))
"""The same in float64, whose weights cannot be packed."""
GROWN_BLOCKS = 16
"""Blocks grow while at least this many are left."""
BLOCK_ROWS = ((4096, 256), (1024, 128), (512, 64), (0, 32))
"""From this M on, rows of a block. In blocks of few rows, a product spends its time arranging the
weight instead of multiplying; with few blocks, threads have nothing to do."""
BLOCK_VALUES = 2**17
"""Values of x and z in a block that grows beyond that: in fp32 half a megabyte."""
WANTED_BLOCKS = 8
"""With fewer blocks than this the product is cut into tiles, where it is long enough."""
BLOCK_WEIGHT = 2**21
"""Values of a weight that is worth arranging again for each block of less than 256 rows."""
TILE_ROWS = ((1024, 256), (128, 128), (0, 64))
DX_TILE_ROWS = ((1024, 256), (0, 128))
DX_BLOCK_ROWS = 128
"""With blocks of fewer rows, x's gradient is computed in tiles once all of dz is there."""
SMALL_TILE = 8_000_000
"""Floating-point operations worth a task of their own: about 0.1 ms on one core."""
LARGE_TILE = 128_000_000
MIN_TILES = 16
MAX_TILES = 64
MAX_CHUNKS = 32
STRIP_ROWS = 16
"""Rows that a kernel takes at a time (kLanes in lanes.h)."""
PARTS_ROWS = 256
MAX_PARTS_BYTES = 4 * 2**20
"""Memory for the weight's gradients of the chunks; beyond it they are computed as tiles."""
PACKED_BLOCKS = 4
PACKED_WEIGHT = (2**17, 2**22)
"""From this many blocks on, and within these values of the weight, arranging it once for all blocks
costs less than arranging it for each: with a smaller weight that is hardly seen, and the arranged
copy of a larger one leaves the cache."""
GRADIENT_TILE = 512_000_000
"""Floating-point operations of a tile of the weight's gradient, which sums over all rows."""


class Blocks(NamedTuple):
    """How one problem is cut; all but the last are what the runner is told.

    rows: of a block. columns: of N in a product's tile (columns = N: no tiles). inner, outer:
    columns of K and rows of the weight in a tile of the gradients. chunks: of rows, with sums of
    their own. dx_rows: rows of a tile of x's gradient; 0: computed block by block, with dz.
    packed: the weight is arranged once for the products of all blocks. weight_parts: each chunk
    sums its own gradient of the weight.
    """

    rows: int
    columns: int
    inner: int
    outer: int
    chunks: int
    dx_rows: int
    packed: bool
    weight_parts: bool


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(value: int, multiple: int) -> int:
    return _ceil_div(value, multiple) * multiple


def _tile(size: int, across: int) -> int:
    """Columns of one of ``across`` tiles of ``size`` columns, in whole cache lines."""
    return size if across <= 1 else min(size, _round_up(_ceil_div(size, across), 64))


def _rows(m: int, table: tuple[tuple[int, int], ...]) -> int:
    return next(rows for least, rows in table if m >= least)


def _block_rows(m: int, k: int, n: int, double: bool) -> int | None:
    """Rows of a block that goes from x to y in one step; None where tiles serve better."""
    rows = _rows(m, DOUBLE_BLOCK_ROWS if double else BLOCK_ROWS)
    while rows >= 256 and 2 * rows * GROWN_BLOCKS <= m and 2 * rows * (k + n) <= BLOCK_VALUES:
        rows *= 2
    blocks, operations = _ceil_div(m, rows), 2 * m * k * n
    wanted = min(WANTED_BLOCKS, max(operations // SMALL_TILE, 1 + (operations > SMALL_TILE // 4)))
    wanted = (wanted + 1) // 2 if double else wanted
    if blocks < wanted or (rows < 256 and k * n > BLOCK_WEIGHT):
        return None
    return rows


def _packs(problem: Problem, rows: int) -> bool:
    least, most = PACKED_WEIGHT
    return (
        problem.dtype == torch.float32
        and problem.m >= PACKED_BLOCKS * rows
        and least <= problem.k * problem.n <= most
    )


def choose_blocks(problem: Problem, can_pack: bool = False) -> Blocks:
    """The blocks of a problem with M, K, N >= 1; ``can_pack``: the machine's library can arrange a
    weight beforehand."""
    m, k, n = problem.m, problem.k, problem.n
    operations = 2 * m * k * n
    wanted = max(min(MIN_TILES, operations // (SMALL_TILE // 4)), operations // LARGE_TILE)
    tiles = min(MAX_TILES, wanted)
    whole = _block_rows(m, k, n, problem.dtype == torch.float64)
    rows = whole or _rows(m, TILE_ROWS)
    columns = n if whole else _tile(n, _ceil_div(tiles, _ceil_div(m, rows)))
    side = round(min(MAX_TILES, max(4, operations // GRADIENT_TILE)) ** 0.5)
    dx_in_blocks = whole is not None and rows >= DX_BLOCK_ROWS
    # Without a product in the chunk, a strip of 16 rows is all that a chunk needs to be.
    chunks = min(MAX_CHUNKS, _ceil_div(m, rows if dx_in_blocks else STRIP_ROWS))
    size = 8 if problem.dtype == torch.float64 else 4
    # In 16 bit a chunk's gradient would be rounded before the chunks are added, and a product that
    # sums over few rows spends its time adding to the gradient.
    parts = dx_in_blocks and rows >= PARTS_ROWS and problem.dtype != torch.bfloat16
    return Blocks(
        rows,
        columns,
        _tile(k, side),
        _tile(n, side),
        chunks,
        0 if dx_in_blocks else _rows(m, DX_TILE_ROWS),
        whole is not None and can_pack and _packs(problem, rows),
        parts and chunks * n * k * size <= MAX_PARTS_BYTES,
    )
