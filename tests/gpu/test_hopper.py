"""The Hopper kernel on its GPU: values, bits, every tile, hard inputs, races.

``ProductCase.check`` (product_case.py) compares y, z and the statistics with float64, relative to
eager's own error, on outputs pre-filled with NaN, and runs everything twice for the same bits.
Shapes are chosen so that cases share kernels: rows, columns and K are arguments of one.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))

from product_case import bits, fitted, forced_tile, make_product, matmul_precision

import epinorm
from epinorm.backends import memo
from epinorm.backends.cuda.gemm import forward as single
from epinorm.backends.cuda.plan import hopper as hopper_plan
from epinorm.backends.cuda.plan.hopper_tile import Tile, operand_slots
from epinorm.backends.engine import plan_for
from epinorm.chain.pointwise import DEFINITIONS
from epinorm.tools.accuracy import allowed_error, relative_error

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)

GROUP_SIZES = (
    2,
    4,
    8,
    12,
    16,
    20,
    24,
    32,
    40,
    48,
    64,
    96,
    100,
    128,
    192,
    256,
    384,
    512,
    768,
    1024,
    2048,
)
ROWS = (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000, 1024, 4097)

IN_TURN = Tile(64, 64, 0, ping_pong=True)
TOGETHER = Tile(128, 128, 0, ping_pong=False)


@pytest.fixture
def without_guard(monkeypatch):
    """Leave out the range guard's kernel, a second one to compile for each chain and group size:
    tests of values that it would never touch. tests/gpu/test_precision.py has it in."""
    monkeypatch.setattr(single, "LARGEST_GUARDED_GROUP", 0)  # no group is guarded
    memo.clear()
    yield
    memo.clear()


def sixteen_bit(channels: int) -> str:
    return "bfloat16" if GROUP_SIZES.index(channels) % 2 else "float16"


# ---- shapes ----


SIZES = [("16 bit", channels) for channels in GROUP_SIZES]
SIZES += [
    ("highest", channels) for channels in (2, 8, 12, 16, 24, 40, 96, 128, 192, 256, 512, 1024)
]
SIZES += [("high", channels) for channels in (4, 12, 16, 100, 48, 192, 768, 2048)]


@pytest.mark.usefixtures("without_guard")
@pytest.mark.parametrize("kind, channels", SIZES)
def test_group_sizes(kind, channels):
    """Whatever tile the plan takes; N is no multiple of it, nor K of a step.

    In groups of 2 or 4 a large eps: else the few that are nearly constant outweigh all others.
    """
    kind = sixteen_bit(channels) if kind == "16 bit" else kind
    groups = max(5, 520 // channels)
    groups += groups % 2 if channels % 8 else 0  # rows of whole 16-byte units
    chain = "group_norm({groups},EPS)|leaky_relu(0.01)|scale(2)"
    chain = chain.replace("EPS", "0.1" if channels < 8 else "1e-5")
    uniform = channels % 3 == 0
    case = make_product(129, 520, channels, groups, kind, chain, training=True, uniform=uniform)
    assert hopper_plan.why_not(case.problem) is None
    case.check()


@pytest.mark.parametrize("m", ROWS)
def test_rows_in_both_schedules(m):
    for tile in (IN_TURN, TOGETHER):
        with forced_tile(tile):
            make_product(m, 200, 16, 17, training=True).check()
    with forced_tile(TOGETHER):
        make_product(m, 200, 16, 17, "highest", training=True, uniform=True).check()


@pytest.mark.parametrize("m", [1, 15, 17, 63])
@pytest.mark.parametrize("kind", ["bfloat16", "high", "highest"])
def test_few_rows_with_the_tile_of_the_plan(m, kind):
    make_product(m, 1032, 16, 64, kind, training=m == 15).check()


@pytest.mark.parametrize("k", [8, 16, 56, 64, 72, 128, 136, 512, 1000, 4104])
def test_k_of_16_bit(k):
    """From less than a step to more than the ring holds, ragged."""
    for tile in (IN_TURN, TOGETHER):
        with forced_tile(tile):
            make_product(300, k, 16, 17, uniform=True).check()


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 7, 8, 63, 65, 129, 1001, 4099])
def test_k_of_fp32(k):
    for kind, tile in (("highest", TOGETHER), ("high", IN_TURN)):
        with forced_tile(tile):
            make_product(300, k, 16, 17, kind, uniform=True, bias=False).check()


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 5, 8, 9, 16, 33])
def test_columns(groups):
    for kind, tile in (("bfloat16", IN_TURN), ("bfloat16", TOGETHER), ("highest", TOGETHER)):
        with forced_tile(tile):
            make_product(130, 136, 16, groups, kind, training=True).check()


WIDTHS = [(width, None) for width in (8, 16, 24, 32, 40, 64, 72, 128, 136, 200, 248, 256)]
WIDTHS += [(width, torch.float32) for width in (8, 16, 24, 64, 136, 256)]


@pytest.mark.parametrize("width, out_dtype", WIDTHS)
def test_widths_of_a_tile(width, out_dtype):
    """Rows leave in units of 16 to 128 bytes, by what divides a tile's row."""
    with forced_tile(Tile(64, width, 0)):
        make_product(200, 72, 8, 33, out_dtype=out_dtype, training=True).check()


