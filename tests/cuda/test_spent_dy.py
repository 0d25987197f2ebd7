"""A backward pass that is the last to read dy may write over it: which are, and that no other does.

The GPU is conftest.py's. Each pass of a problem that ``spends_dy`` ends here with NaN all over dy.
"""

from __future__ import annotations

import copy
import ctypes
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor.utils import fresh_cache
from torch.utils._pytree import tree_leaves

from epinorm.backends.cuda.executable import CudaExecutable
from epinorm.backends.cuda.replayed import ReplayedBackward
from epinorm.capture import rewriting
from epinorm.capture.backend import compile_graph
from epinorm.capture.paying import Settings
from epinorm.operator import calls, dispatch, halves
from epinorm.operator.schema import (
    linear_norm_backward,
    linear_norm_backward_begin,
    linear_norm_backward_end,
    spending_dy,
)
from epinorm.problem import Forward, Gradients, Inputs, Rest, Wanted
from epinorm.tools.tune import recorded

N, ROWS = 64, 24


@pytest.fixture(autouse=True)
def spoiling(gpu: Any, fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all that may be written over be spoilt, by launches that are repeated like others; and
    take Linears without a norm, too."""

    def fill(_: Any, at: int, n: int) -> None:
        torch.frombuffer((ctypes.c_char * (4 * n)).from_address(at), dtype=torch.float32).fill_(
            torch.nan
        )

    gpu.signature_of_spoil, gpu.compute_spoil = lambda _: "pl", fill
    spoil = gpu.load(("spoil", None)).prepare("pl", 1, 32)
    make = calls.executable_for

    def spoiled(problem: Any, *facts: Any) -> Any:
        made = make(problem, *facts)
        for has_dsum in (False, True) if problem.spends_dy else ():
            backward = made._backward_of(has_dsum)
            backward.run = ReplayedBackward(partial(spending, backward._run))
        return made

    def spending(run: Any, inputs: Any, kept: Any, dy: Tensor, *rest: Any, **more: Any) -> Any:
        found = run(inputs, kept, dy, *rest, **more)
        spoil(dy.data_ptr(), dy.numel())
        return found

    monkeypatch.setattr(calls, "executable_for", spoiled)
    monkeypatch.setattr(dispatch, "SPENDING", ("cpu",))
    monkeypatch.setattr(rewriting, "pays", lambda *_: True)
    monkeypatch.setattr(
        Settings, "of", lambda self, normed: (self.strategy if normed else "single", False)
    )


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(N, N), nn.LayerNorm(N), nn.SiLU())


class Net(nn.Module):
    """Three blocks, or what a test says, one behind another."""

    spent = 2

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.a, self.b, self.c = layers or (block(), block(), block())

    def forward(self, x: Tensor) -> Any:
        return self.c(self.b(self.a(x)))


class Linears(Net):
    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(N, N), nn.SiLU()) for _ in range(3)))


class Deep(Net):
    """With leading dimensions, so that dX comes by views."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(4, -1, N)).flatten(0, 1)


class Plain(Net):
    """dz of the one between is dy, which its bias' gradient reads too."""

    spent = 1

    def __init__(self) -> None:
        super().__init__(block(), nn.Linear(N, N), block())


class Product(Net):
    """dX of the last is a product of PyTorch's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(N, N))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) @ self.weight


class Residual(Net):
    """dz of b is the gradient of what is added as well; a's is made of two."""

    spent = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(N, N), nn.LayerNorm(N)

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        return self.c(self.norm(first + self.linear(first)))


class Returned(Net):
    """Two gradients meet in front of a and b."""

    spent = 0

    def forward(self, x: Tensor) -> Any:
        first = self.a(x)
        second = self.b(first)
        return first, second, self.c(second)


class Between(Net):
    """What stands between them reads dX, and makes dy."""

    spent = 1

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).exp()))


class Used(Net):
    """By two calls of one layer, each the last to read its dy."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(self.a(x)))


class Mixed(Net):
    """A sum that is a result: its gradient is what else enters b's backward pass."""

    spent = 1

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(N, N), nn.LayerNorm(N)

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        total = x + self.linear(first)
        return total + self.b(self.norm(total))


MODELS = [Net, *Net.__subclasses__()]


def compiled(model: nn.Module, **options: Any) -> Any:
    options = {"strategy": "planes"} | options
    return torch.compile(copy.deepcopy(model), backend=compile_graph, options=options)


def spent(gpu: Any) -> int:
    return gpu.kinds().count("spoil")


