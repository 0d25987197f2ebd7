"""Tensors whose memory is not what they say, and saved ones that come back as others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epinorm

M, K, N = 9, 12, 16
NAMES = ["x", "weight", "bias", "norm_weight", "norm_bias", "channel", "residual"]
SHAPES = [(M, K), (N, K), (N,), (N,), (N,), (N,), (M, N)]


def eager(x, weight, bias, norm_weight, norm_bias, channel, residual) -> Tensor:
    z = F.linear(x, weight, bias) * channel
    return F.layer_norm(z, (N,), norm_weight, norm_bias) + residual


def ours(x, weight, bias, norm_weight, norm_bias, channel, residual) -> Tensor:
    return epinorm.linear_norm(
        *(x, weight, bias),
        norm=epinorm.LayerNorm(),
        norm_weight=norm_weight,
        norm_bias=norm_bias,
        pre="mul_channel",
        post="add_residual",
        operands=[channel, residual],
    )


def operator(x, weight, bias, norm_weight, norm_bias, *operands) -> Tensor:
    return torch.ops.epinorm.linear_norm(
        *(x, weight, bias, norm_weight, norm_bias, operands),
        *("mul_channel|layer_norm(1e-05)|add_residual", "auto", False, None),
    )


def compare(found: Any, single: Any, exact: Any) -> None:
    for a, b, truth in zip(found, single, exact, strict=True):
        scale = truth.abs().max() + 1e-30
        allowed = max(1e-6, 2 * float((b.double() - truth).abs().max() / scale))
        assert float((a.double() - truth).abs().max() / scale) <= allowed


def run(function: Any, values: list[Tensor], dy: Tensor, training: bool) -> list[Tensor]:
    if not training:
        return [function(*values)]
    y = function(*(v.requires_grad_() for v in values))
    return [y.detach(), *torch.autograd.grad(y, values, dy)]


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("negated", [*NAMES, "dy"])
@pytest.mark.parametrize("function", [ours, operator])
def test_a_negative_bit_is_read_as_the_sign_that_it_is(
    function: Any, negated: str, training: bool
) -> None:
    def values(dtype: torch.dtype, bit: bool) -> tuple[list[Tensor], Tensor]:
        torch.manual_seed(0)
        shapes = dict(zip([*NAMES, "dy"], [*SHAPES, (M, N)], strict=True))
        made = {name: torch.randn(s) for name, s in shapes.items()}
        made[negated] = -made[negated]
        made = {name: t.to(dtype) for name, t in made.items()}
        if bit:
            made[negated] = torch._neg_view(-made[negated])
        *inputs, dy = made.values()
        return inputs, dy

    function(*values(torch.float32, False)[0])  # a call like this one, but for the bit
    found = run(function, *values(torch.float32, True), training)
    single = run(eager, *values(torch.float32, False), training)
    compare(found, single, run(eager, *values(torch.float64, False), training))


def test_the_imaginary_part_of_a_conjugate() -> None:
    weight, norm = torch.randn(1, 1), epinorm.RMSNorm(eps=1.0)
    imaginary = torch.randn(1, 1, dtype=torch.complex64).conj().imag
    assert imaginary.is_neg()
    assert imaginary.is_contiguous()
    found = epinorm.linear_norm(imaginary, weight, norm=norm)
    assert torch.equal(found, epinorm.linear_norm(imaginary.resolve_neg(), weight, norm=norm))


@pytest.mark.parametrize("fresh", [False, True], ids=["second call", "first call"])
def test_zeros_without_memory(fresh: bool) -> None:
    model = nn.Sequential(nn.Linear(K, N), nn.LayerNorm(N), nn.GELU())
    fused, x = epinorm.fuse(copy.deepcopy(model)), torch.randn(M, K)
    if not fresh:
        fused(x).sum().backward()
        fused.zero_grad()
    y = fused(x)
    y.backward(torch._efficientzerotensor(y.shape))
    assert all(not p.grad.any() for p in fused.parameters())
    zeros = torch._efficientzerotensor((M, K))
    torch.testing.assert_close(fused(zeros), model(torch.zeros(M, K)))


def same(t: Tensor) -> Tensor:
    return t


HOOKS: dict[str, Any] = {
    "half": Tensor.half,
    "double": Tensor.double,
    "bfloat16": Tensor.bfloat16,
    "half matrices": lambda t: t.half() if t.dim() == 2 else t,
    "flat": Tensor.flatten,
    "fewer rows": lambda t: t[:3],
    "meta": lambda t: t.to("meta"),
    "other strides": lambda t: t.t().contiguous().t() if t.dim() == 2 else t,
    "negative bit": lambda t: torch._neg_view(-t),
    "same": same,
}


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("hook", HOOKS)
def test_what_a_hook_gives_back_is_taken_for_what_it_is(hook: str, norm: Any) -> None:
    torch.manual_seed(0)
    affine = norm is nn.LayerNorm
    layers = nn.Linear(K, N, bias=affine), norm(N, elementwise_affine=affine), nn.GELU()
    model = nn.Sequential(*layers)
    fused = epinorm.fuse(copy.deepcopy(model))
    x, dy = torch.randn(M, K), torch.randn(M, N)

    def gradients(one: nn.Module, unpack: Any, dtype: torch.dtype = torch.float32) -> Any:
        one = copy.deepcopy(one).to(dtype)
        leaves = [x.to(dtype).requires_grad_(), *one.parameters()]
        with torch.autograd.graph.saved_tensors_hooks(same, unpack):
            y = one(leaves[0])
        return torch.autograd.grad(y, leaves, dy.to(dtype))

    try:
        single = gradients(model, HOOKS[hook])
    except RuntimeError:
        with pytest.raises(RuntimeError):
            gradients(fused, HOOKS[hook])
        return
    found = gradients(fused, HOOKS[hook])
    compare(found, single, gradients(model, same, torch.float64))


def backward_arguments() -> dict[str, Any]:
    torch.manual_seed(0)
    x, weight, residual = torch.randn(M, K), torch.randn(N, K), torch.randn(M, N)
    chain = "group_norm(4,1e-05)|add_residual"
    facts = chain, "auto", False, None
    _, *kept = torch.ops.epinorm.linear_norm_forward(
        x, weight, None, None, None, [residual], *facts
    )
    return {
        **{"dy": torch.randn(M, N), "x": x, "weight": weight},
        **{"bias": None, "norm_weight": None, "norm_bias": None, "operands": [residual]},
        **dict(zip(("z", "mean", "rstd"), kept, strict=True)),
        **{"chain": chain, "strategy": "auto", "strict": False, "out_dtype": None},
        "wanted": [True, True, False, False, False, True],
    }


@pytest.mark.parametrize("change", [Tensor.half, lambda t: t[:1], lambda t: t.to("meta")])
@pytest.mark.parametrize("name", ["dy", "z", "mean", "rstd"])
def test_the_backward_operator_checks_what_it_reads(name: str, change: Any) -> None:
    arguments = backward_arguments()
    assert len(torch.ops.epinorm.linear_norm_backward(*arguments.values())) == 3
    arguments[name] = change(arguments[name])
    with pytest.raises(
        RuntimeError, match=rf"{name} must be of shape \[9, (4|16)\], torch.float32"
    ):
        torch.ops.epinorm.linear_norm_backward(*arguments.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("norm", [epinorm.GroupNorm(4), epinorm.LayerNorm(), epinorm.RMSNorm()])
@pytest.mark.parametrize("strategy", ["cpu", "reference"])
def test_what_forward_keeps_is_what_backward_expects(strategy: str, norm: Any, dtype: Any) -> None:
    x, weight = (torch.randn(s, dtype=dtype, requires_grad=True) for s in SHAPES[:2])
    facts: Any = {"norm": norm, "post": "leaky_relu|scale(2)", "strategy": strategy}
    for _ in range(2):
        y = epinorm.linear_norm(x, weight, **facts)
        with torch.autograd.graph.saved_tensors_hooks(same, same):
            hooked = epinorm.linear_norm(x, weight, **facts)
        found = [torch.autograd.grad(out, [x, weight], torch.ones_like(y)) for out in (y, hooked)]
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("wanted", [[True] * 5, [True] * 7, [True, True, True, False, False, True]])
def test_the_backward_operator_checks_what_is_wanted(wanted: list[bool]) -> None:
    arguments = backward_arguments() | {"wanted": wanted}
    with pytest.raises(ValueError, match="wanted must say for each of the 6 inputs"):
        torch.ops.epinorm.linear_norm_backward(*arguments.values())
