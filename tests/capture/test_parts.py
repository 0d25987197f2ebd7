"""Parts of one Linear that reach norms: which become chains, and that gradients stay whole."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import profile

import epinorm
from epinorm.capture import parts, sites

sys.path.insert(0, str(Path(__file__).parent))

from test_rows import check

from imaginary import imaginary_h200

K, HEADS, WIDTH = 32, 4, 16
N = HEADS * WIDTH
TURNED = (HEADS, WIDTH)
NORM, NORMS = "layer_norm(4,1e-05)", ["layer_norm(4,1e-05)", "rms_norm(4,1e-06)"]


def timms(y: Tensor) -> Any:
    return y.reshape(*y.shape[:-1], 3, *TURNED).permute(2, 0, 3, 1, 4).unbind(0)


def chunks(y: Tensor) -> Any:
    return [part.unflatten(-1, TURNED).transpose(1, 2) for part in y.chunk(3, -1)]


def slices(y: Tensor) -> Any:
    q, k, v = y[..., N : 2 * N], y[..., 2 * N :], y[..., :N]
    return [part.view(*y.shape[:-1], *TURNED).transpose(1, 2) for part in (q, k, v)]


def persimmons(y: Tensor) -> Any:
    y = y.view(*y.shape[:-1], HEADS, 3, WIDTH)
    return [y[..., i, :].transpose(1, 2) for i in range(3)]


class Attention(nn.Module):
    """q and k normalised by heads, of one Linear."""

    def __init__(self, divide: Callable[[Tensor], Any] = timms, bias: bool = True) -> None:
        super().__init__()
        self.qkv, self.divide = nn.Linear(K, 3 * N, bias=bias), divide
        self.q_norm, self.k_norm = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH, 1e-6)
        self.o = nn.Linear(N, K)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.divide(self.qkv(x))
        y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        return self.o(y.transpose(1, 2).flatten(2))


def made(*args: Any, **kwargs: Any) -> tuple[Attention, Tensor]:
    torch.manual_seed(0)
    return Attention(*args, **kwargs).double(), torch.randn(2, 5, K).double()


@pytest.mark.parametrize(
    ("divide", "bias"), [(timms, True), (chunks, False), (slices, True), (persimmons, False)]
)
def test_parts_that_reach_norms_are_chains(divide, bias):
    check(*made(divide, bias), NORMS)


def without_v(y: Tensor) -> Any:
    q, k, _ = timms(y)
    return q, k, q


def k_twice(y: Tensor) -> Any:
    q, k, _ = timms(y)
    return q, k, k


@pytest.mark.parametrize(("divide", "twice"), [(without_v, 0), (k_twice, 1)])
def test_a_part_that_is_read_twice_or_never(divide, twice):
    chains = [chain + "|returns(sum)" * (i == twice) for i, chain in enumerate(NORMS)]
    check(*made(divide), chains)


def test_what_of_a_linear_is_told_by_its_channels():
    model, x = made(slices)
    fused = epinorm.fuse(model, strategy="cpu")
    fused(x)
    told = epinorm.explain(fused)
    assert [row.where for row in told.rows] == ["qkv[64:128] → q_norm", "qkv[128:192] → k_norm"]
    assert all(row.fused for row in told.rows)
    model, x = made(persimmons)
    rows = epinorm.explain(epinorm.fuse(model, strategy="reference"), x).rows
    assert [row.where.partition(" →")[0] for row in rows] == ["qkv[4 x 0:16]", "qkv[4 x 16:32]"]


def test_the_weights_gradient_is_whole():
    """One tensor for hooks and ``grad``, put together once and from no padded parts."""
    model, x = made()
    fused, seen = epinorm.fuse(copy.deepcopy(model), strategy="cpu"), []
    fused.qkv.weight.register_hook(lambda gradient: seen.append(gradient.shape))
    fused(x).sum().backward()
    with profile() as prof:
        fused(x).sum().backward()
    names = [event.name for event in prof.events()]
    assert seen == [model.qkv.weight.shape] * 2
    assert "aten::slice_backward" not in names
    assert (
        sum("evaluate_function: SplitWithSizes" in name for name in names) == 2
    )  # weight and bias
    for _ in range(2):
        model(x).sum().backward()
    torch.testing.assert_close(fused.qkv.weight.grad, model.qkv.weight.grad)


@pytest.mark.parametrize("frozen", ["weight", "bias", "weight bias"])
def test_frozen_and_tied_weights(frozen):
    model, x = made()
    for name in frozen.split():
        getattr(model.qkv, name).requires_grad_(False)
    check(model, x, NORMS)
    if frozen == "bias":
        model.o.weight = nn.Parameter(model.qkv.weight[:K, :].detach().repeat(1, 2))
        tied = nn.Sequential(model, nn.Linear(K, 3 * N).double())
        tied[1].weight = model.qkv.weight
        check(tied, x, NORMS)


@pytest.mark.slow
def test_sizes_that_change_are_captured_once_more():
    model, _ = made()
    fused = epinorm.fuse(copy.deepcopy(model), strategy="cpu")
    for rows in ((2, 5), (3, 7), (4, 9), (2, 6)):
        x = torch.randn(*rows, K).double()
        torch.testing.assert_close(fused(x), model(x))
    with torch._dynamo.config.patch(error_on_recompile=True):
        fused(torch.randn(6, 3, K).double())
    assert all(row.fused for row in epinorm.explain(fused).rows)


def test_a_weight_that_changes_in_between_is_eagers():
    class Changing(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.divide(self.qkv(x))
            with torch.no_grad():
                self.qkv.weight.mul_(0.5)
            return self.q_norm(q) + self.k_norm(k) * v

    torch.manual_seed(0)
    model, x = Changing().double().requires_grad_(False), torch.randn(2, 5, K).double()
    fused = epinorm.fuse(copy.deepcopy(model), strategy="cpu")
    for _ in range(3):
        torch.testing.assert_close(fused(x), model(x), rtol=0, atol=1e-12)
    assert torch.equal(fused.qkv.weight, model.qkv.weight)


def returning_v(model: Attention, x: Tensor) -> Any:
    q, k, v = timms(model.qkv(x))
    return model.q_norm(q) * model.k_norm(k) + v, v


def changing_k(model: Attention, x: Tensor) -> Any:
    q, k, v = slices(model.qkv(x))
    return model.q_norm(q) + model.k_norm(k.mul_(2)) * v


def reading_all(model: Attention, x: Tensor) -> Any:
    y = model.qkv(x)
    q, k, v = timms(y)
    return model.q_norm(q) + model.k_norm(k) * v + y.sum()


WHOLE = {
    "returned": (returning_v, "which a reader sees"),
    "changed in place": (changing_k, "which a reader sees"),
    "read as one": (reading_all, "is used more than once"),
}


@pytest.mark.parametrize("case", WHOLE)
def test_a_linear_stays_one_where_that_is_seen(case):
    forward, reason = WHOLE[case]
    model, x = made()
    model.forward = forward.__get__(model)
    fused = copy.deepcopy(model)
    fused.forward = forward.__get__(fused)
    epinorm.fuse(fused, strategy="cpu")
    ours, theirs = fused(x), model(x)
    for a, b in zip(*((y if isinstance(y, tuple) else (y,)) for y in (ours, theirs)), strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()
    rows = epinorm.explain(fused).rows
    assert [row.where for row in rows] == ["qkv → q_norm", "qkv → k_norm"]
    for row in rows:
        assert not row.fused
        assert reason in row.reason


@pytest.mark.parametrize(
    ("rows", "dtype", "why_not"),
    [
        (32 * 197, torch.float32, ""),
        (197, torch.float32, "a Linear for each of its parts would take longer"),
        (32 * 197, torch.bfloat16, "in 16 bit"),
    ],
)
def test_auto_takes_what_is_faster(rows, dtype, why_not, monkeypatch):
    """A ViT-B's block on an H200: three products and two norms in them, or one and two norms."""
    precision = "native" if dtype == torch.bfloat16 else "highest"

    def on_a_gpu(found: Any) -> Any:
        there = {"device": torch.device("cuda", 0), "precision": precision}
        return replace(sites.problem_of(found), **there)

    monkeypatch.setattr(parts, "problem_of", on_a_gpu)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(768, 3 * 768)
            self.q_norm, self.k_norm = nn.LayerNorm(64), nn.LayerNorm(64)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(1, -1, 3, 12, 64).unbind(2)
            return self.q_norm(q) * self.k_norm(k) + v

    with imaginary_h200(), torch.no_grad():
        told = epinorm.explain(Block().to(dtype), torch.empty(1, rows, 768, dtype=dtype)).rows
    assert told[0].where == ("qkv → q_norm" if why_not else "qkv[0:768] → q_norm")
    assert why_not in told[0].reason


