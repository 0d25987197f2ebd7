"""BatchNorm's kernels: they compile without spills, and compute what they should, on the host."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from on_host import HostKernel
from torch import Tensor

from epinorm.backends.cuda.fp32.rescue import rescue_source
from epinorm.backends.cuda.gemm.hopper.text import linear_norm_source
from epinorm.backends.cuda.norm import backward, batch_backward, batch_forward
from epinorm.backends.cuda.plan.hopper import choose_tile, instance_for
from epinorm.backends.cuda.plan.norm_backward import Outputs
from epinorm.backends.cuda.plan.norm_batch import (
    backward_tile,
    forward_tile,
    narrowed,
    statistics_tile,
)
from epinorm.backends.cuda.plan.norm_tile import vector_width
from epinorm.backends.cuda.plan.planes import product_of
from epinorm.backends.cuda.runtime.jit import compiled
from epinorm.chain import Chain
from epinorm.chain.pointwise import DEFINITIONS
from epinorm.chain.reference import epilogue
from epinorm.problem import Inputs, Problem, Wanted

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
RELU = "batch_norm(1e-05)|relu"
DROPS = "batch_norm(1e-05)|gelu|dropout(0.1)"
HEAVY = "mul_channel|add_residual|batch_norm(1e-05)|silu|add_residual|mul_channel"
EVERY = "|".join(["batch_norm", *(n for n in DEFINITIONS if n not in ("scale", "add"))])
VARIANTS = [
    *((F32, RELU, 512), (BF16, RELU, 512), (F16, DROPS, 60), (F64, RELU, 61)),
    *((F32, HEAVY, 64), (BF16, HEAVY, 30), (F64, HEAVY, 64), (F32, EVERY, 64)),
]
MIXED = [(BF16, RELU, 512), (F16, DROPS, 60)]
"""With parameters of the norm in fp32, as under autocast."""


def problem_of(text: str, m: int, n: int, dtype: torch.dtype, **facts: Any) -> Problem:
    whole = {"has_bias": True, "has_norm_weight": True, "has_norm_bias": True}
    whole |= {"norm_dtype": dtype, "out_dtype": dtype} | facts
    return Problem(
        *(Chain.parse(text), m, 8, n, dtype),
        **whole,
        training=True,
        device=torch.device("cuda", 0),
        precision="native",
    )


@pytest.mark.usefixtures("kept_figures")
@pytest.mark.parametrize("i", range(len(VARIANTS) + len(MIXED)))
def test_they_compile_without_spills(i: int) -> None:
    archs = ["sm_80", "sm_90a", "sm_100"]
    dtype, text, n = [*VARIANTS, *MIXED][i]
    problem = problem_of(text, 1024, n, dtype, norm_dtype=dtype if i < len(VARIANTS) else F32)
    vector = narrowed(vector_width(n // problem.groups, dtype.itemsize, ()))
    kinds = problem.chain.operand_kinds
    operands = tuple(kind in ("channel", "element") for kind in kinds)
    splits = dtype == F32
    outputs = Outputs.of(problem, Wanted(*(True,) * 5, operands), splits, splits)
    none = (False,) * len(kinds)
    passes = (
        Outputs(False, True, True, False, none, none),
        dataclasses.replace(outputs, gamma=False, beta=False),
    )
    for arch in archs if text == EVERY else [archs[i % 3]]:
        first = statistics_tile(problem, vector)
        for source in (
            batch_forward.statistics_source(problem, first, arch),
            batch_forward.join_source(problem, first, arch),
            *[batch_forward.join_source(problem, first, arch, True)] * splits,
            batch_forward.forward_source(problem, forward_tile(problem, vector), arch),
            batch_backward.sums_source(problem, True, False, arch),
            *(
                batch_backward.backward_source(problem, backward_tile(problem, vector), each, arch)
                for each in passes
            ),
        ):
            result = compiled(source)
            assert (result.spill_bytes, result.stack_bytes) == (0, 0), (source.entry, result.log)


@pytest.mark.usefixtures("kept_figures")
@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("m, k, n", [(1024, 512, 512), (16384, 4096, 4096), (65536, 256, 256)])
def test_products_that_leave_moments_compile_without_spills(
    m: int, k: int, n: int, precision: Any
) -> None:
    facts = {"m": m, "k": k, "precision": precision, "device": torch.device("cuda", 0)}
    problem = product_of(dataclasses.replace(problem_of(RELU, m, n, F32), **facts))
    assert problem.column_moments
    tile = choose_tile(problem, 132)
    assert tile is not None
    for source in (
        linear_norm_source(instance_for(problem, tile)),
        rescue_source(problem, True, "sm_90a"),
    ):
        result = compiled(source)
        assert (result.spill_bytes, result.stack_bytes) == (0, 0), (source.entry, result.log)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder: Path = tmp_path_factory.getbasetemp() / "kernels_on_host"
    folder.mkdir(exist_ok=True)
    for module in (batch_forward, batch_backward, backward):
        monkeypatch.setattr(module, "load", lambda source, _: HostKernel(source, folder))
        monkeypatch.setattr(module, "arch_of", lambda _: "sm_90a")
        monkeypatch.setattr(module, "sm_count", lambda _: 3)
        monkeypatch.setattr(module, "starts_early", lambda _: False)


def results(
    problem: Problem, z: Tensor, dy: Tensor, inputs: Inputs, factors: Any = None
) -> tuple[list[Tensor], Any]:
    """y, statistics and all gradients, in the order of ``Inputs`` from z on; largest magnitudes."""
    size = problem.m, problem.n
    kept = batch_forward.BatchForward(problem).bind(problem.n, size)(z, *inputs[2:6], ())
    gives = tuple(t is not None for t in inputs[2:5])
    want = Wanted(True, True, *gives, (True,) * len(inputs.operands))
    run = batch_backward.BatchBackward(problem)
    found = run(inputs, kept, dy, want, factors)
    rest = (found.dz, found.bias, found.norm_weight, found.norm_bias, *found.operands)
    assert kept.second is not None
    return [kept.y, kept.second, *(t for t in rest if t is not None)], found.largest


def by_pytorch(problem: Problem, z: Tensor, dy: Tensor, inputs: Inputs, dtype: Any) -> list[Tensor]:
    """The same in ``dtype``, or in those that are given."""
    given = (z, *inputs[2:5], *inputs.operands)
    leaves = [
        None if t is None else t.detach().to(dtype or t.dtype).requires_grad_() for t in given
    ]
    z, bias, gamma, beta, *operands = leaves  # type: ignore[assignment]
    found: Any = epilogue(z if bias is None else z + bias, problem.chain, gamma, beta, operands)
    wanted = [t for t in leaves if t is not None]
    gradients = torch.autograd.grad(found[0], wanted, dy.to(found[0].dtype))
    return [found[0].detach(), found[1], *gradients]


def tensors_of(problem: Problem) -> tuple[Tensor, Tensor, Inputs]:
    m, n, p = problem.m, problem.n, problem

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=p.dtype)

    vectors = [
        draw(n).to(dtype) if there else None
        for there, dtype in (
            (p.has_bias, p.dtype),
            (p.has_norm_weight, p.norm_dtype),
            (p.has_norm_bias, p.norm_dtype),
        )
    ]
    kinds = p.chain.operand_kinds
    operands = tuple(draw(n) if kind == "channel" else draw(m, n) for kind in kinds)
    return draw(m, n) + 0.5, draw(m, n), Inputs(draw(0), draw(0), *vectors, operands)


CASES: list[tuple[str, int, int, torch.dtype, dict[str, Any]]] = [
    (RELU, 301, 60, F32, {}),
    (HEAVY, 130, 36, F32, {}),
    ("batch_norm(0.001)", 77, 7, F64, {"has_norm_weight": False}),
    ("batch_norm(1e-05)", 301, 60, BF16, {"norm_dtype": F32}),
]
"""Each compiles six kernels: what else there is, tests/gpu has."""


@pytest.mark.slow
@pytest.mark.parametrize("case", range(len(CASES)))
def test_they_compute_what_pytorch_does(case: int, host: None) -> None:
    text, m, n, dtype, facts = CASES[case]
    torch.manual_seed(0)
    problem = problem_of(text, m, n, dtype, **facts)
    problem = dataclasses.replace(problem, device=torch.device("cpu"))
    z, dy, inputs = tensors_of(problem)
    ours, _ = results(problem, z.clone(), dy, inputs)
    eager, truth = (by_pytorch(problem, z, dy, inputs, kind) for kind in (None, F64))
    for i, (a, b, true) in enumerate(zip(ours, eager, truth, strict=True)):
        assert a.dtype == b.dtype
        error, of_eager = ((t.double() - true).norm() for t in (a, b))
        if i == 3 and not problem.chain.reads_z:  # of the bias: 0, and both its roundings
            assert error <= 4 * of_eager + 1e-12
            continue
        floor = 4 * torch.finfo(a.dtype).eps * true.norm()
        assert error <= 1.1 * of_eager + floor, (i, error, of_eager)


@pytest.mark.slow
def test_hard_columns_stay_by_themselves(host: None) -> None:
    torch.manual_seed(0)
    problem = dataclasses.replace(problem_of(RELU, 300, 60, F32), device=torch.device("cpu"))
    z, dy, inputs = tensors_of(problem)
    inputs = inputs._replace(bias=torch.zeros(60))
    z[:, 0] += 1e4
    z[:, 1], z[:, 2] = 1e4, 0
    ours, _ = results(problem, z.clone(), dy, inputs)
    truth = by_pytorch(problem, z, dy, inputs, F64)
    beta = inputs.norm_bias
    assert beta is not None
    assert torch.equal(ours[0][:, 1:3], beta[1:3].relu().expand(300, 2))
    # Half an ulp of column 0 is a thousandth of what it varies by, and moves some over the kink.
    for i, limit, first in ((0, 1e-3, 0), (1, 1e-6, 0), (2, 1e-5, 1)):
        error = (ours[i].double() - truth[i]).norm(dim=0) / truth[i].norm(dim=0).clamp(min=1e-30)
        assert (error[first:] <= limit).all(), (i, error)
    z[3, 5], z[4, 6] = math.nan, math.inf
    hard, _ = results(problem, z, dy, inputs)
    for before, after in ((ours[0], hard[0]), (ours[2], hard[2])):
        assert after[:, 5:7].isnan().all()
        for column in (*range(5), *range(7, 60)):
            assert torch.equal(before[:, column], after[:, column])


@pytest.mark.slow
@pytest.mark.parametrize("has_bias", [True, False])
def test_moments_that_the_product_left_are_joined(has_bias: bool, host: None) -> None:
    """Parts of 64 rows, the last one shorter; those marked by the range guard are found again."""
    torch.manual_seed(0)
    problem = problem_of(RELU, 64 * 41 + 7, 36, F32, has_bias=has_bias)
    problem = dataclasses.replace(problem, device=torch.device("cpu"))
    z, _, inputs = tensors_of(problem)
    z[:, 3] += 100
    parts = [
        torch.stack([part.mean(0), (part - part.mean(0)).square().sum(0)]) for part in z.split(64)
    ]
    moments = torch.stack(parts)
    moments[0, 0, 5] = moments[41, 0, 6] = moments[:, 0, 7] = math.nan
    moments[0, 1, 5] = 1e9
    run = batch_forward.BatchForward(problem).bind(problem.n, (problem.m, problem.n))
    kept = run(z, *inputs[2:5], (), (), moments)
    given = z.double() if inputs.bias is None else z.double() + inputs.bias.double()
    variance, mean = torch.var_mean(given, 0, correction=1)
    assert kept.second is not None
    torch.testing.assert_close(
        kept.second.double(), torch.stack([mean, variance]), rtol=3e-7, atol=3e-7
    )
    (truth, _, *_) = by_pytorch(problem, z, z, inputs, F64)
    torch.testing.assert_close(kept.y.double(), truth, rtol=1e-5, atol=2e-5)


@pytest.mark.slow
def test_what_dzs_planes_are_made_from(host: None) -> None:
    torch.manual_seed(0)
    problem = dataclasses.replace(problem_of(RELU, 301, 60, F32), device=torch.device("cpu"))
    z, dy, inputs = tensors_of(problem)
    columns, rows = torch.rand(60) + 0.5, torch.rand(301) + 0.5
    factors = backward.Factors(columns.data_ptr(), rows.data_ptr())
    (_, _, dz, *_), largest = results(problem, z.clone(), dy, inputs, factors)

    def at(address: int, *shape: int) -> Tensor:
        memory = (ctypes.c_char * (4 * math.prod(shape))).from_address(address)
        return torch.frombuffer(memory, dtype=F32).view(shape)

    of_rows = at(largest.rows, 301, largest.row_parts).amax(1)
    assert torch.equal(of_rows, (dz * columns).abs().amax(1))
    assert torch.equal(at(largest.columns, 60), (dz * rows[:, None]).abs().amax(0))
    assert not largest.flags[:301].any()
    start = largest.column_flags - largest.row_flags
    assert not largest.flags[start : start + 60].any()
