"""The backward norm kernel that writes dz as planes: where it can, its tile and its text.

A cluster of blocks holds whole rows of dz, since their planes' scale is known only when all of a
row is (`fp32/norm_backward_planes.cu`).
"""

from __future__ import annotations

from epinorm.backends.cuda.fp32.planes import TOLERANCE
from epinorm.backends.cuda.norm.backward_text import output_text
from epinorm.backends.cuda.norm.text import norm_text
from epinorm.backends.cuda.plan.norm_backward import Outputs
from epinorm.backends.cuda.plan.norm_planes import RowsPlan, rows_plans
from epinorm.backends.cuda.runtime.jit import KernelSource, compiled
from epinorm.backends.cuda.text.backward_chain import backward_elements
from epinorm.backends.cuda.text.source import constants, kernel_text
from epinorm.backends.memo import memo
from epinorm.problem import Problem


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
