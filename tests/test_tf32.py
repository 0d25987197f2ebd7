"""TF32's rounding is exact, and reaches the operands of products, forward and backward."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from epinorm.tools.tf32 import RoundedOperands, round_to_tf32


def of_bits(*bits: int) -> Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def test_every_value_goes_to_the_nearest() -> None:
    bits = torch.randint(-(2**31), 2**31, (1 << 17,))
    denormal = torch.randint(0, 1 << 23, (1 << 12,))
    x = torch.cat([bits, denormal, -(2**31) + denormal]).to(torch.int32).view(torch.float32)
    x = x[x.isfinite()]
    exact = x.double()
    step = torch.ldexp(torch.ones_like(exact), torch.frexp(exact).exponent.clamp(min=-125) - 11)
    nearest = (exact.abs() / step + 0.5).floor() * step  # ties away from zero
    nearest[nearest >= 2.0**128] = math.inf
    assert torch.equal(round_to_tf32(x).double(), nearest.copysign(exact))


def test_ties_carries_and_what_is_no_number() -> None:
    step = 2.0**-10
    x = torch.tensor([1 + step / 2, 1 + 3 * step / 2, -1 - step / 2, 2 - step / 2, 1 + 0.49 * step])
    assert round_to_tf32(x).tolist() == [1 + step, 1 + 2 * step, -1 - step, 2.0, 1.0]
    largest, denormal_tie, last_denormal = 0x7F7FFFFF, 0x00001000, 0x007FFFFF
    found = round_to_tf32(of_bits(largest, denormal_tie, last_denormal))
    assert found.tolist() == [math.inf, 2.0**-136, 2.0**-126]
    assert round_to_tf32(of_bits(0x7F800000, 0xFF800000)).tolist() == [math.inf, -math.inf]
    assert round_to_tf32(of_bits(0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001)).isnan().all()
    assert math.copysign(1, round_to_tf32(torch.tensor(-0.0)).item()) == -1


def test_rows_of_any_stride_are_rounded() -> None:
    x = torch.randn(6, 8).t()[::2]
    assert torch.equal(round_to_tf32(x), round_to_tf32(x.contiguous()))


def products(a: Tensor, b: Tensor, c: Tensor) -> dict[str, Tensor]:
    """Of (2, 3, 4), (2, 4, 5) and (2, 3, 5), by each of ATen's operators."""
    return {
        "mm": a[0] @ b[0],
        "addmm": torch.addmm(c[0], a[0], b[0], beta=2.0, alpha=0.5),
        "bmm": a @ b,
        "baddbmm": torch.baddbmm(c, a, b),
        "linear": F.linear(a, b[0].t(), c[0, 0]),
    }


@pytest.mark.parametrize("inference", [False, True])  # there F.linear arrives in one piece
def test_products_have_rounded_operands_and_addends_as_they_are(inference: bool) -> None:
    a, b, c = torch.randn(2, 3, 4), torch.randn(2, 4, 5), torch.randn(2, 3, 5)
    with torch.inference_mode(inference), RoundedOperands():
        found = products(a, b, c)
    right = products(round_to_tf32(a), round_to_tf32(b), c)
    for name, plain in products(a, b, c).items():
        torch.testing.assert_close(found[name], right[name], rtol=1e-6, atol=1e-6)
        assert not torch.allclose(found[name], plain, rtol=1e-6, atol=1e-6), name


def test_backward_products_too() -> None:
    x, weight = (torch.randn(6, 8).requires_grad_() for _ in range(2))
    bias, dy = torch.randn(6).requires_grad_(), torch.randn(6, 6)
    with RoundedOperands():
        F.linear(x, weight, bias).backward(dy)
    rounded = round_to_tf32(dy)
    assert torch.equal(x.grad, rounded @ round_to_tf32(weight.detach()))
    assert torch.equal(weight.grad, rounded.t() @ round_to_tf32(x.detach()))
    assert torch.equal(bias.grad, dy.sum(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_never_tf32_stays(dtype: torch.dtype) -> None:
    """Other dtypes; and of fp32 a single row, column or term."""
    sizes = [(1, 8, 8), (8, 1, 8), (8, 8, 1)] + [(8, 8, 8)] * (dtype != torch.float32)
    for m, k, n in sizes:
        x, weight = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
        with RoundedOperands():
            found = F.linear(x, weight)
        assert torch.equal(found, F.linear(x, weight))
