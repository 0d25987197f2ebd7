"""BatchNorm's kernels, forward: z → y, the batch's statistics and, in training, mean and rstd.

Three launches: each block's statistics of its rows, all of them joined, and the pass that applies
them. The second read of z is what a norm over columns costs. Where the product left moments of z's
columns (gemm/column_moments.cuh), it is the only one, and two launches do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from epinorm.backends.cuda.norm.text import (
    chain_signature,
    matrix_arguments,
    norm_text,
    parameters_at,
)
from epinorm.backends.cuda.plan.norm_batch import (
    MOMENT_ROWS,
    STATISTICS_BLOCKS,
    forward_tile,
    narrowed,
    statistics_tile,
    strips,
)
from epinorm.backends.cuda.plan.norm_tile import (
    LARGEST_ACCESS_BYTES,
    NormTile,
    ceil_div,
    vector_width,
)
from epinorm.backends.cuda.runtime.device import arch_of, sm_count
from epinorm.backends.cuda.runtime.jit import KernelSource, load
from epinorm.backends.cuda.runtime.prepared import new_tensor, starts_early
from epinorm.backends.cuda.text.chain_text import ChainArguments
from epinorm.chain import Chain
from epinorm.problem import Forward, Problem

STATISTICS_SIGNATURE = "plpp" + "li"
"""z and its row stride, bias, partial statistics; rows, groups. Then the operands and constants of
what stands before the norm."""
JOIN_SIGNATURE = "pi" + "plp" + "ll" + "ppp"
"""Partial statistics, how many; z and its row stride, bias; M, N; mean, rstd, statistics."""
SIGNATURE = "pl" + "pppppp" + "li"
"""z and its row stride, bias, gamma, beta, y, mean, rstd, rows, groups. Then the operands and the
chain's constants."""

LARGEST_GRID_Y = 65535
JOIN_THREADS = 512
"""As kJoinThreads in batch_join.cu."""
JOIN_COLUMNS, FEW_COLUMNS, MANY_PARTS = 32, 8, 128
"""Columns of a block there, and of one where there are so many parts."""
WAVES = 8
"""Blocks of the last pass for this many rounds over the GPU, as in norm/forward.py."""


def _entering(problem: Problem) -> Problem:
    """The problem up to what enters the norm."""
    chain = replace(problem.chain, post=())
    return replace(problem, chain=chain, has_norm_weight=False, has_norm_bias=False)


def statistics_source(problem: Problem, tile: NormTile, arch: str) -> KernelSource:
    """The kernel of each block's statistics."""
    text = norm_text("norm/batch_statistics", _entering(problem), tile, {})
    return KernelSource("batch_statistics", text, arch)


def join_source(
    problem: Problem,
    tile: NormTile,
    arch: str,
    of_product: bool = False,
    columns: int = JOIN_COLUMNS,
) -> KernelSource:
    """The kernel that joins them; tile: of the first one; of_product: moments of z, which the
    product left; columns: a block's."""
    has_bias = of_product and problem.has_bias
    alone = replace(_entering(problem), chain=Chain(problem.chain.norm), has_bias=has_bias)
    rows = MOMENT_ROWS * of_product
    more = {"kStatisticsRows": tile.rows_per_pass, "kMomentRows": rows, "kJoinColumns": columns}
    return KernelSource("batch_join", norm_text("norm/batch_join", alone, tile, more), arch)


def forward_source(
    problem: Problem, tile: NormTile, arch: str, of_product: bool = False
) -> KernelSource:
    """The kernel that applies them; of_product: as ``join_source``."""
    more = {"kFromLast": of_product}
    return KernelSource("batch_forward", norm_text("norm/batch_forward", problem, tile, more), arch)


