"""PyTorch's transformer layers on a GPU: opened in fp32, as exact as eager, and whole in 16 bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import epinorm
from epinorm.tools.accuracy import allowed_error

E, B, T = 256, 8, 100


def layer(norm_first: bool, dtype: torch.dtype = torch.float32) -> nn.Module:
    made = nn.TransformerEncoderLayer(
        E, 4, 2 * E, dropout=0.0, activation="gelu", batch_first=True, norm_first=norm_first
    )
    for name, parameter in made.named_parameters():
        if parameter.dim() == 1 and "norm" in name:
            nn.init.normal_(parameter, 0.5, 0.2)
    return made.to("cuda", dtype)


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y.sin().sum(), [*model.parameters()])]


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_layer_in_fp32_is_opened_and_as_exact_as_eager(norm_first: bool) -> None:
    """As whole models are judged (docs/measuring.md): over four draws, and above the floor."""
    squares = []
    for _ in range(4):
        model, x = layer(norm_first), torch.randn(B, T, E, device="cuda")
        fused, exact = epinorm.fuse(copy.deepcopy(model)), copy.deepcopy(model).double()
        runs = zip(step(exact, x.double()), step(model, x), step(fused, x), strict=True)
        squares.append(
            [
                [t.norm().item() ** 2 for t in (truth, eager - truth, ours - truth)]
                for truth, eager, ours in runs
            ]
        )
    for truth, eager, ours in torch.tensor(squares, dtype=torch.float64).sum(0).sqrt().tolist():
        assert ours <= truth * max(2 * eager / truth, allowed_error(eager / truth, torch.float32))
    with torch.no_grad():
        # In eval PyTorch's own kernel has GELU's approximation by tanh, in float64 too.
        truth, eager, ours = exact(x.double()), model.eval()(x), fused.eval()(x)
    assert (ours - truth).norm() <= 2 * (eager - truth).norm() + 2**-24 * truth.norm()
    told = epinorm.explain(fused)
    assert not told.notes
    assert "self_attn.out_proj" in "".join(row.where for row in told.rows)


@pytest.mark.parametrize("training", [False, True])
def test_in_16_bit_attention_stays_pytorchs(training: bool) -> None:
    fused = epinorm.fuse(layer(False, torch.bfloat16).train(training))
    with torch.set_grad_enabled(training):
        fused(torch.randn(B, T, E, device="cuda", dtype=torch.bfloat16))
    (note,) = epinorm.explain(fused).notes
    assert "in 16 bit its operations gain less" in note
