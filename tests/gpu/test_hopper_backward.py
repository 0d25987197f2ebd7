"""The backward products on the Hopper core: accuracy against float64 and the library."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from product_case import matmul_precision

import epinorm
from epinorm.accuracy import allowed_error, relative_error
from epinorm.cuda import hopper_product

pytestmark = pytest.mark.gpu

PRECISIONS = {2: "highest", 1: "high"}
SIZES = [(128, 128, 128), (1000, 520, 1048), (300, 72, 264), (17, 1024, 512), (2048, 1024, 1024)]


@pytest.fixture(autouse=True)
def _needs_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Hopper kernel needs compute capability 9.0")


def matrices(m: int, k: int, n: int, spread: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """dz whose rows differ by factors of e^spread, a weight, and x with a mean far from zero."""
    rows = torch.exp(spread * torch.randn(m, 1, device="cuda"))
    dz = torch.randn(m, n, device="cuda") * rows
    return dz, torch.randn(n, k, device="cuda") / k**0.5, torch.rand(m, k, device="cuda") + 1.0


def check(dz: Tensor, weight: Tensor, x: Tensor, planes: int, limit: float = 1.0) -> None:
    """No less accurate than the library; its error may be ``limit`` times as large."""
    exact, precision = torch.float64, PRECISIONS[planes]
    with matmul_precision(precision):
        library = (torch.mm(dz, weight), torch.mm(dz.t(), x))
    truth = (dz.to(exact) @ weight.to(exact), dz.to(exact).t() @ x.to(exact))
    for compute, right, eager in zip((True, False), truth, library, strict=True):

        def ours(input_gradient: bool = compute) -> Tensor:
            if input_gradient:
                return hopper_product.input_gradient(dz, weight, planes)
            return hopper_product.weight_gradient(dz, x, planes)

        found = ours()
        allowed = allowed_error(limit * relative_error(eager, right), torch.float32)
        assert relative_error(found, right) <= allowed
        assert torch.equal(found, ours())


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


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_inf_stay_in_their_row(value: float) -> None:
    dz, weight, x = matrices(256, 264, 520)
    dz[4, 6] = value
    for planes in (1, 2):
        dx = hopper_product.input_gradient(dz, weight, planes)
        dw = hopper_product.weight_gradient(dz, x, planes)
        assert torch.equal(dx.isfinite(), torch.mm(dz, weight).isfinite())
        assert torch.equal(dw.isfinite(), torch.mm(dz.t(), x).isfinite())


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