@pytest.mark.parametrize("k", [24, 128, 384])
@pytest.mark.parametrize("kind", ["bfloat16", "high"])
def test_every_tile_that_keeps_w_in_shared_memory(k, kind):
    """Also where a tile of x has more steps than the ring has slots."""
    case = make_product(4099, k, 8, 8, kind, training=True)
    tiles = [t for t in hopper_plan.candidates(case.problem) if t.resident_steps]
    assert {t.tf32 for t in tiles} == ({True, False} if kind == "high" else {False})
    longer = [t for t in tiles if t.resident_steps > t.stages]
    assert bool(longer) == (kind == "high" and k == 384)
    for tile in tiles:
        with forced_tile(tile):
            case.check()


# ---- tiles ----

TILES = [
    (Tile(128, 256, 0, ping_pong=False), "bfloat16"),
    (Tile(128, 256, 0, ping_pong=False, cluster=2), "bfloat16"),
    (Tile(128, 128, 0), "bfloat16"),
    (Tile(128, 128, 0, cluster=2), "float16"),
    (Tile(64, 256, 0), "bfloat16"),
    (Tile(64, 128, 0, cluster=2), "bfloat16"),
    (Tile(128, 64, 2, ping_pong=False), "bfloat16"),
    (Tile(64, 64, 2), "float16"),
    (Tile(64, 64, 3, group=1), "bfloat16"),
    (Tile(128, 192, 0, ping_pong=False, group=3), "bfloat16"),
    (Tile(64, 256, 0, ping_pong=False, split_columns=True), "bfloat16"),
    (Tile(128, 256, 0, ping_pong=False), "high"),
    (Tile(128, 128, 0, tf32=True), "high"),
    (Tile(64, 128, 0, tf32=True), "high"),
    (Tile(64, 256, 0, tf32=True, register_a=True), "high"),
    (Tile(128, 256, 0, ping_pong=False, tf32=True, register_a=True), "high"),
    (Tile(64, 64, 2, tf32=True, register_a=True), "high"),
    (Tile(64, 64, 0, tf32=True, register_a=True, consumers=4), "high"),
    (Tile(128, 128, 0, ping_pong=False), "highest"),
    (Tile(128, 96, 0, ping_pong=False, cluster=2), "highest"),
    (Tile(64, 64, 0), "highest"),
    (Tile(64, 64, 0, fold_steps=1), "highest"),
    (Tile(64, 64, 0, fold_steps=0), "highest"),
    (Tile(128, 64, 2, ping_pong=False, fold_steps=0), "highest"),
    (Tile(128, 64, 2, ping_pong=False, fold_steps=3), "highest"),
]


@pytest.mark.usefixtures("without_guard")
@pytest.mark.parametrize("tile, kind", TILES)
def test_every_kind_of_tile(tile, kind):
    """More tiles than multiprocessors: the ring, its parities and the turns go round many times."""
    with forced_tile(tile):
        make_product(4097, 264, 16, 129, kind, training=True).check()


