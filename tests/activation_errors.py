"""All numbers of 16 bits, many of fp32, and whether an operation is as accurate as eager's."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from epinorm.chain.pointwise import DEFINITIONS

NAMES = ("elu", "gelu", "gelu_tanh", "mish", "quick_gelu", "sigmoid", "silu", "softplus")
"""What has functions of its own for 16 bits (chain_short.cuh)."""

AS_PYTORCH = ("gelu", "gelu_tanh", "quick_gelu", "sigmoid", "silu")
"""Of these, in fp32 PyTorch's formulas, rounded as often."""

SPECIAL = (0.0, -0.0, 1e-45, -1e-45, 1e-40, -1e-40, 3e38, -3e38, math.inf, -math.inf, math.nan)
SMALL = (-14, -4)
"""Of the operation and of its derivative, whose terms are of 1's size: below two to this, an error
counts as it does there. The first is fp16's smallest normal number."""


def numbers(dtype: torch.dtype) -> Tensor:
    """(65536,): all of a dtype of 16 bits; of fp32 a dense set with both ends."""
    if dtype.itemsize == 2:
        return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    near, far = torch.linspace(-12, 12, 40_000), torch.linspace(-120, 120, 15_525)
    sizes = torch.logspace(-38, 38, 5_000)
    return torch.cat([near, far, sizes, -sizes, torch.tensor(SPECIAL)])


def eagers(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """The operation of x and its derivative there, by PyTorch in x's dtype."""
    x = x.detach().clone().requires_grad_()
    y = DEFINITIONS[name].apply(x, *DEFINITIONS[name].parameters.values())
    return y.detach(), torch.autograd.grad(y, x, torch.ones_like(y))[0]


def _steps_off(found: Tensor, truth: Tensor, small: int) -> Tensor:
    """In the dtype's steps at the truth."""
    digits = -math.log2(torch.finfo(found.dtype).eps)
    exponent = torch.frexp(truth)[1] - 1
    return (found.double() - truth).abs() / 2.0 ** (exponent.clamp_min(small) - digits)


def check_as_accurate(found: Tensor, eager: Tensor, truth: Tensor, small: int) -> None:
    """NaN and infinities where eager has them; elsewhere the largest and the mean error of eager's,
    but for what an error of 2^-18 moves across a tie, or another order of roundings does to fp32.
    truth: float64. small: one of ``SMALL``."""
    assert torch.equal(found.isnan(), eager.isnan())
    infinite = eager.isinf()
    assert torch.equal(found.isinf(), infinite)
    assert torch.equal(found[infinite], eager[infinite])
    here = found.isfinite() & truth.isfinite()
    ours, theirs = (_steps_off(y[here], truth[here], small) for y in (found, eager))
    narrow = found.dtype.itemsize == 2
    assert ours.max() <= (theirs.max() + 0.02 if narrow else 1.1 * theirs.max())
    assert ours.mean() <= (1.002 if narrow else 1.05) * theirs.mean()
