"""The backward products on both cores: accuracy against float64 and the library."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from product_case import matmul_precision, plane_products, split

import epinorm
from epinorm.backends.cuda.gemm.product import Product
from epinorm.backends.cuda.norm.backward import Largest
from epinorm.backends.cuda.plan.hopper_product import TILES, Choice, ProductShape, choose
from epinorm.backends.cuda.plan.hopper_tile import Tile
from epinorm.backends.engine import plan_for
from epinorm.chain import Chain
from epinorm.operator import calls
from epinorm.problem import Core, Inputs, Problem
from epinorm.tools.accuracy import allowed_error, relative_error

pytestmark = pytest.mark.gpu

PRECISIONS = {2: "highest", 1: "high"}
SIZES = [
    (128, 128, 128),
    (1000, 520, 1048),
    (300, 72, 264),
    (17, 1024, 512),
    (2048, 1024, 1024),
    (8192, 256, 256),  # dW in parts
    (1024, 2048, 4096),
]


CORE: Core = "hopper"


@pytest.fixture(autouse=True, params=["hopper", "portable"])
def _core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Hopper core needs compute capability 9.0")
    monkeypatch.setattr(sys.modules[__name__], "CORE", request.param)
    monkeypatch.setenv("EPINORM_CORE", request.param)
    _forget_plans()
    yield
    _forget_plans()


def _forget_plans() -> None:
    """A core is read when a call is planned."""
    calls.forget_plans()
    plan_for.cache_clear()


def matrices(m: int, k: int, n: int, spread: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """dz whose rows differ by factors of e^spread, a weight, and x with a mean far from zero."""
    rows = torch.exp(spread * torch.randn(m, 1, device="cuda"))
    dz = torch.randn(m, n, device="cuda") * rows
    return dz, torch.randn(n, k, device="cuda") / k**0.5, torch.rand(m, k, device="cuda") + 1.0


def problem(m: int, k: int, n: int, precision: str) -> Problem:
    fp32 = torch.float32
    return Problem(
        chain=Chain.parse("group_norm(1)|silu"),
        m=m, k=k, n=n, dtype=fp32, norm_dtype=fp32, out_dtype=fp32,
        has_bias=False, has_norm_weight=False, has_norm_bias=False, training=True,
        device=torch.device("cuda", 0), precision=precision,  # type: ignore[arg-type]
    )  # fmt: skip


EMPTY_SCALE = 2.0**-24
"""Of rows of zeros (common/empty_rows.cuh)."""


def scales_that_count(matrix: Tensor, planes: int) -> Tensor:
    scale = split(matrix, planes).scale
    return torch.where(scale == EMPTY_SCALE, 0.0, scale)


def gradients(dz: Tensor, weight: Tensor, x: Tensor, planes: int) -> tuple[Tensor, Tensor]:
    """dX and dW of a dz that no norm kernel has written."""
    return gradients_and_flags(dz, weight, x, planes)[:2]


def gradients_and_flags(
    dz: Tensor, weight: Tensor, x: Tensor, planes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dX, dW, and which rows and columns of dz are flagged; its largest magnitudes by PyTorch."""
    (m, n), k = dz.shape, x.shape[1]
    products = plane_products(problem(m, k, n, PRECISIONS[planes]), CORE)
    inputs = Inputs(x, weight, None, None, None, ())
    rows = (dz * scales_that_count(weight, planes)).abs().amax(1)
    columns = (dz * scales_that_count(x, planes)[:, None]).abs().amax(0)
    flags = (
        torch.zeros(m, dtype=torch.uint8, device="cuda"),
        torch.zeros(n, dtype=torch.uint8, device="cuda"),
    )
    addresses = rows.data_ptr(), 1, columns.data_ptr(), *(each.data_ptr() for each in flags)
    largest = Largest(dz, [rows, columns], *addresses)
    operands = [products.operands(inputs, None)]
    by = list(products.split_gradient(dz, operands[0].factors, largest))
    dx, dw = products.multiply(inputs, operands, lambda: dz, by)
    assert dx is not None
    assert dw is not None
    return dx, dw, *flags


