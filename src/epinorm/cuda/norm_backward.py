"""The fused norm-activation kernel, backward: dy and z → dz and the sums over rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from epinorm.cuda.device import arch_of, sm_count
from epinorm.cuda.jit import KernelSource, compiled, load
from epinorm.cuda.norm_text import (
    OPERAND_SIGNATURE,
    matrix_arguments,
    norm_text,
    parameter_addresses,
    types_text,
)
from epinorm.cuda.norm_tile import (
    LARGEST_ACCESS_BYTES,
    WARP,
    Tile,
    ceil_div,
    lanes_for,
    power_of_two_from,
    vector_width,
)
from epinorm.cuda.prepared import PreparedByProblem, starts_early
from epinorm.cuda.source import read_kernel
from epinorm.plan import Forward, Inputs, Problem, Wanted

__all__ = [
    "BackwardPlan",
    "NormGradients",
    "backward_plan",
    "backward_plans",
    "backward_source",
    "column_sums_source",
    "norm_backward",
    "row_sums_source",
]

SIGNATURE = "plpl" + "pppppppp" + "li"
"""dy and z with their row strides; mean, rstd, row sums, bias, gamma, beta, dz, partial sums; M,
groups."""
ROW_SUMS_SIGNATURE = "plpl" + "pppppp" + "li"
"""The same, up to beta, then M and groups."""

LARGEST_GRID_Y = 65535
BLOCK_WARPS = 8
MOST_LANES = 512
SUMS_COLUMNS = 32
SUMS_THREADS = 512
"""A block of norm_column_sums, as kColumns and kShares there."""


class NormGradients(NamedTuple):
    """What the kernel computes: dz (M, N) in ``dtype`` and the rest as in ``Gradients``."""

    dz: Tensor | None
    bias: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    operands: tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Outputs:
    """Which outputs a launch has: dz, sums over rows, gradients of element operands."""

    dz: bool
    gamma: bool
    beta: bool
    bias: bool
    channels: tuple[bool, ...]
    elements: tuple[bool, ...]

    @staticmethod
    def of(problem: Problem, want: Wanted) -> Outputs:
        pairs = list(zip(problem.chain.operand_kinds, want.operands, strict=True))
        return Outputs(
            dz=want.x or want.weight,
            gamma=want.norm_weight and problem.has_norm_weight,
            beta=want.norm_bias and problem.has_norm_bias,
            bias=want.bias and problem.has_bias,
            channels=tuple(wanted and kind == "channel" for kind, wanted in pairs),
            elements=tuple(wanted and kind == "element" for kind, wanted in pairs),
        )

    @property
    def sums(self) -> tuple[bool, ...]:
        """Gamma, beta, bias, then every operand: is its sum over rows wanted?"""
        return (self.gamma, self.beta, self.bias, *self.channels)

    @property
    def places(self) -> tuple[int, ...]:
        """The place of each of ``sums`` among the wanted ones, -1 for one that is not."""
        taken = [sum(self.sums[:i]) for i in range(len(self.sums))]
        return tuple(p if wanted else -1 for p, wanted in zip(taken, self.sums, strict=True))

    def sum_dtypes(self, problem: Problem) -> list[torch.dtype]:
        """The dtype of each wanted sum, in their order."""
        norm = problem.norm_dtype
        dtypes = (norm, norm, problem.dtype, *(norm for _ in self.channels))
        return [dtype for dtype, wanted in zip(dtypes, self.sums, strict=True) if wanted]


@dataclass(frozen=True)
class BackwardPlan:
    """The main kernel's tile; and, for groups that it cannot hold, that of norm_backward_sums."""

    tile: Tile
    row_sums: Tile | None = None