FROM_REGISTERS = [
    Tile(64, 256, 0, tf32=True, register_a=True),
    Tile(128, 192, 0, ping_pong=False, tf32=True, register_a=True),
    Tile(64, 256, 0, ping_pong=False, split_columns=True, tf32=True, register_a=True, cluster_n=2),
    Tile(64, 128, 0, tf32=True, register_a=True, cluster_n=4),
    Tile(128, 128, 0, ping_pong=False, tf32=True, register_a=True, cluster_n=3),
]
SHARING = [
    Tile(128, 192, 0, ping_pong=False, cluster_n=4),
    Tile(128, 256, 0, ping_pong=False, cluster_n=3),
    Tile(128, 256, 0, ping_pong=False, cluster_n=8),
    Tile(64, 192, 0, cluster_n=4),
    Tile(64, 128, 0, cluster_n=8),
    Tile(128, 128, 0, cluster_n=6),
    Tile(128, 96, 0, cluster_n=5),
]


@pytest.mark.parametrize("k", [4, 28, 32, 36, 100, 512])
@pytest.mark.parametrize("tile", FROM_REGISTERS, ids=str)
def test_tf32_from_registers(tile, k):
    """Sums of one step and of an odd number, that end within one; W's rows at any stride."""
    channels, chain = tile.block_n * tile.cluster_n, "group_norm({groups})|silu"
    with forced_tile(tile):
        make_product(4099, k, channels, 2, "high", chain, training=True).check()
        case = make_product(300, k, channels, 1, "high", "add_residual|layer_norm", uniform=True)
        wide = torch.randn(channels, k + 3, device="cuda") / k**0.5
        case.inputs = case.inputs._replace(weight=wide[:, 1 : k + 1])
        case.check()


def test_tf32_from_registers_keeps_what_is_not_finite():
    """Inf and NaN of x and W come out where PyTorch's products have them."""
    with forced_tile(Tile(64, 128, 0, tf32=True, register_a=True)):
        case = make_product(200, 96, 16, 8, "high")
        x, weight = case.inputs.x, case.inputs.weight
        x[3, 5], x[70, 95] = float("inf"), float("nan")
        weight[17, 40] = float("nan")
        y = case.ours().y
        assert torch.equal(y.isnan(), case.pytorch(torch.float64)["y"].isnan())


@pytest.mark.parametrize("tile", SHARING, ids=str)
def test_groups_that_blocks_share(tile):
    """Each warpgroup exchanges for its own rows; more tiles than clusters."""
    channels = tile.block_n * tile.cluster_n
    with forced_tile(tile):
        make_product(4097, 264, channels, 3, "bfloat16", training=True).check()
        make_product(70, 72, channels, 1, "float16", "add_residual|layer_norm|silu").check()
        make_product(300, 72, channels, 1, chain="rms_norm|gelu", norm_bias=False).check()


@pytest.mark.parametrize("kind", ["bfloat16", "high", "highest"])
def test_element_operands(kind):
    """Before the norm, behind it and without one; a row block is not full, nor a tile's columns."""
    for training in (False, True):
        chain = "add_residual|group_norm({groups})|silu|add_residual"
        make_product(300, 72, 16, 33, kind, chain, training=training).check()


HELD = [
    (Tile(64, 192, 0, cluster_n=4), "bfloat16", 768),
    (Tile(64, 256, 0, cluster_n=3), "high", 768),
    (Tile(128, 128, 0, ping_pong=False), "highest", 32),
    (Tile(64, 128, 0, cluster_n=8), "float16", 1024),
]


