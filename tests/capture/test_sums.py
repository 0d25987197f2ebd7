"""What enters a norm and is read elsewhere too, a residual stream: an operation of two results."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epinorm

B, T, C = 2, 5, 16


class RMS(nn.Module):
    """As Llama writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(C))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32) if dtype != torch.float64 else x
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(dtype)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(B, T, 3, 2, C // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    """x + attn(norm(x)), then x + mlp(norm(x)); with LayerScale where there is a scale."""

    def __init__(self, norm: Callable[[], nn.Module], scaled: bool) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = norm(), Attention(), norm()
        self.up, self.down = nn.Linear(C, 2 * C), nn.Linear(2 * C, C)
        self.scaled = scaled
        self.scale1, self.scale2 = (nn.Parameter(torch.ones(C)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attn(self.norm1(x))
        x = x + (attended if not self.scaled else self.scale1 * attended)
        made = self.down(F.gelu(self.up(self.norm2(x))))
        return x + (made if not self.scaled else made * self.scale2)


class Model(nn.Module):
    def __init__(self, norm: Callable[[], nn.Module], scaled: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(C, C)
        self.blocks = nn.ModuleList(Block(norm, scaled) for _ in range(2))
        self.norm = norm()

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x), x.tanh()


def layer_norm() -> nn.Module:
    return nn.LayerNorm(C)


def randomise(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    return model


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """All results, then the gradients of the input and of every parameter."""
    x = x.detach().clone().requires_grad_()
    results = model(x)
    results = results if isinstance(results, tuple) else (results,)
    loss = sum((r * torch.linspace(-1, 2, r.numel()).to(r).view(r.shape)).sum() for r in results)
    return [*results, *torch.autograd.grad(loss, [x, *model.parameters()], allow_unused=True)]


def fused_like(model: nn.Module, x: Tensor) -> nn.Module:
    """A fused copy, once it was found to compute what the model computes, in training and not."""
    fused = epinorm.fuse(copy.deepcopy(model))
    for ours, theirs in zip(step(fused, x), step(model, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x), rtol=1e-10, atol=1e-10)
    return fused


def chains(fused: nn.Module) -> list[str]:
    return [row.chain for row in epinorm.explain(fused).rows if row.fused and "norm" in row.chain]


@pytest.mark.slow
@pytest.mark.parametrize("norm", [layer_norm, RMS])
@pytest.mark.parametrize("scaled", [False, True])
def test_the_residual_stream_of_pre_norm_blocks(norm: Any, scaled: bool) -> None:
    model = randomise(Model(norm, scaled)).double()
    fused = fused_like(model, torch.randn(B, T, C, dtype=torch.float64))
    text = str(epinorm.LayerNorm()) if norm is layer_norm else "rms_norm(1e-06)"
    step_to_sum = "mul_channel|add_residual|" if scaled else "add_residual|"
    found = chains(fused)
    # embed with the first norm; then each sum with the norm behind it, across blocks.
    assert found == [f"{text}|returns(sum)"] + [f"{step_to_sum}{text}|returns(sum)"] * 4
    assert not [row for row in epinorm.explain(fused).rows if not row.fused and row.reason]


class Layers(nn.Module):
    def __init__(self, forward: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.fc, self.fc2, self.ln = nn.Linear(C, C), nn.Linear(C, C), nn.LayerNorm(C)
        self.run = forward

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x, x * 2)


def between(s: Any, x: Tensor, r: Tensor) -> Any:
    """A reader of the sum comes before the norm."""
    h = s.fc(x) + r
    early = torch.tanh(h)
    return s.ln(h), early + h


def of_rows(s: Any, x: Tensor, r: Tensor) -> Any:
    """The norm is of the sum's rows, which others read with all leading dimensions."""
    h = s.fc(x) + r
    return s.ln(h.view(-1, C)).relu(), h * 2


def rows_before(s: Any, x: Tensor, r: Tensor) -> Any:
    h = s.fc(x.reshape(-1, C)).view(B, T, C) + r
    return s.ln(h), h * 2


def behind_too(s: Any, x: Tensor, r: Tensor) -> Any:
    h = s.fc(x) + r
    return s.ln(h) + h


def two_norms(s: Any, x: Tensor, r: Tensor) -> Any:
    h = s.fc(x) + r
    return s.ln(h), F.rms_norm(h, (C,)), h * 2


def late_weight(s: Any, x: Tensor, r: Tensor) -> Any:
    """What the norm multiplies by is computed from the sum."""
    h = s.fc(x) + r
    return F.layer_norm(h, (C,), h.mean((0, 1))), h * 2


def hooked(s: Any, x: Tensor, r: Tensor) -> Any:
    """A hook of a tensor sees all of its gradient."""
    h = s.fc(x) + r
    n = s.ln(h)
    if h.requires_grad:
        h.register_hook(lambda g: g * 2)
    return n, h * 2


def changed_later(s: Any, x: Tensor, r: Tensor) -> Any:
    h = s.fc(x) + r
    return s.ln(h).detach(), h.mul_(2)


def changed_between(s: Any, x: Tensor, r: Tensor) -> Any:
    h = s.fc(x) + r
    g = h * 3
    h.add_(1)
    return s.ln(h), g, h * 2


CASES: dict[str, tuple[Any, list[str]]] = {
    "between": (between, ["add_residual|layer_norm(1e-05)|returns(sum)"]),
    "of_rows": (of_rows, ["add_residual|layer_norm(1e-05)|relu|returns(sum)"]),
    "rows_before": (rows_before, ["add_residual|layer_norm(1e-05)|returns(sum)"]),
    "behind_too": (behind_too, ["add_residual|layer_norm(1e-05)|returns(sum)"]),
    "two_norms": (two_norms, ["add_residual|layer_norm(1e-05)|returns(sum)"]),
    "late_weight": (late_weight, []),
    "hooked": (hooked, ["add_residual|layer_norm(1e-05)|returns(sum)"]),  # without gradients
    "changed_later": (changed_later, []),
    "changed_between": (changed_between, []),
}


@pytest.mark.parametrize("case", CASES)
def test_where_the_sum_is_read(case: str) -> None:
    forward, expected = CASES[case]
    model = randomise(Layers(forward)).double()
    fused = fused_like(model, torch.randn(B, T, C, dtype=torch.float64))
    assert chains(fused) == expected


def test_a_sum_that_is_returned_has_all_of_its_gradient() -> None:
    def forward(s: Any, x: Tensor, r: Tensor) -> Any:
        h = s.fc(x) + r
        return s.ln(h), h

    model = randomise(Layers(forward)).double()
    fused = epinorm.fuse(copy.deepcopy(model))
    x = torch.randn(B, T, C, dtype=torch.float64, requires_grad=True)
    gradients = []
    for each in (model, fused):
        n, h = each(x)
        gradients.append(torch.autograd.grad((n * 3).sum() + h.square().sum(), h)[0])
    torch.testing.assert_close(*gradients)
    assert "is returned" in epinorm.explain(fused).rows[0].reason
    with torch.no_grad():
        fused(x)
    assert chains(fused) == ["add_residual|layer_norm(1e-05)|returns(sum)"]


def test_rounded_as_eager_rounds() -> None:
    model = randomise(Layers(between)).bfloat16()
    x = torch.randn(B, T, C, dtype=torch.bfloat16)
    fused = epinorm.fuse(copy.deepcopy(model), rounding="eager")
    for ours, theirs in zip(fused(x), model(x), strict=True):
        assert (ours == theirs).float().mean() > 0.98
    assert chains(fused) == ["add_residual|layer_norm(1e-05)|returns(sum)|rounding(eager)"]
