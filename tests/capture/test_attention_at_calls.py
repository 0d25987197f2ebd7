"""``fuse`` computes fp32 attention by products in TF32, and looks at each call whether it may."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

import epinorm
from epinorm import said
from epinorm.backends import memo
from epinorm.capture import tf32_attention
from epinorm.capture.fuse import fused_of
from epinorm.operator import attention
from epinorm.precision import product_precision

S, D, HEADS = 64, 64, 2
NUMPYS = 1 / np.sqrt(50)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
plain: Attend = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU as a GPU that the kernels were measured on, where TF32 is allowed, with launches
    worth it at all sizes. What computes is ``epinorm::attention`` in PyTorch's products."""

    def pytorchs(*_: Tensor) -> int:
        enabled = torch.backends.cuda.mem_efficient_sdp_enabled()
        return (SDPBackend.EFFICIENT_ATTENTION if enabled else SDPBackend.MATH).value

    def precision(dtype: torch.dtype, _: str) -> str:
        return product_precision(dtype, "cuda")

    for module in (tf32_attention, attention):
        monkeypatch.setattr(module, "product_precision", precision)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(tf32_attention, "pytorchs_kernel", pytorchs)
    monkeypatch.setattr(tf32_attention, "FEWEST_TERMS", {False: 0, True: 0})
    was = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(was)
    memo.clear()


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The results of attentions that were taken."""
    made: list[Tensor] = []

    def attend(*given: Any) -> Tensor:
        made.append(attention.attend(*given))
        return made[-1]

    monkeypatch.setattr(tf32_attention, "attend", attend)
    return made


class Layer(nn.Module):
    """Self-attention with a residual; what a CPU's kernels might take, a norm, is left out."""

    def __init__(self, attend: Attend = plain, width: int = D) -> None:
        super().__init__()
        channels = HEADS * width
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.attend, self.width = attend, width

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (-1, self.width)).transpose(1, 2) for t in parts)
        mixed = self.attend(q, k, v)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def layer(attend: Attend = plain, width: int = D) -> tuple[Layer, Layer, Tensor]:
    """A layer, the same fused, and x."""
    torch.manual_seed(0)
    model = Layer(attend, width)
    return (
        model,
        epinorm.fuse(copy.deepcopy(model)),
        torch.randn(2, S, HEADS * width, requires_grad=True),
    )


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The result, and gradients of x and parameters."""
    y, leaves = model(x), [x, *model.parameters()]
    for leaf in leaves:
        leaf.grad = None
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape))
    return [y, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def check(model: nn.Module, fused: nn.Module, x: Tensor, run: Any = step) -> None:
    """As accurate as eager, by float64."""
    wide = copy.deepcopy(model).double()
    exact = run(wide, x.detach().double().requires_grad_())
    for our, their, true in zip(run(fused, x), run(model, x), exact, strict=True):
        errors = [((y - true).norm() / true.norm()).item() for y in (our, their)]
        assert errors[0] <= max(2 * errors[1], 4.8e-7)


def test_values_and_gradients(ours: list[Tensor]) -> None:
    model, fused, x = layer()
    check(model, fused, x)
    assert len(ours) == 1
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x))
    assert len(ours) == 2
    assert ours[0].stride() == ours[1].stride() == (S * HEADS * D, D, HEADS * D, 1)


def test_other_batches_too(ours: list[Tensor]) -> None:
    model, fused, _ = layer()
    for batch in (2, 3, 5):
        check(model, fused, torch.randn(batch, S, HEADS * D, requires_grad=True))
    assert len(ours) == 3


def scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=None, scale=0.5)


def positional(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, None, 0.0, False)


def changed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(q, k, v).mul_(2)


def frozen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(q, k.detach(), v)


def crossed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(q, *(torch.cat((t, -t.flip(2)), 2) for t in (k, v)))


def by_numpy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(q, k, v, scale=NUMPYS)


def test_a_scale_of_numpys_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def attend(*asked: Any) -> Tensor:
        given.append(asked[3])
        return attention.attend(*asked)

    monkeypatch.setattr(tf32_attention, "attend", attend)
    model, fused, x = layer(by_numpy)
    check(model, fused, x)
    assert [type(scale) for scale in given] == [float]


@pytest.mark.parametrize("attend", [scaled, positional, frozen, crossed])
def test_however_it_is_asked(attend: Attend, ours: list[Tensor]) -> None:
    check(*layer(attend))
    assert len(ours) == 1


def test_its_result_may_be_changed_where_eager_lets_it(ours: list[Tensor]) -> None:
    model, fused, x = layer(changed)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x))
    assert len(ours) == 1
    for each in (model, fused):  # both save their result
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            step(each, x)


def test_in_multi_head_attention(ours: list[Tensor]) -> None:
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(HEADS * D, HEADS, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.attention(x, x, x, need_weights=False)[0]
            return y

    model, x = Model(), torch.randn(2, S, HEADS * D, requires_grad=True)
    check(model, epinorm.fuse(copy.deepcopy(model)), x)
    assert len(ours) == 1


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(S, S, dtype=torch.bool).tril(3)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)


def broadcast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(q, k[:1], v[:1])


def short(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(q, k[:, :, :8], v[:, :, :8])


def chosen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION]):
        return plain(q, k, v)


def test_dropout_and_scale_that_are_other_numbers_from_call_to_call(ours: list[Tensor]) -> None:
    class Changing(nn.Module):
        p, scale = 0.0, 0.0

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=self.p, scale=self.scale)

    model = Changing()
    fused, given = epinorm.fuse(model), [torch.randn(2, HEADS, S, D) for _ in range(3)]
    for p, scale in ((0.1, 0.3), (0.2, 0.4), (0.0, 0.5), (0.1, 0.6), (0.0, 0.7)):
        fused.p, fused.scale = p, scale
        ours.clear()
        fused_of(fused).forget()  # of the calls that gained nothing
        torch.manual_seed(1)
        made = fused(*given)
        torch.manual_seed(1)
        torch.testing.assert_close(made, model.forward(*given))
        assert len(ours) == (p == 0.0)


def check_left(model: nn.Module, fused: nn.Module, x: Tensor) -> None:
    """Eager's bits; of dropout too."""
    results = []
    for each in (fused, model):
        torch.manual_seed(1)
        results.append(each(x))
    assert torch.equal(*results)


