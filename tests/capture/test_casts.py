"""Casts of weights and gradients in compiled graphs: made together, with the same values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
import torch.nn.functional as F
from torch import Tensor, fx, nn

from epinorm.capture import casts as module
from epinorm.capture.after_autograd import AfterAutograd
from epinorm.capture.backend import compile_graph
from epinorm.capture.casts import cast_together
from epinorm.operator.casts import casts

K, N, ROWS = 16, 24, 8
F32, BF16 = torch.float32, torch.bfloat16
CAST = torch.ops.prims.convert_element_type.default


class Layer(nn.Module):
    """Linears and what may not be moved: casts that other kernels are joined to."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(K, N), nn.Linear(N, K)
        self.scale = nn.Parameter(torch.randn(K))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x))) * self.scale.bfloat16()


class Joined(nn.Module):
    """The weights of two Linears one behind another, and one of them besides."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = nn.Linear(K, N), nn.Linear(K, 2 * N), nn.Linear(3 * N, K)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (
            torch.cat((self.q.weight, self.k.weight)),
            torch.cat((self.q.bias, self.k.bias)),
        )
        return self.o(F.linear(x, weight, bias)).sin()


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEVICES", ("cpu",))


def compiled(model: nn.Module, graphs: list[fx.Graph], together: bool) -> Callable[..., Any]:
    """The model as autograd's forward and backward graphs under autocast."""

    def inner(gm: fx.GraphModule, *_: Any, **__: Any) -> Any:
        if together:
            cast_together(gm.graph)
            gm.graph.lint()
            gm.recompile()
        graphs.append(gm.graph)
        return gm

    def backend(gm: Any, inputs: Any) -> Any:
        return torch._inductor.compile_fx.compile_fx(gm, inputs, inner_compile=inner)

    made = torch.compile(model, backend=backend, dynamic=False, fullgraph=True)

    def call(x: Tensor) -> Any:
        with torch.autocast("cpu", BF16):
            return made(x)

    return call


def step(model: nn.Module, call: Callable[..., Any], x: Tensor) -> list[Tensor]:
    model.zero_grad()
    y = call(x)
    y.float().square().sum().backward()
    return [y, *(p.grad for p in model.parameters() if p.grad is not None)]


def counts_of(graph: fx.Graph) -> list[list[int]]:
    return [node.args[1] for node in graph.find_nodes(op="call_function", target=casts)]


def casts_of(graph: fx.Graph) -> int:
    return len(graph.find_nodes(op="call_function", target=CAST))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "forward", "backward"),
    [
        # x, weights and biases; gradients but for the biases', whose casts end a sum
        (Layer, [[1] * 5], [[1] * 2]),
        (Joined, [[2, 2, 1, 1, 1]], [[1] * 2]),
        (lambda: nn.Sequential(Layer(), Layer(), Layer()), [[1] * 13], [[1] * 6]),
    ],
)
def test_a_step_casts_once_each_way_and_to_the_same_values(
    make: Any, forward: Any, backward: Any, on_cpu: None
) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(ROWS, K)
    twin, plain, gathered = copy.deepcopy(model), list[fx.Graph](), list[fx.Graph]()
    expected = step(twin, compiled(twin, plain, False), x)
    for a, b in zip(step(model, compiled(model, gathered, True), x), expected, strict=True):
        assert torch.equal(a, b)
    assert [sorted(counts, reverse=True) for counts in counts_of(gathered[0])] == forward
    assert counts_of(gathered[1]) == backward
    for before, after, made in zip(plain, gathered, (forward, backward), strict=True):
        assert casts_of(before) - casts_of(after) == len(made[0])
    names = {str(node.target) for node in gathered[0].nodes}
    assert "aten.cat.default" not in names


def test_as_many_at_once_as_may_wait_in_memory(on_cpu: None, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "MOST_VALUES", 2 * (K + 1) * N)
    model, graphs = nn.Sequential(Layer(), Layer(), Layer()), list[fx.Graph]()
    step(model, compiled(model, graphs, True), torch.randn(ROWS, K))
    for graph in graphs:
        groups = graph.find_nodes(op="call_function", target=casts)
        assert len(groups) == 3
        for node in groups:
            assert sum(t.numel() for t in node.meta["val"]) <= module.MOST_VALUES