def check(dz: Tensor, weight: Tensor, x: Tensor, planes: int, limit: float = 1.0) -> None:
    """No less accurate than the library; its error may be ``limit`` times as large."""
    exact = torch.float64
    with matmul_precision(PRECISIONS[planes]):  # type: ignore[arg-type]
        library = (torch.mm(dz, weight), torch.mm(dz.t(), x))
    truth = (dz.to(exact) @ weight.to(exact), dz.to(exact).t() @ x.to(exact))
    found, again = (gradients(dz, weight, x, planes) for _ in range(2))
    for i in range(2):
        allowed = allowed_error(limit * relative_error(library[i], truth[i]), torch.float32)
        assert relative_error(found[i], truth[i]) <= allowed
        assert torch.equal(found[i], again[i])


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products_are_as_accurate_as_the_library(sizes: tuple[int, int, int], planes: int) -> None:
    # High: both round to 11 bits, and differ by chance.
    check(*matrices(*sizes), planes, 1.0 if planes == 2 else 1.02)


@pytest.mark.parametrize("planes", [1, 2])
def test_scales_that_differ_from_row_to_row(planes: int) -> None:
    dz, weight, x = matrices(256, 264, 520, spread=4.0)
    weight *= torch.exp(4.0 * torch.randn(weight.shape[0], 1, device="cuda"))
    x *= torch.exp(4.0 * torch.randn(x.shape[0], 1, device="cuda"))
    check(dz, weight, x, planes, 1.0 if planes == 2 else 1.02)


@pytest.mark.parametrize("planes", [1, 2])
def test_what_the_planes_cannot_hold_is_computed_in_fp32(planes: int) -> None:
    dz, weight, x = matrices(256, 264, 520)
    dz[3] *= 1e-30
    dz[:, 7] *= 1e-30
    dz[5, 9] = 1e30
    check(dz, weight, x, planes, 2.0)
    weight[11, 0] = 1e30
    x[13] *= 1e-35
    check(dz, weight, x, planes, 2.0)


@pytest.mark.parametrize("planes", [1, 2])
def test_faint_elements_of_dz_flag_nothing(planes: int) -> None:
    """GELU's tail, or what a BatchNorm takes off where nothing comes through: less than rounding,
    row by row and column by column."""
    dz, weight, x = matrices(256, 264, 520)
    dz[:, ::3] *= torch.exp2(-100 * torch.rand(256, 174, device="cuda"))
    *found, row_flags, column_flags = gradients_and_flags(dz, weight, x, planes)
    assert not row_flags.any()
    assert not column_flags.any()
    allowed = 2.0**-10 if planes == 1 else 2.0**-21
    for ours, a, b in zip(found, (dz, dz.t()), (weight, x), strict=True):
        error = (ours - a.double() @ b.double()).norm(dim=1)
        terms = (a.double() ** 2 @ (b.double() ** 2).sum(1)).sqrt()
        assert (error <= allowed * terms).all()


@pytest.mark.parametrize("planes", [1, 2])
def test_what_is_beside_zeros_takes_no_part_in_scales(planes: int) -> None:
    dz, weight, x = matrices(256, 264, 520)
    weight[7] = x[9] = 0
    columns, rows = dz.clone(), dz
    columns[:, 7] = rows[9] = 1e15
    dx, dw = gradients(columns, weight, x, planes)[0], gradients(rows, weight, x, planes)[1]
    allowed = 2.0**-11 if planes == 1 else 2.0**-22
    assert relative_error(dx, columns.double() @ weight.double()) < allowed
    assert relative_error(dw, rows.double().t() @ x.double()) < allowed


@pytest.mark.parametrize("planes", [1, 2])
def test_lines_that_are_lost_in_a_scale_are_flagged(planes: int) -> None:
    dz, weight, x = matrices(256, 264, 520)
    dz[:, 11] = 2.0**-147
    dz[3] = 2.0**-148
    dz[5] = dz[:, 13] = 0
    _, _, row_flags, column_flags = gradients_and_flags(dz, weight, x, planes)
    assert row_flags.nonzero().squeeze(1).tolist() == [3]
    assert column_flags.nonzero().squeeze(1).tolist() == [11]
    check(dz, weight, x, planes, 1.0 if planes == 2 else 1.02)


