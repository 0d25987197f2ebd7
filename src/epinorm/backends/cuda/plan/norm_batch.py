"""BatchNorm's kernels, whose threads keep columns and walk over rows: tiles and steps."""

from __future__ import annotations

from dataclasses import replace

import torch

from epinorm.backends.cuda.plan.norm_backward import Outputs
from epinorm.backends.cuda.plan.norm_tile import (
    LARGEST_ACCESS_BYTES,
    NARROW,
    WARP,
    NormTile,
    ceil_div,
    vector_width,
)
from epinorm.problem import Buffer, Problem, Step

BLOCK_WARPS = 8
MOST_VALUES = 4
"""Of a vector: each column has its mean, scale, sums and parameters in registers, so that wider
ones in 16 bit would leave room for few rows on their way."""
STATISTICS_ROWS, FORWARD_ROWS = 8, 4
"""That a thread has in flight. Of 16 bytes each, two blocks of the first have 64 KB on their way on
a multiprocessor, where memory's rate times its latency takes 25."""
STATISTICS_BLOCKS = 3
"""Of a multiprocessor, at most: each leaves a part, which all wait for."""


MOMENT_ROWS = 64
"""Of which the product leaves a column's mean and squares around it (gemm/column_moments.cuh)."""


def may_find_moments(problem: Problem) -> bool:
    """Whether a product by Hopper's core leaves moments of what enters the norm, but for a bias."""
    before = problem.chain.pre and problem.keeps_z  # which is z without what comes before the norm
    whole_units = problem.n * problem.dtype.itemsize % LARGEST_ACCESS_BYTES == 0
    return problem.dtype == torch.float32 and whole_units and not before


def narrowed(vector: int) -> int:
    """The width that BatchNorm's kernels have where this is the widest."""
    return min(vector, MOST_VALUES)


def _tile(vector: int, rows: int) -> NormTile:
    return NormTile(vector, 1, 1, rows, 1, BLOCK_WARPS, True)


def statistics_tile(problem: Problem, vector: int) -> NormTile:
    """Of ``batch_statistics``."""
    elements = sum(kind == "element" for kind in problem.chain.operand_kinds)
    return _tile(vector, max(STATISTICS_ROWS // (1 + elements), 1))


def forward_tile(problem: Problem, vector: int) -> NormTile:
    """Of ``batch_forward``."""
    return _tile(vector, FORWARD_ROWS)


def backward_tile(problem: Problem, vector: int) -> NormTile:
    """Of ``batch_backward``, which reads two matrices."""
    return _tile(vector, 4 if problem.dtype.itemsize == 2 else 2)


def strips(problem: Problem, vector: int) -> int:
    """Blocks side by side."""
    return ceil_div(problem.n, WARP * vector)


_JOINED = "joined in a fixed order"


def _vector(problem: Problem) -> int:
    return narrowed(vector_width(problem.n // problem.groups, problem.dtype.itemsize, ()))


def _said(tile: NormTile) -> str:
    return f"{tile.vector} columns a thread, {tile.rows} rows on their way, {tile.threads} threads"


def add_forward_steps(
    problem: Problem, into: list[Step], scratch: list[Buffer], has_moments: bool = False
) -> None:
    """Those behind the product, and the memory that they take; has_moments: the product left
    them."""
    vector, nbytes = _vector(problem), 2 * problem.n * problem.stats_dtype.itemsize
    first, last = _said(statistics_tile(problem, vector)), _said(forward_tile(problem, vector))
    made = "statistics" + ", mean, rstd" * problem.keeps_statistics
    reason = "each block has some rows of its columns"
    if not has_moments:
        into.append(Step("batch_statistics", "partial statistics", reason, first, NARROW))
    into.append(Step("batch_join", made, _JOINED))
    reason = "z again, as statistics are of all rows"
    into.append(Step("batch_forward", "y", reason, last, NARROW))
    if has_moments:
        nbytes *= ceil_div(problem.m, MOMENT_ROWS)
        scratch.append(Buffer("moments of columns", nbytes, "linear_norm", "batch_join"))
    else:
        scratch.append(Buffer("partial statistics", nbytes, "batch_statistics", "batch_join", True))


def add_backward_steps(
    problem: Problem, outputs: Outputs, into: list[Step], scratch: list[Buffer]
) -> None:
    """Those from dy and z to dz and what else is wanted."""
    tile, nbytes = _said(backward_tile(problem, _vector(problem))), problem.stats_dtype.itemsize
    made = "sums over rows"
    made += ", weight's gradient" * outputs.gamma + ", bias's gradient" * outputs.beta
    reason = "before dz, which needs them"
    into.append(Step("batch_backward", "partial sums over rows", reason, tile, NARROW))
    into.append(Step("norm_column_sums", made, _JOINED))
    nbytes *= 2 * problem.n
    scratch.append(Buffer("partial sums", nbytes, "batch_backward", "norm_column_sums", True))
    rest = replace(outputs, gamma=False, beta=False)
    if rest.is_empty:
        return
    sums = any(rest.sums)
    made = ", ".join(
        ["dz"] * rest.dz
        + ["partial sums over rows"] * sums
        + ["operands' gradients"] * any(rest.elements)
    )
    reason = "dy and z again, as the sums are of all rows"
    into.append(Step("batch_backward", made, reason, tile, NARROW))
    nbytes = problem.m * problem.n * problem.dtype.itemsize
    scratch += [Buffer("dz", nbytes, "batch_backward", "dW")] * rest.dz
    of_columns = ["gradients over channels"] * sums
    of_columns += ["largest magnitudes of columns"] * rest.column_largest
    if of_columns:
        into.append(Step("norm_column_sums", ", ".join(of_columns), _JOINED))
