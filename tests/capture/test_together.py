"""Linears of one input as one: which, and that values, gradients and errors stay eager's."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parents[1]))

from epinorm.capture import together
from epinorm.capture.backend import compile_graph
from epinorm.capture.chains import Found, Search
from epinorm.capture.together import groups_of, put_together
from epinorm.chain import Chain
from epinorm.problem import Problem
from imaginary import imaginary_h200

K, N, ROWS = 12, 16, 5


class Attention(nn.Module):
    """q, k and v of one tensor, and the last from another one besides."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(K, N, bias=True) for _ in range(3))
        self.o = nn.Linear(N, K)

    def heads(self, x: Tensor) -> list[Tensor]:
        shape = (*x.shape[:-1], -1, 4)
        return [layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v)]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        q = torch.cat((-q[..., 2:], q[..., :2]), -1)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Results(Attention):
    def forward(self, x: Tensor) -> Any:
        return self.q(x), self.k(x).view(-1).sum(), self.v(x).exp()


class InPlace(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x), self.k(x)
        q.view(-1, N).mul_(2)
        x = x * 1
        return q + k * self.v(x) + self.q(x).exp() * self.k(x)


class Changed(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, x = self.q(x), x.detach()
        x.add_(1)
        return q + self.k(x) * self.v(x)


class OneFrozen(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.k.requires_grad_(False)
        self.v.bias = None


class OneBias(Attention):
    """Biases of one value for all channels."""

    def __init__(self) -> None:
        super().__init__()
        self.of_q, self.of_k = nn.Parameter(torch.randn(1)), nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        q, k = F.linear(x, self.q.weight, self.of_q), F.linear(x, self.k.weight, self.of_k)
        return q.sin() * k.cos()


class Mapped(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(super().forward)(x.unsqueeze(1)).squeeze(1)


class Heads(Attention):
    """Losses of their own, of which a step may take one."""

    def forward(self, x: Tensor) -> Any:
        return self.q(x).sin(), self.k(x).cos(), self.v(x).exp()


CASES: dict[type[nn.Module], list[int]] = {
    Attention: [3],
    Results: [],
    InPlace: [2],  # of the other x, where v is of another chain
    OneFrozen: [],
    OneBias: [],
    Mapped: [3],
    Heads: [],
}


def problem_of(found: Found) -> Problem:
    return Problem(
        Chain(None), 8192, 768, 768, torch.float32, torch.float32, torch.float32,
        True, False, False, False, torch.device("cuda", 0), "highest",
    )  # fmt: skip


def rewritten(
    model: nn.Module,
    groups: list[int],
    smaller: bool = False,
    compiler: Any = None,
    compiled: bool = False,
) -> Callable[..., Any]:
    """The model with groups put together as for an H200; notes how many each has."""

    def apply(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        return F.linear(x, weight, bias)

    def sized(found: Found) -> Problem:
        return replace(problem_of(found), m=256) if smaller else problem_of(found)

    def backend(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        search = Search(gm.graph)
        with imaginary_h200():
            found = groups_of(search, search.linears(), sized, compiled)
        for each in {id(group): group for group in found.values()}.values():
            groups.append(len(each))
            put_together(gm.graph, each, apply, {})
        gm.graph.lint()
        gm.recompile()
        return gm.forward if compiler is None else compiler(gm, inputs)

    return torch.compile(model, backend=backend, dynamic=False)


@pytest.mark.parametrize("make", CASES)
def test_values_and_gradients_are_eagers(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, groups = make(), list[int]()
    twin = copy.deepcopy(model)
    run = rewritten(twin, groups)
    x = torch.randn(2, ROWS, K)
    for m, call in ((model, model), (twin, run)):
        results = call(x.clone())
        results = results if isinstance(results, tuple) else (results,)
        sum(result.square().sum() for result in results).backward()
        m.results = results
    torch.testing.assert_close(twin.results, model.results)
    for ours, eagers in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, eagers.grad)
    assert groups == CASES[make]


class Plain(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*self.heads(x))


def test_the_weights_as_one_wait_for_no_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    model, made, cat = Plain(), list[Tensor](), torch.cat
    model.o = nn.Identity()

    def noted(*given: Any, **named: Any) -> Tensor:
        made.append(cat(*given, **named))
        return made[-1]

    run, x = rewritten(model, []), torch.randn(2, ROWS, K)
    run(x)
    monkeypatch.setattr(torch, "cat", noted)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        run(x)
    assert [t.untyped_storage().nbytes() > 0 for t in made] == [True, True]  # hooks may copy it
    made.clear()
    y = run(x)
    assert [t.untyped_storage().nbytes() > 0 for t in made] == [True, False]
    y.square().sum().backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    y.square().sum().backward()
    for again, once in zip(model.parameters(), first, strict=True):
        assert torch.equal(again.grad, once)
    del y
    model.zero_grad()
    checkpoint(run, x, use_reentrant=False).square().sum().backward()
    for again, once in zip(model.parameters(), first, strict=True):
        torch.testing.assert_close(again.grad, once)
    y = run(x)
    with torch.no_grad():
        model.k.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_nor_where_a_compiler_decides_what_waits() -> None:
    model, x = Plain(), torch.randn(2, ROWS, K)
    model.o = nn.Identity()
    read: list[tuple[int, ...]] = []

    def backward(gm: fx.GraphModule, inputs: Any) -> Any:
        read.extend(t.shape for t in inputs if isinstance(t, Tensor))
        return make_boxed_func(gm.forward)

    compiler = aot_autograd(
        fw_compiler=lambda gm, _: make_boxed_func(gm.forward),
        bw_compiler=backward,
        partition_fn=min_cut_rematerialization_partition,
    )
    run, ours, eagers = rewritten(model, [], compiler=compiler), x.clone(), x.clone()
    weights = [layer.weight for layer in (model.q, model.k, model.v)]
    for call, given in ((run, ours), (model, eagers)):
        y = call(given.requires_grad_())
        given.found = torch.autograd.grad(y.square().sum(), [given, *weights])
    torch.testing.assert_close(ours.found, eagers.found)
    assert (N, K) in read
    assert (3 * N, K) not in read
    assert (K, 3 * N) not in read


def test_what_changes_between_them_keeps_them_apart() -> None:
    model, groups = Changed(), list[int]()
    x = torch.randn(2, ROWS, K)
    with torch.no_grad():
        torch.testing.assert_close(rewritten(model, groups)(x.clone()), model(x))
    assert 3 not in groups


def test_a_loss_of_one_result_gives_the_others_no_gradient() -> None:
    """Zeros are a gradient to optimizers: momentum and weight decay go on."""
    model, groups = Heads(), list[int]()
    policy, *_ = rewritten(model, groups)(torch.randn(2, ROWS, K))
    policy.sum().backward()
    assert [p.grad is None for p in model.parameters()] == [False] * 2 + [True] * 6
    with torch.no_grad():
        torch._dynamo.reset()
        rewritten(model, groups)(torch.randn(2, ROWS, K))
    assert groups == [3]


def test_in_inference_too_but_not_for_few_rows() -> None:
    model, groups = Attention(), list[int]()
    x = torch.randn(2, ROWS, K)
    with torch.no_grad():
        torch.testing.assert_close(rewritten(model, groups)(x), model(x))
        assert groups == [3]
        torch._dynamo.reset()
        rewritten(model, groups, smaller=True)(x)
    assert groups == [3]


def under_autocast(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return call(x)

    return run


def step(model: nn.Module, call: Callable[..., Any], x: Tensor) -> list[Tensor]:
    """Results and gradients, as one vector each."""
    x = x.clone().requires_grad_()
    results = call(x)
    results = results if isinstance(results, tuple) else (results,)
    sum(result.double().square().sum() for result in results).backward()
    gradients = [t.grad.flatten() for t in (x, *model.parameters()) if t.grad is not None]
    model.zero_grad()
    return [
        torch.cat([t.detach().flatten() for t in results]).double(),
        torch.cat(gradients).double(),
    ]


@pytest.mark.parametrize("make", CASES)
def test_under_autocast_a_compiler_casts_the_weights_as_one(
    make: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together, "CAST_TOGETHER", ("cpu",))
    torch.manual_seed(0)
    model, groups, x = make(), list[int](), torch.randn(2, ROWS, K)
    exact = step(twin := copy.deepcopy(model).double(), twin, x.double())
    eagers = step(model, under_autocast(model), x)
    found = step(model, under_autocast(rewritten(model, groups, compiled=True)), x)
    assert groups == ([3] if make is InPlace else CASES[make])  # v's chain is not taken then
    for ours, eager, truth in zip(found, eagers, exact, strict=True):
        assert (ours - truth).norm() <= 1.1 * (eager - truth).norm()
        torch.testing.assert_close(ours, eager, rtol=0.1, atol=0.02 * float(eager.abs().max()))


@pytest.mark.parametrize("devices", [("cpu",), ("cuda",)])
def test_a_layer_multiplies_once_forward_and_twice_backward(
    devices: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    interpreted: list[fx.GraphModule],
) -> None:
    monkeypatch.setattr(together, "CAST_TOGETHER", devices)
    model = Plain()
    model.o = nn.Identity()
    step(model, under_autocast(torch.compile(model, backend=compile_graph)), torch.randn(2, 5, K))
    aten = torch.ops.aten
    products = [
        sum(node.target in (aten.mm.default, aten.addmm.default) for node in gm.graph.nodes)
        for gm in interpreted
    ]
    assert products == ([1, 2] if devices == ("cpu",) else [3, 6])


def test_eager_keeps_its_own_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "CAST_TOGETHER", ("cpu",))
    groups: list[int] = []
    under_autocast(rewritten(Attention(), groups))(torch.randn(2, ROWS, K))
    assert groups == []
