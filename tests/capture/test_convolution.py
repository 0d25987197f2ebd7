"""Convolutions of one tap as Linears: what they compute, how it lies, and which are taken."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

import epinorm
from epinorm.capture import convolution, dynamo, paying, rewriting, sites

sys.path.insert(0, str(Path(__file__).parent))

from test_rows import check

from epinorm.precision import fp32_precision
from epinorm.tools.accuracy import relative_error
from imaginary import imaginary_h200

B, K, N, L = 3, 24, 32, 20


class Convolved(nn.Module):
    """A convolution, and what a test makes of its result."""

    def __init__(
        self,
        after: Callable[[Tensor], Tensor] = F.relu,
        dims: int = 1,
        taps: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.conv = (nn.Conv1d, nn.Conv2d)[dims - 1](K, N, taps, **kwargs)
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.conv(x))


def image(channels_last: bool) -> Tensor:
    x = torch.rand(B, K, 4, 5)
    return x.to(memory_format=torch.channels_last) if channels_last else x


def chains_of(model: nn.Module, x: Tensor) -> list[tuple[str, str]]:
    told = epinorm.explain(epinorm.fuse(copy.deepcopy(model), strategy="reference"), x)
    assert not told.rows
    return [(row.where, row.chain) for row in told.linears]


TAKEN: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], str]] = {
    "ReLU": (Convolved, lambda: torch.rand(B, K, L), "relu"),
    "alone": (lambda: Convolved(nn.Identity()), lambda: torch.rand(B, K, L), "identity"),
    "in place": (
        lambda: Convolved(lambda h: F.silu(h, inplace=True).mul_(2)),
        lambda: torch.randn(B, K, L),
        "silu|scale(2)",
    ),
    "changed behind": (
        lambda: Convolved(lambda h: F.gelu(h).add_(torch.ones(L))),
        lambda: torch.randn(B, K, L),
        "gelu",
    ),
    "no bias": (lambda: Convolved(F.gelu, bias=False), lambda: torch.randn(B, K, L), "gelu"),
    "dilated": (lambda: Convolved(dilation=3), lambda: torch.randn(B, K, L), "relu"),
    "padding same": (lambda: Convolved(padding="same"), lambda: torch.randn(B, K, L), "relu"),
    "image": (lambda: Convolved(dims=2), lambda: image(False), "relu"),
    "channels-last image": (lambda: Convolved(F.gelu, dims=2), lambda: image(True), "gelu"),
    "one that is turned": (
        Convolved,
        lambda: torch.rand(B, L, K).transpose(1, 2),
        "relu",
    ),
    "as many places as channels": (
        lambda: Convolved(lambda h: F.layer_norm(h + torch.linspace(0, 1, N), (N,))),
        lambda: torch.rand(B, K, N),
        "identity",
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_it_is_a_linear_with_what_follows_it(name: str) -> None:
    """Values, gradients, shapes and strides are eager's."""
    make, given, chain = TAKEN[name]
    torch.manual_seed(0)
    model, x = make(), given()
    assert chains_of(model, x) == [("conv", chain)]
    check(model, x, [], "reference")


class Mixed(Convolved):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "taps": (lambda: Convolved(taps=3), lambda: torch.rand(B, K, L)),
    "stride": (lambda: Convolved(stride=2), lambda: torch.rand(B, K, L)),
    "padding": (lambda: Convolved(padding=1), lambda: torch.rand(B, K, L)),
    "padding of images": (lambda: Convolved(dims=2, padding=(0, 1)), lambda: image(False)),
    "groups": (lambda: Convolved(groups=4), lambda: torch.rand(B, K, L)),
    "double": (lambda: Convolved().double(), lambda: torch.rand(B, K, L).double()),
    "two dtypes": (Mixed, lambda: torch.rand(B, K, L)),
    "no batch": (Convolved, lambda: torch.rand(K, L)),
    "one channel": (lambda: nn.Conv2d(K, 1, 1), lambda: image(True)),
    "of one channel": (lambda: nn.Conv2d(1, N, 1), lambda: image(True)[:, :1]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_linear_stays(name: str) -> None:
    make, given = REFUSED[name]
    model, x = make(), given()
    assert not chains_of(model, x)
    fused = epinorm.fuse(copy.deepcopy(model), strategy="reference")
    assert torch.equal(fused(x), model(x))


def test_under_autocast_it_stays() -> None:
    model, x = Convolved(), torch.rand(B, K, L)
    fused = epinorm.fuse(copy.deepcopy(model), strategy="reference")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fused(x), model(x))
    assert not epinorm.explain(fused).linears


