"""The backward norm kernel's instances: which outputs, which tile, and the text of its kernels."""

from __future__ import annotations

from collections.abc import Sequence

from epinorm.backends.cuda.norm.text import norm_text, types_text
from epinorm.backends.cuda.plan.norm_backward import BackwardPlan, Outputs, backward_plans
from epinorm.backends.cuda.plan.norm_tile import NormTile
from epinorm.backends.cuda.runtime.jit import KernelSource, compiled
from epinorm.backends.cuda.text.source import constants, read_kernel
from epinorm.problem import Problem


def backward_plan(problem: Problem, vector: int, outputs: Outputs, arch: str) -> BackwardPlan:
    """The first plan whose main kernel ptxas compiles without spilling, else the last one."""
    plans = backward_plans(problem, vector, outputs)
    for plan in plans[:-1]:
        if compiled(backward_source(problem, plan, outputs, arch)).spill_bytes <= 0:
            return plan
    return plans[-1]


def backward_source(
    problem: Problem, plan: BackwardPlan, outputs: Outputs, arch: str
) -> KernelSource:
    """The main kernel of this problem, plan and outputs for one architecture."""
    more = {"kSumsGiven": plan.row_sums is not None, "kEveryGroup": 0, "kRaggedRows": 1}
    more["kOwnsDy"] = problem.spends_dy
    extra = output_text(outputs) + last_parameters(outputs)
    text = norm_text("norm/norm_backward", problem, plan.tile, more, extra)
    return KernelSource("norm_backward", text, arch)


def output_text(outputs: Outputs) -> str:
    """The constants of norm_gradient.cuh, and the parameters of element operands' gradients."""
    gamma, beta, bias, *operands = outputs.places
    numbers = {
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
        constants({name: int(value) for name, value in numbers.items()})
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


def last_parameters(outputs: Outputs) -> str:
    """The parameters behind them."""
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


def row_sums_source(problem: Problem, tile: NormTile, arch: str) -> KernelSource:
    """The kernel of groups too wide for the main one: their sums, ahead of it."""
    text = norm_text("norm/norm_backward_sums", problem, tile, {})
    return KernelSource("norm_backward_sums", text, arch)


def column_sums_source(problem: Problem, outputs: Outputs, arch: str) -> KernelSource:
    """The second step of the sums over rows, and of the largest magnitudes of columns."""
    letters = ["Z" if dtype == problem.dtype else "P" for dtype in outputs.sum_dtypes(problem)]
    parameters = "".join(f", {letter}* sum{i}" for i, letter in enumerate(letters))
    stores = " ".join(
        f"case {i}: sum{i}[column] = Rounded<{letter}>::from(sum); break;"
        for i, letter in enumerate(letters)
    )
    largest = int(outputs.column_largest)
    text = column_sums_text(problem, len(letters), largest, parameters, stores)
    return KernelSource("norm_column_sums", text, arch)


def column_sums_text(
    problem: Problem, sums: int, largest: int, parameters: str, stores: str
) -> str:
    """Of so many sums, which have these parameters and are stored so."""
    defines = f"#define EPINORM_SUM_PARAMETERS {parameters}\n#define EPINORM_SUM_STORES {stores}\n"
    numbers = {"kSums": sums, "kColumnLargest": largest}
    text = types_text(problem, True) + constants(numbers) + defines
    return text + read_kernel("norm/norm_column_sums.cu")


def _table(kind: str, name: str, values: Sequence[int], otherwise: int) -> str:
    """A function of a constant index, which costs nothing in an unrolled loop."""
    cases = "".join(f"i == {i} ? {int(value)} : " for i, value in enumerate(values))
    return (
        f"EPINORM_FUNCTION constexpr {kind} {name}(int i) {{ return {cases}{int(otherwise)}; }}\n"
    )
