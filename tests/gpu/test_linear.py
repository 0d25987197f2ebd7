"""A chain without a norm whose last activation's result is kept for gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import epinorm
from epinorm.chain import Chain
from epinorm.tools.accuracy import relative_error

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
M, K, N = 1000, 256, 512


@pytest.mark.parametrize("last", ["relu", "sigmoid", "tanh"])
@pytest.mark.parametrize(
    ("dtype", "precision"), [(BF16, "high"), (F16, "high"), (F32, "high"), (F32, "highest")]
)
def test_gradients_are_those_of_the_result(last, dtype, precision):
    """Of y as it is, whose kinks and roundings then play no part; in Python's steps and native."""
    torch.set_float32_matmul_precision(precision)
    torch.manual_seed(0)
    sizes = (M, K), (N, K), (N,), (M, N)
    given = [torch.randn(s, device="cuda").to(dtype).requires_grad_() for s in sizes]
    x, weight, bias, residual = given
    text = f"scale(0.25)|add_residual|{last}"
    gradient = Chain.parse(text).pre[-1].definition.result_gradient
    dy = torch.randn(M, N, device="cuda").to(dtype)
    activation = getattr(torch, last)

    def errors(y):
        found = torch.autograd.grad(y, given, dy)
        dz = gradient(dy.double(), y.detach().double())
        through = 0.25 * dz
        exact = (through @ weight.double(), through.t() @ x.double(), through.sum(0), dz)
        return [relative_error(f, e) for f, e in zip(found, exact, strict=True)]

    for _ in range(5):
        y = epinorm.linear(
            x, weight, bias, post=text.split("|"), operands=[residual], strategy="single"
        )
        z = F.linear(x.double(), weight.double(), bias.double())
        exact = activation(0.25 * z + residual.double())
        eager = activation(0.25 * F.linear(x, weight, bias) + residual)
        floor = torch.finfo(dtype).eps
        assert relative_error(y, exact) <= 1.1 * relative_error(eager, exact) + floor
        for ours, theirs in zip(errors(y), errors(eager), strict=True):
            assert ours <= 1.1 * theirs + floor
