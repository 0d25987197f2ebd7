"""dz written once, as the planes of both products: for fp32 chains whose rows a cluster holds.

`fp32/norm_backward_planes.cu` writes dz's planes with a scale a row, `fp32/rescale_planes.cu`
gives x's planes the scales with which dW is a sum over the same. fp32 dz is computed only where
something is flagged, by the ordinary norm kernel, for the range guard. A cluster of blocks holds
whole rows, since their planes' scale is known only when all of a row is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epinorm.backends.cuda.fp32.gradient_planes import GradientPlanes
from epinorm.backends.cuda.fp32.planes import TOLERANCE, Splitter
from epinorm.backends.cuda.norm.backward import (
    FLAGS_ALIGNMENT,
    Factors,
    NormGradients,
    RowSums,
    Vectors,
)
from epinorm.backends.cuda.norm.backward_text import output_text
from epinorm.backends.cuda.norm.text import chain_signature, norm_text
from epinorm.backends.cuda.plan.norm_backward import Outputs
from epinorm.backends.cuda.plan.norm_planes import RowsPlan, rows_plans
from epinorm.backends.cuda.plan.norm_tile import ceil_div
from epinorm.backends.cuda.runtime.device import arch_of, sm_count
from epinorm.backends.cuda.runtime.jit import KernelSource, compiled, load
from epinorm.backends.cuda.runtime.prepared import new_tensor
from epinorm.backends.cuda.text.backward_chain import backward_elements
from epinorm.backends.cuda.text.source import constants, kernel_text
from epinorm.backends.memo import memo
from epinorm.problem import Forward, Inputs, Problem, Wanted

SIGNATURE = "plpl" + "pp" + "ppp" + "pp" + "ppppp" + "i" + "pppp" + "p" + "li"
"""dy and z with their row strides; mean, rstd; bias, gamma, beta; `Factors`; dz's planes, their
scales, powers, what is not held, in how many words; powers' ranges, columns' largest magnitudes and
flags, whether anything is flagged; partial sums; M, groups. Then the operands and their
gradients."""
RESCALE_SIGNATURE = "ppp" + "pp" + "pp" + "ii" + "pppi" + "p" + "pp" + "p" + "iiiiii"
"""x's planes and flags; W's scales and flags; rows' powers, what is not held, in how many parts and
words; ranges, columns' largest, partial sums, how many of each; rows' flags; columns' scales and
flags; whether anything is flagged; M, units of a row, N, `Faint`. Then the sums."""

RESCALE_THREADS, RESCALE_COLUMNS = 256, 32
"""kThreads and kColumns there."""
RESCALE_BLOCKS = 4
"""Of a multiprocessor, for x's planes: they seldom have anything to do."""
UNIT_BYTES = 16


class PlanesRead(NamedTuple):
    """The buffers of W's and x's planes, as `planes.Splitter` lays them out, W's perhaps without
    its planes, and their scales as dz takes them over; None where that gradient is not computed
    from planes."""

    weight: Tensor | None
    x: Tensor | None
    factors: Factors


@dataclass
class WrittenDz:
    """What the products take: dz's planes, the same with other scales and flags for each of them.

    any_flag: the address of a word in front of the flags, not 0 where anything is flagged.
    beside_dx: when to `finish`, which lets go of the scratch.
    """

    by_row: GradientPlanes
    by_column: GradientPlanes
    any_flag: int
    beside_dx: bool
    rescale: Callable[[], None]
    scratch: list[Tensor]

    def finish(self) -> None:
        """Launch what fills the flags, the scales of ``by_column`` and the sums; once: before dX
        or, where it is ``beside_dx``, right behind it. There the kernel does not wait for the norm
        kernel: launched before dX it would read what is not there yet."""
        self.rescale()
        self.scratch.clear()


