"""NaN and infinities come out of the CUDA kernels where they come out of PyTorch's own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import epinorm
from epinorm.problem import Strategy

M, K = 40, 64
INF, NAN = math.inf, math.nan
# Widths in registers, in a cluster of blocks, and beyond; units of four columns or not.
WIDTHS = (64, 128, 250, 384, 512, 768, 2048)
CHANGES: dict[str, Any] = {
    "outlier": lambda t: t.__setitem__((1, slice(129, 130) if t.size(1) == 384 else 3), 1e30),
    "largest": lambda t: t.__setitem__((1, slice(129, 130) if t.size(1) == 384 else 3), 3e38),
    "row of one value": lambda t: t.__setitem__(1, 1e20),
    "inf": lambda t: t.__setitem__((1, 3), INF),
    "-inf": lambda t: t.__setitem__((1, 3), -INF),
    "nan": lambda t: t.__setitem__((1, 3), NAN),
    "both infinities": lambda t: t[1].copy_(torch.tensor([INF, -INF]).repeat(t.size(1) // 2)),
    "fits": lambda t: t.__setitem__((1, 3), 1e6),
}
NORMS: dict[str, tuple[Any, Any]] = {
    "layer_norm": (
        epinorm.LayerNorm(),
        lambda z, gamma, beta: F.layer_norm(z, (z.size(1),), gamma, beta),
    ),
    "group_norm(1)": (
        epinorm.GroupNorm(1),
        lambda z, gamma, beta: F.group_norm(z, 1, gamma, beta),
    ),
    "group_norm(2)": (
        epinorm.GroupNorm(2),
        lambda z, gamma, beta: F.group_norm(z, 2, gamma, beta),
    ),
    "rms_norm": (
        epinorm.RMSNorm(),
        lambda z, gamma, beta: F.rms_norm(z, (z.size(1),), gamma) + beta,
    ),
}
STRATEGIES: dict[torch.dtype, tuple[Strategy, ...]] = {
    torch.float32: ("auto", "single", "planes", "epilogue"),
    torch.bfloat16: ("auto", "single", "epilogue"),
    torch.float64: ("epilogue",),
}


def same_places(found: Tensor, expected: Tensor) -> bool:
    infinite = torch.nan_to_num(found, 0, 1, -1) * found.isinf()
    theirs = torch.nan_to_num(expected, 0, 1, -1) * expected.isinf()
    return torch.equal(found.isnan(), expected.isnan()) and torch.equal(infinite, theirs)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", STRATEGIES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_places_are_those_of_eager(width: int, dtype: torch.dtype, norm: str) -> None:
    torch.manual_seed(0)
    shapes = [(M, K), (width, K), (width,), (width,), (width,), (M, width)]
    tensors = [torch.randn(s, device="cuda").to(dtype) for s in shapes]
    dy = torch.randn(M, width, device="cuda").to(dtype)
    ours, theirs = NORMS[norm]

    def run(function: Any, added: Tensor) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in (*tensors[:5], added)]
        y = function(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    def eager(x, weight, bias, gamma, beta, added) -> Tensor:
        return F.leaky_relu(theirs(F.linear(x, weight, bias) + added, gamma, beta))

    wrong = []
    for change, apply in CHANGES.items():
        unvectorised = dtype == torch.float64 or width % 4
        if unvectorised and norm == "rms_norm" and "inf" in change:
            continue  # PyTorch finds squares from a variance and a mean: NaN in the whole row
        added = tensors[5].clone()
        apply(added)
        expected = run(eager, added)
        for strategy in STRATEGIES[dtype]:

            def fused(x, weight, bias, gamma, beta, added, strategy=strategy) -> Tensor:
                return epinorm.linear_norm(
                    *(x, weight, bias), norm=ours, norm_weight=gamma, norm_bias=beta,
                    pre="add_residual", post="leaky_relu", operands=[added], strategy=strategy,
                )  # fmt: skip

            try:
                found = run(fused, added)
            except RuntimeError as error:
                if "cannot serve" not in str(error):
                    raise
                continue
            # PyTorch's formula of group_norm's gradients overflows on the way to finite ones.
            overflows = norm.startswith("group_norm") and change == "row of one value"
            for name, a, b in zip(
                ("y", "dx", "dweight", "dbias", "dgamma", "dbeta", "dadded"),
                found, expected, strict=True,
            ):  # fmt: skip
                if not same_places(a, b) and (name == "y" or not overflows):
                    counts = [int((~t.isfinite()).sum()) for t in (a, b)]
                    wrong.append((change, strategy, name, *counts))
    assert not wrong, wrong