@pytest.mark.parametrize(
    "attend", [masked, causal, dropped, grouped, broadcast, short, chosen], ids=lambda f: f.__name__
)
def test_what_is_another_function_stays(attend: Attend, ours: list[Tensor]) -> None:
    check_left(*layer(attend))
    assert not ours


@pytest.mark.parametrize("asked", [{"strategy": "reference"}, {"rounding": "eager"}])
def test_what_is_asked_of_pytorch_stays(asked: Any, ours: list[Tensor]) -> None:
    model, fused, x = layer()
    check_left(model, epinorm.fuse(fused, **asked), x)
    assert not ours


def test_a_width_without_kernels_stays(ours: list[Tensor]) -> None:
    check_left(*layer(width=32))
    assert not ours


def test_settings_are_looked_at_at_each_call(ours: list[Tensor]) -> None:
    model, fused, x = layer()
    for _ in range(2):
        ours.clear()
        fused(x)
        with profile(acc_events=True):
            fused(x)
        assert len(ours) == 2
        torch.set_float32_matmul_precision("highest")
        check_left(model, fused, x)
        torch.set_float32_matmul_precision("high")
        with sdpa_kernel(SDPBackend.MATH):
            check_left(model, fused, x)
        fused(x)
        assert len(ours) == 3
        with torch.autocast("cpu", torch.bfloat16):
            check_left(model, fused, x)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        try:
            check_left(model, fused, x)
        finally:
            torch.backends.cuda.enable_mem_efficient_sdp(True)
        assert len(ours) == 3
        fused_of(fused).forget()  # of the calls under modes