def graph_of(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    """Its ATen operations, after the pass."""
    from torch.fx.experimental.proxy_tensor import make_fx

    gm = make_fx(function, decomposition_table=torch._inductor.decomposition.decompositions)(
        *inputs
    )
    gm.graph.eliminate_dead_code()  # as Inductor does first
    cast_together(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return gm


def cast(t: Tensor, dtype: torch.dtype = BF16) -> Tensor:
    return torch.ops.prims.convert_element_type(t, dtype)


def changed(x: Tensor, a: Tensor, b: Tensor) -> Any:
    y = x @ cast(a)
    b.add_(1)
    return y @ cast(b).t()


def changed_by_a_view(x: Tensor, a: Tensor, b: Tensor) -> Any:
    y = x @ cast(a)
    b.t().mul_(2)
    return y @ cast(b).t()


def pointwise(x: Tensor, a: Tensor, b: Tensor) -> Any:
    return x @ cast(a) + cast(b)[0]


def alone(x: Tensor, a: Tensor, b: Tensor) -> Any:
    return x @ cast(a), b


def strided(x: Tensor, a: Tensor, b: Tensor) -> Any:
    return x @ cast(a.t()).t(), x @ cast(b)


def several_dtypes(x: Tensor, a: Tensor, b: Tensor) -> Any:
    return x @ cast(a), x.half() @ cast(b, torch.float16)


def other_users(x: Tensor, a: Tensor, b: Tensor) -> Any:
    both = torch.cat((a, b))
    return x @ cast(both).t(), both * 2, x @ cast(a)


def columns(x: Tensor, a: Tensor, b: Tensor) -> Any:
    return x @ cast(torch.cat((a, b), 1)), x @ cast(a)


def read_again(x: Tensor, a: Tensor, b: Tensor) -> Any:
    dw, dv = cast(x.t() @ x, F32), cast(x.t() @ x.sin(), F32)
    return dw, dv, dw * 2


@pytest.mark.parametrize(
    "function",
    [
        changed,
        changed_by_a_view,
        pointwise,
        alone,
        strided,
        several_dtypes,
        other_users,
        columns,
        read_again,
    ],
)
def test_what_stays_where_it_is(function: Any, on_cpu: None) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(ROWS, K).bfloat16(), torch.randn(K, K), torch.randn(K, K)
    gm = graph_of(function, *(t.clone() for t in inputs))
    assert counts_of(gm.graph) == []


def test_nothing_is_moved_where_launches_cost_nothing() -> None:
    x, a, b = torch.randn(ROWS, K).bfloat16(), torch.randn(K, K), torch.randn(K, K)
    gm = graph_of(lambda x, a, b: x @ cast(a) @ cast(b), x, a, b)
    assert module.DEVICES == ("cuda",)
    assert casts_of(gm.graph) == 2


@pytest.mark.parametrize(("given", "made"), [(F32, BF16), (BF16, F32), (F32, torch.float16)])
def test_the_operator(given: torch.dtype, made: torch.dtype) -> None:
    tensors = [torch.randn(shape).to(given) for shape in ((3, 4), (5, 4), (2, 4), (7,), (), (0, 4))]
    results = casts(tensors, [1, 2, 1, 1, 1], made)
    expected = [tensors[0], torch.cat(tensors[1:3]), *tensors[3:]]
    for result, t in zip(results, expected, strict=True):
        assert torch.equal(result, t.to(made))
        assert result.dtype == made
    torch.library.opcheck(casts, (tensors, [1, 2, 1, 1, 1], made))


def test_a_pass_of_the_users_own_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def compile_fx(gm: Any, inputs: Any, config_patches: Any) -> Any:
        seen.append(config_patches.get("post_grad_custom_post_pass"))
        return gm

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
    own, x = AfterAutograd(), torch.randn(ROWS, K)
    torch.compile(Layer(), backend=compile_graph)(x)
    options = {"post_grad_custom_post_pass": own}
    torch.compile(Layer(), backend=compile_graph, options=options)(x)
    torch._dynamo.reset()
    with torch._inductor.config.patch(post_grad_custom_post_pass=own):
        torch.compile(Layer(), backend=compile_graph)(x)
    assert isinstance(seen[0], AfterAutograd)
    assert seen[1] is own
    assert seen[2] is None


def test_inductor_itself(on_cpu: None) -> None:
    """Its code calls the operator, in both passes, and gives eager's values.

    There is no kernel of its own in it, each of which takes seconds to compile."""
    model = nn.Sequential(nn.Linear(K, N, bias=False), nn.Linear(N, K, bias=False))
    made = torch.compile(model, backend=compile_graph)
    x, dy = torch.randn(ROWS, K).bfloat16(), torch.randn(ROWS, K).bfloat16()

    def run(call: Callable[..., Any]) -> list[Any]:
        model.zero_grad()
        with torch.autocast("cpu", BF16):
            y = call(x)
        y.backward(dy)
        return [y, *(p.grad for p in model.parameters())]

    run(made)
    with torch.profiler.profile() as profile:
        got = run(made)
    assert [event.key for event in profile.events()].count("epinorm::casts") == 2
    for a, b in zip(got, run(model), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
        assert a.dtype == b.dtype
