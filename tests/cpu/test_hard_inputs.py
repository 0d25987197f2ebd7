"""Where values are large, tiny, infinite or not numbers, and where groups have an offset."""

from __future__ import annotations

import ctypes
import math
import sys
from pathlib import Path

import pytest
import torch

import epinorm
from epinorm.backends.cpu import build
from epinorm.chain import reference
from epinorm.chain.pointwise import DEFINITIONS
from epinorm.problem import Inputs
from epinorm.tools.accuracy import relative_error

sys.path.insert(0, str(Path(__file__).parent))
import kernels as backend

pytestmark = pytest.mark.usefixtures("needs_kernels")

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("norm", ["group_norm(8)", "layer_norm"])
def test_offset_far_from_zero(norm, make_case, check_as_accurate_as_eager):
    """E[x²] − E[x]² would lose every digit here."""
    cases = [make_case(f"{norm}|silu", 600, 48, 64, offset=1e4) for _ in range(4)]
    for case in cases:
        case.inputs.bias.fill_(1e4)
    check_as_accurate_as_eager(cases)


@pytest.mark.parametrize("norm", ["rms_norm(1e-05)", "layer_norm", "group_norm(2)"])
def test_wide_groups(norm, make_case, check_as_accurate_as_eager):
    """Sums of thousands of values; RMSNorm's of squares that are nearly alike."""
    cases = [make_case(norm, 96, 32, 4096) for _ in range(4)]
    for case in cases if norm.startswith("rms") else ():
        case.inputs.weight.copy_(case.inputs.weight[:1] + 1e-4 * case.inputs.weight)
        case.inputs.bias.fill_(100)
    check_as_accurate_as_eager(cases)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("m", [33, 4200])
def test_bad_value_stays_in_its_group(bad, dtype, m, make_case):
    """One bad weight row spoils its group in every row; one bad residual only its own."""
    case = make_case("add_residual|group_norm(8)|leaky_relu", m, 24, 64, dtype)
    clean = case.run()[0]
    case.inputs.operands[0][5, 17] = bad
    spoilt = case.run()[0]
    group = slice(16, 24)
    assert spoilt[5, group].isnan().all()
    spoilt[5, group] = clean[5, group]
    assert torch.equal(spoilt, clean)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_bad_value_under_rms_norm(bad, make_case):
    """RMSNorm subtracts nothing: beside an infinity the others become zero, as in PyTorch."""
    case = make_case("add_residual|rms_norm|leaky_relu", 33, 24, 64)
    case.inputs.operands[0][5, 17] = bad
    y, theirs = case.run()[0], case.eager()[0]
    torch.testing.assert_close(y, theirs, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_bad_row_of_x(make_case):
    case = make_case("group_norm(8)|silu", 100, 24, 64)
    clean = case.run()
    case.inputs.x[40] = NAN
    y, dx, *_ = case.run()
    assert y[40].isnan().all()
    assert dx[40].isnan().all()
    rows = torch.arange(100) != 40
    assert torch.equal(y[rows], clean[0][rows])
    assert torch.equal(dx[rows], clean[1][rows])


CAPABILITY = torch.backends.cpu.get_cpu_capability()
VALUES = [NAN, INF, -INF, 0.0, -0.0, 1e-40, -1e-40, 1e-7, 0.3, 3.0, 6.0, -3.0, 19.0, 21.0, 87.0]
VALUES += [89.0, -87.5, -103.0, -105.0, 3e38, -3e38, 1.0, -1.0, 0.625, 0.5]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(DEFINITIONS) - {"mul_channel", "dropout", "mul_row"}))
def test_special_values_of_every_operation(name, make_case):
    """As PyTorch: the operation behind a norm of single channels, which passes beta on (whatever
    is before it, that is of another test's kernel)."""
    operation = {"scale": "scale(1.5)", "add": "add(1)"}.get(name, name)
    m, n = 20, len(VALUES)
    case = make_case(f"{operation}|group_norm({n})|{operation}", m, 8, n)
    inputs = case.inputs._replace(norm_bias=torch.tensor(VALUES))
    y, _, _, _, _, dbeta, *_ = type(case)(case.problem, inputs, case.dy).run()
    beta = inputs.norm_bias.clone().requires_grad_()
    expected = case.problem.chain.post[0](beta.expand(m, n), *inputs.operands[1:])
    # PyTorch's vector code without AVX-512 has an erf that is as near as that.
    atol = 2e-7 if name == "gelu" and CAPABILITY != "AVX512" else 1e-37
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=atol, equal_nan=True)
    (expected_dbeta,) = torch.autograd.grad(expected, beta, case.dy)
    if name in ("hardtanh", "relu6") or (name in ("elu", "hardswish") and CAPABILITY != "AVX512"):
        # At a NaN PyTorch's scalar and CUDA code pass the gradient on, its vector code stops it.
        dbeta, expected_dbeta = dbeta[1:], expected_dbeta[1:]
    torch.testing.assert_close(dbeta, expected_dbeta, rtol=2e-5, atol=2e-5, equal_nan=True)


