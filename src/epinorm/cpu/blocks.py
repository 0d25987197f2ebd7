"""How the rows of one call are cut into blocks, tiles and chunks.

Only the shape and the dtype decide, never the number of threads: so the same bits come out of any
number of threads. The numbers were measured on two cores of an AMD EPYC (docs/cpu.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from epinorm.plan import Problem

__all__ = ["Blocks", "choose_blocks"]

MIN_BLOCKS = 16
"""As many blocks as this, and a block of whole rows per thread keeps every thread busy."""
BLOCK_ROWS = 256
"""Below this many rows, a product spends its time arranging the weight instead of multiplying."""
BLOCK_VALUES = 2**17
"""Values of x and z in a block that grows beyond BLOCK_ROWS: in fp32 half a megabyte."""
SMALL_TILE = 8_000_000
"""Floating-point operations worth a task of their own: about 0.1 ms on one core."""
LARGE_TILE = 128_000_000
MAX_TILES = 64
MAX_CHUNKS = 32
MAX_PARTS_BYTES = 32 * 2**20
"""Memory for the weight's gradients of the chunks; beyond it they are computed as tiles."""


@dataclass(frozen=True)
class Blocks:
    """Rows of a block; columns of N, ``inner`` columns of K and ``outer`` rows of the weight in a
    product's tile (columns = N: no tiles); chunks of rows with sums of their own; and whether each
    chunk sums its own gradient of the weight."""

    rows: int
    columns: int
    inner: int
    outer: int
    chunks: int
    weight_parts: bool


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(value: int, multiple: int) -> int:
    return _ceil_div(value, multiple) * multiple


def _tile(size: int, across: int) -> int:
    """Columns of one of ``across`` tiles of ``size`` columns, in whole cache lines."""
    return size if across <= 1 else min(size, _round_up(_ceil_div(size, across), 64))


def choose_blocks(problem: Problem) -> Blocks:
    """The blocks of a problem with M, K, N >= 1."""
    m, k, n = problem.m, problem.k, problem.n
    operations = 2 * m * k * n
    tiles = min(MAX_TILES, max(min(MIN_BLOCKS, operations // SMALL_TILE), operations // LARGE_TILE))
    if m >= MIN_BLOCKS * BLOCK_ROWS:
        rows, columns = BLOCK_ROWS, n
        while 2 * rows * MIN_BLOCKS <= m and 2 * rows * (k + n) <= BLOCK_VALUES:
            rows *= 2
    else:
        rows = BLOCK_ROWS if m >= 1024 else 128 if m >= 512 else 64
        columns = _tile(n, _ceil_div(tiles, _ceil_div(m, rows)))
    by_blocks = columns >= n
    # Without a product in the chunk, a strip of 16 rows is all that a chunk needs to be.
    chunks = min(MAX_CHUNKS, _ceil_div(m, rows if by_blocks else 16))
    size = 8 if problem.dtype == torch.float64 else 4
    # In 16 bit a chunk's gradient would be rounded before the chunks are added.
    parts = by_blocks and problem.dtype != torch.bfloat16
    return Blocks(
        rows if by_blocks or m > rows else _round_up(m, 16),
        columns,
        _tile(k, _ceil_div(tiles, 4)) if k > 256 else k,
        _tile(n, max(4, _ceil_div(tiles, 4))) if n > 64 else n,
        chunks,
        parts and chunks * n * k * size <= MAX_PARTS_BYTES,
    )