def swapped(graphs: list[fx.Graph]) -> int:
    targets = [node.target for graph in graphs for node in graph.nodes]
    graphs.clear()
    return sum(target in spending_dy().values() for target in targets)


def check(model: nn.Module, made: nn.Module, x: Tensor, again: bool = False) -> None:
    """Gradients are right, and what the user gave is as it was; again: the pass is run twice."""
    found = []
    for each in (model, made):
        outputs = tree_leaves(each(x))
        torch.manual_seed(0)
        dys = [torch.randn_like(t) for t in outputs]
        before = [t.clone() for t in dys]
        of = (outputs, [x, *each.parameters()], dys)
        if again:
            torch.autograd.grad(*of, retain_graph=True, allow_unused=True)
        found.append(torch.autograd.grad(*of, allow_unused=True))
        assert all(map(torch.equal, dys, before))
    for mine, expected in zip(*found[::-1], strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-3)


@torch._functorch.config.patch(donated_buffer=False)  # else no graph is retained
@pytest.mark.parametrize("kind", MODELS)
def test_who_spends_dy(gpu: Any, graphs: Any, kind: type[Net]) -> None:
    """In Python's launches and in native ones."""
    model = kind()
    made = compiled(model)
    for i in range(5):
        check(model, made, torch.randn(ROWS, N, requires_grad=True), again=i == 3)
        assert spent(gpu) == (1 + (i == 3)) * kind.spent
    assert swapped(graphs) == kind.spent
    assert gpu.replayed


@pytest.mark.parametrize("kind", [Net, Product])
def test_inductors_own_code(gpu: Any, kind: type[Net]) -> None:
    """There is no kernel of its own in it. Once more from its cache of graphs."""
    model = kind()
    with fresh_cache():
        for hits in (0, 2):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            made = compiled(model, fx_graph_cache=True)
            for _ in range(4):
                check(model, made, torch.randn(ROWS, N, requires_grad=True))
                assert spent(gpu) == 2
            assert torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"] == hits


@pytest.mark.parametrize(
    "dtype, devices", [(torch.bfloat16, ("cpu",)), (torch.float64, ("cpu",)), (None, ("cuda",))]
)
def test_graphs_of_other_dtypes_and_devices_stay(
    graphs: Any, monkeypatch: pytest.MonkeyPatch, dtype: Any, devices: Any
) -> None:
    monkeypatch.setattr(dispatch, "SPENDING", devices)
    made = compiled(Net().to(dtype), strategy="epilogue")
    made(torch.randn(ROWS, N, dtype=dtype, requires_grad=True)).sum().backward()
    assert str(graphs[-1]).count("epinorm.linear_norm_backward.default") == 3
    assert swapped(graphs) == 0


def given(chain: str) -> tuple[Any, ...]:
    """What the backward pass of a (ROWS, N) chain takes."""
    x, weight, dy = torch.randn(ROWS, N), torch.randn(N, N), torch.randn(ROWS, N)
    tensors = (x, weight, torch.randn(N), torch.randn(N), torch.randn(N), [])
    facts = (chain, "planes", False, None)
    _, *kept = torch.ops.epinorm.linear_norm_forward(*tensors, *facts)
    return dy, *tensors, *kept, *facts, [True] * 5


def test_the_operator(gpu: Any) -> None:
    """From the first call on, by Python's launches and by native ones; an ordinary one of the same
    facts never; what has other strides is copied, and the copy spent."""
    spending = spending_dy()[linear_norm_backward, 5]
    for _ in range(5):
        dy, *rest = given("layer_norm(1e-05)|silu")
        mine, expected, before = dy.clone(), linear_norm_backward(dy, *rest), gpu.replayed
        assert dy.isfinite().all()
        torch.testing.assert_close(list(spending(mine, *rest)), list(expected))
        assert mine.isnan().all()
    assert gpu.replayed > before
    columns = dy.t().contiguous().t()
    torch.testing.assert_close(list(spending(columns, *rest)), list(expected))
    assert torch.equal(columns, dy)
    torch.library.opcheck(spending, (dy, *rest))


