"""Which gradients are computed from planes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from epinorm.backends.cuda.plan import costs, hopper_product
from epinorm.backends.cuda.plan import portable as portable_plan
from epinorm.backends.cuda.plan.norm_planes import beside_dx, rows_plans, worthwhile
from epinorm.backends.cuda.plan.norm_tile import vector_width
from epinorm.backends.cuda.runtime.device import HOPPER, gpu_of
from epinorm.backends.memo import memo
from epinorm.problem import Core, Plan, Problem, Wanted

_BYTES = 3.5e6
"""That a conversion, or a product too small for its arithmetic to matter, moves a microsecond on an
H200."""
_PRODUCT_LAUNCHES, _SPLIT_LAUNCH = 8.0, 4.0
"""Microseconds of a product with its guard, and of a conversion."""
_BOTH_LAUNCHES, _BOTH_DZ, _BOTH_X = 9.0, 10.0, 5.0
"""What both products from one plane of dz take beside themselves: microseconds, and bytes for each
value of dz and of x. Whole steps of 90 random shapes with TF32 allowed: by what this and the
library's estimate choose they took 0.5 % longer than by the faster of both, at worst 1.1 times as
long; where x and W are split again, in all but a network's last layer, 0.9 % (decision 10)."""


@memo()
def planes_taken(
    problem: Problem, want_x: bool, want_weight: bool, core: Core = "hopper"
) -> tuple[bool, bool]:
    """Whether dX and dW are computed from planes: where conversions cost less than they save."""
    return _cheapest(problem, want_x, want_weight, core)[1]


def weight_waits(problem: Problem) -> bool:
    """Whether W's planes wait for the backward pass; else their scales alone, and the planes are
    made again before dX.

    Where dW comes first they lie idle. Where dz is written for a residual too, beside its planes
    and those of a wider x, as in a transformer's second Linear, a step's memory peaks.
    """
    residual = problem.chain.begins_with_residual
    peaks = residual and problem.m > problem.n and problem.k > problem.n
    return problem.planes == 1 or not peaks


def products(problem: Problem, core: Core | None) -> float:
    """Estimated microseconds of dX and dW, conversions included; without a core, the library's."""
    if core is None or problem.dtype != torch.float32:
        return costs.library_product(problem, "dX") + costs.library_product(problem, "dW")
    return _cheapest(problem, True, True, core)[0]


def _cheapest(
    problem: Problem, want_x: bool, want_weight: bool, core: Core
) -> tuple[float, tuple[bool, bool]]:
    """Estimated microseconds, and which of dX and dW then are from planes."""
    m, k, n = problem.m, problem.k, problem.n
    library = [costs.library_product(problem, "dX"), costs.library_product(problem, "dW")]
    # Rows of dz, dX and dW are whole 16-byte units.
    if problem.dtype != torch.float32 or m == 0 or n % 8 or k % 4:
        return sum(library), (False, False)
    planes = problem.planes
    gpu = gpu_of(problem.device)
    moved = _BYTES if gpu.capability == HOPPER else portable_plan.bytes_per_microsecond(gpu)
    least = 4.0 * (m * n + n * k + m * k) / moved

    def split(values: int, copies: int) -> float:
        return _SPLIT_LAUNCH + values * (4 + 2 * planes * copies) / moved

    def ours(of_weight: bool, converted: int) -> float:
        product = multiplied[of_weight]
        return _PRODUCT_LAUNCHES + max(product, least * planes / 2) + split(converted, 1)

    shapes = [hopper_product.gradient_shape(problem, of_weight) for of_weight in (False, True)]
    multiplied = [
        portable_plan.product_microseconds(shape, gpu)
        if core == "portable"
        else hopper_product.choose(shape, gpu.multiprocessors).microseconds
        for shape in shapes
    ]
    by_planes = [ours(False, n * k), ours(True, m * k)]
    wanted = (want_x, want_weight)

    def cost(taken: tuple[bool, bool]) -> float:
        if all(taken) and planes == 1 and core == "hopper":
            beside = (_BOTH_DZ * m * n + _BOTH_X * m * k) / moved
            return sum(multiplied) + _BOTH_LAUNCHES + beside
        parts = [(by_planes[i] if taken[i] else library[i]) for i in range(2) if wanted[i]]
        return sum(parts) + (split(m * n, sum(taken)) if any(taken) else 0.0)

    choices = [
        (x, w) for x in (False, True) for w in (False, True) if x <= want_x and w <= want_weight
    ]
    return min((cost(choice), choice) for choice in choices)


@dataclass(frozen=True)
class BackwardChoice:
    """How the gradients are computed.

    core: what multiplies planes. x, weight: dX and dW are computed from planes. writes_planes: dz
    is written once, as the planes of both; beside_dx: when its scales for dW are. weight_first: dW
    is computed before dX; dz_over_x: and dz in fp32 behind its product (``dz_over_x``).
    """

    core: Core | None
    x: bool
    weight: bool
    writes_planes: bool
    beside_dx: bool
    weight_first: bool
    dz_over_x: bool


def residual_has_dz(problem: Problem, want: Wanted) -> bool:
    """Whether the first operand's gradient is dz: it is added to the linear's own result."""
    return problem.chain.begins_with_residual and want.operands[0]


def dz_over_x(problem: Problem, want: Wanted) -> bool:
    """Whether the range guard's fp32 dz is written over x's planes, once dW's product has read
    them; and planes of W that did not wait are made for their scales alone, and again before dX.

    Where z is kept dz is written over it. A result in its place (``Chain.saves_y``) stays, with dy,
    y, all planes and dz at once. Here dW, no larger than dz, is there in dz's place.
    """
    fits = problem.planes == 2 and problem.n <= problem.k <= problem.m
    return fits and problem.chain.saves_y and not residual_has_dz(problem, want)


@memo()
def backward_choice(problem: Problem, plan: Plan, want: Wanted) -> BackwardChoice:
    """The choice for a set of gradients."""
    # A core that was not named is Hopper's.
    core = plan.core or "hopper" if plan.strategy in ("single", "planes") else None
    x = weight = writes_planes = False
    if core is not None:
        x, weight = planes_taken(problem, want.x, want.weight, core)
    planes = problem.planes
    of_rows = not problem.chain.returns_statistics
    if x and weight and core == "hopper" and of_rows and worthwhile(problem, planes):
        vector = vector_width(problem.n // problem.groups, problem.dtype.itemsize, ())
        writes_planes = next(rows_plans(problem, vector), None) is not None
    # The larger planes are to be free before the other product's result is allocated.
    weight_first = x and weight and problem.m > problem.n
    beside = writes_planes and not weight_first and beside_dx(problem, planes)
    over_x = writes_planes and weight_first and dz_over_x(problem, want)
    return BackwardChoice(core, x, weight, writes_planes, beside, weight_first, over_x)