def results_of(a: nn.Module, b: nn.Module, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """What both compute of x, and their gradients, of x first, in pairs."""
    found = []
    for model in (a, b):
        given = x.clone().requires_grad_()
        y = model(given)
        found.append((y, *torch.autograd.grad(y.square().sum(), (given, *model.parameters()))))
    return zip(*found, strict=True)


def test_where_it_does_not_pay_it_is_eagers_bit_for_bit() -> None:
    model, x = Convolved(F.gelu, dims=2), image(True)
    fused = epinorm.fuse(copy.deepcopy(model))
    assert all(torch.equal(a, b) for a, b in results_of(fused, model, x))
    assert not epinorm.explain(fused).linears


class Points(nn.Module):
    """PointNet's kind, whose last result is returned or reduced over its places."""

    def __init__(self, reduced: bool) -> None:
        super().__init__()
        self.a, self.b, self.reduced = nn.Conv1d(K, N, 1), nn.Conv1d(N, K, 1), reduced

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(F.relu(self.a(x)))
        return y.max(-1)[0] if self.reduced else y


@pytest.mark.parametrize(("reduced", "copies"), [(True, 1), (False, 2)])
def test_it_is_turned_back_only_where_that_is_seen(reduced: bool, copies: int) -> None:
    torch.manual_seed(0)
    model, x = Points(reduced), torch.randn(B, K, L)
    check(model, x, [], "reference")
    fused = epinorm.fuse(copy.deepcopy(model), strategy="reference")
    with torch.no_grad():
        fused(x)
        with profile() as prof:
            y = fused(x)
    assert y.stride() == model(x).stride()
    assert sum(event.name == "aten::clone" for event in prof.events()) == copies


def test_a_result_that_is_read_twice_ends_its_chain() -> None:
    class Twice(Convolved):
        def forward(self, x: Tensor) -> Any:
            h = self.conv(x)
            return F.gelu(h), h

    model, x = Twice(), torch.randn(B, K, L)
    assert chains_of(model, x) == [("conv", "identity")]
    fused = epinorm.fuse(copy.deepcopy(model), strategy="reference")
    for ours, eagers in zip(fused(x), model(x), strict=True):
        torch.testing.assert_close(ours, eagers)
        assert ours.is_contiguous()


def test_what_changes_in_between_does_so_behind_it() -> None:
    class Changing(Convolved):
        def forward(self, x: Tensor) -> Any:
            h = self.conv(x)
            x.mul_(2)
            with torch.no_grad():
                y = F.relu(h)
            return y + F.silu(self.conv(x)), y

    model, x = Changing(), torch.randn(B, K, L)
    fused = epinorm.fuse(copy.deepcopy(model), strategy="reference")
    for _ in range(2):
        given = x.clone(), x.clone()
        for ours, eagers in zip(fused(given[0]), model(given[1]), strict=True):
            torch.testing.assert_close(ours, eagers)
            assert ours.requires_grad == eagers.requires_grad
        assert torch.equal(*given)
    chains = [row.chain for row in epinorm.explain(fused).linears]
    assert chains == ["identity", "silu"]


def test_sizes_that_change_are_captured_once_more() -> None:
    model = Convolved(F.gelu, dims=2)
    fused = epinorm.fuse(copy.deepcopy(model), strategy="reference")
    for batch, places in ((3, 4), (5, 6), (7, 9)):
        x = torch.randn(batch, K, places, 5)
        torch.testing.assert_close(fused(x), model(x))
    with torch._dynamo.config.patch(error_on_recompile=True):
        y = fused(torch.randn(4, K, 8, 5))
    assert y.is_contiguous()


def test_hooks_and_gradients_are_of_the_convolution() -> None:
    model = Convolved(F.relu)
    fused, seen = epinorm.fuse(copy.deepcopy(model), strategy="reference"), []
    for m in (model, fused):
        m.conv.register_forward_hook(lambda module, given, result: result * 2)
        m.conv.weight.register_hook(lambda gradient: seen.append(gradient.shape))
    x = torch.randn(B, K, L)
    for m in (model, fused):
        m(x).square().sum().backward()
    assert seen == [(N, K, 1)] * 2
    torch.testing.assert_close(fused.conv.weight.grad, model.conv.weight.grad)
    assert [row.chain for row in epinorm.explain(fused).linears] == ["scale(2)|relu"]


def test_gradients_lie_as_eagers() -> None:
    """Optimizers take another way for what lies otherwise than its parameter."""
    model = Convolved(F.relu, dims=2).to(memory_format=torch.channels_last)
    fused, strides = epinorm.fuse(copy.deepcopy(model), strategy="reference"), []
    for m in (model, fused):
        m(image(True)).square().sum().backward()
        strides.append([p.grad.stride() for p in m.parameters()])
    assert strides[0] == strides[1] == [(K, 1, K, K), (1,)]
    assert len(epinorm.explain(fused).linears) == 1


@pytest.mark.parametrize("channels_last", [(False, False), (True, False), (False, True)])
def test_gradients_of_x_lie_as_eagers(channels_last: tuple[bool, bool]) -> None:
    """Of x or the weight as channels-last; two in a row, whose own rows are turned nowhere."""
    model = nn.Sequential(nn.Conv2d(K, N, 1), nn.ReLU(), nn.Conv2d(N, K, 1))
    if channels_last[1]:
        model = model.to(memory_format=torch.channels_last)
    fused, gradients = epinorm.fuse(copy.deepcopy(model), strategy="reference"), []
    given = image(channels_last[0])
    for m in (model, fused):
        x = given.clone().requires_grad_()
        gradients += torch.autograd.grad(m(x).square().sum(), x)
    assert gradients[0].stride() == gradients[1].stride()
    torch.testing.assert_close(*gradients)
    assert len(epinorm.explain(fused).linears) == 2


def test_hooks_may_view_the_gradient_of_x() -> None:
    fused = epinorm.fuse(nn.Sequential(nn.Conv1d(K, N, 1)), strategy="reference")
    for x in (
        torch.rand(B, K, L),
        torch.rand(B, K, 2 * L)[..., ::2],
        torch.rand(K, L).expand(B, K, L),
    ):
        (x := x.detach()).requires_grad_().register_hook(lambda g: g.view(-1).view(g.shape))
        fused(x).square().sum().backward()
    assert epinorm.explain(fused).linears


def test_a_result_without_gradients_may_be_changed_where_they_are() -> None:
    """As features of a network that does not train are: no view of rows, as a Linear's are."""
    fused = epinorm.fuse(Convolved(F.gelu, dims=2), strategy="reference")
    scale = torch.ones((), requires_grad=True)
    with torch.no_grad():
        y = fused(image(True))
    expected = y.sum()
    y.mul_(scale)
    y.sum().backward()
    torch.testing.assert_close(scale.grad, expected)
    assert epinorm.explain(fused).linears


class Beside(nn.Module):
    """A convolution that stays, and a Linear."""

    def __init__(self, within_vmap: bool) -> None:
        super().__init__()
        self.conv, self.fc, self.within_vmap = nn.Conv1d(K, N, 1), nn.Linear(L, N), within_vmap

    def forward(self, x: Tensor) -> Tensor:
        y = torch.vmap(lambda row: self.conv(row[None])[0])(x) if self.within_vmap else self.conv(x)
        return F.gelu(self.fc(y))


@pytest.mark.parametrize("within_vmap", [True, False])
def test_where_layouts_have_no_answer_the_rest_is_captured(within_vmap: bool) -> None:
    model, x = Beside(within_vmap), torch.rand(B, K, L)
    if not within_vmap:
        torch._dynamo.decorators.mark_unbacked(x, 0)
    fused = epinorm.fuse(copy.deepcopy(model), strategy="reference")
    torch.testing.assert_close(fused(x), model(x))
    assert [row.where for row in epinorm.explain(fused).linears] == ["fc"]


def test_a_dilation_that_is_none_raises_as_in_eager() -> None:
    fused = epinorm.fuse(Convolved(dilation=0), strategy="reference")
    with pytest.raises(RuntimeError, match="dilation"):
        fused(torch.rand(B, K, L))


def test_a_norm_behind_it_is_no_chain_that_failed() -> None:
    model = nn.Sequential(nn.Conv1d(K, N, 1), nn.BatchNorm1d(N), nn.ReLU(), nn.GroupNorm(4, N))
    fused = epinorm.fuse(copy.deepcopy(model), strategy="reference", strict=True)
    x = torch.randn(B, K, L)
    torch.testing.assert_close(fused(x), model(x))
    told = epinorm.explain(fused)
    assert (told.rows, [row.chain for row in told.linears]) == ((), ["identity"])


@pytest.mark.usefixtures("interpreted")
def test_checkpointed_and_compiled() -> None:
    class Checkpointed(Convolved):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    model, x = Checkpointed(F.gelu), torch.randn(B, K, L)
    check(model, x, [], "reference")
    options = {"strategy": "reference"}
    plain = Convolved(F.gelu)
    plain.load_state_dict(model.state_dict())
    y = torch.compile(plain, backend="epinorm", options=options)(x)
    torch.testing.assert_close(y, model(x))
    assert y.is_contiguous()


def told_of_an_h200(
    monkeypatch: Any, k: int, n: int, x: Tensor, training: bool, *behind: nn.Module
) -> bool:
    """Whether ``auto`` takes a convolution there."""

    def on_a_gpu(found: Any) -> Any:
        there = {"device": torch.device("cuda", 0)}
        if x.dtype == torch.float32:
            there |= {"precision": fp32_precision()}
        return replace(sites.problem_of(found), **there)

    for module in (paying, convolution):
        monkeypatch.setattr(module, "problem_of", on_a_gpu)
    conv = (nn.Conv1d if x.dim() == 3 else nn.Conv2d)(k, n, 1, dtype=x.dtype)
    with imaginary_h200(), torch.set_grad_enabled(training):
        told = epinorm.explain(nn.Sequential(conv, *behind), x)
        return any(row.fused for row in told.linears)


def channels_last(k: int, size: int = 14, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.empty(32, k, size, size, dtype=dtype)
    return x.to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("k", "n", "x", "forward", "training"),
    [
        (64, 128, lambda: torch.empty(32, 64, 1024), False, False),
        (512, 512, lambda: torch.empty(32, 512, 1024), False, True),
        (1024, 1024, lambda: torch.empty(32, 1024, 1024), True, True),
        (1024, 256, lambda: torch.empty(32, 1024, 14, 14), False, False),
        (1024, 256, lambda: channels_last(1024), True, True),
    ],
)
def test_auto_takes_what_is_faster_with_its_copies(k, n, x, forward, training, monkeypatch):
    torch.backends.cudnn.allow_tf32 = False
    given = x()
    assert told_of_an_h200(monkeypatch, k, n, given, False) is forward
    assert told_of_an_h200(monkeypatch, k, n, given, True) is training


TF32 = [(True, "high"), (True, "highest")]
"""Whether convolutions take it, and how products are computed."""


@pytest.mark.parametrize(("tf32", "products"), TF32)
def test_in_tf32_images_that_need_no_copy_are_taken(tf32, products, monkeypatch):
    """Of what cuDNN took 52 us for on an H200, and PyTorch's Linear with GELU 38."""
    torch.backends.cudnn.allow_tf32 = tf32
    torch.set_float32_matmul_precision(products)

    def told(k: int, n: int, x: Tensor, training: bool = False) -> bool:
        return told_of_an_h200(monkeypatch, k, n, x, training, nn.GELU())

    assert told(256, 1024, channels_last(256))
    assert told(64, 256, channels_last(64, 112), training=True) is (products == "high")
    assert not told(256, 64, channels_last(256, 56), training=True)  # the host's
    assert not told(1024, 256, channels_last(1024))  # cuDNN's 36 us are the host's
    assert not told(256, 1024, channels_last(256).contiguous())


def test_in_16_bit_images_that_need_no_copy_are_taken(monkeypatch):
    def told(size: int, training: bool = False, contiguous: bool = False) -> bool:
        x = channels_last(64, size, torch.bfloat16)
        x = x.contiguous() if contiguous else x
        return told_of_an_h200(monkeypatch, 64, 256, x, training, nn.GELU())

    assert told(56)
    assert told(112, training=True)
    assert not told(56, training=True)  # the host's
    assert not told(14)
    assert not told(56, contiguous=True)


def test_where_no_guard_sees_their_setting_tf32_is_not_kept(monkeypatch):
    """torch.compile does not look at what convolutions take: one that is computed in full fp32 may
    be taken, as it stays right when TF32 is no longer allowed."""
    torch.backends.cudnn.allow_tf32 = True
    taken = []
    for products in ("high", "highest"):
        torch.set_float32_matmul_precision(products)
        for is_guarded in (True, False):
            opens = functools.partial(convolution.open_convolutions, is_guarded=is_guarded)
            with monkeypatch.context() as patched:
                patched.setattr(
                    rewriting, "open_convolutions", lambda *a, opens=opens, **_: opens(*a)
                )
                x = channels_last(64, 56)
                taken.append(told_of_an_h200(patched, 64, 256, x, False, nn.GELU()))
    assert taken == [True, False, True, True]


def test_it_is_left_where_products_may_be_less_exact_or_nothing_was_measured(monkeypatch):
    x = channels_last(64, 56, torch.float16)
    assert told_of_an_h200(monkeypatch, 64, 256, x, False, nn.GELU())
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    try:
        assert not told_of_an_h200(monkeypatch, 64, 256, x, False, nn.GELU())
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = False
    with monkeypatch.context() as patched:
        patched.setattr(convolution, "capability", lambda device: (8, 0))
        assert not told_of_an_h200(patched, 64, 256, x, False, nn.GELU())


def test_where_fp32_is_asked_of_convolutions_alone_it_stays(monkeypatch):
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("high")
    assert not told_of_an_h200(monkeypatch, 256, 1024, channels_last(256, 56), False, nn.GELU())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bit_it_is_what_the_linear_computes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Convolved(F.gelu, dims=2).to(dtype), image(True).to(dtype)
    fused = epinorm.fuse(copy.deepcopy(model), strategy="reference")
    for ours, eager in results_of(fused, model, x):
        strides = [
            [s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] for t in (ours, eager)
        ]
        assert strides[0] == strides[1]
        assert relative_error(ours, eager) < torch.finfo(dtype).eps
    assert [row.chain for row in epinorm.explain(fused).linears] == ["gelu"]


def test_another_setting_is_another_capture(monkeypatch):
    """On a GPU; a convolution on the CPU has no such guard."""
    x, counts = torch.rand(B, K, L), []
    for on_gpu in (True, False):
        monkeypatch.setattr(dynamo, "depends_on_tf32", lambda gm, on_gpu=on_gpu: on_gpu)
        fused = epinorm.fuse(nn.Sequential(nn.Conv1d(K, N, 1)), strategy="reference")
        recorder = fused._compiled_call_impl._epinorm.recorder
        for tf32 in (False, True, False, True):
            torch.backends.cudnn.allow_tf32 = tf32
            fused(x)
        counts.append(len(recorder.graphs))
    assert counts == [2, 1]
    monkeypatch.undo()

    def looks(gm: Any) -> bool:
        with monkeypatch.context() as on_a_gpu:
            on_a_gpu.setattr(convolution, "tensor_of", lambda node: SimpleNamespace(is_cuda=True))
            depends.append(convolution.depends_on_tf32(gm))
        return False

    class Checkpointed(Convolved):
        def forward(self, x: Tensor, times: int = 2) -> Tensor:
            if not times:
                return super().forward(x)
            return checkpoint(self.forward, x, times - 1, use_reentrant=False)

    depends: list[bool] = []
    with monkeypatch.context() as watching:
        watching.setattr(dynamo, "depends_on_tf32", looks)
        epinorm.fuse(Checkpointed(), strategy="reference")(x)
    assert depends == [True]
    with torch.device("meta"):
        graph = torch.fx.symbolic_trace(nn.Sequential(nn.Conv1d(K, N, 1)))
    assert not dynamo.depends_on_tf32(graph)