def test_the_backward_pass_looks_at_the_precision_too(
    ours: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    known = attention.by_products

    def products(*given: Any) -> Any:
        asked.append(torch.get_float32_matmul_precision())
        return known(*given)

    monkeypatch.setattr(attention, "by_products", products)
    _, fused, x = layer()
    y = fused(x)
    torch.set_float32_matmul_precision("highest")
    y.sum().backward()
    torch.set_float32_matmul_precision("high")
    fused(x).sum().backward()
    assert len(ours) == 2
    assert asked == ["highest"]


def test_a_default_device_changes_nothing() -> None:
    q = torch.randn(2, HEADS, S, D)
    with torch.device("cpu"):
        assert tf32_attention.is_taken_now(q, q, q)


def test_a_mode_of_the_users_sees_pytorchs(ours: list[Tensor]) -> None:
    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return function(*args, **(kwargs or {}))

    model, fused, x = layer()
    with Mode():
        check(model, fused, x)
    assert not ours


def test_a_negated_view_is_pytorchs() -> None:
    q = torch.randn(2, HEADS, S, D)
    assert tf32_attention.is_taken_now(q, q, q)
    assert not tf32_attention.is_taken_now(q, torch._neg_view(q), q)


def test_where_launches_cost_more_than_they_save_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(tf32_attention, "product_precision", lambda *_: "high")
    monkeypatch.setattr(tf32_attention, "pytorchs_kernel", lambda *_: 2)
    monkeypatch.setattr(tf32_attention, "compiles", lambda *_: True)
    sizes = {(16, 12, 512): True, (32, 12, 197): True, (1, 12, 512): False, (64, 12, 64): False}
    for (batch, heads, rows), taken in sizes.items():
        q = torch.empty(batch, heads, rows, D)
        assert tf32_attention.is_taken_now(q, q, q) == taken


def gradients_of_gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    first = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
    return [*first, *torch.autograd.grad(first[0].square().sum(), [x, *model.parameters()][:3])]


def in_a_batch(model: nn.Module, x: Tensor) -> list[Tensor]:
    y = model(x)
    grads = torch.stack([torch.linspace(-1, n, y.numel(), dtype=y.dtype) for n in range(1, 4)])
    grads = grads.view(3, *y.shape)
    return list(torch.autograd.grad(y, [x], grads, is_grads_batched=True))


def vmapped(model: nn.Module, x: Tensor) -> list[Tensor]:
    y = model(x)
    grads = torch.stack([torch.full_like(y, n).cumsum(-1) for n in range(1, 4)])
    return [torch.func.vmap(lambda g: torch.autograd.grad(y, x, g, retain_graph=True)[0])(grads)]


@pytest.mark.parametrize("run", [gradients_of_gradients, in_a_batch, vmapped])
def test_what_autograd_can_ask(run: Any, ours: list[Tensor]) -> None:
    model, fused, x = layer()
    with sdpa_kernel(SDPBackend.MATH):  # others have no second derivative
        exact = run(copy.deepcopy(model).double(), x.detach().double().requires_grad_())
        theirs = run(model, x)
    for our, their, true in zip(run(fused, x), theirs, exact, strict=True):
        errors = [((y - true).norm() / true.norm()).item() for y in (our, their)]
        assert errors[0] <= max(2 * errors[1], 1e-6)
    assert len(ours) == 1


def test_tangents_are_pytorchs(ours: list[Tensor]) -> None:
    model, fused, x = layer()
    tangents = []
    with sdpa_kernel(SDPBackend.MATH), forward_ad.dual_level():
        dual = forward_ad.make_dual(x.detach(), torch.ones_like(x))
        for each in (model, fused):
            tangents.append(forward_ad.unpack_dual(each(dual)).tangent)
    torch.testing.assert_close(*tangents)
    assert not ours


def followed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """By what saves something too: running again ends there."""
    return plain(q, k, v).tanh()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("within", [False, True])
def test_checkpointing(within: bool, reentrant: bool, ours: list[Tensor]) -> None:
    def again(function: Attend) -> Any:
        return partial(checkpoint, function, use_reentrant=reentrant)

    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    def run(model: nn.Module, x: Tensor) -> list[Tensor]:
        return step(model if within else Checkpointed(model), x)

    check(*layer(again(followed) if within else followed), run)
    assert len(ours) == 2


@pytest.mark.parametrize("fails_at", [0, 1])
def test_without_a_triton_that_works_it_stays(
    fails_at: int, ours: list[Tensor], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    tried = []

    def fails(*_: Any) -> Any:
        tried.append(fails_at)
        raise RuntimeError("Failed to find C compiler")

    passes: list[Any] = [attention._forward, attention._backward]
    passes[fails_at] = fails
    monkeypatch.setattr(attention, "passes", lambda on_gpu: passes)
    said.forget()
    model, fused, x = layer()
    for _ in range(3):
        for our, their in zip(step(fused, x), step(model, x), strict=True):
            assert torch.equal(our, their)
    assert not ours
    assert len(tried) == 1
    assert "Failed to find C compiler" in caplog.text


def test_where_memory_was_short_it_is_tried_again(
    ours: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes, short = attention.passes(False), [True]

    def forward(*given: Any) -> Any:
        if short:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return passes[0](*given)

    monkeypatch.setattr(attention, "passes", lambda on_gpu: (forward, passes[1]))
    model, fused, x = layer()
    check(model, fused, x)
    assert not ours
    short.clear()
    fused_of(fused).forget()  # that the call gained nothing
    check(model, fused, x)
    assert len(ours) == 1


def test_explain_says_so() -> None:
    model, fused, x = layer()
    assert any("TF32" in note for note in epinorm.explain(fused, x).notes)
    torch.set_float32_matmul_precision("highest")
    assert not any("TF32" in note for note in epinorm.explain(model, x).notes)
