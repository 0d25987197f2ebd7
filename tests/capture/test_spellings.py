"""Each spelling of an operation around a chain computes what the model computes."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epinorm
from epinorm.capture.operands import holds_channels

N = 16

SPELLINGS: dict[str, Callable[..., Tensor]] = {
    "rsub": lambda s, x: 1 - s.gn(s.fc(x)),
    "number first": lambda s, x: 3 + 0.5 * s.ln(x + 2 * s.fc(x)),
    "rdiv": lambda s, x: 1 / s.gn(s.fc(x)),
    "div3": lambda s, x: s.gn(s.fc(x)) / 3,
    "div0": lambda s, x: s.gn(s.fc(x)) / 4.0,
    "alpha": lambda s, x: torch.add(s.gn(s.fc(x)), 2, alpha=3),
    "alpha self": lambda s, x: (lambda h: torch.add(h, h, alpha=3))(s.gn(s.fc(x))),
    "alpha rev": lambda s, x: torch.sub(s.gn(s.fc(x)), x, alpha=3),
    "xx": lambda s, x: (lambda h: h * h)(s.gn(s.fc(x))),
    "h-h": lambda s, x: (lambda h: h - h)(s.gn(s.fc(x))),
    "h/h": lambda s, x: (lambda h: h / h)(s.gn(s.fc(x))),
    "pow": lambda s, x: s.gn(s.fc(x)) ** 2,
    "col": lambda s, x: s.gn(s.fc(x)) * s.col + s.col,
    "scalar param": lambda s, x: s.gn(s.fc(x)) * s.sc + s.sc,
    "g*": lambda s, x: s.g * s.gn(s.fc(x) * s.g + s.g) - s.g,
    "g/": lambda s, x: s.gn(s.fc(x)) / s.g,
    "fc.bias": lambda s, x: s.gn(s.fc(x) + s.fc2.bias),
    "functional child params": lambda s, x: F.group_norm(
        F.linear(x, s.fc.weight, s.fc.bias), 4, weight=s.gn.weight, bias=s.gn.bias, eps=1e-3
    ),
    "kw linear": lambda s, x: s.gn(F.linear(input=x, weight=s.fc.weight)),
    "kw module": lambda s, x: s.gn(input=s.fc(input=x)),
    "weight computed": lambda s, x: s.gn(F.linear(x, s.fc.weight * 2, s.fc.bias + 1)),
    "norm weight computed": lambda s, x: F.layer_norm(
        s.fc(x), (N,), s.ln.weight + 1, s.ln.bias * 2
    ),
    "norm weight from input": lambda s, x: F.layer_norm(s.fc(x), (N,), x.mean(0), s.ln.bias),
    "clamp tensor": lambda s, x: torch.clamp(s.gn(s.fc(x)), min=s.g),
    "clamp none": lambda s, x: torch.clamp(s.gn(s.fc(x)), max=0.5),
    "clamp inv": lambda s, x: torch.clamp(s.gn(s.fc(x)), 1, -1),
    "relu_ twice": lambda s, x: s.gn(s.fc(x)).relu_().mul_(2).add_(1).clamp_(0, 3),
    "residual iadd r": lambda s, x: x.add_(s.gn(s.fc(x))),
    "residual iadd op": lambda s, x: (lambda r, h: (r.__iadd__(h), r + 1)[1])(x, s.gn(s.fc(x))),
    "sum of two chains": lambda s, x: s.gn(s.fc(x)).relu() + s.ln(s.fc2(x)),
    "norm both": lambda s, x: s.gn(s.ln(s.fc(x))),
    "norm nested residual": lambda s, x: s.ln(s.fc(x) + x) + x,
    "3d gn permute": lambda s, x: s.gn(s.fc(x).transpose(0, 1)),
    "slice": lambda s, x: s.gn(s.fc(x))[:2] + x[:2],
    "add shape": lambda s, x: s.gn(s.fc(x)) + x.shape[0],
    "mul shape": lambda s, x: s.gn(s.fc(x)) * x.size(0),
    "dict": lambda s, x: s.gn(s.lst["a"](x)),
    "bn": lambda s, x: s.gn(s.fc(x)) + s.bn(x),
    "inner input": lambda s, x, y: s.gn(s.fc(x)) + y,
    "mult y": lambda s, x, y: s.gn(s.fc(x)) * y,
    "float()": lambda s, x: s.gn(s.fc(x)).float().double(),
    "softplus": lambda s, x: F.softplus(s.gn(s.fc(x)), 2, 5),
    "gelu pos": lambda s, x: F.gelu(s.gn(s.fc(x)), approximate="tanh"),
    "elu": lambda s, x: F.elu(s.gn(s.fc(x)), 0.3, True),
    "leaky_": lambda s, x: F.leaky_relu_(s.gn(s.fc(x)), 0.3),
    "dropout pos": lambda s, x: F.dropout(s.gn(s.fc(x)), 0.0) + F.dropout(s.fc2(x), 0.5, False),
    "out kw": lambda s, x: torch.add(s.gn(s.fc(x)), 1, out=torch.empty(5, N, dtype=torch.float64)),
    "bool mul": lambda s, x: s.gn(s.fc(x)) * True,
    "inf": lambda s, x: s.gn(s.fc(x)) + float("inf"),
    "int div": lambda s, x: torch.div(s.gn(s.fc(x)), 2, rounding_mode="floor"),
    "floordiv": lambda s, x: s.gn(s.fc(x)) // 2,
    "matmul": lambda s, x: s.gn(x @ s.fc.weight.T + s.fc.bias),
    "matmul by mT": lambda s, x: s.gn(x @ s.fc.weight.mT + s.fc.bias),
    "one minus": lambda s, x: s.ln(1 - s.fc(x)),
    "residual minus": lambda s, x: s.ln(x - s.fc(x)),
    "residual minus, behind": lambda s, x: x - s.gn(s.fc(x)),
    "channels minus": lambda s, x: s.ln(s.g - s.fc(x)),
    "rows minus": lambda s, x: s.ln(x[:1] - s.fc(x)),
    "sum by alpha": lambda s, x: s.ln(torch.add(x, s.fc(x), alpha=0.5)),
    "sum by alpha of 0": lambda s, x: s.ln(torch.add(x, s.fc(x), alpha=0)),
    "difference by alpha": lambda s, x: s.ln(x.sub(s.fc(x), alpha=2)),
    "rsub by alpha": lambda s, x: s.ln(torch.rsub(s.fc(x), x, alpha=0.5)),
    "rsub by keywords": lambda s, x: s.ln(torch.rsub(other=x, input=s.fc(x))),
    "difference of two": lambda s, x: s.ln(s.fc2(x) - s.fc(x)),
    "minus and both": lambda s, x: (lambda h: s.ln(h) * h)(x - s.fc(x)),
    "gate": lambda s, x: s.ln(x + s.sc.tanh() * s.fc(x)),
    "gate of one row": lambda s, x: s.ln(x + s.g[:1].view(1, 1) * s.fc(x)),
    "gate of x": lambda s, x: s.gn(s.fc(x) * x.mean()),
    "gate in place": lambda s, x: s.gn(s.fc(x).mul_(s.sc)),
    "one bias for all": lambda s, x: s.ln(F.linear(x, s.fc.weight) + s.sc),
    "one less for all": lambda s, x: s.ln(s.fc(x) - s.sc),
    "gate minus": lambda s, x: s.ln(s.sc - s.fc(x)),
    "gate of heads": lambda s, x: F.layer_norm((s.fc(x) * s.sc).view(5, 4, 4), (4,)) * s.g[:1],
    "no grad tens": lambda s, x: s.gn(s.fc(x)).detach() * 2,
    "einsum of one weight for all": lambda s, x: s.gn(
        torch.einsum("bk,nk->bn", x, s.fc.weight[:, :1])
    ),
}

SPELLINGS |= {
    "einsum": lambda s, x: s.gn(torch.einsum("bi,oi->bo", x, s.fc.weight) + s.fc.bias),
    "addmm": lambda s, x: s.gn(torch.addmm(s.fc.bias, x, s.fc.weight.t())),
    "addmm method": lambda s, x: s.gn(s.fc.bias.addmm(x, s.fc.weight.transpose(0, 1))).relu(),
    "addmm scaled": lambda s, x: s.gn(torch.addmm(s.fc.bias, x, s.fc.weight.t(), beta=2)),
    "silu by hand": lambda s, x: (lambda h: h * torch.sigmoid(h))(s.gn(s.fc(x))),
    "swish of two": lambda s, x: (lambda h: h * torch.sigmoid(2 * h))(s.gn(s.fc(x))),
    "quick gelu": lambda s, x: (lambda h: h * torch.sigmoid(1.702 * h))(s.gn(s.fc(x))),
    "gelu by hand": lambda s, x: (lambda h: h * 0.5 * (1 + torch.erf(h / math.sqrt(2))))(
        s.ln(s.fc(x))
    ),
    "gelu_tanh by hand": lambda s, x: (
        lambda h: 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h.pow(3))))
    )(s.ln(s.fc(x))),
    "mish by hand": lambda s, x: s.gn((lambda h: h * torch.tanh(F.softplus(h)))(s.fc(x))),
    "llama": lambda s, x: s.g * rms(s.fc(x), 1e-6),
    "gemma": lambda s, x: rms(s.fc(x), 1e-6) * (1.0 + s.g.double()),
    "t5": lambda s, x: (
        lambda h: s.g * (h * torch.rsqrt(h.to(torch.float64).pow(2).mean(-1, keepdim=True) + 1e-6))
    )(s.fc(x)),
    "olmo": lambda s, x: (lambda h: h / torch.sqrt((h * h).sum(-1, keepdim=True) / N + 1e-6) * s.g)(
        s.fc(x)
    ),
    "rms of something else": lambda s, x: (
        lambda h: h * torch.rsqrt(h.abs().mean(-1, keepdim=True) + 1e-6)
    )(s.fc(x)),
    "rms of the batch": lambda s, x: (
        lambda h: h * torch.rsqrt(h.pow(2).mean(0, keepdim=True) + 1e-6)
    )(s.fc(x)),
    "layer norm by hand": lambda s, x: (
        lambda h, m: (
            s.g * ((h - m) / torch.sqrt((h - m).pow(2).mean(-1, keepdim=True) + 1e-6)) + s.fc2.bias
        )
    )(*(lambda h: (h, h.mean(-1, keepdim=True)))(s.fc(x))),
    "layer norm by var_mean": lambda s, x: (
        lambda h, vm: (h - vm[1]) * torch.rsqrt(vm[0] + 1e-5) * s.g
    )(*(lambda h: (h, torch.var_mean(h, -1, correction=0, keepdim=True)))(s.fc(x))),
    "unbiased variance": lambda s, x: (
        lambda h: (h - h.mean(-1, keepdim=True)) / (h.std(-1, keepdim=True) + 1e-6)
    )(s.fc(x)),
    "batch and heads": lambda s, x: s.ln(s.fc(x).view(1, 5, N)) + x.view(1, 5, N),
    "heads": lambda s, x: F.layer_norm(s.fc(x).view(5, 4, 4), (4,)),
    "transposed rows": lambda s, x: s.ln(s.fc(x).t().reshape(5, N)),
    "conv1d": lambda s, x: s.ln(torch.addmm(s.fc.bias, x, s.fc.weight)),
    "kernelbench 37": lambda s, x: s.gn((lambda h: torch.sigmoid(h) * h)(s.fc(x)) + s.g),
    "kernelbench 88": lambda s, x: (lambda h: h * torch.sigmoid(h))(
        (lambda h: h * torch.sigmoid(h))(s.gn(s.fc(x))) * s.g
    ),
    "two outputs": lambda s, x: (lambda h: s.ln(h) + h)(s.fc(x) + x),
    "two uses": lambda s, x: (lambda h: s.ln(h.relu()) + h)(s.fc(x) + x),
}

# Almost what a chain computes: none of it may be taken for that.
NEAR_MISSES: dict[str, Callable[..., Tensor]] = {
    "permuted to itself": lambda s, x: s.ln(x @ s.fc.weight.permute(0, 1)),
    "permuted from behind to itself": lambda s, x: s.ln(x @ s.fc.weight.permute(-2, -1)),
    "a product's keywords turned": lambda s, x: s.ln(
        torch.mm(mat2=s.fc.weight.t(), input=s.fc2.weight.t())
    ),
    "a product's out": lambda s, x: (
        lambda out: s.ln(torch.mm(x, s.fc.weight.detach().t(), out=out)) + out
    )(torch.empty(5, N, dtype=torch.float64)),
    "a bias for each row": lambda s, x: s.ln(F.linear(x, s.fc.weight, x[:, :1])),
    "a bias for each element": lambda s, x: s.ln(F.linear(x, s.fc.weight, x)),
    "normalised by itself": lambda s, x: (lambda h: F.layer_norm(h, (N,), h))(s.fc(x[0])),
    "a clamped length": lambda s, x: (
        lambda h: h / h.norm(dim=-1, keepdim=True).clamp(min=1e-30) * math.sqrt(N)
    )(F.linear(x * 1e-20, s.fc.weight)),
    "eps outside of the root": lambda s, x: (
        lambda h: h / (h.pow(2).mean(-1, keepdim=True).sqrt() + 1e-30)
    )(F.linear(x * 1e-20, s.fc.weight)),
    "a bound that is rarely met": lambda s, x: (
        lambda h, m: (h - m).clamp(-1e5, 1e5) * ((h - m).pow(2).mean(-1, True) + 1e-5).rsqrt()
    )(*(lambda h: (h, h.mean(-1, True)))(s.fc(x * 1e6))),
    "rounded on its way": lambda s, x: (
        lambda h: h * torch.rsqrt(h.bfloat16().to(h.dtype).pow(2).mean(-1, True) + 1e-5)
    )(s.fc(x)),
    "rounded as a difference": lambda s, x: s.ln(
        (lambda h: h + (h.bfloat16().to(h.dtype) - h))(s.fc(x))
    ),
    "alpha of the other": lambda s, x: s.ln(torch.add(s.fc(x), x, alpha=0.5)),
    "itself and itself by alpha": lambda s, x: (lambda h: s.ln(torch.add(h, h, alpha=0.5)))(
        s.fc(x)
    ),
    "what it is taken from changes": lambda s, x: (lambda r, h: (r.sub_(h), s.ln(r))[1])(
        x * 1, s.fc(x)
    ),
    "what it was taken from changes later": lambda s, x: (
        lambda r, h: (lambda d: (r.mul_(2), s.ln(d))[1])(r - h)
    )(x * 1, s.fc(x)),
    "a gate that changes later": lambda s, x: (
        lambda g, h: (lambda d: (g.add_(1), s.ln(d))[1])(h + g)
    )(s.sc * 1, s.fc(x)),
    "nothing minus": lambda s, x: s.ln((math.nan - s.fc(x)).nan_to_num()),
    "positions looked up behind": lambda s, x: (
        lambda h: s.ln(h + F.embedding(torch.arange(5), s.lst["a"].weight))
    )(s.fc(x)),
    "rows shortened while looked up": lambda s, x: (
        lambda h: s.ln(h + F.embedding(torch.arange(5), s.lst["a"].weight, max_norm=1.0))
    )(s.fc(x)),
    "a view as itself": lambda s, x: (lambda h: h.view_as(h))(s.ln(s.fc(x))),
    "a view as itself, in between": lambda s, x: (lambda h: s.ln(h.reshape_as(h)))(s.fc(x)),
    "a gate of its own": lambda s, x: (lambda h: s.ln(h * h.mean()))(s.fc(x)),
    "a gate of more dimensions": lambda s, x: s.ln(s.g[:1].view(1, 1, 1) * s.fc(x)),
    "a gate of another dtype": lambda s, x: s.ln(s.sc.float() * s.fc(x)),
    "relu by differences, of infinities": lambda s, x: (
        (lambda h: (h.relu() - h) + h)(s.ln(s.fc(x)) * 1e308 * 10).nan_to_num().sign()
    ),
    "over what has no reciprocal": lambda s, x: s.ln(s.fc(x)) * 1e-300 / 1e-310 * 1e-12,
    "x changes later, by a method's whole name": lambda s, x: (
        lambda t: (lambda h: (t.__imul__(3.0), s.ln(h))[1])(s.fc(t))
    )(x * 1),
    "statistics that move unseen": lambda s, x: (
        lambda h, m, v: (
            lambda d: (torch.native_batch_norm(x, None, None, m, v, True, 0.5, 1e-5), s.ln(d))[1]
        )(h + m)
    )(s.fc(x), s.g.detach() * 1, s.g.detach().square()),
    "statistics that an overload moves": lambda s, x: (
        lambda h, m, v: (
            lambda d: (
                torch.ops.aten.native_batch_norm.default(x, None, None, m, v, True, 0.5, 1e-5),
                s.ln(d),
            )[1]
        )(h + m)
    )(s.fc(x), s.g.detach() * 1, s.g.detach().square()),
    "another slope at zero": lambda s, x: s.ln(
        (lambda h: torch.maximum(h, 0.01 * h))(F.linear(x, s.fc.weight - s.fc.weight.detach()))
    ),
}
SPELLINGS |= NEAR_MISSES


def rms(h: Tensor, eps: float) -> Tensor:
    """As Llama writes it."""
    wide = h.to(torch.float64)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return wide.to(h.dtype)


UNFUSED = {
    "transposed rows": "makes columns of its rows|not a pointwise operation",
    "two uses": "used more than once, by relu, ",
    "alpha of the other": "add is not a pointwise operation",
    "itself and itself by alpha": "add is not a pointwise operation",
    "what it was taken from changes later": "mul_ changes a tensor in place",
    "a gate that changes later": "add_ changes a tensor in place",
    "rows shortened while looked up": "embedding in between may change tensors",
    "a gate of its own": "used more than once, by mean, mul",
    "a gate of more dimensions": "operands are not broadcast",
    "a gate of another dtype": "operands are not broadcast",
}

FUSED_WHOLE = {
    "heads": "layer_norm(4,1e-05)",
    "matmul": "group_norm(4,1e-05)",
    "matmul by mT": "group_norm(4,1e-05)",
    "einsum": "group_norm(4,1e-05)",
    "addmm": "group_norm(4,1e-05)",
    "conv1d": "layer_norm(1e-05)",
    "addmm method": "group_norm(4,1e-05)|relu",
    "silu by hand": "group_norm(4,1e-05)|silu",
    "quick gelu": "group_norm(4,1e-05)|quick_gelu",
    "gelu by hand": "layer_norm(1e-05)|gelu",
    "gelu_tanh by hand": "layer_norm(1e-05)|gelu_tanh",
    "mish by hand": "mish|group_norm(4,1e-05)",
    "col": "group_norm(4,1e-05)|mul_channel|add_channel",
    "llama": "rms_norm(1e-06)",
    "gemma": "rms_norm(1e-06)",
    "t5": "rms_norm(1e-06)",
    "olmo": "rms_norm(1e-06)",
    "layer norm by hand": "layer_norm(1e-06)",
    "layer norm by var_mean": "layer_norm(1e-05)",
    "batch and heads": "layer_norm(1e-05)|add_residual",
    "number first": "scale(2)|add_residual|layer_norm(1e-05)|scale(0.5)|add(3)",
    "div3": "group_norm(4,1e-05)|scale(0.3333333333333333)",
    "alpha": "group_norm(4,1e-05)|add(6)",
    "clamp none": "group_norm(4,1e-05)|clamp(-inf,0.5)",
    "relu_ twice": "group_norm(4,1e-05)|relu|scale(2)|add(1)|clamp(0,3)",
    "norm nested residual": "add_residual|layer_norm(1e-05)|add_residual",
    "softplus": "group_norm(4,1e-05)|softplus(2,5)",
    "gelu pos": "group_norm(4,1e-05)|gelu_tanh",
    "leaky_": "group_norm(4,1e-05)|leaky_relu(0.3)",
    "kernelbench 37": "silu|add_channel|group_norm(4,1e-05)",
    "kernelbench 88": "group_norm(4,1e-05)|silu|mul_channel|silu",
    "two outputs": "add_residual|layer_norm(1e-05)|returns(sum)",
    "rsub": "group_norm(4,1e-05)|scale(-1)|add(1)",
    "one minus": "scale(-1)|add(1)|layer_norm(1e-05)",
    "residual minus": "scale(-1)|add_residual|layer_norm(1e-05)",
    "residual minus, behind": "group_norm(4,1e-05)|scale(-1)|add_residual",
    "channels minus": "scale(-1)|add_channel|layer_norm(1e-05)",
    "a view as itself": "layer_norm(1e-05)",
    "positions looked up behind": "add_residual|layer_norm(1e-05)",
    "sum by alpha": "scale(0.5)|add_residual|layer_norm(1e-05)",
    "difference by alpha": "scale(-2)|add_residual|layer_norm(1e-05)",
    "rsub by alpha": "scale(-0.5)|add_residual|layer_norm(1e-05)",
    "rsub by keywords": "scale(-1)|add_residual|layer_norm(1e-05)",
    "difference of two": "scale(-1)|add_residual|layer_norm(1e-05)",
    "minus and both": "scale(-1)|add_residual|layer_norm(1e-05)|returns(sum)",
    "scalar param": "group_norm(4,1e-05)|mul_channel|add_channel",
    "gate": "mul_channel|add_residual|layer_norm(1e-05)",
    "gate of one row": "mul_channel|add_residual|layer_norm(1e-05)",
    "gate of x": "mul_channel|group_norm(4,1e-05)",
    "gate in place": "mul_channel|group_norm(4,1e-05)",
    "one bias for all": "layer_norm(1e-05)",
    "one less for all": "sub_channel|layer_norm(1e-05)",
    "gate minus": "scale(-1)|add_channel|layer_norm(1e-05)",
    "gate of heads": "mul_channel|layer_norm(4,1e-05)",
}


def make(forward: Callable[..., Tensor]) -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.fc2 = nn.Linear(N, N), nn.Linear(N, N)
            self.gn, self.ln, self.bn = nn.GroupNorm(4, N), nn.LayerNorm(N), nn.BatchNorm1d(N)
            self.g = nn.Parameter(torch.empty(N))
            self.col = nn.Parameter(torch.empty(1, N))
            self.sc = nn.Parameter(torch.empty(()))
            self.lst = nn.ModuleDict({"a": nn.Linear(N, N)})

    Model.forward = forward
    model = Model().double()
    for p in model.parameters():
        nn.init.normal_(p)
    return model


def forward_of(model: nn.Module, inputs: list[Tensor]) -> Any:
    """The output and the inputs after it, or the type of what it raised."""
    inputs = [x.clone() for x in inputs]
    try:
        return [model(*inputs), *inputs]
    except RuntimeError as error:
        return type(error)


def gradients_of(y: Tensor, model: nn.Module) -> list[Tensor] | None:
    """The gradient of every parameter; None where eager has none, as after in-place changes."""
    weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape)
    try:
        found = torch.autograd.grad((y * weights).sum(), [*model.parameters()], allow_unused=True)
    except RuntimeError:
        return None
    return [torch.zeros(()) if g is None else g for g in found]


@pytest.mark.parametrize("name", SPELLINGS)
def test_same_result(name: str) -> None:
    forward = SPELLINGS[name]
    model = make(forward)
    fused = epinorm.fuse(copy.deepcopy(model), strategy="reference")
    inputs = [torch.randn(5, N).double() for _ in range(forward.__code__.co_argcount - 1)]
    expected, got = forward_of(model, inputs), forward_of(fused, inputs)
    if isinstance(expected, type):
        assert got is expected
        return
    gradients = gradients_of(expected[0], model)
    if gradients is not None:
        expected += gradients
        got += gradients_of(got[0], fused)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", FUSED_WHOLE)
def test_chain_text(name: str) -> None:
    (row,) = epinorm.explain(make(SPELLINGS[name]), torch.randn(5, N).double()).rows
    assert row.fused
    assert row.chain == FUSED_WHOLE[name]


@pytest.mark.parametrize(
    "join, fused",
    [
        (lambda r, h: r - h, True),
        (lambda r, h: 1 - h, True),
        (lambda r, h: torch.add(r, h, alpha=0.3), False),
        (lambda r, h: torch.sub(r, h, alpha=3), False),
    ],
)
def test_eagers_roundings_of_scaled_sums(join: Callable[..., Tensor], fused: bool) -> None:
    """Eager rounds a scaled sum once; so does a chain of two operations if the first is exact."""
    model = make(lambda s, x: s.ln(join(x, s.fc(x)))).to(torch.bfloat16)
    x = torch.randn(64, N).to(torch.bfloat16)
    ours = epinorm.fuse(copy.deepcopy(model), strategy="reference", rounding="eager")
    with torch.no_grad():
        torch.testing.assert_close(ours(x), model(x), rtol=0, atol=0)
    (row,) = epinorm.explain(ours).rows
    assert row.fused == fused


@pytest.mark.parametrize("name", UNFUSED)
def test_why_not(name: str) -> None:
    (row,) = epinorm.explain(make(SPELLINGS[name]), torch.randn(5, N).double()).rows
    assert not row.fused
    assert re.search(UNFUSED[name], row.reason), row.reason


@pytest.mark.parametrize("name", ["rms of something else", "rms of the batch", "unbiased variance"])
def test_what_is_no_norm_is_not_taken_for_one(name: str) -> None:
    assert epinorm.explain(make(SPELLINGS[name]), torch.randn(5, N).double()).rows == ()


def test_a_number_on_another_device_is_no_operand() -> None:
    """As eager lets one be on the CPU beside values on a GPU."""
    value = torch.empty(2, 3, device="meta")
    assert holds_channels(torch.tensor(2.0, device="meta"), value, 3, False)
    assert not holds_channels(torch.tensor(2.0), value, 3, False)