class DzPlanes:
    """The launches of one problem, for each vector width and set of gradients."""

    def __init__(self, problem: Problem, split_x: Splitter, split_w: Splitter) -> None:
        self.problem, self.splitters = problem, (split_x, split_w)
        self.vectors = Vectors(problem)
        self.launches: dict[tuple[int, Wanted, bool], _Launches | None] = {}

    def __call__(
        self,
        inputs: Inputs,
        kept: Forward,
        dy: Tensor,
        want: Wanted,
        operands: PlanesRead,
        beside: bool,
    ) -> tuple[NormGradients, WrittenDz] | None:
        """The sums over rows and the operands' gradients, and dz as planes, still to `finish`:
        beside dX, or, as it says, before.

        None where no cluster can hold whole rows. x's planes become those for dW, in other scales.
        """
        vector, matrices, parameters = self.vectors(inputs, kept, dy)
        key, other = (vector, want, beside), (vector, want, not beside)
        if key not in self.launches:
            # A CUDA graph that is being captured forbids to load another kernel.
            if other in self.launches and torch.cuda.is_current_stream_capturing():
                key = other
            else:
                self.launches[key] = self._prepare(vector, want, beside)
        launches = self.launches[key]
        if launches is None:
            return None
        return launches(kept, matrices, parameters, operands)

    def _prepare(self, vector: int, want: Wanted, beside: bool) -> _Launches | None:
        problem = self.problem
        outputs = Outputs.of(problem, want, True, True)
        plan = rows_plan(problem, vector, outputs, problem.planes, arch_of(problem.device))
        if plan is None:
            return None
        return _Launches(problem, plan, outputs, *self.splitters, beside)


class _Launches:
    """The kernels of one problem, vector width and set of gradients, ready to launch."""

    def __init__(
        self,
        problem: Problem,
        plan: RowsPlan,
        outputs: Outputs,
        split_x: Splitter,
        split_w: Splitter,
        beside: bool,
    ) -> None:
        self.beside = beside
        m, n, planes, device = problem.m, problem.n, problem.planes, problem.device
        arch = arch_of(device)
        self.split_x, self.split_w = split_x, split_w
        self.sizes = m, problem.groups
        self.sums = RowSums(problem, outputs)
        kernel = load(planes_source(problem, plan, outputs, planes, arch), device)
        if plan.strips > 1:
            at_once = kernel.clusters_at_once(plan.strips, plan.tile.threads)
        else:
            at_once = kernel.blocks_per_sm(plan.tile.threads) * sm_count(device)
        self.parts = ceil_div(m, ceil_div(m, max(at_once, 1)))
        operands = chain_signature(problem)
        self.main = kernel.prepare(
            SIGNATURE + operands + "p" * sum(outputs.elements),
            (plan.strips, self.parts),
            plan.tile.threads,
            cluster=plan.strips if plan.strips > 1 else None,
            dependent=True,
        )
        self.row_parts = plan.strips * plan.tile.row_warps
        self.scratch = _Scratch(problem, outputs, self.row_parts, self.parts)
        self.new_scratch = new_tensor((self.scratch.nbytes,), torch.uint8, device)
        # Flags are read until the last product. First the word that says whether there are any.
        self.row_flags = FLAGS_ALIGNMENT
        self.column_flags = self.row_flags + ceil_div(m, FLAGS_ALIGNMENT) * FLAGS_ALIGNMENT
        self.new_flags = new_tensor((self.column_flags + n,), torch.uint8, device)
        self.lo, self.scale = (planes - 1) * 2 * m * n, planes * 2 * m * n
        self.column_scale = self.scale + 4 * m
        self.new_planes = new_tensor((self.column_scale + 4 * n,), torch.uint8, device)
        units = split_x.padded * 2 // UNIT_BYTES
        self.rescale_sizes = (m, units, n, *faint_rows(m, problem.k))
        sums = sum(outputs.sums)
        blocks = (1 + sums) * ceil_div(n, RESCALE_COLUMNS) + ceil_div(m, RESCALE_THREADS)
        blocks += min(ceil_div(m * units, RESCALE_THREADS), RESCALE_BLOCKS * sm_count(device))
        source = rescale_source(planes, sums, beside, arch)
        rescale = load(source, device)
        self.rescale = rescale.prepare(
            RESCALE_SIGNATURE + "p" * sums, blocks, RESCALE_THREADS, dependent=True
        )

    def __call__(
        self,
        kept: Forward,
        matrices: list[Any],
        parameters: tuple[int, int, int],
        operands: PlanesRead,
    ) -> tuple[NormGradients, WrittenDz]:
        """Launch the first kernel; matrices: addresses and row strides of dy, z and operands."""
        weight, x, factors = operands
        assert weight is not None
        assert x is not None
        sums, elements = self.sums.new()
        planes, scratch, flags = self.new_planes(), self.new_scratch(), self.new_flags()
        hi, partial_sums, s = planes.data_ptr(), scratch.data_ptr(), self.scratch
        any_flag = flags.data_ptr()
        row_flags, column_flags = any_flag + self.row_flags, any_flag + self.column_flags
        powers, spoilt = partial_sums + s.powers, partial_sums + s.spoilt
        ranges, largest = partial_sums + s.ranges, partial_sums + s.columns
        self.main(
            *matrices[:4],
            *(kept.mean.data_ptr(), kept.rstd.data_ptr(), *parameters, *factors),
            *(hi, hi + self.lo, hi + self.scale, powers, spoilt, s.words),
            *(ranges, largest, column_flags, any_flag, partial_sums),
            *self.sizes,
            *matrices[4:],
            *[t.data_ptr() for t in elements if t is not None],
        )
        at, w, split = x.data_ptr(), self.split_w.origin(weight), self.split_x
        column_scale = hi + self.column_scale
        rescale = partial(
            self.rescale,
            *(at + split.hi, at + split.lo, at + split.flags),
            *(w + self.split_w.scale, w + self.split_w.flags),
            *(powers, spoilt, self.row_parts, s.words),
            *(ranges, largest, partial_sums, self.parts),
            *(row_flags, column_scale, column_flags, any_flag),
            *self.rescale_sizes,
            *[t.data_ptr() for t in sums],
        )
        by_row = GradientPlanes(planes, hi + self.scale, row_flags, flags)
        by_column = GradientPlanes(planes, column_scale, column_flags, flags)
        written = WrittenDz(by_row, by_column, any_flag, self.beside, rescale, [scratch])
        return self.sums.named(None, sums, elements, None), written


