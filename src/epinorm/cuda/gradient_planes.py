"""dz as the planes that the two backward products of an fp32 chain sum over.

`kernels/split_gradient.cu` says how the scales of W's and x's planes, which run along the summed
index, are taken into dz.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from epinorm.cuda.device import arch_of, sm_count
from epinorm.cuda.jit import KernelSource, load
from epinorm.cuda.launch import Kernel, i32
from epinorm.cuda.planes import TOLERANCE, Planes
from epinorm.cuda.source import kernel_text

__all__ = ["gradient_source", "split_columns", "split_rows"]

THREADS = 256
STRIP_COLUMNS = 64
STRIP_ROWS = THREADS // (STRIP_COLUMNS // 4)
"""Of a block of the column kernels: kStripColumns and kStripRows there."""
LARGEST_GRID_Y = 65535


def gradient_source(entry: str, planes: int, arch: str) -> KernelSource:
    """One of the kernels split_gradient_rows, gradient_column_max and split_gradient_columns."""
    prelude = (
        f"constexpr int kPlanes = {planes};\nconstexpr float kTolerance = {TOLERANCE[planes]};\n"
    )
    return KernelSource(entry, kernel_text("split_gradient.cu", prelude), arch)


@lru_cache(maxsize=256)
def _kernel(entry: str, planes: int, device: torch.device) -> Kernel:
    return load(gradient_source(entry, planes, arch_of(device)), device)


def _planes_for(dz: Tensor, planes: int, flags: Tensor) -> Planes:
    stored = torch.empty((planes, *dz.shape), dtype=torch.float16, device=dz.device)
    scale = torch.empty(flags.shape, dtype=torch.float32, device=dz.device)
    return Planes(stored[0], stored[planes - 1], scale, flags)


def split_rows(dz: Tensor, column_scale: Tensor, planes: int) -> Planes:
    """Planes of dz[i, n] * column_scale[n] with a scale a row; dz: (m, n) fp32 contiguous, n a
    multiple of 8; column_scale: (n,), powers of two."""
    m, n = dz.shape
    result = _planes_for(dz, planes, torch.empty(m, dtype=torch.uint8, device=dz.device))
    args = (dz, column_scale, result.hi, result.lo, result.scale, result.flags, i32(n))
    _kernel("split_gradient_rows", planes, dz.device).launch(m, THREADS, args)
    return result


def split_columns(dz: Tensor, row_scale: Tensor, planes: int) -> Planes:
    """Planes of dz[i, n] * row_scale[i] with a scale a column; dz as in `split_rows`; row_scale:
    (m,), powers of two."""
    m, n = dz.shape
    device = dz.device
    result = _planes_for(dz, planes, torch.zeros(n, dtype=torch.uint8, device=device))
    strips = -(-n // STRIP_COLUMNS)
    blocks = max(1, min(4 * sm_count(device) // strips, -(-m // STRIP_ROWS), LARGEST_GRID_Y))
    rows = -(-m // blocks)
    blocks = -(-m // rows)
    largest = torch.empty((blocks, n), dtype=torch.int32, device=device)
    sizes = (i32(m), i32(n), i32(rows))
    grid = (strips, blocks)
    found = (dz, row_scale, largest, *sizes)
    _kernel("gradient_column_max", planes, device).launch(grid, THREADS, found)
    made = (dz, row_scale, largest, result.hi, result.lo, result.scale, result.flags, *sizes)
    _kernel("split_gradient_columns", planes, device).launch(grid, THREADS, made)
    return result