def test_dz_is_where_dy_was(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of its size is allocated for it."""
    places = []
    compute = gpu.compute_norm_backward
    monkeypatch.setattr(
        gpu,
        "compute_norm_backward",
        lambda source, dy, *rest: places.append((dy, rest[9])) or compute(source, dy, *rest),
    )
    dy, *rest = given("layer_norm(1e-05)|silu")
    linear_norm_backward(dy, *rest)
    spending_dy()[linear_norm_backward, 5](dy, *rest)
    assert [at == dz for at, dz in places] == [False, True]


def test_what_is_tuned_is_what_the_call_was_given(gpu: Any) -> None:
    with recorded() as found:
        for _ in range(2):
            dy, *rest = given("layer_norm(1e-05)|silu")
            spending_dy()[linear_norm_backward, 5](dy, *rest)
    assert len(found) == 1
    assert not found[0][0].spends_dy


class Pass:
    """A backward pass in two that PyTorch computes, dz over dy; runs: how often each half did."""

    def __init__(self) -> None:
        self.constant, self.runs = torch.randn(N, N), [0, 0]
        self.replayed = ReplayedBackward(self.run)

    def run(self, inputs: Any, kept: Any, dy: Tensor, want: Any, left: Any, later: Any) -> Any:
        self.runs[0] += 1
        kept.clear()
        made = torch.mm(dy, self.constant)
        later.append(Rest([made, dy], self.rest))
        return Gradients(None, torch.mm(dy.t(), inputs.x), None, None, None, ())

    def rest(self, carried: Any, weight: Tensor) -> Tensor:
        self.runs[1] += 1
        dy, made = carried.pop(), carried.pop()
        return torch.mm(dy, weight) if made.isfinite().all() else made


def test_dy_is_carried_over_to_the_second_half(gpu: Any) -> None:
    """That of the call, which the first half gives back to nobody."""
    made, want = Pass(), Wanted(True, True, False, False, False, ())
    nothing = torch.empty(0)
    for i in range(6):
        waiting = []
        for _ in range(2):
            x, weight, dy = torch.randn(ROWS, N), torch.randn(N, N), torch.randn(ROWS, N)
            inputs, later = Inputs(x, weight, None, None, None, ()), list[Rest]()
            kept = [Forward(nothing, dy, nothing, nothing)]
            found = made.replayed(inputs, kept, dy, want, None, later)
            torch.testing.assert_close(found.weight, dy.t() @ x)
            waiting.append((later[0], weight, dy))
        for rest, weight, dy in waiting[::-1]:
            assert rest.carried[-1] is dy
            expected = dy @ weight
            torch.testing.assert_close(rest(weight), expected)
        if i == 3:
            before = list(made.runs)
    assert made.runs[0] == before[0]


def test_halves_spend(graphs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What begins a pass whose dy is another's dX."""
    monkeypatch.setattr(halves, "DEVICES", ("cpu",))
    monkeypatch.setitem(halves.LARGE, "highest", 1)
    seen = []
    backward = CudaExecutable.backward

    def noted(self: Any, inputs: Any, kept: Any, dy: Tensor, want: Any, *rest: Any) -> Any:
        seen.append(self.problem.spends_dy)
        return backward(self, inputs, kept, dy, want, *rest)

    monkeypatch.setattr(CudaExecutable, "backward", noted)
    model = Linears()
    made = compiled(model)
    x = torch.randn(2 * N, N, requires_grad=True)
    check(model, made, x)
    assert seen == [False, True, True]
    begun = [spending_dy()[linear_norm_backward_begin, 3]] * 2
    nodes = [node for graph in graphs for node in graph.nodes]
    spending = [node for node in nodes if node.target in spending_dy().values()]
    assert [node.target for node in spending] == begun
    ends = [node.args for node in nodes if node.target is linear_norm_backward_end]
    dys = [None, *[node.args[0] for node in spending]]
    assert [dict(enumerate(args)).get(4) for args in ends] == dys  # dz is there


def test_halves_whose_dz_is_elsewhere_do_not(graphs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over x's planes."""
    monkeypatch.setattr(halves, "DEVICES", ("cpu",))
    monkeypatch.setitem(halves.LARGE, "highest", 1)
    model = Net(*(nn.Sequential(nn.Linear(N, N), nn.ReLU()) for _ in range(3)))
    check(model, compiled(model), torch.randn(2 * N, N, requires_grad=True))
    assert str(graphs[-1]).count("epinorm.linear_norm_backward_begin.default") == 3


def test_halves_in_inductors_own_code(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends a pass takes one argument more than autograd's graph had."""
    monkeypatch.setattr(halves, "DEVICES", ("cpu",))
    monkeypatch.setitem(halves.LARGE, "highest", 1)
    model = Linears()
    with fresh_cache():
        check(model, compiled(model), torch.randn(2 * N, N, requires_grad=True))
    assert spent(gpu) == 2