class _Scratch:
    """One allocation for what the two kernels hand to each other; offsets in bytes."""

    def __init__(self, problem: Problem, outputs: Outputs, row_parts: int, parts: int) -> None:
        m, n = problem.m, problem.n
        end = 4 * parts * sum(outputs.sums) * n  # the partial sums are first
        self.columns, end = end, end + 4 * parts * n
        self.powers, end = end, end + 4 * m
        self.ranges, end = end, end + 12 * parts
        self.words = ceil_div(ceil_div(m, parts), 32)
        self.spoilt, end = end, end + 4 * row_parts * parts * self.words
        self.nbytes = end


@memo()
def rows_plan(
    problem: Problem, vector: int, outputs: Outputs, planes: int, arch: str
) -> RowsPlan | None:
    """The first plan whose kernel ptxas compiles without spilling; None where there is none."""
    for plan in rows_plans(problem, vector):
        if compiled(planes_source(problem, plan, outputs, planes, arch)).spill_bytes <= 0:
            return plan
    return None


def planes_source(
    problem: Problem, plan: RowsPlan, outputs: Outputs, planes: int, arch: str
) -> KernelSource:
    """The kernel of this problem, plan and outputs, whose largest magnitudes must be among them."""
    elements = backward_elements(problem.chain)
    places = "".join(f"i == {i} ? {2 + at} : " for at, i in enumerate(elements))
    more = {
        "kSumsGiven": 0,
        "kRaggedRows": 0,
        "kOwnsDy": 0,
        "kEveryGroup": plan.strips * plan.tile.groups_per_block == problem.groups,
        "kStrips": plan.strips,
        "kStages": plan.stages,
        "kStreams": 2 + len(elements),
        "kPlanes": planes,
    }
    extra = (
        output_text(outputs)
        + constants({"kTolerance": TOLERANCE[planes]})
        + f"EPINORM_FUNCTION constexpr int element_stream(int i) {{ return {places}0; }}\n"
    )
    text = norm_text("fp32/norm_backward_planes", problem, plan.tile, more, extra)
    return KernelSource("norm_backward_planes", text, arch)


def rescale_source(planes: int, sums: int, beside_dx: bool, arch: str) -> KernelSource:
    """The kernel between this one and the products, with ``sums`` sums over rows; compiles without
    a GPU. beside_dx: it is launched behind dX."""
    stores = " ".join(f"case {i}: sum{i}[column] = sum; break;" for i in range(sums))
    prelude = (
        constants({"kPlanes": planes, "kSums": sums, "kBesideDx": beside_dx})
        + f"#define SUM_PARAMETERS {''.join(f', float* sum{i}' for i in range(sums))}\n"
        f"#define SUM_STORES {stores}\n"
    )
    text = kernel_text("fp32/rescale_planes.cu", prelude)
    return KernelSource("rescale_planes", text, arch)


def faint_rows(m: int, k: int) -> tuple[int, int, int]:
    """`Faint` of rescale_planes.cu for x (m, k): exponents (internals/precision.md, Faint rows)."""
    root_k = ((k - 1).bit_length() + 1) // 2
    log_m = (m - 1).bit_length()
    return root_k - 25, log_m + root_k - 9, (log_m + 1) // 2 - 9
