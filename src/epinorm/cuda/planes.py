"""fp32 matrices as fp16 planes: what the tensor cores multiply in place of fp32.

A row v becomes (hi + lo 2^-11) scale with a power of two for a scale; `kernels/split.cu` says how,
docs/precision.md why.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from epinorm.cuda.device import arch_of
from epinorm.cuda.jit import KernelSource, load
from epinorm.cuda.launch import Kernel, i32, i64
from epinorm.cuda.source import kernel_text

__all__ = ["Planes", "split", "split_source"]

THREADS = 256
MOST_VECTORS = 8
"""float4 that a thread keeps between finding a row's largest value and splitting it."""
COLUMN_MULTIPLE = 8
"""Rows of 16-bit numbers must start on 16 bytes for the copy engine."""

# What a plane pair and a single plane must hold of each element, relatively. Two: an fp32 product's
# own error. One: 2^-11 is what TF32 keeps; a little more is let through for values 2^-28 of their
# row's largest, of which every row of a large random matrix has some.
_TOLERANCE = {2: "0x1p-20f", 1: "0x1p-8f"}


@dataclass(frozen=True)
class Planes:
    """The planes of a (rows, columns) fp32 matrix.

    hi, lo: (rows, columns rounded up to 8) fp16; lo is hi again where there is one plane. scale:
    (rows,) fp32. flags: (rows,) uint8, 1 where the planes do not hold the row.
    """

    hi: Tensor
    lo: Tensor
    scale: Tensor
    flags: Tensor


def _row_threads(columns: int) -> int:
    threads = 32
    while threads < THREADS and threads * 4 * MOST_VECTORS < 2 * columns:
        threads *= 2
    return threads


def split_source(planes: int, columns: int, aligned: bool, arch: str) -> KernelSource:
    """The splitting kernel for rows of this length; `aligned`: rows start on 16 bytes."""
    threads = _row_threads(columns)
    vectors = min(MOST_VECTORS, -(-columns // (threads * 4)))
    prelude = (
        f"constexpr int kPlanes = {planes}, kRowThreads = {threads}, kRowVectors = {vectors};\n"
        f"constexpr float kTolerance = {_TOLERANCE[planes]};\n"
        f"constexpr bool kAligned = {str(aligned).lower()};\n"
    )
    return KernelSource("split", kernel_text("split.cu", prelude), arch)


@lru_cache(maxsize=256)
def _kernel(planes: int, columns: int, aligned: bool, device: torch.device) -> Kernel:
    return load(split_source(planes, columns, aligned, arch_of(device)), device)


def split(values: Tensor, planes: int) -> Planes:
    """Split a (rows, columns) fp32 matrix, columns contiguous, into one or two planes."""
    rows, columns = values.shape
    padded = -(-columns // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
    device = values.device
    stored = torch.empty((planes, rows, padded), dtype=torch.float16, device=device)
    scale = torch.empty(rows, dtype=torch.float32, device=device)
    flags = torch.empty(rows, dtype=torch.uint8, device=device)
    result = Planes(stored[0], stored[planes - 1], scale, flags)
    if rows == 0:
        return result
    aligned = values.data_ptr() % 16 == 0 and values.stride(0) % 4 == 0
    kernel = _kernel(planes, columns, aligned, device)
    blocks = -(-rows * _row_threads(columns) // THREADS)
    numbers = (i32(rows), i32(columns), i32(padded))
    args = (values, i64(values.stride(0)), result.hi, result.lo, scale, flags, *numbers)
    kernel.launch(blocks, THREADS, args)
    return result
