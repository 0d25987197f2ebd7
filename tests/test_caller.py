"""A call like an earlier one goes past PyTorch's dispatcher, but not where someone waits there."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

import epinorm
from epinorm.backends.prepack import marked
from epinorm.operator import calls
from epinorm.operator.dispatch import Caller, caller_of
from epinorm.operator.kinds import MOST_KINDS, Kinds
from watching import SeesOperators

K, N, ROWS = 12, 16, 5
OPERATOR = "linear_norm"


def seen_as(ours: nn.Module) -> str:
    """What modes and tracers see: for who looks on, a fused model runs its own layers."""
    return OPERATOR if isinstance(ours, epinorm.LinearNorm) else "group_norm"


@pytest.fixture(params=["fused", "block"])
def pair(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module]:
    """A model and what computes the same as one operation, after two calls."""
    model = nn.Sequential(nn.Linear(K, N), nn.GroupNorm(4, N), nn.Tanh()).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    ours: nn.Module
    if request.param == "fused":
        ours = epinorm.fuse(copy.deepcopy(model))
    else:
        ours = epinorm.LinearNorm(K, N, norm=epinorm.GroupNorm(4), post="tanh").double()
        names = [n.replace("linear", "0").replace("norm", "1") for n, _ in ours.named_parameters()]
        given = dict(model.named_parameters())
        with torch.no_grad():
            for name, parameter in zip(names, ours.parameters(), strict=True):
                parameter.copy_(given[name])
    for _ in range(2):
        with torch.no_grad():
            ours(inputs())
        ours(inputs())
    return model, ours


def inputs() -> Tensor:
    return torch.randn(ROWS, K, dtype=torch.float64)


def same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_the_second_call_of_a_kind_takes_the_short_way(pair: Any, short: list[bool]) -> None:
    model, ours = pair
    for _ in range(2):
        x = inputs()
        same(ours(x), model(x))
        with torch.no_grad():
            same(ours(x), model(x))
    assert all(short)


def test_gradients(pair: Any, short: list[bool]) -> None:
    model, ours = pair
    for _ in range(2):
        x = inputs().requires_grad_()
        found = [
            torch.autograd.grad(m(x).square().sum(), [x, *m.parameters()]) for m in (model, ours)
        ]
        same(*found)
    assert short == [False, True]  # an x that wants its gradient was not there before


@pytest.mark.parametrize("shape", [(K,), (2, 3, K), (0, 2, K)])
def test_gradients_through_leading_dimensions(shape: tuple[int, ...], short: list[bool]) -> None:
    model = nn.Sequential(nn.Linear(K, N), nn.LayerNorm(N), nn.Tanh()).double()
    ours = epinorm.fuse(copy.deepcopy(model))
    for _ in range(3):
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        y = model(x)
        dy = torch.randn_like(y)
        same(ours(x), y)
        same(*(torch.autograd.grad(m(x), [x, *m.parameters()], dy) for m in (model, ours)))
    assert short == ([] if 0 in shape else [False, *[True] * 5])  # empty: as it is written


def test_a_residual_that_is_the_input_itself(short: list[bool]) -> None:
    caller, weight = Caller("add_residual|layer_norm(1e-05)"), torch.randn(N, N)
    for same in (True, True, False, False, True):
        x = torch.randn(5, N)
        residual = x if same else torch.randn(5, N)
        y = caller(x, weight, None, None, None, (residual,))
        torch.testing.assert_close(y, F.layer_norm(F.linear(x, weight) + residual, (N,)))
    assert short == [False, True, False, True, True]


@pytest.mark.parametrize("shape", [(K,), (2, 3, K)])
@pytest.mark.parametrize("norm", [epinorm.LayerNorm(), None])
def test_residuals_through_leading_dimensions(
    shape: tuple[int, ...], norm: Any, short: list[bool]
) -> None:
    caller = Caller(str(epinorm.Chain.build(norm, "add_residual|mul_channel")))
    weight, gain = torch.randn(N, K), torch.randn(N)
    for training in (False, True):
        for _ in range(2):
            x, residual = torch.randn(shape), torch.randn(*shape[:-1], N)
            tensors = [t.requires_grad_(training) for t in (x, weight, residual, gain)]
            y = caller(x, weight, None, None, None, (residual, gain))
            expected = (F.linear(x, weight) + residual) * gain
            expected = expected if norm is None else F.layer_norm(expected, (N,))
            torch.testing.assert_close(y, expected)
            if training:
                dy = torch.randn_like(y)
                pairs = (torch.autograd.grad(t, tensors, dy) for t in (y, expected))
                torch.testing.assert_close(*pairs)
    assert short == [False, True] * 2


def test_a_weight_that_is_a_view_takes_the_short_way(short: list[bool]) -> None:
    caller = Caller("layer_norm(1e-05)|silu", "auto")
    turned = torch.randn(K, N)
    for training in (False, True):
        for _ in range(2):
            x = torch.randn(ROWS, K, requires_grad=training)
            y = caller(x, turned.requires_grad_(training).t(), None, None, None, ())
            expected = F.silu(F.layer_norm(x @ turned, (N,)))
            torch.testing.assert_close(y, expected)
            if training:
                dy = torch.randn_like(y)
                ours, eagers = (torch.autograd.grad(t, [x, turned], dy) for t in (y, expected))
                torch.testing.assert_close(ours, eagers)
    assert short == [False, True] * 2


def test_second_derivatives(pair: Any) -> None:
    found = []
    x = inputs()
    for m in pair:
        leaves = list(m.parameters())
        first = torch.autograd.grad(m(x).square().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))
    same(*found)


class SeesFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [SeesOperators, SeesFunctions])
def test_modes_see_the_operator(pair: Any, mode: Any) -> None:
    model, ours = pair
    x = inputs()
    with torch.no_grad(), mode() as seen:
        y = ours(x)
    assert any(seen_as(ours) in str(name) for name in seen.seen)
    same(y, model(x))


def test_the_profiler_sees_the_operator(pair: Any) -> None:
    _, ours = pair
    with torch.no_grad(), torch.autograd.profiler.profile() as profile:
        ours(inputs())
    assert any(OPERATOR in event.name for event in profile.function_events)


def test_autocast(pair: Any) -> None:
    model, ours = (m.float() for m in pair)
    x = inputs().float()
    for _ in range(2):
        assert ours(x).dtype == torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected, y = model(x), ours(x)
        assert y.dtype == expected.dtype
        torch.testing.assert_close(y, expected, rtol=0, atol=0)  # by PyTorch's own layers


def test_inference_mode(pair: Any) -> None:
    model, ours = pair
    x = inputs()
    for _ in range(2):
        with torch.inference_mode():
            assert ours(x).is_inference()
        assert not ours(x).is_inference()
        same(ours(x), model(x))


def test_transforms(pair: Any) -> None:
    xs, x = torch.randn(3, ROWS, K, dtype=torch.float64), inputs()
    same(*(torch.vmap(m)(xs) for m in pair))
    same(*(torch.func.grad(lambda v, m=m: m(v).square().sum())(x) for m in pair))
    same(*(torch.func.jvp(m, (x,), (torch.ones_like(x),)) for m in pair))
    same(*(torch.func.vjp(m, x)[1](torch.ones(ROWS, N).double()) for m in pair))


def test_forward_mode(pair: Any) -> None:
    tangents = []
    x, v = inputs(), inputs()
    for m in pair:
        with forward_ad.dual_level():
            tangents.append(forward_ad.unpack_dual(m(forward_ad.make_dual(x, v))).tangent)
    same(*tangents)


class Named(Tensor):
    pass


def test_subclasses(pair: Any) -> None:
    model, ours = pair
    with torch.no_grad():
        x = inputs()
        y = ours(x.as_subclass(Named))
        assert type(y) is type(model(x.as_subclass(Named)))
        same(y.as_subclass(Tensor), model(x))


def test_tracers(pair: Any) -> None:
    model, ours = pair
    x, other = inputs(), torch.randn(ROWS, K, dtype=torch.float64)
    with torch.no_grad():
        traced = torch.jit.trace(ours, x)
        assert seen_as(ours) in str(traced.inlined_graph)
        same(traced(other), model(other))
        graph = make_fx(ours)(x)
        assert seen_as(ours) in graph.code
        same(graph(other), model(other))


@pytest.mark.parametrize("training", [False, True])
def test_compile(pair: Any, training: bool) -> None:
    model, ours = pair
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    with torch.set_grad_enabled(training):
        for _ in range(2):
            x = inputs()
            same(compiled(x), model(x))
            same(ours(x), model(x))


def test_a_tensor_that_was_absent_makes_another_kind() -> None:
    kinds: Kinds[str] = Kinds()
    x, weight, bias = torch.randn(ROWS, K), torch.randn(N, K), torch.randn(N)
    kinds.keep((x, weight, None, None, None), None, lambda: "without")
    assert kinds.find((x, weight, None, None, None), None) == "without"
    for others in ((bias, None, None), (None, bias, None), (None, None, bias)):
        assert kinds.find((x, weight, *others), None) is None


def test_compiling_warns_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(torch._dynamo.utils, "warn_once", said.append)
    block = epinorm.LinearNorm(K, N, norm=epinorm.RMSNorm(), pre="add_residual")
    torch.compile(block, fullgraph=True, backend="eager")(torch.randn(2, 3, K), torch.ones(2, 3, N))
    assert said == []


def test_mistakes_are_said_at_any_call(pair: Any) -> None:
    _, ours = pair
    x = inputs()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            ours(x[:, 1:])
        with pytest.raises(RuntimeError, match="dtype"):
            ours(x.float())
        ours(x)


def test_the_function_takes_the_short_way_too(short: list[bool]) -> None:
    x, w = torch.randn(ROWS, K), torch.randn(N, K)
    expected = F.silu(F.layer_norm(x @ w.t(), (N,)))
    for given in ("silu", ["silu"], "silu"):
        y = epinorm.linear_norm(x, w, norm=epinorm.LayerNorm(), post=given)
        torch.testing.assert_close(y, expected)
    assert short == [False, True, True]


def test_no_tensor_is_kept_alive(pair: Any) -> None:
    _, ours = pair
    x = inputs()
    y = ours(x)
    watched = [weakref.ref(t) for t in (x, y, *ours.parameters())]
    for module in ours.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().clone()))
    del x, y, parameter
    gc.collect()
    assert [reference() for reference in watched] == [None] * len(watched)


def test_kinds_and_sizes_are_bounded(short: list[bool]) -> None:
    caller = Caller("layer_norm")
    for count in range(1, 2 * MOST_KINDS):
        x, w = torch.randn(ROWS, count), torch.randn(N, count)
        for _ in range(2):
            y = caller(x, w, None, None, None, ())
            torch.testing.assert_close(y, torch.nn.functional.layer_norm(x @ w.t(), (N,)))
    assert short.count(True) == MOST_KINDS
    assert sum(len(kinds) for kinds in caller._kinds.by_count.values()) == MOST_KINDS


def test_a_fact_of_the_caller_is_no_fact_of_another(short: list[bool]) -> None:
    x, w = torch.randn(ROWS, K), torch.randn(N, K)
    activations: list[Callable[[Tensor], Tensor]] = [F.silu, F.gelu, F.silu]
    for activation in activations:
        caller = caller_of(f"layer_norm|{activation.__name__}")
        y = caller(x, w, None, None, None, ())
        torch.testing.assert_close(y, activation(torch.nn.functional.layer_norm(x @ w.t(), (N,))))


def test_a_weight_is_planned_anew_where_it_is_prepacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this were a GPU: prepack changes which strategy is fastest, for that weight alone."""
    monkeypatch.setattr("epinorm.operator.calls.keeps", lambda weight: id(weight) in marked)
    monkeypatch.setattr("epinorm.operator.kinds.follows_setting", lambda *_: True)
    planned: list[bool] = []
    monkeypatch.setattr(calls, "planned", [lambda problem, _: planned.append(problem.prepacked)])
    calls.forget_plans()
    caller = Caller("layer_norm")
    x, one, other = torch.randn(ROWS, K), torch.randn(N, K), torch.randn(N, K)
    expected = [torch.nn.functional.layer_norm(x @ w.t(), (N,)) for w in (one, other)]

    def call() -> None:
        for weight, right in zip((one, other), expected, strict=True):
            for _ in range(2):
                torch.testing.assert_close(caller(x, weight, None, None, None, ()), right)

    call()
    assert planned == [False]
    marked[id(one)] = object()  # type: ignore[assignment]
    try:
        call()
        assert planned == [False, True]
        x.requires_grad_()  # what a step will have converted is not known
        call()
        assert planned == [False, True, False, False]
    finally:
        del marked[id(one)]
        calls.forget_plans()
