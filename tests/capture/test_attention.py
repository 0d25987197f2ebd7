"""nn.MultiheadAttention and PyTorch's transformer layers, opened into their operations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import epinorm

B, T, S, E, HEADS = 3, 5, 7, 16, 4

PADDED = torch.arange(S) >= torch.tensor([S, S - 2, 3])[:, None]
CAUSAL = torch.ones(T, T).triu(1).bool()
ADDED = torch.randn(T, S, generator=torch.Generator().manual_seed(0))
PER_HEAD = torch.randn(B * HEADS, T, S, generator=torch.Generator().manual_seed(1))

# What the module is made with, and what it is called with beside query, key and value.
CROSS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "without weights": ({}, {"need_weights": False}),
    "weights of each head": ({}, {"average_attn_weights": False}),
    "without biases": ({"bias": False}, {"need_weights": False}),
    "other sizes": ({"kdim": 6, "vdim": 10}, {"need_weights": False}),
    "added keys": ({"add_bias_kv": True, "add_zero_attn": True}, {"attn_mask": ADDED}),
    "padding": ({}, {"key_padding_mask": PADDED, "need_weights": False}),
    "padding, mask": ({}, {"key_padding_mask": PADDED, "attn_mask": ADDED > 1.5}),
    "a mask of each head": ({"add_zero_attn": True}, {"attn_mask": PER_HEAD}),
}
SELF: dict[str, dict[str, Any]] = {
    "plain": {"need_weights": False},
    "weights": {},
    "causal": {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False},
    "causal, padding": {
        "attn_mask": CAUSAL, "is_causal": True, "key_padding_mask": PADDED[:, :T],
    },
}  # fmt: skip


def results(model: nn.Module, *tensors: Tensor, **arguments: Any) -> list[Tensor]:
    """What a call returns, all gradients, and what the generator gives next."""
    torch.manual_seed(7)
    leaves = {id(t): t.detach().clone().requires_grad_() for t in tensors}
    made = model(*(leaves[id(t)] for t in tensors), **arguments)
    made = [t for t in (made if isinstance(made, tuple) else (made,)) if t is not None]
    loss = sum((t * torch.linspace(-1, 2, t.numel()).to(t).view(t.shape)).sum() for t in made)
    leaves_ = [*leaves.values(), *model.parameters()]
    return [*made, *torch.autograd.grad(loss, leaves_, allow_unused=True), torch.rand(3)]


def check_equal(model: nn.Module, *tensors: Tensor, **arguments: Any) -> None:
    """Opened, and bit for bit what it was."""
    fused = epinorm.fuse(copy.deepcopy(model))
    ours, theirs = (results(m, *tensors, **arguments) for m in (fused, model))
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None and b is None) or (torch.equal(a, b) and a.stride() == b.stride())
    told = epinorm.explain(fused)
    assert not told.notes
    packed = getattr(model, "_qkv_same_embed_dim", True)
    into = {"in_proj"} if packed else {"q_proj", "k_proj", "v_proj"}
    assert {row.where for row in told.linears} == {*into, "out_proj"}


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("name", CROSS)
def test_attention_to_another_is_eagers_bit_for_bit(name: str, batch_first: bool) -> None:
    made, called = CROSS[name]
    model = nn.MultiheadAttention(E, HEADS, dropout=0.2, batch_first=batch_first, **made)
    sizes = made.get("kdim", E), made.get("vdim", E)
    q, k, v = torch.randn(B, T, E), *(torch.randn(B, S, size) for size in sizes)
    turned = (q, k, v) if batch_first else [t.transpose(0, 1).contiguous() for t in (q, k, v)]
    check_equal(model, *turned, **called)


@pytest.mark.parametrize("name", SELF)
def test_self_attention_is_eagers_bit_for_bit(name: str) -> None:
    x = torch.randn(B, T, E)
    check_equal(
        nn.MultiheadAttention(E, HEADS, dropout=0.2, batch_first=True), x, x, x, **SELF[name]
    )


def test_what_is_not_batched() -> None:
    x = torch.randn(T, E)
    check_equal(nn.MultiheadAttention(E, HEADS), x, x, x)
    memory = torch.randn(S, E)
    check_equal(nn.MultiheadAttention(E, HEADS), x, memory, memory)


@pytest.mark.slow
def test_sizes_that_change_are_captured_once_more() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(E, HEADS, batch_first=True)
            self.norm = nn.LayerNorm(E)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            y, _ = self.attention(x, x, x, attn_mask=mask, need_weights=False)
            return self.norm(x + y)

    model = Model().double()
    fused = epinorm.fuse(copy.deepcopy(model))
    for batch, length in ((3, 5), (4, 6), (7, 9), (5, 2), (1, 4)):
        x, mask = torch.randn(batch, length, E).double(), torch.randn(length, length).double()
        for a, b in zip(results(fused, x, mask=mask), results(model, x, mask=mask), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    assert len({row.where for row in epinorm.explain(fused).rows}) == 1
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3


LAYERS: dict[str, Callable[[], nn.Module]] = {
    f"{cls.__name__}, {norm_first=}, {batch_first=}": lambda c=cls, n=norm_first, b=batch_first: c(
        E, HEADS, 24, dropout=0.0, norm_first=n, batch_first=b, dtype=torch.float64
    )
    for cls in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    for norm_first in (False, True)
    for batch_first in (False, True)
}


@pytest.mark.parametrize("name", LAYERS)
def test_every_norm_of_a_layer_is_fused_with_the_projection_before(name: str) -> None:
    model = LAYERS[name]()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    given = [torch.randn(2, 6, E, dtype=torch.float64)] * (1 + ("Decoder" in name))
    fused = epinorm.fuse(copy.deepcopy(model))
    for a, b in zip(results(fused, *given), results(model, *given), strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    rows = epinorm.explain(fused).rows
    projections = ["self_attn", "multihead_attn"][: len(given)]
    first = "norm_first=True" in name
    expected = [
        f"{projection}.out_proj → norm{i + 1 + first}" for i, projection in enumerate(projections)
    ]
    if not first:
        expected.append(f"linear2 → norm{len(given) + 1}")
    assert [row.where for row in rows if row.fused] == expected
    assert not [row for row in rows if not row.fused]


class Stream(nn.Module):
    """As torchvision's ViT: attention plus x, which then lies in memory as attention does."""

    def __init__(self, ends_with_norm: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(E, HEADS, batch_first=True)
        self.norm, self.mlp, self.last = nn.LayerNorm(E), nn.Linear(E, E), nn.LayerNorm(E)
        self.ends_with_norm = ends_with_norm

    def forward(self, x: Tensor) -> Tensor:
        h = self.attention(x, x, x, need_weights=False)[0] + x
        h = h + self.mlp(self.norm(h))
        return self.last(h) if self.ends_with_norm else h


@pytest.mark.parametrize("ends_with_norm", [False, True])
def test_a_residual_stream_as_attention_lies_in_memory(ends_with_norm: bool) -> None:
    """Fused where nobody sees how; a result is laid out as eager's."""
    model, x = Stream(ends_with_norm).double(), torch.randn(B, T, E).double()
    fused = epinorm.fuse(copy.deepcopy(model))
    for a, b in zip(results(fused, x), results(model, x), strict=True):
        if a is None or b is None:  # a norm that nothing reads
            assert a is b
        else:
            assert a.stride() == b.stride()
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    rows = {row.where: row.fused for row in epinorm.explain(fused).rows}
    assert rows["attention.out_proj → norm"] == ends_with_norm


def test_a_layers_own_kernel_is_opened_for_operations_that_gain() -> None:
    """By name everything is taken; by itself, on a CPU, the kernel stays."""
    model = nn.TransformerEncoderLayer(E, HEADS, 24, batch_first=True).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    x, wheres = torch.randn(B, T, E), ["self_attn.out_proj → norm1", "linear2 → norm2"]
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        error = (model(x) - exact).abs().max()
        opened = epinorm.fuse(copy.deepcopy(model), strategy="reference")
        assert (opened(x) - exact).abs().max() <= 2 * error
        assert [row.where for row in epinorm.explain(opened).rows] == wheres
        left = epinorm.fuse(copy.deepcopy(model))
        assert torch.equal(left(x), model(x))
    (note,) = epinorm.explain(left).notes
    assert "nn.TransformerEncoderLayer's Linears and norms are not seen in eval" in note


@pytest.mark.parametrize("need_weights", [False, True])
def test_attentions_own_kernel(need_weights: bool) -> None:
    model = nn.MultiheadAttention(E, HEADS, batch_first=True).eval()
    fused = epinorm.fuse(copy.deepcopy(model), strategy="reference")
    x = torch.randn(B, T, E)
    with torch.no_grad():
        for ours, theirs in zip(
            fused(x, x, x, need_weights=need_weights),
            model(x, x, x, need_weights=need_weights),
            strict=True,
        ):
            if theirs is not None:
                torch.testing.assert_close(ours, theirs)
    assert not epinorm.explain(fused).notes


def test_stacked_layers_that_gain_nothing_keep_their_kernels() -> None:
    """Opened for the search, closed again, with a Linear behind that is taken."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.GroupNorm(4, 32), nn.Linear(E, 32)
            layer = nn.TransformerEncoderLayer(E, HEADS, 24, batch_first=True, dropout=0)
            self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return F.relu(self.norm(self.head(x[:, 0])))

    model = Model().eval()
    fused = epinorm.fuse(copy.deepcopy(model))
    with torch.no_grad():
        x = torch.randn(B, T, E)
        torch.testing.assert_close(fused(x), model(x))
    assert [row.where for row in epinorm.explain(fused).rows if row.fused] == ["head → norm"]


class Inner(nn.Module):
    """Attention under a mode that the model itself changes."""

    def __init__(self, mode: Callable[[], Any]) -> None:
        super().__init__()
        self.attention, self.mode = nn.MultiheadAttention(E, HEADS, batch_first=True), mode

    def forward(self, x: Tensor) -> Tensor:
        with self.mode():
            return self.attention(x, x, x)[0]


MODES = [lambda: torch.autocast("cpu", torch.bfloat16), torch.no_grad]


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_within_the_model_leaves_it_whole(mode: Any) -> None:
    model, x = Inner(mode), torch.randn(B, T, E)
    fused = epinorm.fuse(copy.deepcopy(model))
    ours, theirs = fused(x), model(x)
    assert torch.equal(ours, theirs)
    assert ours.requires_grad == theirs.requires_grad
    (note,) = epinorm.explain(fused).notes
    assert "modes that are changed within the model" in note


class Masked(nn.MultiheadAttention):
    """Its function alone, with masks of two types, of which PyTorch warns at each call."""

    def forward(self, q: Tensor, k: Tensor) -> Any:
        vectors = (self.in_proj_weight, self.in_proj_bias, None, None, False, 0.0)
        out = (self.out_proj.weight, self.out_proj.bias)
        masks = {"key_padding_mask": PADDED, "attn_mask": ADDED}
        return F.multi_head_attention_forward(q, k, k, E, HEADS, *vectors, *out, **masks)[0]


def test_what_warns_at_each_call_stays_whole() -> None:
    fused = epinorm.fuse(Masked(E, HEADS))
    with pytest.warns(UserWarning, match="mismatched"):
        fused(torch.randn(T, B, E), torch.randn(S, B, E))
    (note,) = epinorm.explain(fused).notes
    assert "it warns" in note


def test_checkpointing_from_the_first_call_on() -> None:
    """Attention is tried on example values, which checkpoint's hooks must not see; and both runs of
    a call take the same way."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
            self.norm = nn.LayerNorm(32)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
            return y

    model = Block()
    fused, x = epinorm.fuse(copy.deepcopy(model)), torch.randn(2, 5, 32, requires_grad=True)
    for _ in range(3):
        found = []
        for m in (fused, model):
            y = checkpoint(m, x, use_reentrant=False)
            found.append((y, *torch.autograd.grad(y.sin().sum(), [x, *m.parameters()])))
        for ours, eager in zip(*found, strict=True):
            torch.testing.assert_close(ours, eager)


def test_padded_positions_of_an_encoder_are_eagers_from_the_first_call_on() -> None:
    """In eval eager makes nested tensors, and zeros of the padding; compiled it does not."""
    layer = nn.TransformerEncoderLayer(E, HEADS, 2 * E, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    fused, x = epinorm.fuse(copy.deepcopy(model)), torch.randn(B, S, E)
    with torch.no_grad():
        eager = model(x, src_key_padding_mask=PADDED)
        for _ in range(2):
            torch.testing.assert_close(fused(x, src_key_padding_mask=PADDED), eager)
    assert not eager[PADDED].any()
