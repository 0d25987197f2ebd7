"""Chains that return what enters the norm: their kernels compile, and plans say who writes it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from epinorm.backends.cuda.fp32.norm_planes import planes_source, rows_plan
from epinorm.backends.cuda.fp32.rescue import rescue_source
from epinorm.backends.cuda.gemm.hopper.text import linear_norm_source
from epinorm.backends.cuda.gemm.portable.text import linear_norm_source as portable_source
from epinorm.backends.cuda.norm.backward_text import (
    backward_plan,
    backward_source,
    row_sums_source,
)
from epinorm.backends.cuda.norm.forward import forward_plan, forward_source
from epinorm.backends.cuda.plan import hopper, portable
from epinorm.backends.cuda.plan.norm_backward import Outputs
from epinorm.backends.cuda.plan.norm_tile import vector_width
from epinorm.backends.cuda.plan.strategy import plan_cuda
from epinorm.backends.cuda.runtime.jit import KernelSource, compiled
from epinorm.backends.cuda.text.backward_chain import backward_elements, backward_problem
from epinorm.backends.cuda.text.instance import rows_aligned
from epinorm.problem import Problem, Wanted

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from problems import problem_of

from imaginary import H200, believe_in

pytestmark = pytest.mark.usefixtures("kept_figures")

RESIDUAL = "add_residual|layer_norm|returns(sum)"
GROUPS = "silu|add_residual|group_norm({groups})|gelu|add_residual|returns(sum)"
ARCH, SHARED = "sm_90a", 227 * 1024


def norm_kernels(problem: Problem) -> Iterator[KernelSource]:
    """Of both passes, with the sum's gradient."""
    vector = vector_width(problem.n // problem.groups, problem.dtype.itemsize, ())
    yield forward_source(problem, forward_plan(problem, vector, SHARED, ARCH), ARCH)
    seen = backward_problem(problem, True)
    operands = tuple(True for _ in problem.chain.operand_kinds)
    outputs = Outputs.of(seen, Wanted(True, True, True, True, True, (*operands, False)))
    plan = backward_plan(seen, vector, outputs, ARCH)
    yield backward_source(seen, plan, outputs, ARCH)
    if plan.row_sums is not None:
        yield row_sums_source(seen, plan.row_sums, ARCH)


@pytest.mark.parametrize(
    ("chain", "channels", "groups", "kind", "out_dtype", "rounding"),
    [
        (RESIDUAL, 768, 1, "bfloat16", None, ""),
        (RESIDUAL, 768, 1, "bfloat16", torch.float32, "|rounding(eager)"),
        (RESIDUAL, 768, 1, "highest", None, ""),
        ("layer_norm|returns(sum)", 768, 1, "bfloat16", torch.float32, ""),
        (RESIDUAL, 20000, 1, "float16", None, "|rounding(eager)"),
        (GROUPS, 16, 64, "bfloat16", None, "|rounding(eager)"),
        (GROUPS, 40, 8, "float64", None, ""),
    ],
)
def test_norm_kernels_compile_without_spills(
    chain: str, channels: int, groups: int, kind: str, out_dtype: Any, rounding: str
) -> None:
    facts: Any = {"channels": channels, "groups": groups, "kind": kind, "out_dtype": out_dtype}
    problem = problem_of(training=True, chain=chain + rounding, **facts)
    for source in norm_kernels(problem):
        result = compiled(source)
        assert result.spill_bytes <= 0, source.entry


@pytest.mark.parametrize("kind", ["bfloat16", "high", "highest"])
@pytest.mark.parametrize("chain", [RESIDUAL, "group_norm({groups})|leaky_relu|returns(sum)"])
def test_single_kernels_compile(chain: str, kind: str, monkeypatch: Any) -> None:
    believe_in(monkeypatch, H200)
    training = (chain == RESIDUAL) == (kind == "high")
    groups = 1 if chain == RESIDUAL else 16
    problem = problem_of(2048, 512, 256 // groups, groups, kind, training, chain)
    tile = hopper.choose_tile(problem, H200.multiprocessors)
    portable_tile = portable.choose_tile(problem, H200)
    assert tile is not None
    assert portable_tile is not None
    instance = portable.instance_for(problem, portable_tile)
    sources = [
        linear_norm_source(hopper.instance_for(problem, tile)),
        portable_source(instance, ARCH, 16, rows_aligned(problem)),
    ]
    if kind != "bfloat16":
        sources.append(rescue_source(problem, True, ARCH))
    for source in sources:
        assert compiled(source).spill_bytes <= 0, source.entry


@pytest.mark.parametrize("planes", [1, 2])
def test_dz_is_written_as_planes_without_reading_the_residual(planes: int) -> None:
    problem = problem_of(16384, 3072, 768, 1, "highest", True, RESIDUAL)
    seen = backward_problem(problem, True)
    assert backward_elements(seen.chain) == (1,)
    assert backward_elements(problem.chain) == (0,)
    want = Wanted(True, True, True, True, True, (True, False))
    outputs = Outputs.of(seen, want, True, True)
    plan = rows_plan(seen, 4, outputs, planes, ARCH)
    assert plan is not None
    source = planes_source(seen, plan, outputs, planes, ARCH)
    assert "kStreams = 3;" in source.text
    assert compiled(source).spill_bytes <= 0


@pytest.mark.parametrize("training", [True, False])
def test_the_matrix_between_product_and_norm_is_the_sum(training: bool, monkeypatch: Any) -> None:
    believe_in(monkeypatch, H200)
    problem = problem_of(16384, 768, 768, 1, "highest", training, RESIDUAL)
    problem = dataclasses.replace(problem, whole_step=training)
    plan = plan_cuda(problem, "auto")
    assert plan.strategy == "planes"
    product, norm = (s for s in plan.forward if s.kernel in ("linear_norm", "norm_forward"))
    assert product.makes.startswith("the sum")
    assert "sum" not in norm.makes
    names = [buffer.name for buffer in plan.saved]
    assert "z" not in names
    assert ("the sum, a result" in names) == training


@pytest.mark.parametrize("training", [True, False])
def test_without_operations_between_them_the_product_is_the_sum(
    training: bool, monkeypatch: Any
) -> None:
    believe_in(monkeypatch, H200)
    chain = "layer_norm|gelu|returns(sum)"
    for kind in ("bfloat16", "float64"):
        plan = plan_cuda(problem_of(2048, 512, 768, 1, kind, training, chain), "epilogue")
        assert [s.kernel for s in plan.forward[:1]] == ["aten::addmm"]  # rounded once, as eager's
        assert plan.forward[0].makes == "the sum"
        assert "sum" not in plan.forward[1].makes


def test_where_gradients_need_z_as_well_no_single_kernel_writes_both(monkeypatch: Any) -> None:
    believe_in(monkeypatch, H200)
    chain = "mul_channel|add_residual|layer_norm|returns(sum)"
    facts = (2048, 512, 256, 1, "bfloat16")
    assert plan_cuda(problem_of(*facts, False, chain), "single").strategy == "single"
    plan = plan_cuda(problem_of(*facts, True, chain), "auto")
    assert plan.strategy == "epilogue"
    assert "need both" in plan.reason
    assert plan.forward[-1].makes == "y, sum, z, mean, rstd"
    assert [b.name for b in plan.saved] == ["z", "mean and rstd"]


@pytest.mark.parametrize("last", ["relu", "sigmoid", "tanh"])
def test_y_is_the_result_that_a_last_activations_gradient_reads(
    last: str, monkeypatch: Any
) -> None:
    believe_in(monkeypatch, H200)
    for kind, rounding in (("highest", ""), ("bfloat16", "|rounding(eager)")):
        chain = f"scale(0.5)|add_residual|{last}{rounding}"
        problem = problem_of(4096, 2048, 2048, 1, kind, True, chain, None, (True, False, False))
        plan = plan_cuda(problem, "single")
        assert plan.forward[-1].makes == "y"
        assert "z" not in [buffer.name for buffer in plan.saved]
        assert "y, a result" in [buffer.name for buffer in plan.saved]
        assert problem.matrix_dtype is None
        seen = backward_problem(problem, False)
        assert backward_elements(seen.chain) == ()
        outputs = Outputs.of(seen, Wanted(True, True, True, False, False, (True,)))
        vector = vector_width(8, problem.dtype.itemsize, ())
        source = backward_source(seen, backward_plan(seen, vector, outputs, ARCH), outputs, ARCH)
        assert problem.chain.pre[-1].definition.result_backward in source.text
        assert compiled(source).spill_bytes <= 0
