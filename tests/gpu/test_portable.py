"""The portable kernel on any GPU since Ampere: values, bits, tiles, odd shapes, products.

The rest of the suite runs with it too: `EPINORM_CORE=portable make test-gpu`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from product_case import make_product

import epinorm
from epinorm.backends import memo
from epinorm.backends.cuda.gemm import forward as single
from epinorm.backends.cuda.gemm.product import prepare_product
from epinorm.backends.cuda.plan import portable as portable_plan
from epinorm.backends.cuda.plan.hopper_product import ProductShape
from epinorm.backends.cuda.plan.portable import choose_product_tile
from epinorm.backends.cuda.plan.portable_tile import PortableTile, largest_stages
from epinorm.backends.cuda.runtime.device import gpu_of
from epinorm.tools.accuracy import relative_error
from epinorm.tools.verify import poisoned_memory

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
    reason="needs a GPU since Ampere",
)

PLANES = {"high": 1, "highest": 2}


@pytest.fixture
def without_guard(monkeypatch):
    """Leave out the range guard's kernel, a second one to compile for each chain and group size:
    tests of values that it would never touch."""
    monkeypatch.setattr(single, "LARGEST_GUARDED_GROUP", 0)  # no group is guarded
    memo.clear()
    yield
    memo.clear()


def portable_case(*args, **kwargs):
    return dataclasses.replace(make_product(*args, **kwargs), core="portable")


@contextlib.contextmanager
def forced_tile(tile: PortableTile) -> Iterator[None]:
    """Within, the portable kernel takes this tile for every problem (stages 0: what fits)."""

    def chosen(problem, gpu):
        if tile.stages:
            return tile
        limit = gpu.shared_of_block
        if tile.blocks > 1:
            limit = min(limit, gpu.shared_of_multiprocessor // tile.blocks - 1024)
        stages = largest_stages(portable_plan.instance_for(problem, tile), limit)
        return dataclasses.replace(tile, stages=min(stages, 8))

    before = portable_plan.choose_tile
    portable_plan.choose_tile = chosen
    memo.clear()
    try:
        yield
    finally:
        portable_plan.choose_tile = before
        memo.clear()


# ---- shapes ----

GROUP_SIZES = (2, 4, 8, 16, 24, 32, 40, 48, 64, 72, 96, 128, 136, 192, 256, 384, 512)
SIZES = [("bfloat16", channels) for channels in GROUP_SIZES]
SIZES += [("float16", channels) for channels in (4, 40, 128)]
SIZES += [("high", channels) for channels in (16, 48, 104, 256)]
SIZES += [("highest", channels) for channels in (2, 8, 16, 24, 40, 64, 72, 96, 128, 136, 192, 256)]


@pytest.mark.usefixtures("without_guard")
@pytest.mark.parametrize("kind, channels", SIZES)
def test_group_sizes(kind, channels):
    """Whatever tile the plan takes; N is no multiple of it, nor K of a step.

    In groups of 2 or 4 a large eps: else the few that are nearly constant outweigh all others.
    """
    groups = max(5, 520 // channels)
    chain = "group_norm({groups},EPS)|leaky_relu(0.01)|scale(2)"
    chain = chain.replace("EPS", "0.1" if channels < 8 else "1e-5")
    uniform = channels % 3 == 0
    case = portable_case(129, 520, channels, groups, kind, chain, training=True, uniform=uniform)
    assert portable_plan.why_not(case.problem) is None
    case.check()


@pytest.mark.parametrize("m", [0, 1, 15, 16, 17, 63, 65, 127, 129, 1000, 4097])
def test_rows(m):
    for tile in (PortableTile(64, 64, 2, 2, 32), PortableTile(16, 32, 1, 4)):
        with forced_tile(tile):
            portable_case(m, 200, 16, 17, training=True).check()
    portable_case(m, 200, 16, 17, "highest", training=True, uniform=True).check()


@pytest.mark.parametrize("k", [1, 2, 3, 7, 8, 9, 16, 31, 32, 33, 56, 63, 64, 65, 130, 513, 1000])
@pytest.mark.parametrize("kind", ["bfloat16", "high", "highest"])
def test_k(k, kind):
    """From less than a unit to more than the ring holds; rows on 16 bytes, on 4 and on 2."""
    for tile in (PortableTile(32, 32, 2, 2, 64, 3), PortableTile(32, 32, 2, 2, 32, 2)):
        with forced_tile(tile):
            portable_case(300, k, 16, 17, kind, uniform=True, bias=False).check()


@pytest.mark.parametrize("channels, groups", [(2, 1), (2, 3), (2, 37), (4, 9), (8, 5), (24, 3)])
@pytest.mark.parametrize("kind", ["bfloat16", "highest"])
def test_columns_that_do_not_fill_units(channels, groups, kind):
    """Rows of y and z that start on 4 or 8 bytes."""
    chain = "group_norm({groups},0.1)|leaky_relu(0.01)|scale(2)"
    portable_case(130, 136, channels, groups, kind, chain, training=True).check()


# ---- tiles ----

TILES = [
    (PortableTile(64, 64, 2, 4), "bfloat16"),
    (PortableTile(64, 64, 2, 4, 32, 3), "float16"),
    (PortableTile(64, 64, 2, 2, blocks=2), "bfloat16"),
    (PortableTile(64, 64, 2, 2, 32, 2, blocks=2, group=1), "bfloat16"),
    (PortableTile(64, 64, 4, 2), "bfloat16"),
    (PortableTile(64, 64, 1, 8, group=3), "bfloat16"),
    (PortableTile(32, 64, 4, 2), "high"),
    (PortableTile(16, 16, 2, 4), "bfloat16"),
    (PortableTile(16, 16, 8, 1), "bfloat16"),
    (PortableTile(64, 48, 2, 4), "bfloat16"),
    (PortableTile(64, 32, 2, 4, 32), "highest"),
    (PortableTile(64, 32, 2, 4, 64, 2), "highest"),
    (PortableTile(64, 32, 2, 2, 32, blocks=2), "highest"),
    (PortableTile(32, 32, 2, 4, 32), "highest"),
    (PortableTile(16, 160, 2, 2, 32, 2), "highest"),  # wide
    (PortableTile(16, 256, 2, 1, 32, 2), "bfloat16"),
]


@pytest.mark.usefixtures("without_guard")
@pytest.mark.parametrize("tile, kind", TILES)
def test_every_kind_of_tile(tile, kind):
    with forced_tile(tile):
        portable_case(2049, 264, 16, 129, kind, training=True).check()


SHARED = [("bfloat16", 64, 2), ("bfloat16", 240, 5), ("high", 512, 8), ("highest", 256, 8)]
SHARED += [("highest", 96, 4), ("bfloat16", 96, 3)]


@pytest.mark.usefixtures("without_guard")
@pytest.mark.parametrize("kind, channels, parts", SHARED)
def test_groups_that_warps_share(kind, channels, parts):
    for along_rows in (1, 2):
        if along_rows * parts > 8:
            continue
        columns = parts * (2 if along_rows * parts * 2 <= 8 else 1)
        tile = PortableTile(32, channels // parts, along_rows, columns, 32, 2, parts)
        with forced_tile(tile):
            portable_case(600, 264, channels, 9, kind, training=True, offset=3.0).check()


# ---- chains and hard inputs ----

HEAVY = "mul_channel|add_residual|group_norm({groups})|silu|add_residual|mul_channel"


@pytest.mark.usefixtures("without_guard")
@pytest.mark.parametrize("kind", ["bfloat16", "highest"])
@pytest.mark.parametrize("chain", [HEAVY, "layer_norm|gelu", "silu|rms_norm(1e-06)|scale(2)"])
def test_chains(chain, kind):
    channels, groups = (16, 33) if "group" in chain else (256, 1)
    norm_bias = "rms" not in chain
    case = portable_case(
        200, 264, channels, groups, kind, chain, training=True, norm_bias=norm_bias
    )
    case.check()


def test_the_public_function_takes_rows_that_the_copy_engine_cannot(monkeypatch):
    """On Hopper too, where its own core refuses them."""
    monkeypatch.delenv("EPINORM_CORE", raising=False)
    case = portable_case(65, 63, 24, 5)
    x, weight, bias, norm_weight, norm_bias = case.inputs[:5]
    y = epinorm.linear_norm(
        *(x, weight, bias),
        norm=case.problem.chain.norm,
        norm_weight=norm_weight,
        norm_bias=norm_bias,
        post=case.problem.chain.post,
        strategy="single",
    )
    assert torch.equal(y, case.check().y)


def test_autocast_has_a_linear_in_16_bit_and_a_norm_in_fp32():
    chain = "mul_channel|group_norm({groups})|silu|add_residual"
    portable_case(200, 264, 16, 33, "float16", chain, out_dtype=torch.float32).check()


@pytest.mark.parametrize("kind", ["bfloat16", "high", "highest"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_inf_stay_in_their_row_and_group(kind, value):
    case = portable_case(200, 136, 16, 33, kind, training=True)
    clean = case.ours()
    case.inputs.x[70, 5] = value
    case.inputs.weight[16 * 7 + 3, 9] = value
    found = case.ours()
    assert torch.equal(found.y.isnan(), case.eager["y"].isnan())
    rows = torch.arange(200, device="cuda") != 70
    columns = torch.arange(33 * 16, device="cuda") // 16 != 7
    assert torch.equal(found.y[rows][:, columns], clean.y[rows][:, columns])


@pytest.mark.parametrize("kind, k", [("bfloat16", 136), ("bfloat16", 133), ("highest", 133)])
@pytest.mark.parametrize("which", ["x", "weight"])
def test_odd_addresses_and_strides(kind, k, which):
    """Neither what lies beside the rows nor what lies behind them is read."""
    case = portable_case(70, k, 16, 5, kind)
    expected = case.ours().y
    matrix = getattr(case.inputs, which)
    rows, _ = matrix.shape
    for extra, shift in ((3, 0), (4, 2), (8 - k % 8, 0), (24, 1)):
        wide = matrix.new_full((rows + 3, k + extra), float("nan"))[:, shift:]
        odd = wide[:rows, :k] if k <= wide.shape[1] else wide[:rows]
        odd.copy_(matrix)
        found = dataclasses.replace(case, inputs=case.inputs._replace(**{which: odd})).ours().y
        assert torch.equal(found, expected), (extra, shift)


@pytest.mark.parametrize("kind", ["bfloat16", "highest"])
def test_hundreds_of_runs_give_the_same_bits(kind):
    case = portable_case(2100, 328, 16, 129, kind, training=True)
    case.check_repeats(300)


@pytest.mark.parametrize("kind", ["bfloat16", "highest"])
def test_a_cuda_graph_replays_with_new_inputs(kind):
    case = portable_case(300, 264, 16, 33, kind, training=True)
    case.ours()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = case.run()
    case.inputs.x.copy_(torch.rand(300, 264, device="cuda"))
    for tensor in captured.outputs:
        tensor.fill_(float("nan"))
    graph.replay()
    for found, right in zip(captured.outputs, case.ours().outputs, strict=True):
        assert torch.equal(found, right)


# ---- products with nothing after them ----

PRODUCTS = [(128, 256, 64), (1000, 520, 328), (17, 24, 8), (300, 72, 1032), (130, 100, 9)]


def product(a: Tensor, b: Tensor, major_k_a: bool, scale: Tensor) -> Tensor:
    rows, length = a.shape if major_k_a else a.shape[::-1]
    shape = ProductShape(rows, b.shape[1], length, 1)
    tile = choose_product_tile(1, gpu_of(a.device))
    multiply = prepare_product(shape, tile, major_k_a, a.device)
    like = torch.empty(rows, b.shape[1], device=a.device)
    with poisoned_memory([like]):
        key = (a.data_ptr(), b.data_ptr())
        return multiply(key, lambda: (a, a, b, b), scale.data_ptr())


def in_units(t: Tensor) -> Tensor:
    """The same matrix in rows of whole 16-byte units, the rest of them zeros."""
    rows, columns = t.shape
    wide = t.new_zeros((rows, -(-columns // 8) * 8))
    wide[:, :columns] = t
    return wide[:, :columns]


@pytest.mark.parametrize("major_k_a", [True, False])
@pytest.mark.parametrize("sizes", PRODUCTS, ids=str)
def test_products(sizes, major_k_a):
    rows, columns, length = sizes
    shape = (rows, length) if major_k_a else (length, rows)
    a = in_units(torch.randn(shape, device="cuda").half())
    b = in_units(torch.randn(length, columns, device="cuda").half())
    scale = torch.exp2(torch.randint(-9, 9, (rows,), device="cuda").float())
    found = product(a, b, major_k_a, scale)
    truth = scale.double()[:, None] * ((a if major_k_a else a.t()).double() @ b.double())
    assert relative_error(found, truth) <= 2e-6  # operands are exact, the sum is fp32
    assert torch.equal(found, product(a, b, major_k_a, scale))


def test_the_facts_of_this_gpu():
    gpu = gpu_of()
    assert gpu.capability == torch.cuda.get_device_capability()
    assert 48 * 1024 <= gpu.shared_of_block < gpu.shared_of_multiprocessor
