"""BatchNorm's kernels, backward: dy and z → dz and the sums over rows.

The first pass has sum(du) and sum(du * h) of each column, which are beta's and gamma's gradients,
joined by norm_column_sums; the second has all else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from epinorm.backends.cuda.norm.backward import (
    LARGEST_GRID_Y,
    SUMS_COLUMNS,
    SUMS_THREADS,
    Factors,
    Largest,
    NormGradients,
    RowSums,
    Scratch,
    Vectors,
    column_sums,
    splits_for,
)
from epinorm.backends.cuda.norm.backward_text import (
    column_sums_text,
    last_parameters,
    output_text,
)
from epinorm.backends.cuda.norm.text import chain_signature, norm_text
from epinorm.backends.cuda.plan.norm_backward import Outputs
from epinorm.backends.cuda.plan.norm_batch import backward_tile, narrowed, strips
from epinorm.backends.cuda.plan.norm_tile import NormTile, ceil_div
from epinorm.backends.cuda.runtime.device import arch_of, sm_count
from epinorm.backends.cuda.runtime.jit import KernelSource, load
from epinorm.backends.cuda.runtime.prepared import may_be_over, new_tensor, starts_early
from epinorm.problem import Forward, Inputs, Problem, Wanted

SIGNATURE = "plpl" + "pppppppp" + "li"
"""dy and z with their row strides; mean, rstd, sums, bias, gamma, beta, dz, partial sums; M,
groups. Then the operands, their gradients, and `Factors` and `Largest` where dz is to be split."""


def backward_source(problem: Problem, tile: NormTile, outputs: Outputs, arch: str) -> KernelSource:
    """The kernel of the pass that has these outputs: gamma's and beta's gradients, or all else."""
    more = {"kSumsGiven": 1, "kEveryGroup": 0, "kRaggedRows": 1, "kOwnsDy": 0}
    more["kFinishes"] = not (outputs.gamma or outputs.beta)
    extra = output_text(outputs) + last_parameters(outputs)
    text = norm_text("norm/batch_backward", problem, tile, more, extra)
    return KernelSource("batch_backward", text, arch)


def sums_source(problem: Problem, gamma: bool, beta: bool, arch: str) -> KernelSource:
    """The second step of the first pass: the sums as they are, sum(du) first, and those that are
    wanted rounded."""
    names = ["gamma"] * gamma + ["beta"] * beta
    parameters = ", T* kept" + "".join(f", P* {name}" for name in names)

    def stores(case: int, name: str, place: str) -> str:
        rounded = f" {name}[column] = Rounded<P>::from(sum);" * (name in names)
        return f"case {case}: kept[{place}] = sum;{rounded} break;"

    text = f"{stores(0, 'gamma', 'width + column')} {stores(1, 'beta', 'column')}"
    return KernelSource("norm_column_sums", column_sums_text(problem, 2, 0, parameters, text), arch)


class BatchBackward:
    """dz and the wanted gradients but those of x and weight, as ``NormBackward`` of other norms."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.vectors = problem, Vectors(problem)
        self.launches: dict[tuple[int, Wanted, bool, bool], _Launches] = {}

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
        """As ``NormBackward``; nothing asks it for ``if_wanted``, as its dz is never written as
        planes."""
        assert not if_wanted
        vector, matrices, parameters = self.vectors(inputs, kept, dy)
        largest = splits_for(factors)
        vector = narrowed(vector)
        key = (vector, want, *largest)
        launches = self.launches.get(key)
        if launches is None:
            launches = _Launches(self.problem, vector, Outputs.of(self.problem, want, *largest))
            self.launches[key] = launches
        return launches(kept, matrices, parameters, factors, dz)