class PerHead(nn.Module):
    """StableLM's: a norm for each head, of heads that were turned."""

    def __init__(self, *eps: float, bias: bool = False) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, each, bias=bias) for each in eps)

    def forward(self, heads: Tensor) -> Tensor:
        each = torch.split(heads, 1, dim=1)
        return torch.cat([norm(h) for norm, h in zip(self.norms, each, strict=True)], dim=1)


class StableLm(nn.Module):
    def __init__(self, norm: nn.Module, is_returned: bool = False) -> None:
        super().__init__()
        self.q, self.norm, self.is_returned = nn.Linear(K, N), norm, is_returned

    def forward(self, x: Tensor) -> Tensor:
        q = self.norm(self.q(x).view(*x.shape[:-1], *TURNED).transpose(1, 2))
        if self.is_returned:
            return q
        return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(x.shape[0], -1)


@pytest.mark.parametrize("bias", [True, False])
def test_heads_with_a_norm_each_are_one_chain(bias):
    torch.manual_seed(0)
    model = StableLm(PerHead(*[1e-5] * HEADS, bias=bias)).double()
    for parameter in model.norm.parameters():
        nn.init.normal_(parameter)
    check(model, torch.randn(2, 5, K).double(), [NORM])


@pytest.mark.parametrize(
    ("eps", "is_returned"), [((1e-5, 1e-5, 1e-5, 1e-6), False), ((1e-5,) * 4, True)]
)
def test_heads_with_norms_of_several_kinds_or_seen_in_memory_stay(eps, is_returned):
    model, x = StableLm(PerHead(*eps), is_returned), torch.randn(2, 5, K)
    fused = epinorm.fuse(copy.deepcopy(model), strategy="cpu")
    y = fused(x)
    assert torch.equal(y, model(x))
    assert y.stride() == model(x).stride()
    assert not any(row.fused for row in epinorm.explain(fused).rows)


def test_heads_round_as_in_eager_where_that_is_asked_for():
    model, x = StableLm(PerHead(*[1e-5] * HEADS)).bfloat16(), torch.randn(2, 5, K).bfloat16()
    fused = epinorm.fuse(copy.deepcopy(model), strategy="reference", rounding="eager")
    assert torch.equal(fused(x), model(x))


def test_a_mode_that_the_model_sets_itself_keeps_it_one():
    """What its parts would be there is not known while it is captured."""

    class Narrow(Attention):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                q, k, v = self.divide(self.qkv(x))
                return self.q_norm(q) * self.q_norm(k) + self.q_norm(v)

    torch.manual_seed(0)
    model, x = Narrow(), torch.randn(2, 5, K)
    fused = epinorm.fuse(copy.deepcopy(model), strategy="cpu")
    y = fused(x)
    assert y.dtype == model(x).dtype
    assert torch.equal(y, model(x))
    assert "modes that are changed" in epinorm.explain(fused).rows[0].reason