@pytest.mark.parametrize("tile, kind, channels", HELD, ids=str)
def test_an_element_operand_through_the_ring(tile, kind, channels):
    """More tiles than blocks, sums of one step, rows that do not begin on 16 bytes."""
    with forced_tile(tile):
        for rows, k, chain, training in (
            (20003, 264, "add_residual|group_norm({groups})", False),
            (70, 72, "group_norm({groups})|silu|mul_element", True),
            (4097, 64, "mul_element|group_norm({groups})|silu", True),
        ):
            groups = max(768 // channels, 1)
            case = make_product(rows, k, channels, groups, kind, chain, training=training)
            instance = hopper_plan.instance_for(case.problem, fitted(case.problem, tile))
            assert operand_slots(instance) > 0
            case.check()
            (element,) = case.inputs.operands
            room = torch.empty(element.numel() + 1, dtype=element.dtype, device="cuda")[1:]
            case.inputs = case.inputs._replace(operands=(room.view_as(element).copy_(element),))
            case.check()


@pytest.mark.parametrize("tile, kind", [HELD[0][:2], HELD[1][:2]], ids=str)
def test_a_sum_of_what_came_through_the_ring(tile, kind):
    with forced_tile(tile):
        case = make_product(4097, 264, 768, 1, kind, "add_residual|layer_norm|returns(sum)")
        instance = hopper_plan.instance_for(case.problem, fitted(case.problem, tile))
        assert operand_slots(instance) > 0
        case.check_with_sum()


# ---- chains ----


@pytest.mark.parametrize("name", sorted(set(DEFINITIONS) - {"dropout", "mul_row"}))
def test_every_operation_before_and_after(name):
    text = {"scale": "scale(1.5)", "add": "add(-0.25)", "clamp": "clamp(-0.5,0.75)"}.get(name, name)
    with forced_tile(IN_TURN):
        chain = f"{text}|group_norm({{groups}})|{text}"
        make_product(70, 64, 16, 4, "float16", chain, out_dtype=torch.float32).check()


@pytest.mark.parametrize("kind", ["bfloat16", "highest"])
def test_layer_and_rms_norm(kind):
    make_product(129, 264, 256, 1, kind, "layer_norm|gelu", training=True).check()
    make_product(129, 264, 128, 1, kind, "rms_norm", norm_bias=False, training=True).check()
    chain = "silu|rms_norm(1e-06)|scale(2)"
    make_product(129, 264, 64, 1, kind, chain, norm_bias=False, uniform=True).check()


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "high", "highest"])
def test_operands(kind):
    chain = "mul_channel|add_residual|group_norm({groups})|add_residual|silu|mul_channel"
    make_product(200, 264, 16, 33, kind, chain, training=True).check()


@pytest.mark.parametrize("present", list(itertools.product([False, True], repeat=3)))
def test_absent_parameters(present):
    bias, weight, norm_bias = present
    with forced_tile(IN_TURN):
        make_product(
            100, 64, 16, 8, bias=bias, norm_weight=weight, norm_bias=norm_bias, training=True
        ).check()


@pytest.mark.parametrize("factor", ["2", "0.25", "-2", "3"])
def test_a_last_scale(factor):
    """Taken into gamma and beta or not: the same values."""
    with forced_tile(IN_TURN):
        make_product(
            100, 64, 16, 8, chain="group_norm({groups})|relu|scale(" + factor + ")"
        ).check()
        chain = "group_norm({groups})|silu|scale(" + factor + ")"
        make_product(100, 64, 16, 8, "float16", chain, out_dtype=torch.float32).check()


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_autocast_has_a_linear_in_16_bit_and_a_norm_in_fp32(kind):
    chain = "mul_channel|group_norm({groups})|silu|add_residual"
    make_product(200, 264, 16, 33, kind, chain, out_dtype=torch.float32, training=True).check()
    make_product(200, 264, 16, 33, kind, out_dtype=torch.float32, training=True).check()


# ---- hard inputs ----


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "high", "highest"])
@pytest.mark.parametrize("offset", [3.0, 1000.0])
def test_offset_inputs(kind, offset):
    for uniform in (False, True):
        make_product(200, 1024, 16, 16, kind, offset=offset, uniform=uniform, training=True).check()


def test_constant_groups_give_beta():
    """Rows of W alike within a group: the variance is zero, whatever the mean."""
    for kind in ("bfloat16", "high", "highest"):
        case = make_product(65, 72, 16, 8, kind, bias=False, offset=100.0)
        case.inputs.weight.copy_(case.inputs.weight[::16].repeat_interleave(16, 0))
        beta = case.inputs.norm_bias.double()
        expected = 2 * torch.where(beta > 0, beta, beta * 0.01)
        eps = torch.finfo(case.problem.dtype).eps
        assert relative_error(case.ours().y, expected.expand(65, -1)) <= eps


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "high", "highest"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_in_x_stay_in_their_row(kind, value):
    case = make_product(200, 136, 16, 33, kind, training=True)
    clean = case.ours()
    case.inputs.x[70, 5] = value
    found, eager = case.ours(), case.eager["y"]
    assert torch.equal(found.y.isnan(), eager.isnan())
    assert found.y[70].isnan().all()
    others = torch.arange(200, device="cuda") != 70
    for ours, before in zip(found.outputs, clean.outputs, strict=True):
        assert torch.equal(ours[others], before[others])


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "high", "highest"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_inf_in_weight_stay_in_their_group(kind, value):
    case = make_product(200, 136, 16, 33, kind, training=True)
    clean = case.ours()
    case.inputs.weight[16 * 7 + 3, 9] = value
    found, eager = case.ours(), case.eager["y"]
    assert torch.equal(found.y.isnan(), eager.isnan())
    assert found.y[:, 16 * 7 : 16 * 8].isnan().all()
    others = torch.arange(33 * 16, device="cuda") // 16 != 7
    assert torch.equal(found.y[:, others], clean.y[:, others])
    assert torch.equal(found.mean[:, others[::16]], clean.mean[:, others[::16]])


