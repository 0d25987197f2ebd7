"""The fused norm-activation kernel, backward: dy and z → dz and the sums over rows.

`norm/backward_text.py` chooses the tile and writes the kernels; here they are launched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epinorm.backends.cuda.norm.backward_text import (
    backward_plan,
    backward_source,
    column_sums_source,
    row_sums_source,
)
from epinorm.backends.cuda.norm.text import chain_signature, matrix_arguments, parameters_at
from epinorm.backends.cuda.plan.gradients import residual_has_dz
from epinorm.backends.cuda.plan.norm_backward import Outputs
from epinorm.backends.cuda.plan.norm_tile import LARGEST_ACCESS_BYTES, WARP, ceil_div, vector_width
from epinorm.backends.cuda.runtime.device import arch_of, sm_count
from epinorm.backends.cuda.runtime.jit import load
from epinorm.backends.cuda.runtime.prepared import may_be_over, new_tensor, starts_early
from epinorm.backends.cuda.text.chain_text import ChainArguments, begins_at_result
from epinorm.problem import Forward, Inputs, Problem, Wanted

SIGNATURE = "plpl" + "pppppppp" + "li"
"""dy and z with their row strides; mean, rstd, row sums, bias, gamma, beta, dz, partial sums; M,
groups. Then the operands, their gradients, and `Factors` and `Largest` where dz is to be split, or
a word that says whether dz is wanted."""
ROW_SUMS_SIGNATURE = "plpl" + "pppppp" + "li"
"""The same, up to beta, then M and groups."""

LARGEST_GRID_Y = 65535
SUMS_COLUMNS = 32
SUMS_THREADS = 1024
"""A block of norm_column_sums, as kColumns and kShares there."""

FLAGS_ALIGNMENT = 16


class Factors(NamedTuple):
    """Addresses of the fp32 scales that dz takes over before it is split (`split_gradient.cu`)."""

    columns: int
    """(N,), of W's planes; 0 where dX is not computed from planes."""
    rows: int
    """(M,), of x's planes; 0 where dW is not computed from planes."""


def splits_for(factors: Factors | None) -> tuple[bool, bool]:
    """Whether dz is split into planes for dX, and for dW."""
    return (False, False) if factors is None else (factors.columns != 0, factors.rows != 0)


class Largest(NamedTuple):
    """Addresses of what the scales of dz's planes are made from, and of the flags in ``flags``.

    rows: (M, row_parts), the largest magnitudes of dz[i, n] * columns[n] of `Factors`, as bits;
    columns: (N,), of dz[i, n] * rows[i]. row_flags (M,) and column_flags (N,) uint8:
    zeros, for what finds that planes do not hold a row or a column. scratch: holds the magnitudes,
    until the planes are made.
    """

    flags: Tensor
    scratch: list[Tensor]
    rows: int
    row_parts: int
    columns: int
    row_flags: int
    column_flags: int

    @property
    def outputs(self) -> tuple[int, int, int, int]:
        """As the kernel takes them."""
        return self.rows, self.columns, self.row_flags, self.column_flags


class NormGradients(NamedTuple):
    """What the kernel computes: dz (M, N) in ``dtype`` and the rest as in ``Gradients``."""

    dz: Tensor | None
    bias: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    operands: tuple[Tensor | None, ...]
    largest: Largest | None


class Vectors:
    """The widest vector that a problem's tensors are aligned for, and the arguments they become."""

    def __init__(self, problem: Problem) -> None:
        self.channels = problem.n // problem.groups
        self.itemsize = problem.dtype.itemsize
        self.widest = vector_width(self.channels, self.itemsize, ())
        self.constants = ChainArguments(problem.chain, problem.stats_dtype)

    def __call__(
        self, inputs: Inputs, kept: Forward, dy: Tensor
    ) -> tuple[int, list[Any], tuple[int, int, int]]:
        """The width in values; addresses and row strides of dy, z and every operand, then the
        chain's constants; addresses of bias, gamma and beta."""
        parameters = parameters_at(*inputs[2:5])
        matrices, aligned = matrix_arguments((dy, kept.z, *inputs.operands))
        aligned |= parameters[0] | parameters[1] | parameters[2]
        vector = self.widest
        if aligned % LARGEST_ACCESS_BYTES:
            tensors = (kept.z, dy, *inputs[2:5], *inputs.operands)
            vector = vector_width(self.channels, self.itemsize, tensors)
        return vector, [*matrices, *self.constants(inputs.constants)], parameters