class BatchForward:
    """y, z, mean, rstd and statistics from z (M, N), as ``NormForward`` of other norms."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.channels = problem.n // problem.groups
        self.itemsize = problem.dtype.itemsize
        self.widest = narrowed(vector_width(self.channels, self.itemsize, ()))
        self.launches: dict[tuple[int, bool], _Launches] = {}

    def bind(
        self, z_stride: int, z_size: tuple[int, ...], over_z: bool = False
    ) -> Callable[..., Forward]:
        """As ``NormForward.bind``; the function may be given moments (of rows, 2, N) of z too."""
        problem, channels, itemsize = self.problem, self.channels, self.itemsize
        n, stats, device, launches = problem.n, problem.stats_dtype, problem.device, self.launches
        new_y = None if over_z else new_tensor(z_size, problem.out_dtype, device)
        new_statistics = new_tensor((2, n), stats, device)
        new_of_columns = new_tensor((n,), stats, device)
        no_z = torch.empty((0,), dtype=problem.dtype, device=device)
        nothing = torch.empty((0,), dtype=stats, device=device)
        stride_bytes = z_stride * itemsize

        def run(
            z: Tensor,
            bias: Tensor | None,
            gamma: Tensor | None,
            beta: Tensor | None,
            operands: Sequence[Tensor],
            constants: tuple[float, ...] = (),
            moments: Tensor | None = None,
        ) -> Forward:
            parameters = parameters_at(bias, gamma, beta)
            given, aligned = matrix_arguments(operands) if operands else ([], 0)
            aligned |= z.data_ptr() | stride_bytes | parameters[0] | parameters[1] | parameters[2]
            vector = self.widest
            if aligned % LARGEST_ACCESS_BYTES:
                tensors = (z, bias, gamma, beta, *operands)
                vector = narrowed(vector_width(channels, itemsize, tensors))
            kind = vector, moments is not None
            launch = launches.get(kind)
            if launch is None:
                launch = launches[kind] = _Launches(problem, vector, z.device, kind[1])
            y = z if new_y is None else new_y()
            mean, rstd, statistics = new_of_columns(), new_of_columns(), new_statistics()
            launch(z, z_stride, parameters, y, (mean, rstd, statistics), given, constants, moments)
            if problem.training:
                return Forward(y, z, mean, rstd, statistics)
            return Forward(y, no_z, nothing, nothing, statistics)

        return run


class _Launches:
    """The kernels of one problem and vector width, ready to launch: three, or, of_product, the last
    two."""

    def __init__(
        self, problem: Problem, vector: int, device: torch.device, of_product: bool
    ) -> None:
        arch, sms, early = arch_of(device), sm_count(device), starts_early(device)
        self.m, self.n, self.groups = problem.m, problem.n, problem.groups
        entering, side = _entering(problem), strips(problem, vector)
        self.operands = 2 * len(entering.chain.operand_kinds)
        self.constants = len(entering.chain.arguments)
        self.before = ChainArguments(entering.chain, problem.stats_dtype)
        self.all = ChainArguments(problem.chain, problem.stats_dtype)

        tile, parts = statistics_tile(entering, vector), ceil_div(problem.m, MOMENT_ROWS)
        if not of_product:
            first = load(statistics_source(problem, tile, arch), device)
            resident = min(first.blocks_per_sm(tile.threads), STATISTICS_BLOCKS) * sms
            passes = ceil_div(problem.m, tile.rows_per_pass)
            parts = max(1, min(passes, resident // side, LARGEST_GRID_Y))
            self.new_partial = new_tensor((parts, 2, problem.n), problem.stats_dtype, device)
            self.statistics = first.prepare(
                STATISTICS_SIGNATURE + chain_signature(entering),
                *((side, parts), tile.threads),
                dependent=early,
            )
        columns = FEW_COLUMNS if parts >= MANY_PARTS else JOIN_COLUMNS
        join = load(join_source(problem, tile, arch, of_product, columns), device)
        grid = ceil_div(problem.n, columns)
        self.join = join.prepare(JOIN_SIGNATURE, grid, JOIN_THREADS, dependent=early)

        tile = forward_tile(problem, vector)
        last = load(forward_source(problem, tile, arch, of_product), device)
        resident = last.blocks_per_sm(tile.threads) * sms
        passes = ceil_div(problem.m, tile.rows_per_pass)
        rows = max(1, min(passes, ceil_div(WAVES * resident, side), LARGEST_GRID_Y))
        signature = SIGNATURE + chain_signature(problem)
        self.apply = last.prepare(signature, (side, rows), tile.threads, dependent=early)

    def __call__(
        self,
        z: Tensor,
        z_stride: int,
        parameters: tuple[int, int, int],
        y: Tensor,
        made: tuple[Tensor, Tensor, Tensor],
        given: list[int],
        constants: tuple[float, ...],
        moments: Tensor | None,
    ) -> None:
        """Launch; made: mean, rstd and statistics; given: the operands' arguments; moments: of z's
        columns."""
        z_at, bias = z.data_ptr(), parameters[0]
        mean, rstd, statistics = (t.data_ptr() for t in made)
        partial = self.new_partial() if moments is None else moments
        at, parts = partial.data_ptr(), partial.shape[0]
        if moments is None:
            self.statistics(
                *(z_at, z_stride, bias, at, self.m, self.groups),
                *given[: self.operands],
                *self.before(constants[: self.constants]),
            )
        self.join(at, parts, z_at, z_stride, bias, self.m, self.n, mean, rstd, statistics)
        self.apply(
            *(z_at, z_stride, *parameters, y.data_ptr(), mean, rstd, self.m, self.groups),
            *given,
            *self.all(constants),
        )