@pytest.mark.parametrize("kind", ["bfloat16", "high", "highest"])
def test_nan_beyond_the_rows_of_x_is_not_read(kind):
    """x as part of a wider matrix of NaN: neither the columns to its right nor the rows below."""
    case = make_product(70, 140 if kind != "bfloat16" else 136, 16, 5, kind)
    expected = case.ours().y
    m, k = case.inputs.x.shape
    wide = torch.full((m + 9, k + 24), float("nan"), device="cuda", dtype=case.problem.dtype)
    wide[:m, :k] = case.inputs.x
    case.inputs = case.inputs._replace(x=wide[:m, :k])
    assert torch.equal(case.ours().y, expected)


@pytest.mark.parametrize("kind", ["bfloat16", "high", "highest"])
@pytest.mark.parametrize("which", ["x", "weight"])
def test_odd_addresses_and_strides(kind, which):
    case = make_product(70, 136, 16, 5, kind)
    expected = case.ours().y
    matrix = getattr(case.inputs, which)
    rows, k = matrix.shape
    shifted = matrix.new_full((rows * k + 1,), float("nan"))[1:].view(rows, k)
    shifted.copy_(matrix)
    wide = matrix.new_full((rows, k + 3), float("nan"))
    wide[:, :k] = matrix
    for odd in (shifted, wide[:, :k], wide.t().contiguous().t()[:, :k]):
        if odd.stride(1) != 1:  # through the public function, which makes it dense
            tensors = case.inputs._replace(**{which: odd})
            with matmul_precision(case.problem.precision), torch.no_grad():
                found = public(case, tensors)
        else:
            found = dataclasses.replace(case, inputs=case.inputs._replace(**{which: odd})).ours().y
        assert torch.equal(found, expected)


# ---- the public function ----


def public(case, tensors=None):
    x, weight, bias, norm_weight, norm_bias, operands = (tensors or case.inputs)[:6]
    chain = case.problem.chain
    return epinorm.linear_norm(
        *(x, weight, bias),
        norm=chain.norm,
        norm_weight=norm_weight,
        norm_bias=norm_bias,
        pre=chain.pre,
        post=chain.post,
        operands=operands,
        strategy="single",
    )


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "high", "highest"])
def test_linear_norm_with_and_without_gradients(kind):
    # No kink in the chain: a sign that rounding flips would be all of the gradients' error.
    case = make_product(200, 264, 16, 33, kind, "group_norm({groups})|silu|scale(2)")
    with matmul_precision(case.problem.precision):
        with torch.no_grad():
            y = public(case)
        assert torch.equal(y, case.ours().y)
        leaves = [t.clone().requires_grad_() for t in case.inputs[:5]]
        trained = public(case, [*leaves, ()])
        allowed = allowed_error(relative_error(case.eager["y"], case.truth["y"]), y.dtype)
        assert relative_error(trained, case.truth["y"]) <= allowed
        dy = torch.randn_like(y)
        ours = torch.autograd.grad(trained, leaves, dy)
    exact, eager = (gradients(case, dtype, dy) for dtype in (torch.float64, None))
    for mine, theirs, truth in zip(ours, eager, exact, strict=True):
        limit = allowed_error(relative_error(theirs, truth), case.problem.dtype)
        assert relative_error(mine, truth) <= limit


def gradients(case, dtype, dy):
    with matmul_precision(case.problem.precision):
        leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in case.inputs[:5]]
        x, weight, bias, norm_weight, norm_bias = leaves
        z = F.linear(x, weight, bias)
        y = F.silu(F.group_norm(z, case.problem.groups, norm_weight, norm_bias)) * 2
        return torch.autograd.grad(y, leaves, dy.to(y.dtype))