def test_denormal_and_huge_rows(make_case):
    case = make_case("group_norm(8)|silu", 64, 24, 64)
    case.inputs.x[3] *= 1e-40
    case.inputs.x[4] *= 1e15
    case.inputs.x[5] = 0
    y, dx, *_ = case.run()
    theirs, their_dx, *_ = case.eager()
    torch.testing.assert_close(y, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(dx, their_dx, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_bf16_rounds_to_nearest_even(make_case):
    """Through a norm of single channels, y is beta: fp32 parameters, bf16 result, every half-way
    case. Autocast gives fp32 results, so the types here are made up for the conversion's sake."""
    values = torch.tensor([1.0 + 2**-8, 1.0 + 3 * 2**-8, 1.0 + 2**-8 + 2**-20, 3.4e38, -3.4e38])
    values = torch.cat([values, torch.randn(200), torch.tensor([NAN, INF, -INF, 1e-40, -0.0])])
    n = len(values)
    case = make_case(f"group_norm({n})", 5, 8, n, torch.bfloat16, torch.float32)
    problem = case.problem.__class__(**{**case.problem.__dict__, "out_dtype": torch.bfloat16})
    inputs: Inputs = case.inputs._replace(norm_bias=values)

    y = backend.forward(problem, inputs).y
    assert torch.equal(y.nan_to_num(7.0), values.bfloat16().nan_to_num(7.0).expand(5, n))


ELEMENTARY = """
#include "call.h"
#include "elementary.h"
#define TEST(name) \\
  EPINORM_EXPORT void test_##name(const float* x, float* y, long n) { \\
    _Pragma("omp simd") for (long i = 0; i < n; ++i) y[i] = epinorm::name(x[i]); \\
  }
TEST(exp) TEST(expm1) TEST(log1p) TEST(tanh) TEST(erf)
"""
RANGES = {"exp": (-87, 88), "expm1": (-20, 88), "log1p": (0, 50), "tanh": (-3, 3), "erf": (-3, 3)}


@pytest.mark.parametrize("name", RANGES)
def test_elementary_functions(name):
    """Within 1.5 units in the last place everywhere, as elementary.h promises two."""
    parts = build._kernel_parts(ELEMENTARY)
    code = build._compile(build._compiler()[0], *parts, "the elementary functions")
    function = getattr(build._open(code), f"test_{name}")
    x = torch.cat([torch.empty(300_000).uniform_(*RANGES[name]), torch.rand(100_000)])
    y = torch.full_like(x, NAN)
    pointers = (ctypes.c_void_p(t.data_ptr()) for t in (x, y))
    function(*pointers, ctypes.c_long(x.numel()))
    exact = getattr(torch, name)(x.double())
    size = exact.float().abs()
    ulp = (torch.nextafter(size, torch.tensor(INF)) - size).double()
    assert ((y.double() - exact).abs() / ulp).max() < 1.5


def test_reference_agrees_with_float64(make_case):
    """The cases' own truth is what epinorm.chain.reference says."""
    chain = "add_residual|silu|mul_channel|layer_norm|add_channel|gelu|add_residual|tanh"
    case = make_case(chain, 50, 16, 24, torch.float64)
    y = reference.linear_norm(
        *(case.inputs.x, case.inputs.weight, case.inputs.bias, case.problem.chain),
        *(case.inputs.norm_weight, case.inputs.norm_bias, case.inputs.operands),
    )
    assert relative_error(case.run()[0], y) < 1e-14


@pytest.mark.parametrize("m", [7, 300])
def test_a_bias_far_above_the_products_rounds_their_sum_once(m):
    """In float64: added to the bias one by one, each of K products would be rounded at its size."""
    torch.manual_seed(0)
    x, weight = torch.randn(m, 128).double() * 2**-20, torch.randn(12, 128).double()
    bias = torch.randn(12).double()
    _, total = epinorm.linear_norm(
        x, weight, bias, norm=epinorm.RMSNorm(), post="scale(2)", return_sum=True, strategy="cpu"
    )
    rows = range(0, m, max(1, m // 7))
    terms = [[[*(x[i] * weight[j]).tolist(), bias[j].item()] for j in range(12)] for i in rows]
    exact = torch.tensor([[math.fsum(t) for t in row] for row in terms], dtype=torch.float64)
    assert relative_error(total[list(rows)], exact) < 1.2e-16