class RowSums:
    """The sums over rows and the gradients of element operands: allocated and given their names."""

    def __init__(self, problem: Problem, outputs: Outputs) -> None:
        m, n, device = problem.m, problem.n, problem.device
        self.places = outputs.places
        dtypes = outputs.sum_dtypes(problem)
        # A gradient over channels has a value for each of them.
        self.new_sums = [new_tensor((n,), dtype, device) for dtype in dtypes]
        new_element = new_tensor((m, n), problem.norm_dtype, device)
        self.new_elements = [new_element if wanted else None for wanted in outputs.elements]

    def new(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """The sums, and the elements' gradients."""
        elements = [None if new is None else new() for new in self.new_elements]
        return [new() for new in self.new_sums], elements

    def named(
        self,
        dz: Tensor | None,
        sums: list[Tensor],
        elements: list[Tensor | None],
        largest: Largest | None,
    ) -> NormGradients:
        """Everything under its name."""
        gamma, beta, bias, *channels = [sums[p] if p >= 0 else None for p in self.places]
        operands = tuple(
            [
                element if channel is None else channel
                for channel, element in zip(channels, elements, strict=True)
            ]
        )
        return NormGradients(dz, bias, gamma, beta, operands, largest)


class NormBackward:
    """dz and the wanted gradients but those of x and weight, from dy (M, N) in ``out_dtype``."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.vectors = problem, Vectors(problem)
        self.dz_is_dy = problem.chain.is_linear
        self.spends_dy = problem.spends_dy and problem.out_dtype == problem.dtype
        self.launches: dict[tuple[int, Wanted, bool, bool, bool], _Launches] = {}

    def __call__(
        self,
        inputs: Inputs,
        kept: Forward,
        dy: Tensor,
        want: Wanted,
        factors: Factors | None = None,
        if_wanted: int = 0,
        dz: Tensor | None = None,
    ) -> NormGradients:
        """dy and z may have a row stride, their last dimension is contiguous. dz is computed where
        x's or the weight's gradient is wanted. The sums over rows are added up in a fixed order:
        the same inputs give the same bits on the same GPU. ``factors``: dz, fp32, will be split
        into planes; what their scales are made from is computed as well. Where nothing but a bias
        follows the linear layer, dz is dy itself, which is contiguous then. ``if_wanted``: the
        address of a 4-byte word on the GPU; where that is 0 by then, nothing is computed. ``dz``:
        (M, N), contiguous, that dz is written to in place of a new one; else it is dy, where the
        problem ``spends_dy`` and dz is no gradient too."""
        vector, matrices, parameters = self.vectors(inputs, kept, dy)
        if dz is None and self.spends_dy and dy.is_contiguous():
            dz = None if residual_has_dz(self.problem, want) else dy
        largest = splits_for(factors)
        key = (vector, want, *largest, if_wanted != 0)
        launches = self.launches.get(key)
        if launches is None:
            outputs = Outputs.of(self.problem, want, *largest, if_wanted != 0)
            launches = self.launches[key] = _Launches(self.problem, vector, outputs, dy.device)
        found = launches(kept, matrices, parameters, factors, if_wanted, dz)
        return found._replace(dz=dy) if self.dz_is_dy and (want.x or want.weight) else found


class _Launches:
    """The kernels of one problem, vector width and set of outputs, ready to launch."""

    def __init__(
        self, problem: Problem, vector: int, outputs: Outputs, device: torch.device
    ) -> None:
        self.problem, self.outputs = problem, outputs
        self.groups = problem.groups
        m, n = problem.m, problem.n
        self.row_gradients = RowSums(problem, outputs)
        self.new_dz = new_tensor((m, n), problem.dtype, device) if outputs.dz else None
        self.nothing = not m or outputs.is_empty
        if self.nothing:
            return
        arch, sms = arch_of(device), sm_count(device)
        plan = backward_plan(problem, vector, outputs, arch)
        tile = plan.tile
        operands = chain_signature(problem)
        kernel = load(backward_source(problem, plan, outputs, arch), device)
        if plan.row_sums is None:
            strips = ceil_div(self.groups, tile.groups_per_block)
        else:
            strips = ceil_div(problem.n, tile.warps_x * WARP * vector)
        resident = kernel.blocks_per_sm(tile.threads) * sms
        passes = ceil_div(problem.m, tile.rows_per_pass)
        parts = max(1, min(passes, resident // strips, LARGEST_GRID_Y))
        self.scratch = Scratch(problem, outputs, strips * tile.row_warps, parts)
        self.new_scratch = new_tensor((self.scratch.nbytes,), torch.uint8, device)
        self.new_flags = new_tensor((self.scratch.column_flags + n,), torch.uint8, device)
        if plan.row_sums is not None:
            shape = (m, self.groups, 2)
            self.new_row_sums = new_tensor(shape, problem.stats_dtype, device)
        splitting = outputs.row_largest or outputs.column_largest
        last = "p" * (6 * splitting + outputs.if_wanted)
        signature = SIGNATURE + operands + "p" * sum(outputs.elements) + last
        early = starts_early(device)
        self.main = kernel.prepare(signature, (strips, parts), tile.threads, dependent=early)
        self.column_sums = column_sums(problem, outputs, device)
        self.row_sums: Callable[..., None] | None = None
        if plan.row_sums is not None:
            before = load(row_sums_source(problem, plan.row_sums, arch), device)
            grid = (self.groups, min(problem.m, LARGEST_GRID_Y))
            self.row_sums = before.prepare(
                ROW_SUMS_SIGNATURE + operands, grid, plan.row_sums.threads
            )

    def __call__(
        self,
        kept: Forward,
        matrices: list[Any],
        parameters: tuple[int, int, int],
        factors: Factors | None,
        if_wanted: int,
        dz: Tensor | None,
    ) -> NormGradients:
        """Launch on ``matrices``, which are of ``Vectors``."""
        m = self.problem.m
        sums, elements = self.row_gradients.new()
        if dz is None and self.new_dz is not None:
            dz = self.new_dz()
            # Another stream may still read a result that no tensor holds.
            if not begins_at_result(self.problem.chain):
                may_be_over(dz, kept.z)
        if self.nothing:
            for gradient in sums:
                gradient.zero_()
            return self.row_gradients.named(dz, sums, elements, None)
        rows, operands = matrices[:4], matrices[4:]
        statistics = (kept.mean.data_ptr(), kept.rstd.data_ptr())
        before = self._row_sums(rows, statistics, parameters, operands)
        scratch = self.scratch
        storage = self.new_scratch()
        at = storage.data_ptr()
        largest: Largest | None = None
        last: tuple[int, ...] = (if_wanted,) if if_wanted else ()
        if factors is not None:
            # Flags are read until the last product.
            largest = scratch.largest_in(storage, at, self.new_flags())
            last = (*factors, *largest.outputs)
        self.main(
            *rows,
            *statistics,
            0 if before is None else before.data_ptr(),
            *parameters,
            0 if dz is None else dz.data_ptr(),
            at,
            m,
            self.groups,
            *operands,
            *[t.data_ptr() for t in elements if t is not None],
            *last,
        )
        if self.column_sums is not None:
            sums_at = [t.data_ptr() for t in sums]
            columns = at + scratch.columns if scratch.has_columns else 0
            self.column_sums(at, columns, scratch.parts, self.problem.n, *sums_at)
        return self.row_gradients.named(dz, sums, elements, largest)

    def _row_sums(
        self,
        rows: list[Any],
        statistics: tuple[int, int],
        parameters: tuple[int, int, int],
        operands: list[Any],
    ) -> Tensor | None:
        """The sums of each (row, group) for groups that the main kernel cannot hold."""
        if self.row_sums is None:
            return None
        sums = self.new_row_sums()
        sizes = (self.problem.m, self.groups)
        self.row_sums(*rows, *statistics, sums.data_ptr(), *parameters, *sizes, *operands)
        return sums


def column_sums(
    problem: Problem, outputs: Outputs, device: torch.device
) -> Callable[..., None] | None:
    """The launch of the second step of what blocks found of columns, where there is any."""
    sums = sum(outputs.sums)
    count = sums + outputs.column_largest
    if not count:
        return None
    kernel = load(column_sums_source(problem, outputs, arch_of(device)), device)
    return kernel.prepare(
        "ppil" + "p" * sums,
        (ceil_div(problem.n, SUMS_COLUMNS), count),
        SUMS_THREADS,
        dependent=starts_early(device),
    )


class Scratch:
    """One allocation for what the kernels hand to each other; offsets in bytes."""

    def __init__(self, problem: Problem, outputs: Outputs, row_parts: int, parts: int) -> None:
        m, n = problem.m, problem.n
        self.row_parts, self.parts = row_parts, parts
        end = parts * sum(outputs.sums) * n * problem.stats_dtype.itemsize
        # What is not wanted begins at 0: a recording finds no address at the end of a tensor.
        rows, columns = outputs.row_largest, outputs.column_largest
        self.has_columns = columns
        self.columns, end = end * columns, end + 4 * parts * n * columns
        self.rows, end = end * rows, end + 4 * m * row_parts * rows
        self.nbytes = end
        self.column_flags = ceil_div(m, FLAGS_ALIGNMENT) * FLAGS_ALIGNMENT

    def largest_in(self, storage: Tensor, at: int, flags: Tensor) -> Largest:
        of_rows = flags.data_ptr()
        return Largest(
            *(flags, [storage], at + self.rows, self.row_parts, at + self.columns),
            *(of_rows, of_rows + self.column_flags),
        )