def test_what_it_cannot_serve_is_an_error_that_says_why():
    with pytest.raises(RuntimeError, match="'single' cannot serve.*a group of 13 channels"):
        public(make_product(8, 64, 13, 5))


def test_auto_takes_it_for_the_benchmark(monkeypatch):
    monkeypatch.delenv("EPINORM_CORE", raising=False)
    plan_for.cache_clear()
    for kind in ("bfloat16", "high", "highest"):
        problem = make_product(1024, 8192, 16, 512, kind).problem
        assert plan_for(problem).strategy == "single", kind


def test_planes_known_beforehand_give_the_same_bits():
    for kind in ("highest", "high"):
        case = make_product(200, 264, 16, 33, kind)
        with forced_tile(TOGETHER):
            expected = case.ours().y
            epinorm.prepack(case.inputs.weight)
            assert torch.equal(case.ours().y, expected)


# ---- streams, graphs, races ----


@pytest.mark.parametrize("kind", ["bfloat16", "high", "highest"])
def test_a_cuda_graph_replays_with_new_inputs(kind):
    case = make_product(300, 264, 16, 33, kind, training=True)
    case.ours()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [case.run() for _ in range(3)]
    for source in (torch.randn, torch.rand):
        case.inputs.x.copy_(source(300, 264, device="cuda"))
        for forward in captured:
            for tensor in forward.outputs:
                tensor.fill_(float("nan"))
        graph.replay()
        expected = case.ours()
        for forward in captured:
            for found, right in zip(forward.outputs, expected.outputs, strict=True):
                assert torch.equal(found, right)


@pytest.mark.parametrize("kind", ["bfloat16", "high", "highest"])
def test_work_lands_on_the_current_stream(kind):
    case = make_product(2000, 264, 16, 33, kind)
    expected = case.ours().y
    late = torch.full_like(case.inputs.x, float("nan"))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        late.copy_(case.inputs.x)
        found = case.run(case.inputs._replace(x=late)).y
    side.synchronize()
    assert torch.equal(found, expected)


RACES = [
    (Tile(64, 64, 0), "bfloat16"),
    (Tile(128, 256, 0, ping_pong=False), "bfloat16"),
    (Tile(128, 128, 2, cluster=2), "bfloat16"),
    (Tile(128, 128, 0, ping_pong=False), "highest"),
    (Tile(64, 256, 0, ping_pong=False, split_columns=True, cluster_n=2), "bfloat16"),
    (Tile(64, 128, 0, tf32=True), "high"),
]


@pytest.mark.parametrize("tile, kind", RACES)
def test_a_thousand_runs_give_the_same_bits(tile, kind):
    channels, groups = (512, 5) if tile.cluster_n > 1 else (16, 129)
    with forced_tile(tile):
        case = make_product(2100, 328, channels, groups, kind, training=True)
        case.check_repeats(1000)


@pytest.mark.alone
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_on_the_second_gpu():
    for kind in ("bfloat16", "highest"):
        case = make_product(200, 264, 16, 33, kind, device="cuda:1")
        on_first = dataclasses.replace(case.problem, device=torch.device("cuda", 0))
        inputs = type(case.inputs)(*(t.to("cuda:0") for t in case.inputs[:5]), case.inputs.operands)
        with torch.cuda.device(0):
            expected = dataclasses.replace(case, problem=on_first, inputs=inputs).run().y
            assert torch.equal(case.run().y.cpu(), expected.cpu())


def test_results_are_not_overwritten_by_the_next_call():
    case = make_product(300, 264, 16, 33, "highest")
    first = case.ours().y
    copy = first.clone()
    other = make_product(300, 264, 16, 33, "highest")
    other.ours()
    assert torch.equal(bits(first), bits(copy))


SHARED = [("bfloat16", 512, 2), ("high", 512, 4), ("highest", 512, 4), ("float16", 1024, 4)]
SHARED += [("bfloat16", 2048, 8), ("highest", 256, 1)]


@pytest.mark.usefixtures("without_guard")
@pytest.mark.parametrize("kind, channels, blocks", SHARED)
def test_groups_that_warpgroups_and_blocks_share(kind, channels, blocks):
    tile = Tile(64, channels // blocks, 0, False, split_columns=True, cluster_n=blocks)
    with forced_tile(tile):
        make_product(2000, 264, channels, 9, kind, training=True, offset=3.0).check()
