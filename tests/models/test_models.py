"""Each model of the zoo computes and trains as in eager, fused and compiled: `-m models`.

What the operation itself rounds differently is compared to fp32's digits; everything else of a
model, its state_dict included, is equal.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import epinorm

sys.path.insert(0, str(Path(__file__).parent))
from zoo import CASES, Missing

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("fresh_dynamo")]

DROPPING = (
    "p",
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "hidden_dropout",
    "drop_prob",
)


def made(name: str) -> tuple[nn.Module, nn.Module, dict[str, Any]]:
    make, kwargs = CASES[name]
    torch.manual_seed(0)
    try:
        model = make()
    except Missing as error:
        pytest.skip(str(error))
    for module in model.modules():
        if "Norm" in type(module).__name__:  # gammas and betas prove nothing as they start
            for parameter in module.parameters(recurse=False):
                nn.init.normal_(parameter, 0.5, 0.3)
        for attribute in DROPPING:  # masks of our own have other bits, and tests of their own
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)
    return model, epinorm.fuse(copy.deepcopy(model), strategy="reference"), kwargs


def outputs(model: nn.Module, kwargs: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(1)
    leaves = pytree.tree_leaves(dict(y=model(**kwargs)))
    return [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]


@pytest.mark.parametrize("name", CASES)
def test_a_model_computes_what_it_computes(name: str) -> None:
    model, fused, kwargs = made(name)
    with torch.no_grad():
        expected = outputs(model.eval(), kwargs)
        torch.testing.assert_close(outputs(fused.eval(), kwargs), expected, rtol=1e-4, atol=1e-4)
    assert all(row.reason for row in epinorm.explain(fused).rows)


@pytest.mark.parametrize("name", CASES)
def test_a_model_trains_as_it_trains(name: str) -> None:
    model, fused, kwargs = made(name)
    losses = []
    for m in (model.train(), fused.train()):
        found = [t for t in outputs(m, kwargs) if t.requires_grad]
        loss = torch.stack([t.square().mean() for t in found]).sum()
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-4)
    largest = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    for (path, a), b in zip(fused.named_parameters(), model.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), path
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4 * largest, msg=path)
    plain = copy.deepcopy(model)
    plain.load_state_dict(fused.state_dict())
    assert [*plain.state_dict()] == [*fused.state_dict()]
    torch.testing.assert_close(dict(plain.state_dict()), dict(fused.state_dict()), rtol=0, atol=0)


NAMED = [
    *("bert", "roberta", "vit", "dinov2", "gpt2", "llama", "qwen3", "t5", "whisper", "clip text"),
    *("clip vision", "timm vit", "timm mixer", "timm swinv2", "timm convnext", "torchvision swin"),
    *("encoder layer, norm first", "encoder layer, norm last", "decoder layer, norm first"),
    *("decoder layer, norm last", "diffusers block", "td-mpc2", "group norms"),
    *("timm vit, qk norm", "stablelm, qk norm", "persimmon, qk norm"),
]
BREAKS: tuple[str, ...] = ()
"""Whose graph breaks in `torch.compile(backend="eager")` too."""


@pytest.fixture
def without_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """What AOTAutograd hands to Inductor runs as it is: to compile it takes a minute."""
    compile_fx = torch._inductor.compile_fx.compile_fx

    def interpreted(gm: Any, inputs: Any, **_: Any) -> Any:
        return compile_fx(gm, inputs, inner_compile=lambda inner, *_, **__: inner)

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", interpreted)


@pytest.mark.parametrize("name", NAMED)
def test_a_model_compiles_as_one_graph(name: str, without_code: None) -> None:
    model, _, kwargs = made(name)
    compiled: Any = torch.compile(
        copy.deepcopy(model),
        backend="epinorm",
        options={"strategy": "reference"},
        fullgraph=name not in BREAKS,
    )
    for m in (model.train(), compiled.train()):
        torch.stack(
            [t.square().mean() for t in outputs(m, kwargs) if t.requires_grad]
        ).sum().backward()
    largest = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    for (path, a), b in zip(compiled.named_parameters(), model.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), path
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4 * largest, msg=path)
    with torch.no_grad():
        expected = outputs(model.eval(), kwargs)
        torch.testing.assert_close(outputs(compiled.eval(), kwargs), expected, rtol=1e-4, atol=1e-4)
