"""The backward norm kernel's instances: which outputs, which tile, and the text of its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from epinorm.backends.cuda.norm.text import norm_text, types_text
from epinorm.backends.cuda.norm.tile import WARP, Tile, ceil_div, lanes_for, power_of_two_from
from epinorm.backends.cuda.runtime.jit import KernelSource, compiled
from epinorm.backends.cuda.text.source import read_kernel
from epinorm.problem import Problem, Wanted

__all__ = [
    "BackwardPlan",
    "Outputs",
    "backward_plan",
    "backward_plans",
    "backward_source",
    "column_sums_source",
    "output_text",
    "row_sums_source",
]

BLOCK_WARPS = 8
MOST_LANES = 512


@dataclass(frozen=True)
class Outputs:
    """Which outputs a launch has: dz, sums over rows, gradients of element operands, and the
    largest magnitudes of dz's rows and columns. ``if_wanted``: just where a word on the GPU is not
    0, which the launch is given."""

    dz: bool
    gamma: bool
    beta: bool
    bias: bool
    channels: tuple[bool, ...]
    elements: tuple[bool, ...]
    row_largest: bool = False
    column_largest: bool = False
    if_wanted: bool = False

    @staticmethod
    def of(
        problem: Problem,
        want: Wanted,
        row_largest: bool = False,
        column_largest: bool = False,
        if_wanted: bool = False,
    ) -> Outputs:
        pairs = list(zip(problem.chain.operand_kinds, want.operands, strict=True))
        return Outputs(
            dz=want.x or want.weight,
            gamma=want.norm_weight and problem.has_norm_weight,
            beta=want.norm_bias and problem.has_norm_bias,
            bias=want.bias and problem.has_bias,
            channels=tuple(wanted and kind == "channel" for kind, wanted in pairs),
            elements=tuple(wanted and kind == "element" for kind, wanted in pairs),
            row_largest=row_largest,
            column_largest=column_largest,
            if_wanted=if_wanted,
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
    more = {"kSumsGiven": plan.row_sums is not None, "kEveryGroup": 0, "kRaggedRows": 1}
    extra = output_text(outputs) + _last_parameters(outputs)
    text = norm_text("norm/norm_backward", problem, plan.tile, more, extra)
    return KernelSource("norm_backward", text, arch)


def output_text(outputs: Outputs) -> str:
    """The constants of norm_gradient.cuh, and the parameters of element operands' gradients."""
    gamma, beta, bias, *operands = outputs.places
    constants = {
        "kSumGamma": gamma,
        "kSumBeta": beta,
        "kSumBias": bias,
        "kSums": sum(outputs.sums),
        "kWriteDz": outputs.dz,
        "kRowLargest": outputs.row_largest,
        "kColumnLargest": outputs.column_largest,
    }
    elements = [i for i, wanted in enumerate(outputs.elements) if wanted]
    count = len(outputs.elements)
    return (
        "".join(f"constexpr int {name} = {int(value)};\n" for name, value in constants.items())
        + _table("int", "sum_of_operand", operands, -1)
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


def _last_parameters(outputs: Outputs) -> str:
    if outputs.if_wanted:
        return (
            "#define EPINORM_LARGEST_PARAMETERS , const unsigned* wanted\n"
            "#define EPINORM_LARGEST {}\n#define EPINORM_WANTED *wanted != 0\n"
        )
    if not (outputs.row_largest or outputs.column_largest):
        return "#define EPINORM_LARGEST_PARAMETERS\n#define EPINORM_LARGEST {}\n"
    return (
        "#define EPINORM_LARGEST_PARAMETERS , const float* column_factor, const float* row_factor, "
        "unsigned* row_largest, unsigned* column_largest, unsigned char* row_flag, "
        "unsigned char* column_flag\n"
        "#define EPINORM_LARGEST {column_factor, row_factor, row_largest, column_largest, "
        "row_flag, column_flag}\n"
    )


def row_sums_source(problem: Problem, tile: Tile, arch: str) -> KernelSource:
    """The kernel of groups too wide for the main one: their sums, ahead of it."""
    text = norm_text("norm/norm_backward_sums", problem, tile, {})
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
    text = types_text(problem) + defines + read_kernel("norm/norm_column_sums.cu")
    return KernelSource("norm_column_sums", text, arch)


def _table(kind: str, name: str, values: Sequence[int], otherwise: int) -> str:
    """A function of a constant index, which costs nothing in an unrolled loop."""
    cases = "".join(f"i == {i} ? {int(value)} : " for i, value in enumerate(values))
    return (
        f"EPINORM_FUNCTION constexpr {kind} {name}(int i) {{ return {cases}{int(otherwise)}; }}\n"
    )
