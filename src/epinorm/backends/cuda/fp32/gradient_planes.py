"""dz as the planes that the two backward products of an fp32 chain sum over.

`fp32/split_gradient.cu` says how the scales of W's and x's planes, which run along the summed
index, are taken into dz.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from epinorm.backends.cuda.norm.backward import Factors, Largest
from epinorm.backends.cuda.runtime.device import arch_of, sm_count
from epinorm.backends.cuda.runtime.jit import KernelSource, load
from epinorm.backends.cuda.runtime.prepared import new_tensor, starts_early
from epinorm.backends.cuda.text.source import constants, kernel_text
from epinorm.problem import Problem

SIGNATURE = "p" + "pp" + "pip" + "pppp" + "pppp" + "iii"
"""dz; the factors of columns and rows; the largest magnitudes of rows, how many parts of each, and
of columns; hi, lo, scale, flags by row; the same by column; m, n, rows of a block."""

THREADS = 256
STRIP_COLUMNS = 256
STRIP_ROWS = THREADS // (STRIP_COLUMNS // 4)
MOST_ROWS = 64
"""Of a block: kStripColumns, kStripRows and kMostRows there."""
BLOCKS_PER_SM = 4


class GradientPlanes(NamedTuple):
    """dz's planes with a scale a row, or a column; (m, n) fp16 each, in ``buffer``.

    buffer: (planes, m, n) fp16, then the scales. scale and flags: addresses; held: where
    the flags are.
    """

    buffer: Tensor
    scale: int
    flags: int
    held: Tensor


def gradient_source(planes: int, by_row: bool, by_column: bool, arch: str) -> KernelSource:
    """The kernel's text; compiles without a GPU."""
    prelude = constants(
        {
            "kPlanes": planes,
            "kByRow": by_row,
            "kByColumn": by_column,
        }
    )
    return KernelSource("split_gradient", kernel_text("fp32/split_gradient.cu", prelude), arch)


class GradientSplitter:
    """Splits a dz (m, n), n a multiple of 8, for dX (``by_row``), dW (``by_column``), or both."""

    def __init__(self, problem: Problem, by_row: bool, by_column: bool) -> None:
        planes, m, n, device = problem.planes, problem.m, problem.n, problem.device
        self.by_row, self.by_column = by_row, by_column
        self.lo, self.scale = (planes - 1) * 2 * m * n, planes * 2 * m * n
        self.new_row = new_tensor((self.scale + 4 * m,), torch.uint8, device)
        self.new_column = new_tensor((self.scale + 4 * n,), torch.uint8, device)
        strips = -(-n // STRIP_COLUMNS)
        wanted = max(BLOCKS_PER_SM * sm_count(device) // strips, 1)
        self.sizes = (m, n, min(max(-(-m // wanted), STRIP_ROWS), MOST_ROWS))
        kernel = load(gradient_source(planes, by_row, by_column, arch_of(device)), device)
        # Rows run along the dimension that may be long.
        grid = (-(-m // self.sizes[2]), strips)
        self.launch = kernel.prepare(SIGNATURE, grid, THREADS, dependent=starts_early(device))

    def __call__(
        self, dz: Tensor, factors: Factors, largest: Largest
    ) -> tuple[GradientPlanes | None, GradientPlanes | None]:
        """The planes by row and by column of dz, (m, n) fp32, contiguous."""
        rows = columns = None
        targets = [0] * 8
        if self.by_row:
            buffer = self.new_row()
            at = buffer.data_ptr()
            rows = GradientPlanes(buffer, at + self.scale, largest.row_flags, largest.flags)
            targets[:4] = (at, at + self.lo, rows.scale, rows.flags)
        if self.by_column:
            buffer = self.new_column()
            at = buffer.data_ptr()
            scale, flags = at + self.scale, largest.column_flags
            columns = GradientPlanes(buffer, scale, flags, largest.flags)
            targets[4:] = (at, at + self.lo, columns.scale, columns.flags)
        self.launch(
            dz.data_ptr(),
            *factors,
            *(largest.rows, largest.row_parts, largest.columns),
            *targets,
            *self.sizes,
        )
        return rows, columns
