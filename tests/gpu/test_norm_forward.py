"""The forward norm kernel on a GPU, and what both directions share: shapes, dtypes, hard values.

``norm_case(...).check()`` (conftest.py) compares y and every gradient with float64, relative to
eager's own error, on outputs pre-filled with NaN, and runs everything twice for the same bits.
"""

import itertools

import pytest
import torch

from epinorm.backends.cuda.executable import CudaExecutable
from epinorm.backends.cuda.norm.forward import NormForward
from epinorm.backends.cuda.plan.norm_forward import FEW, forward_plans
from epinorm.chain.pointwise import DEFINITIONS
from epinorm.problem import Layout, Plan
from epinorm.tools.accuracy import allowed_error, relative_error

CHANNELS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 24, 31, 32, 33, 64, 96, 100, 128, 256, 1000, 1024)
CHANNELS += (4096, 8192)
ROWS = (0, 1, 2, 3, 17, 1024, 65537)
OTHER_DTYPES = (torch.bfloat16, torch.float16, torch.float64)
GROUPS = (1, 2, 3, 5, 8, 33)
MOST_ELEMENTS = 2**24


def shapes() -> list[tuple[int, int, torch.dtype, list[int]]]:
    """Every number of channels in fp32 and in one other dtype, with rows and groups crossed in."""
    found = []
    turn = itertools.count()
    for channels in CHANNELS:
        for dtype in (torch.float32, OTHER_DTYPES[CHANNELS.index(channels) % 3]):
            i = next(turn)
            groups = GROUPS[i % len(GROUPS)] if channels <= 1024 else 1 + i % 2
            rows = [ROWS[(i + k) % len(ROWS)] for k in (0, 2, 3, 5)]
            rows = [m for m in rows if m * channels * groups <= MOST_ELEMENTS]
            found.append((channels, groups, dtype, rows or [17]))
    return found


@pytest.mark.parametrize("channels, groups, dtype, rows", shapes())
def test_every_group_size(norm_case, channels, groups, dtype, rows):
    for i, m in enumerate(rows):
        if m * channels == 1:  # PyTorch refuses one value a channel
            continue
        norm_case(channels, groups, m, dtype, uniform=bool(i % 2)).check()


@pytest.mark.parametrize("rows", ROWS)
def test_every_number_of_rows(norm_case, rows):
    norm_case(16, 8, rows).check()


@pytest.mark.parametrize("dtype, channels", [(torch.float32, 512), (torch.bfloat16, 1000)])
def test_few_rows_are_spread_over_blocks_and_many_are_not(norm_case, dtype, channels):
    for rows in (FEW, FEW + 1):
        norm_case(channels, 1, rows, dtype, "layer_norm|gelu").check()


@pytest.mark.parametrize("dtype", [torch.float32, *OTHER_DTYPES])
def test_layer_and_rms_norm(norm_case, dtype):
    norm_case(320, 1, 129, dtype, "layer_norm|gelu").check()
    norm_case(320, 1, 129, dtype, "rms_norm", norm_bias=False, uniform=True).check()
    norm_case(2048, 1, 33, dtype, "silu|rms_norm(1e-06)|scale(2)").check()


@pytest.mark.parametrize("dtype, channels", [(torch.float32, 20000), (torch.bfloat16, 65544)])
@pytest.mark.parametrize("chain", ["layer_norm|relu", "mul_channel|rms_norm|add_residual"])
def test_groups_beyond_the_registers(norm_case, dtype, channels, chain):
    norm_case(channels, 1, 17, dtype, chain).check()


def test_wide_groups_wait_in_shared_memory_or_are_read_again(norm_case):
    limit = 227 * 1024
    kinds = [
        forward_plans(norm_case(channels, 1, 1).problem, 4, limit)[0].kind
        for channels in (8192, 16384, 20000, 65536)
    ]
    assert kinds == ["registers", "registers", "shared", "reread"]


OVER_Z = ((16, 8, 1000), (33, 5, 257), (100, 3, 65), (1024, 1, 1024), (1000, 1, 4096))
OVER_Z += ((8192, 2, 129), (16384, 1, 33), (20000, 1, 17), (65536, 1, 40), (65537, 1, 9))