@pytest.mark.parametrize("planes", [1, 2])
def test_an_element_that_is_not_held_costs_what_it_may_count_in(planes: int) -> None:
    """Of W in dX and of x in dW: nothing among ordinary ones, a column of small numbers by itself;
    the rest has the bits that it has with 0 in its place."""
    dz, weight, x = matrices(256, 264, 520)
    for matrix, index in ((weight, 0), (x, 1)):
        of_column = matrix[:, 40].clone()
        for ordinary in (1.0, 0.0):
            matrix[:, 40] = of_column * ordinary
            matrix[17, 40] = 0
            before = gradients(dz, weight, x, planes)
            matrix[17, 40] = 1.2345e-16
            after = gradients(dz, weight, x, planes)
            same = torch.full((264,), True, device="cuda")
            same[40] = ordinary != 0
            assert torch.equal(before[index][:, same], after[index][:, same])
            assert torch.equal(before[1 - index], after[1 - index])
        left = dz.double() if index == 0 else dz.double().t()
        truth = left @ matrix[:, 40].double()
        assert relative_error(after[index][:, 40], truth) < 1e-7
        matrix[:, 40] = of_column


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_inf_stay_in_their_row(value: float) -> None:
    dz, weight, x = matrices(256, 264, 520)
    dz[4, 6] = value
    for planes in (1, 2):
        dx, dw = gradients(dz, weight, x, planes)
        assert torch.equal(dx.isfinite(), torch.mm(dz, weight).isfinite())
        assert torch.equal(dw.isfinite(), torch.mm(dz.t(), x).isfinite())


INSTANCES = [
    (cost.tile, parts) for cost in TILES[1] for parts in (1, 3) if parts == 1 or cost.splits
]


@pytest.mark.parametrize("major_k_a", [True, False])
@pytest.mark.parametrize(("tile", "parts"), INSTANCES, ids=str)
def test_every_tile_whole_and_in_parts(tile: Tile, parts: int, major_k_a: bool) -> None:
    """Against float64, with ragged sizes; the last part of three is shorter than the others."""
    rows, columns, length = 328, 520, 64 * 7 + 24
    a = torch.randn((rows, length) if major_k_a else (length, rows), device="cuda").half()
    b = torch.randn(length, columns, device="cuda").half()
    scale = torch.exp2(torch.randint(-9, 9, (rows,), device="cuda").float())
    shape = ProductShape(rows, columns, length, 1)
    product = Product(shape, Choice(tile, parts, 0.0), major_k_a, a.device)
    found = product(0, lambda: (a, a, b, b), scale.data_ptr())
    right = scale.double()[:, None] * ((a if major_k_a else a.t()).double() @ b.double())
    assert relative_error(found, right) <= 2e-6  # operands are exact, the sum is fp32
    assert torch.equal(found, product(0, lambda: (a, a, b, b), scale.data_ptr()))


def test_the_shapes_above_have_sums_in_parts() -> None:
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    assert choose(ProductShape(256, 256, 8192, 1), sms).parts > 1
    assert choose(ProductShape(256, 256, 8192, 2), sms).parts > 1


@pytest.mark.parametrize("precision", ["high", "highest"])
def test_every_gradient_of_a_training_step(precision: str) -> None:
    m, k, n, groups = 512, 1024, 2048, 128
    x, weight = torch.randn(m, k), torch.randn(n, k) / k**0.5
    rest = [torch.randn(n) * 0.1, 1 + 0.2 * torch.randn(n), 0.2 * torch.randn(n)]
    # No kink: a sign that rounding flips would be all of the error.
    dy = torch.randn(m, n)
    found: dict[str, list[Tensor]] = {}
    for name, dtype in (
        ("ours", torch.float32),
        ("eager", torch.float32),
        ("truth", torch.float64),
    ):
        leaves = [t.to("cuda", dtype).requires_grad_() for t in (x, weight, *rest)]
        with matmul_precision(precision):  # type: ignore[arg-type]
            if name == "ours":
                y = epinorm.linear_norm(
                    *leaves[:3],
                    norm=epinorm.GroupNorm(groups),
                    norm_weight=leaves[3],
                    norm_bias=leaves[4],
                    post="silu",
                    strategy="single",
                )
            else:
                z = torch.nn.functional.linear(*leaves[:3])
                y = torch.nn.functional.group_norm(z, groups, leaves[3], leaves[4])
                y = torch.nn.functional.silu(y)
            found[name] = list(torch.autograd.grad(y, leaves, dy.to("cuda", dtype)))
    for ours, eager, truth in zip(found["ours"], found["eager"], found["truth"], strict=True):
        allowed = allowed_error(relative_error(eager, truth), torch.float32)
        assert relative_error(ours, truth) <= allowed * (1.02 if precision == "high" else 1.0)
