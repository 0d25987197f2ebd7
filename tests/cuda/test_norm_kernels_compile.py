"""Every kind of norm kernel compiles without a GPU, for each architecture, without spills."""

import dataclasses

import pytest
import torch

from epinorm.backends.cuda.norm.backward_text import (
    backward_plan,
    backward_source,
    column_sums_source,
    row_sums_source,
)
from epinorm.backends.cuda.norm.forward import forward_plan, forward_source
from epinorm.backends.cuda.plan.norm_backward import Outputs, backward_plans
from epinorm.backends.cuda.plan.norm_forward import FEW, forward_plans
from epinorm.backends.cuda.plan.norm_tile import vector_width
from epinorm.backends.cuda.runtime.jit import KernelSource, compiled
from epinorm.chain import Chain
from epinorm.chain.pointwise import DEFINITIONS
from epinorm.problem import Problem, Wanted

pytestmark = pytest.mark.usefixtures("kept_figures")

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
ARCHITECTURES = {"sm_80": 163, "sm_90a": 227, "sm_100": 227}
"""With the shared memory in KiB that a block can have there."""

EASY = "group_norm({groups})|leaky_relu(0.01)|scale(2)"
HEAVY = "gelu|mul_channel|add_residual|group_norm({groups})|add_residual|mish|mul_channel"
EVERY = "|".join(["group_norm({groups})", *(n for n in DEFINITIONS if n not in ("scale", "add"))])

# Channels in a group, their dtype and chain: each kind of team and each dtype, every chain.
VARIANTS = [
    (1, F32, EASY),
    (3, BF16, EASY),
    (4, F32, EASY),
    (16, F32, EASY),
    (16, BF16, EASY),
    (16, F64, HEAVY),
    (24, F16, HEAVY),
    (33, F32, "silu|rms_norm"),
    (100, F64, "layer_norm|tanh"),
    (128, BF16, EASY),
    (512, F32, "layer_norm|gelu"),
    (1000, BF16, "layer_norm|relu"),
    (1024, F32, HEAVY),
    (4096, F16, "rms_norm|silu"),
    (8192, F32, EASY),
    (8192, BF16, HEAVY),
    (8192, F64, EASY),
    (16384, F32, EASY),
    (20000, F32, EASY),
    (100003, BF16, HEAVY),
    (16, F32, EVERY),
]


def problem_of(channels: int, dtype: torch.dtype, chain: str, autocast: bool = False) -> Problem:
    groups = 8 if "group_norm" in chain else 1
    norm_dtype = F32 if autocast else dtype
    return Problem(
        chain=Chain.parse(chain.format(groups=groups)),
        m=1024,
        k=64,
        n=channels * groups,
        dtype=dtype,
        norm_dtype=norm_dtype,
        out_dtype=norm_dtype,
        has_bias=True,
        has_norm_weight=True,
        has_norm_bias="rms" not in chain,
        training=True,
        device=torch.device("cuda", 0),
        precision="native",
    )


def sources(problem: Problem, arch: str) -> list[KernelSource]:
    channels = problem.n // problem.groups
    vector = vector_width(channels, problem.dtype.itemsize, ())
    forward = forward_plan(problem, vector, ARCHITECTURES[arch] * 1024, arch)
    want = Wanted(True, True, True, True, True, tuple(True for _ in problem.chain.operand_kinds))
    outputs = Outputs.of(problem, want)
    backward = backward_plan(problem, vector, outputs, arch)
    found = [
        forward_source(problem, forward, arch),
        backward_source(problem, backward, outputs, arch),
        column_sums_source(problem, outputs, arch),
    ]
    if backward.row_sums is not None:
        found.append(row_sums_source(problem, backward.row_sums, arch))
    return found


def check(problem: Problem, arch: str) -> None:
    for source in sources(problem, arch):
        result = compiled(source)
        assert (result.spill_bytes, result.stack_bytes) == (0, 0), (source.entry, result.log)


@pytest.mark.parametrize("i, channels, dtype, chain", [(i, *one) for i, one in enumerate(VARIANTS)])
def test_variants_compile_without_spills(i, channels, dtype, chain):
    """For one architecture after another; what takes most registers, for all of them."""
    archs = list(ARCHITECTURES)
    for arch in archs if chain == EVERY else [archs[i % 3]]:
        check(problem_of(channels, dtype, chain), arch)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("channels, dtype", [(16, F32), (16, BF16), (128, BF16), (1024, F32)])
def test_preferred_plans_do_not_spill_for_a_plain_chain(channels, dtype, arch):
    """What the fallback to another plan would hide."""
    problem = problem_of(channels, dtype, EASY)
    vector = 16 // dtype.itemsize
    forward = forward_plan(problem, vector, ARCHITECTURES[arch] * 1024, arch)
    assert forward == forward_plans(problem, vector, ARCHITECTURES[arch] * 1024)[0]
    outputs = Outputs.of(problem, Wanted(True, True, True, True, True, ()))
    backward = backward_plan(problem, vector, outputs, arch)
    assert backward == backward_plans(problem, vector, outputs)[0]


@pytest.mark.parametrize(
    "channels, dtype, values", [(512, F32, 16), (1000, BF16, 32), (256, F32, 8)]
)
def test_few_rows_have_few_values_a_lane(channels, dtype, values):
    few = problem_of(channels, dtype, "layer_norm|gelu")
    many = dataclasses.replace(few, m=FEW + 1)
    vector = 16 // dtype.itemsize
    plans = [forward_plan(p, vector, 227 * 1024, "sm_90a") for p in (few, many)]
    assert [plan.tile.values for plan in plans] == [8, values]
    for p, plan in zip((few, many), plans, strict=True):
        result = compiled(forward_source(p, plan, "sm_90a"))
        assert (result.spill_bytes, result.stack_bytes) == (0, 0)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_autocast_compiles_without_spills(dtype):
    check(problem_of(16, dtype, HEAVY, autocast=True), "sm_90a")
    check(problem_of(2048, dtype, EASY, autocast=True), "sm_90a")


def test_vectors_are_as_wide_as_everything_is_aligned_for():
    rows = torch.zeros(4, 24)
    assert vector_width(12, 4, [rows]) == 4
    assert vector_width(6, 4, [rows]) == 2  # a vector lies in one group
    assert vector_width(12, 4, [rows[:, 1:]]) == 1  # an odd address
    assert vector_width(12, 4, [torch.zeros(4, 26)]) == 2  # an odd row stride
    assert vector_width(12, 4, [torch.zeros(1, 26)]) == 4  # a single row has none
    assert vector_width(16, 2, [rows, None]) == 8  # the fp32 operands of autocast: two accesses
    assert vector_width(16, 2, [rows.view(-1)[4:]]) == 8
    assert vector_width(16, 2, [rows.view(-1)[2:]]) == 2


def test_text_does_not_depend_on_rows_or_number_of_groups():
    problem = problem_of(16, F32, EASY)
    other = Problem(**{**vars(problem), "m": 7, "n": 16 * 4})
    other = Problem(**{**vars(other), "chain": Chain.parse(EASY.format(groups=4))})
    plan = forward_plans(problem, 4, 0)[0]
    first, second = (forward_source(p, plan, "sm_80") for p in (problem, other))
    assert first == second