def backward_plans(problem: Problem, vector: int, outputs: Outputs) -> tuple[BackwardPlan, ...]:
    """The plans for vectors of ``vector`` values: the preferred one first, one that fits last.

    Each value that a thread holds costs it three registers, two while it waits for its group's sums
    and one for each sum over rows: that bounds how many it can hold. The last plan reads dy and z a
    second time.
    """
    channels = problem.n // problem.groups
    double = problem.stats_dtype == torch.float64
    light = sum(outputs.sums) <= 3 and not outputs.channels and not double
    cost = (2 if double else 1) * (4 + sum(outputs.sums))
    most = max(vector, power_of_two_from(112 // cost // 2 + 1))
    main = Tile(vector, 1, 1, 1, 1, BLOCK_WARPS, vector <= 8)
    twice = BackwardPlan(main, Tile(vector, 1024, 1, 1))
    team = lanes_for(channels, vector, problem.dtype.itemsize, most)
    if team is not None:
        return BackwardPlan(_warp_teams(vector, *team, light)), twice
    if light:
        # Fewer values and two rows: LayerNorm over 1024 channels, 16384 rows, 64 µs for 72 in fp32
        # and 54 for 63 in bf16.
        lanes = max(power_of_two_from(ceil_div(channels, most if vector == 8 else most // 2)), 64)
        if lanes <= (128 if vector == 8 else 256):
            vectors = ceil_div(channels, lanes * vector)
            return BackwardPlan(Tile(vector, lanes, vectors, 2, keep=True)), twice
    lanes = max(power_of_two_from(ceil_div(channels, most)), 2 * WARP)
    if lanes <= MOST_LANES:
        return BackwardPlan(Tile(vector, lanes, ceil_div(channels, lanes * vector), 1)), twice
    return (twice,)


def backward_plan(problem: Problem, vector: int, outputs: Outputs, arch: str) -> BackwardPlan:
    """The first plan whose main kernel ptxas compiles without spilling, else the last one."""
    plans = backward_plans(problem, vector, outputs)
    for plan in plans[:-1]:
        if compiled(backward_source(problem, plan, outputs, arch)).spill_bytes <= 0:
            return plan
    return plans[-1]


def _warp_teams(vector: int, lanes: int, vectors: int, light: bool) -> Tile:
    """Teams inside warps; as many rows in flight as leave the registers for two blocks or more."""
    values = vectors * vector
    if values <= 4:
        return Tile(vector, lanes, vectors, 4 if light and lanes <= 2 else 2, 1, BLOCK_WARPS, True)
    if values <= 8 and light:
        return Tile(vector, lanes, vectors, 2, 1, BLOCK_WARPS // 2, True)
    return Tile(vector, lanes, vectors, 1, 1, BLOCK_WARPS, values <= 8)


def backward_source(
    problem: Problem, plan: BackwardPlan, outputs: Outputs, arch: str
) -> KernelSource:
    """The main kernel of this problem, plan and outputs for one architecture."""
    gamma, beta, bias, *operands = outputs.places
    more = {
        "kSumGamma": gamma,
        "kSumBeta": beta,
        "kSumBias": bias,
        "kSums": sum(outputs.sums),
        "kWriteDz": outputs.dz,
        "kSumsGiven": plan.row_sums is not None,
    }
    elements = [i for i, wanted in enumerate(outputs.elements) if wanted]
    count = len(outputs.elements)
    extra = (
        _table("int", "sum_of_operand", operands, -1)
        + _table("bool", "writes_operand", outputs.elements, False)
        + "#define EPINORM_OUTPUT_PARAMETERS "
        + "".join(f", P* gradient{i}" for i in elements)
        + "\n#define EPINORM_OUTPUT_POINTERS {"
        + (
            ", ".join(f"gradient{i}" if i in elements else "nullptr" for i in range(count))
            or "nullptr"
        )
        + "}\n"
    )
    text = norm_text("norm_backward", problem, plan.tile, more, extra)
    return KernelSource("norm_backward", text, arch)


def row_sums_source(problem: Problem, tile: Tile, arch: str) -> KernelSource:
    """The kernel of groups too wide for the main one: their sums, ahead of it."""
    text = norm_text("norm_backward_sums", problem, tile, {})
    return KernelSource("norm_backward_sums", text, arch)


def column_sums_source(problem: Problem, outputs: Outputs, arch: str) -> KernelSource:
    """The second step of the sums over rows."""
    letters = ["Z" if dtype == problem.dtype else "P" for dtype in outputs.sum_dtypes(problem)]
    parameters = "".join(f", {letter}* sum{i}" for i, letter in enumerate(letters))
    stores = " ".join(
        f"case {i}: sum{i}[column] = Rounded<{letter}>::from(sum); break;"
        for i, letter in enumerate(letters)
    )
    defines = f"#define EPINORM_SUM_PARAMETERS {parameters}\n#define EPINORM_SUM_STORES {stores}\n"
    text = types_text(problem) + defines + read_kernel("norm_column_sums.cu")
    return KernelSource("norm_column_sums", text, arch)


def _table(kind: str, name: str, values: Sequence[int], otherwise: int) -> str:
    """A function of a constant index, which costs nothing in an unrolled loop."""
    cases = "".join(f"i == {i} ? {int(value)} : " for i, value in enumerate(values))
    return (
        f"EPINORM_FUNCTION constexpr {kind} {name}(int i) {{ return {cases}{int(otherwise)}; }}\n"
    )


def norm_backward(
    problem: Problem, inputs: Inputs, kept: Forward, dy: Tensor, want: Wanted
) -> NormGradients:
    """dz and the wanted gradients but those of x and weight, from dy (M, N) in ``out_dtype``.

    dy and z may have a row stride, their last dimension is contiguous. dz is computed where x's or
    the weight's gradient is wanted. The sums over rows are added up in a fixed order: the same
    inputs give the same bits on the same GPU.
    """
    return _prepared(problem)(inputs, kept, dy, want)


class _PreparedBackward:
    """Everything about a problem's launches that does not change from call to call."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.channels = problem.n // problem.groups
        self.widest = vector_width(self.channels, problem.dtype.itemsize, ())
        self.launches: dict[tuple[int, Wanted], _Launches] = {}

    def __call__(self, inputs: Inputs, kept: Forward, dy: Tensor, want: Wanted) -> NormGradients:
        device = dy.device
        parameters = parameter_addresses(inputs)
        matrices, aligned = matrix_arguments((dy, kept.z, *inputs.operands))
        aligned |= parameters[0] | parameters[1] | parameters[2]
        vector = self.widest
        if aligned % LARGEST_ACCESS_BYTES:
            tensors = (kept.z, dy, *inputs[2:5], *inputs.operands)
            vector = vector_width(self.channels, kept.z.element_size(), tensors)
        launches = self.launches.get((vector, want))
        if launches is None:
            outputs = Outputs.of(self.problem, want)
            launches = _Launches(self.problem, vector, outputs, device)
            self.launches[vector, want] = launches
        return launches(inputs, kept, matrices, parameters)


class _Launches:
    """The kernels of one problem, vector width and set of outputs, ready to launch."""

    def __init__(
        self, problem: Problem, vector: int, outputs: Outputs, device: torch.device
    ) -> None:
        self.problem, self.outputs = problem, outputs
        self.groups = problem.groups
        self.sum_dtypes = outputs.sum_dtypes(problem)
        if not problem.m:
            return
        arch, sms = arch_of(device), sm_count(device)
        plan = backward_plan(problem, vector, outputs, arch)
        tile = plan.tile
        operands = OPERAND_SIGNATURE * len(problem.chain.operand_kinds)
        kernel = load(backward_source(problem, plan, outputs, arch), device)
        if plan.row_sums is None:
            strips = ceil_div(self.groups, tile.groups_per_block)
        else:
            strips = ceil_div(problem.n, tile.warps_x * WARP * vector)
        resident = kernel.blocks_per_sm(tile.threads) * sms
        passes = ceil_div(problem.m, tile.rows_per_pass)
        parts = max(1, min(passes, resident // strips, LARGEST_GRID_Y))
        self.partial_shape = (parts, len(self.sum_dtypes), problem.n)
        signature = SIGNATURE + operands + "p" * sum(outputs.elements)
        early = starts_early(device)
        self.main = kernel.prepare(signature, (strips, parts), tile.threads, dependent=early)
        self.row_sums: Callable[..., None] | None = None
        if plan.row_sums is not None:
            before = load(row_sums_source(problem, plan.row_sums, arch), device)
            grid = (self.groups, min(problem.m, LARGEST_GRID_Y))
            self.row_sums = before.prepare(
                ROW_SUMS_SIGNATURE + operands, grid, plan.row_sums.threads
            )
        if self.sum_dtypes:
            after = load(column_sums_source(problem, outputs, arch), device)
            grid = (ceil_div(problem.n, SUMS_COLUMNS), len(self.sum_dtypes))
            self.column_sums = after.prepare(
                "pil" + "p" * len(self.sum_dtypes), grid, SUMS_THREADS, dependent=early
            )

    def __call__(
        self,
        inputs: Inputs,
        kept: Forward,
        matrices: list[int],
        parameters: tuple[int, int, int],
    ) -> NormGradients:
        """Launch on ``matrices``, the addresses and row strides of dy, z and every operand."""
        problem, outputs = self.problem, self.outputs
        m, n, device = problem.m, problem.n, kept.z.device
        # A gradient has the size and dtype of what it belongs to.
        make = torch.zeros_like if m == 0 else torch.empty_like
        owners = (inputs.norm_weight, inputs.norm_bias, inputs.bias, *inputs.operands)
        wanted = zip(owners, outputs.sums, strict=True)
        sums = [make(owner) for owner, is_wanted in wanted if is_wanted and owner is not None]
        elements = [
            torch.empty((m, n), dtype=problem.norm_dtype, device=device) if wanted else None
            for wanted in outputs.elements
        ]
        dz = torch.empty_like(kept.z) if outputs.dz else None
        if m:
            rows, operands = matrices[:4], matrices[4:]
            statistics = (kept.mean.data_ptr(), kept.rstd.data_ptr())
            before = self._row_sums(rows, statistics, parameters, operands, device)
            partial = torch.empty(self.partial_shape, dtype=problem.stats_dtype, device=device)
            self.main(
                *rows,
                *statistics,
                0 if before is None else before.data_ptr(),
                *parameters,
                0 if dz is None else dz.data_ptr(),
                partial.data_ptr(),
                m,
                self.groups,
                *operands,
                *(t.data_ptr() for t in elements if t is not None),
            )
            if sums:
                addresses = (t.data_ptr() for t in sums)
                self.column_sums(partial.data_ptr(), self.partial_shape[0], n, *addresses)
        return self._named(dz, sums, elements)

    def _row_sums(
        self,
        rows: list[int],
        statistics: tuple[int, int],
        parameters: tuple[int, int, int],
        operands: list[int],
        device: torch.device,
    ) -> Tensor | None:
        """The sums of each (row, group) for groups that the main kernel cannot hold."""
        if self.row_sums is None:
            return None
        problem = self.problem
        shape = (problem.m, self.groups, 2)
        sums = torch.empty(shape, dtype=problem.stats_dtype, device=device)
        address = sums.data_ptr()
        self.row_sums(*rows, *statistics, address, *parameters, *shape[:2], *operands)
        return sums

    def _named(
        self, dz: Tensor | None, sums: list[Tensor], elements: list[Tensor | None]
    ) -> NormGradients:
        places = self.outputs.places
        gamma, beta, bias, *channels = (sums[p] if p >= 0 else None for p in places)
        operands = tuple(
            element if channel is None else channel
            for channel, element in zip(channels, elements, strict=True)
        )
        return NormGradients(dz, bias, gamma, beta, operands)


_prepared = PreparedByProblem(_PreparedBackward)