@pytest.mark.parametrize(("channels", "groups", "rows"), OVER_Z)
@pytest.mark.parametrize("dtype", [torch.float32, *OTHER_DTYPES])
def test_y_over_z_has_the_same_bits(norm_case, channels, groups, rows, dtype):
    """By every kernel: warps and blocks for a group, groups in shared memory and read again; with
    values that a second reader of them would show."""
    chain = "mul_channel|group_norm({groups})|silu|add_residual"
    case = norm_case(channels, groups, rows, dtype, chain, training=False, extra=0)
    case.z[rows // 2, :: channels // 2 + 1] = float("nan")
    expected = case.forward().y
    run = NormForward(case.problem).bind(case.problem.n, tuple(case.z.shape), True)
    for _ in range(3):
        z = case.given.clone()
        y = run(z, *case.inputs[2:]).y
        assert y is z
        assert torch.equal(y.isnan(), expected.isnan())
        assert torch.equal(y.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("extra", [1, 2, 8])
def test_rows_with_a_stride(norm_case, dtype, extra):
    chain = "add_residual|group_norm({groups})|leaky_relu(0.01)|mul_channel"
    norm_case(32, 3, 65, dtype, chain, extra=extra).check()


def test_parameters_at_odd_addresses(norm_case):
    case = norm_case(16, 4, 33)
    shifted = torch.empty(65, device="cuda")[1:]
    shifted.copy_(case.inputs.norm_weight)
    case.inputs = case.inputs._replace(norm_weight=shifted)
    case.check()


@pytest.mark.parametrize("absent", list(itertools.product([False, True], repeat=3)))
def test_absent_parameters(norm_case, absent):
    bias, weight, norm_bias = absent
    norm_case(16, 8, 100, bias=bias, norm_weight=weight, norm_bias=norm_bias).check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_16_bit_products_and_returns_fp32(norm_case, dtype):
    chain = "group_norm({groups})|silu|add_residual"
    norm_case(16, 8, 100, dtype, chain, norm_dtype=torch.float32).check()
    norm_case(1000, 1, 100, dtype, norm_dtype=torch.float32).check()


@pytest.mark.parametrize("name", sorted(set(DEFINITIONS) - {"dropout", "mul_row"}))
def test_every_operation_before_and_after_the_norm(norm_case, name):
    operation = f"{name}(1.5)" if name in ("scale", "add") else name
    norm_case(16, 4, 257, chain=f"{operation}|group_norm({{groups}})|{operation}").check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_several_operands(norm_case, dtype):
    chain = (
        "add_channel|add_residual|mul_channel|group_norm({groups})|add_residual|mul_channel|tanh"
    )
    norm_case(24, 4, 100, dtype, chain).check()


@pytest.mark.parametrize("channels", [16, 100, 1000, 8192])
def test_variance_does_not_cancel_far_from_zero(norm_case, channels):
    """No bias and no kink: rounding z + bias, or y's sign, would hide what the statistics do."""
    chain = "group_norm({groups})|tanh|scale(2)"
    for uniform in (False, True):
        norm_case(channels, 1, 64, chain=chain, offset=1e4, uniform=uniform, bias=False).check()


@pytest.mark.parametrize("channels", [7, 16, 100, 1000, 8192, 20000])
def test_constant_group_gives_beta(norm_case, channels):
    case = norm_case(channels, 1, 8, bias=False)
    case.z.fill_(1e4 + 1.2345)
    case.check()
    beta = case.inputs.norm_bias.double()
    expected = 2 * torch.where(beta > 0, beta, beta * 0.01)
    assert relative_error(case.forward().y, expected.expand(8, -1)) < 1e-6


@pytest.mark.parametrize("scale", [1e30, 1e-20, 1e-40])
@pytest.mark.parametrize("channels", [16, 1000, 20000])
def test_huge_and_denormal_values(norm_case, scale, channels):
    """The squares of 1e30 overflow; PyTorch then has rstd = 0 and y = post(beta), and so do we."""
    case = norm_case(channels, 2, 9, scale=scale, bias=False)
    ours, eager = case.forward().y, case.pytorch(None)["y"]
    assert ours.isfinite().all()
    torch.testing.assert_close(ours, eager, rtol=3e-5, atol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("chain", ["group_norm({groups})|leaky_relu(0.01)", "relu|rms_norm"])
@pytest.mark.parametrize("channels", [4, 16, 100, 2000])
def test_nan_and_inf_stay_in_their_row_and_group(norm_case, value, chain, channels):
    groups = 1 if "rms" in chain else 3
    case = norm_case(channels, groups, 5, chain=chain)
    clean = case.forward().y
    case.z[2, channels // 2] = value
    y, eager = case.forward().y, case.pytorch(None)["y"]
    assert torch.equal(y.isnan(), eager.isnan())
    hit = torch.zeros_like(y, dtype=torch.bool)
    hit[2, :channels] = True
    assert torch.equal(y[~hit], clean[~hit])
    torch.testing.assert_close(y[hit], eager[hit], rtol=1e-5, atol=1e-6, equal_nan=True)


def test_inference_keeps_nothing(norm_case):
    case = norm_case(16, 4, 33, training=False)
    y, *kept = case.forward().outputs
    assert [t.shape for t in kept] == [(0,)] * 3
    assert relative_error(y, case.pytorch(torch.float64)["y"]) < 2.0**-22


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_epilogue_strategy_multiplies_and_normalises(norm_case, dtype):
    case = norm_case(16, 4, 33, dtype)
    x = torch.randn(33, 40, device="cuda").to(dtype)
    weight = torch.randn(64, 40, device="cuda").to(dtype)
    case.inputs = case.inputs._replace(x=x, weight=weight)
    p = case.problem
    layout = Layout(p.k, p.k, (p.m, p.n))
    found = CudaExecutable(p, Plan("epilogue", "test"), layout).forward(*case.inputs)
    case.z = x.double() @ weight.double().t()
    truth = case.pytorch(torch.float64)["y"]
    case.z = torch.mm(x, weight.t())
    allowed = allowed_error(relative_error(case.pytorch(None)["y"], truth), dtype)
    assert relative_error(found.y, truth) <= allowed


def test_more_than_2_to_the_31_elements(norm_case):
    """Rows beyond 2^31 elements get the same bits as alone, forward and backward."""
    m, n = 2**19 + 5, 4096
    case = norm_case(16, n // 16, 8, torch.bfloat16)
    tail_z, tail_dy = case.z, case.dy
    tail = case.forward()
    tail_dz = case.backward(tail)["dz"]
    z = torch.zeros(m, n, device="cuda", dtype=torch.bfloat16)
    dy = torch.zeros_like(z)
    z[-8:], dy[-8:] = tail_z, tail_dy
    whole = norm_case(16, n // 16, 0, torch.bfloat16)
    problem = type(case.problem)(**{**vars(case.problem), "m": m})
    whole.problem, whole.inputs, whole.z, whole.dy = problem, case.inputs, z, dy
    kept = whole.forward()
    found = whole.backward(kept)
    assert torch.equal(kept.y[-8:], tail.y)
    assert torch.equal(kept.rstd[-8:], tail.rstd)
    assert torch.equal(found["dz"][-8:], tail_dz)
    assert not found["dz"][:-8].any()
    beta = case.pytorch(torch.float64)["norm_bias"]
    assert relative_error(found["norm_bias"], beta) < 2.0**-8


def test_cuda_graph_replays_forward_and_backward(norm_case):
    case = norm_case(16, 8, 100)
    case.backward(case.forward())
    graph = torch.cuda.CUDAGraph()
    from epinorm.backends.cuda.norm.backward import NormBackward

    with torch.cuda.graph(graph):
        kept = NormForward(case.problem)(case.z, case.inputs)
        found = NormBackward(case.problem)(case.inputs, kept, case.dy, case.want)
    case.z.copy_(torch.randn_like(case.z))
    graph.replay()
    expected = case.forward()
    assert torch.equal(kept.y, expected.y)
    assert torch.equal(found.dz, case.backward(expected)["dz"])
    assert torch.equal(found.norm_weight, case.backward(expected)["norm_weight"])