class _Launches:
    """Both passes of one problem, vector width and set of outputs, ready to launch."""

    def __init__(self, problem: Problem, vector: int, outputs: Outputs) -> None:
        self.problem, device = problem, problem.device
        self.rest = replace(outputs, gamma=False, beta=False)
        self.nothing = outputs.is_empty
        self.row_gradients = RowSums(problem, self.rest)
        self.new_dz = new_tensor((problem.m, problem.n), problem.dtype, device)
        if self.nothing:
            return
        new_gradient = new_tensor((problem.n,), problem.norm_dtype, device)
        self.new_gamma = new_gradient if outputs.gamma else None
        self.new_beta = new_gradient if outputs.beta else None
        self.new_kept = new_tensor((2, problem.n), problem.stats_dtype, device)
        channels = (False,) * len(outputs.channels)
        both = Outputs(False, True, True, False, channels, channels)
        self.first = _Pass(problem, vector, both)
        source = sums_source(problem, outputs.gamma, outputs.beta, arch_of(device))
        self.join = load(source, device).prepare(
            "ppilp" + "p" * (outputs.gamma + outputs.beta),
            (ceil_div(problem.n, SUMS_COLUMNS), 2),
            SUMS_THREADS,
            dependent=starts_early(device),
        )
        self.second = None if self.rest.is_empty else _Pass(problem, vector, self.rest)
        self.column_sums = None
        if self.second is not None:
            self.column_sums = column_sums(problem, self.rest, device)
            self.new_flags = new_tensor(
                (self.second.scratch.column_flags + problem.n,), torch.uint8, device
            )

    def __call__(
        self,
        kept: Forward,
        matrices: list[Any],
        parameters: tuple[int, int, int],
        factors: Factors | None,
        dz: Tensor | None,
    ) -> NormGradients:
        """Launch on ``matrices``, which are of ``Vectors``."""
        sums, elements = self.row_gradients.new()
        if self.nothing:
            return self.row_gradients.named(None, sums, elements, None)
        gamma = None if self.new_gamma is None else self.new_gamma()
        beta = None if self.new_beta is None else self.new_beta()
        both = self.new_kept()
        statistics = kept.mean.data_ptr(), kept.rstd.data_ptr()
        storage = self.first(matrices, (*statistics, 0), parameters, None)
        wanted = [t.data_ptr() for t in (gamma, beta) if t is not None]
        parts, n = self.first.scratch.parts, self.problem.n
        self.join(storage.data_ptr(), 0, parts, n, both.data_ptr(), *wanted)
        del storage
        largest: Largest | None = None
        if self.second is not None:
            if not self.rest.dz:
                dz = None
            elif dz is None:
                dz = self.new_dz()
                may_be_over(dz, kept.z)
            last = [t.data_ptr() for t in elements if t is not None]
            scratch, storage = self.second.scratch, self.second.new_scratch()
            at = storage.data_ptr()
            if factors is not None:
                largest = scratch.largest_in(storage, at, self.new_flags())
                last += [*factors, *largest.outputs]
            given = (*statistics, both.data_ptr())
            self.second(matrices, given, parameters, dz, storage, last)
            if self.column_sums is not None:
                columns = at + scratch.columns if scratch.has_columns else 0
                of_columns = [t.data_ptr() for t in sums]
                self.column_sums(at, columns, scratch.parts, n, *of_columns)
        found = self.row_gradients.named(dz, sums, elements, largest)
        return found._replace(norm_weight=gamma, norm_bias=beta)


class _Pass:
    """One launch of batch_backward; calls return what its partial sums are in."""

    def __init__(self, problem: Problem, vector: int, outputs: Outputs) -> None:
        device, tile = problem.device, backward_tile(problem, vector)
        self.m, self.groups = problem.m, problem.groups
        kernel = load(backward_source(problem, tile, outputs, arch_of(device)), device)
        side = strips(problem, vector)
        resident = kernel.blocks_per_sm(tile.threads) * sm_count(device)
        passes = ceil_div(problem.m, tile.rows_per_pass)
        parts = max(1, min(passes, resident // side, LARGEST_GRID_Y))
        self.scratch = Scratch(problem, outputs, side, parts)
        self.new_scratch = new_tensor((self.scratch.nbytes,), torch.uint8, device)
        splitting = outputs.row_largest or outputs.column_largest
        signature = SIGNATURE + chain_signature(problem)
        self.launch: Callable[..., None] = kernel.prepare(
            signature + "p" * (sum(outputs.elements) + 6 * splitting),
            *((side, parts), tile.threads),
            dependent=starts_early(device),
        )

    def __call__(
        self,
        matrices: list[Any],
        statistics: tuple[int, int, int],
        parameters: tuple[int, int, int],
        dz: Tensor | None,
        storage: Tensor | None = None,
        last: list[int] | None = None,
    ) -> Tensor:
        """statistics: mean, rstd and the sums; last: what follows the chain's arguments."""
        storage = self.new_scratch() if storage is None else storage
        self.launch(
            *matrices[:4],
            *statistics,
            *parameters,
            0 if dz is None else dz.data_ptr(),
            storage.data_ptr(),
            *(self.m, self.groups),
            *matrices[4:],
            *(last or ()),
        )
        return storage
