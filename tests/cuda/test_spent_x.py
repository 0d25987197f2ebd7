"""A call that is the last to read x may write over it: which calls are, and that no other does.

The GPU is conftest.py's. Each pass whose problem ``spends_x`` ends here with NaN all over x.
"""

from __future__ import annotations

import copy
import ctypes
import itertools
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor.utils import fresh_cache
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import epinorm
from epinorm.backends.cuda.replayed import ReplayedForward
from epinorm.backends.prepack import prepacked
from epinorm.capture import rewriting
from epinorm.capture.backend import compile_graph
from epinorm.capture.paying import Settings
from epinorm.operator import calls, dispatch
from epinorm.operator.dispatch import Caller, caller_of
from epinorm.operator.schema import SPENDING_X
from epinorm.tools.tune import recorded
from watching import SeesOperators

N, ROWS = 64, 24
CHAIN = "layer_norm(1e-05)|silu"


def floats_at(address: int, count: int) -> Tensor:
    memory = (ctypes.c_char * (4 * count)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.float32)


@pytest.fixture(autouse=True)
def spoiling(gpu: Any, fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all that may be written over be spoilt, by launches that are repeated like others; and
    take Linears without a norm, too."""
    make = calls.executable_for
    gpu.signature_of_spoil = lambda _: "pl"
    gpu.compute_spoil = lambda _, at, n: floats_at(at, n).fill_(torch.nan)
    spoil = gpu.load(("spoil", None)).prepare("pl", 1, 32)

    def spoiled(problem: Any, *facts: Any) -> Any:
        made = make(problem, *facts)
        run = made.forward._run

        def spending(inputs: Any) -> Any:
            out = run(inputs)
            spoil(inputs.x.data_ptr(), inputs.x.numel())
            return out

        if problem.spends_x:
            assert not problem.training
            made.forward = ReplayedForward(spending, holds=True)
        return made

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

    spent, trains = 2, True

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.a, self.b, self.c = layers or (block(), block(), block())

    def forward(self, x: Tensor) -> Any:
        return self.c(self.b(self.a(x)))


class Linears(Net):
    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(N, N), nn.ReLU()) for _ in range(3)))


class Mixed(Net):
    """With what returns its input in eval mode as it is: the dropout stands in the graph."""

    spent = 1

    def __init__(self) -> None:
        linear = nn.Sequential(nn.Linear(N, N), nn.ReLU(), nn.Identity())
        super().__init__(block(), linear, nn.Sequential(nn.Dropout(0.5), block()))


class Deep(Net):
    """With leading dimensions."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(4, -1, N)).flatten(0, 1)


class DeepReturned(Net):
    """What a compiled graph views as rows again."""

    spent = 1

    def forward(self, x: Tensor) -> Any:
        first = self.a(x.view(4, -1, N))
        return self.c(self.b(first)), first


class Returned(Net):
    spent = 0

    def forward(self, x: Tensor) -> Any:
        first = self.a(x)
        second = self.b(first)
        return first, second, self.c(second)


class KeptByTheModule(Net):
    spent = 1

    def forward(self, x: Tensor) -> Tensor:
        self.activation = self.a(x)
        return self.c(self.b(self.activation))


class Twice(Net):
    """One tensor, read twice; and one layer, of the user's x and of its own result."""

    spent = 1

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        return self.b(first) + self.c(first) + self.a(self.a(x))


class OneLayer(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.a(self.a(x)))


class ChangedLater(Net):
    spent, trains = 0, False

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        second = self.b(first)
        first.add_(1)
        return self.c(second) * first


class ChangedBefore(Net):
    """What is read is the sum's node, which is the same tensor."""

    spent = 1

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        seen = first.add_(1)
        return self.c(self.b(seen)) * first.mean()


class Viewed(Net):
    spent = 0

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        row = first[3]
        second = self.b(first).view(2, -1, N)
        return self.c(second).flatten(0, 1) + row


class ViewReturned(Net):
    spent = 1

    def forward(self, x: Tensor) -> Any:
        first = self.a(x)
        return self.c(self.b(first)), first.view(2, -1, N)


class FirstPart(Net):
    """A view spelt as the first of a call's two results is."""

    spent = 1

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x.view(2, -1, N))
        second = self.b(first[0])
        return self.c(second) + first.mean(0)


class Sorted(Net):
    """The first of two results, of another operation."""

    spent = 1

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(x.sort(-1)[0]))


class ResidualIsX(Net):
    spent = 1

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        linear, norm, activation = self.b
        return self.c(activation(norm(linear(first) + first)))


class ResidualLater(Net):
    """x of the second is the third's residual."""

    spent = 1

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        second = self.b(first)
        linear, norm, activation = self.c
        return activation(norm(linear(second) + first))


class OneIsWeightOfAnother(Net):
    spent = 0

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        second = nn.functional.layer_norm(nn.functional.linear(first, first), (first.shape[0],))
        return second.exp().mean() + self.c(x)


class PreNorm(Net):
    """The sum, which is a result of the same call, is there to the end."""

    spent = 1

    def forward(self, x: Tensor) -> Tensor:
        linear, norm, _ = self.a
        total = x + linear(x)
        return total + self.b(norm(total)).exp() + total.sum(-1, keepdim=True)


class Broken(Net):
    spent = 1

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        torch._dynamo.graph_break()
        return self.c(self.b(first)) + first


class WithoutGradients(Net):
    """Of a part alone: that whose x autograd knows is as it was."""

    spent, trains = 2, False

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        with torch.no_grad():
            return self.c(self.b(first))


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


MODELS = [Net, *Net.__subclasses__()]
COMPILED = {Mixed: 2, Viewed: 1}
"""How many spend x in a compiled graph, where that has no node for dropout, and knows views."""


def check(model: nn.Module, fused: nn.Module, x: Tensor) -> None:
    """Right, and what the user holds is as it was."""
    before = [t.clone() for t in (x, *fused.parameters())]
    torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-4)
    assert all(map(torch.equal, before, (x, *fused.parameters())))


def spent(gpu: Any) -> int:
    return gpu.kinds().count("spoil")


@pytest.mark.parametrize(
    ("kind", "mode"), list(zip(MODELS, itertools.cycle((torch.no_grad, torch.inference_mode))))
)
def test_who_spends_x(gpu: Any, kind: type[Net], mode: Any) -> None:
    """From the first call on, in Python's launches and in native ones, whatever the rows."""
    model = kind().eval()
    fused = epinorm.fuse(copy.deepcopy(model), strategy="planes")
    with mode():
        for rows in (ROWS, ROWS, ROWS, ROWS, 8, ROWS, 8):
            x = torch.randn(rows, N)
            torch._dynamo.maybe_mark_dynamic(x, 0)  # else each model is captured twice
            check(model, fused, x)
            assert spent(gpu) == kind.spent
    assert gpu.replayed


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_who_trains_spends_nothing(gpu: Any, kind: type[Net]) -> None:
    """Before and after calls without gradients."""
    model = kind().eval()
    fused = epinorm.fuse(copy.deepcopy(model), strategy="planes")
    for _ in range(4):
        x = torch.randn(ROWS, N, requires_grad=True)
        results, exact = fused(x), model(x)
        if kind.trains:
            grads = [
                torch.autograd.grad(sum(t.sum() for t in tree_leaves(r)), x)
                for r in (results, exact)
            ]
            torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-3)
        assert spent(gpu) == (kind is WithoutGradients)
        with torch.no_grad():
            check(model, fused, torch.randn(ROWS, N))
            assert spent(gpu) == kind.spent


def test_frozen_layers_spend_and_those_behind_them_do_not(gpu: Any) -> None:
    model = Net().requires_grad_(False)
    model.c.requires_grad_()
    fused = epinorm.fuse(copy.deepcopy(model), strategy="planes")
    for _ in range(5):
        x = torch.randn(ROWS, N)
        pairs = [
            (m, torch.autograd.grad(m(x).sum(), list(m.c.parameters()))) for m in (model, fused)
        ]
        torch.testing.assert_close(pairs[0][1], pairs[1][1], rtol=1e-3, atol=1e-3)
        assert spent(gpu) == 1


@pytest.mark.parametrize("keeps", [True, False])
def test_hooks_see_what_they_see_in_eager(gpu: Any, keeps: bool) -> None:
    """Also one that holds what it saw until later."""
    model, seen = Net(), list[Tensor]()
    fused = epinorm.fuse(copy.deepcopy(model), strategy="planes")
    for each in (model, fused):
        each.a.register_forward_hook(lambda _m, _x, y: seen.append(y if keeps else y.mean()))
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(ROWS, N)
            torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-4)
            assert spent(gpu) == 1
    for ours, theirs in zip(seen[::2], seen[1::2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_mode_a_profile_or_autocast_changes_nothing(gpu: Any) -> None:
    """Operators spend nothing; of a profile the native calls, which it is told of, may."""
    fused = epinorm.fuse(Net(), strategy="planes")
    x = torch.randn(ROWS, N)
    with torch.no_grad():
        expected = [fused(x) for _ in range(5)][-1]
        spent(gpu)
        for around in (
            SeesOperators(),
            torch.autograd.profiler.profile(),
            torch.autocast("cpu", torch.bfloat16),
            torch.autocast("cpu", enabled=False),
            nullcontext(),
        ):
            with around:
                found = fused(x)
            tolerance = 3e-2 if isinstance(around, torch.autocast) else 1e-4
            torch.testing.assert_close(
                found, expected, rtol=tolerance, atol=tolerance, check_dtype=False
            )


def given(x: Tensor, weight: Tensor) -> tuple[Any, ...]:
    return (torch.empty_like(x).copy_(x), weight, None, None, None, ())


def test_a_call_that_does_not_spend_never_meets_a_pass_that_does(gpu: Any) -> None:
    """Of the same chain, sizes, strides and weight: by the same caller's twin, and by callers that
    share what they know; before plans are forgotten and afterwards."""
    weight = torch.randn(N, N)
    ordinary = [Caller(CHAIN, "planes"), caller_of(CHAIN, "planes"), caller_of(CHAIN, "planes")]
    spending = [each.spending for each in ordinary]
    assert all(each.spending is each for each in spending)
    with torch.no_grad():
        for turn in range(12):
            if turn == 8:
                calls.forget_plans()
            x = torch.randn(ROWS, N)
            exact = nn.functional.silu(nn.functional.layer_norm(x @ weight.t(), (N,)))
            for callers, spends in ((spending, True), (ordinary, False)):
                for caller in callers:
                    mine = given(x, weight)
                    y = caller(*mine)
                    torch.testing.assert_close(y, exact, rtol=1e-4, atol=1e-4)
                    assert mine[0].isnan().all() == spends
                    assert torch.equal(mine[0], x) or spends
            facts = (CHAIN, "planes", False, None)
            z = torch.ops.epinorm.linear_norm(x, weight, None, None, None, [], *facts)
            torch.testing.assert_close(z, exact, rtol=1e-4, atol=1e-4)
            epinorm.linear_norm(x, weight, norm=epinorm.LayerNorm(), post="silu")
            assert torch.isfinite(x).all()
    assert gpu.replayed


def test_what_is_not_a_plain_matrix_by_itself_is_not_written_over(gpu: Any) -> None:
    """Rows apart, other dtypes, a tensor that wants a gradient or is of a subclass."""

    class Sub(Tensor):
        pass

    weight, caller = torch.randn(N, N), Caller(CHAIN, "planes").spending
    wide = torch.randn(ROWS, 2 * N)
    with torch.no_grad():
        for _ in range(4):
            leaf = torch.randn(ROWS, N).requires_grad_()
            for x in (wide[:, :N], leaf, torch.randn(ROWS, N).as_subclass(Sub)):
                before = x.clone()
                caller(x, weight, None, None, None, ())
                assert torch.equal(x, before)
            assert caller(*given(torch.randn(ROWS, N), weight)).isfinite().all()
            assert spent(gpu) == 1


@pytest.mark.filterwarnings("ignore:prepack keeps nothing")
def test_a_prepacked_weight(gpu: Any, streams: None) -> None:
    model = Net()
    fused = epinorm.fuse(copy.deepcopy(model), strategy="planes")
    with prepacked(fused), torch.no_grad():
        for _ in range(5):
            check(model, fused, torch.randn(ROWS, N))
            assert spent(gpu) == 2
    with torch.no_grad():
        check(model, fused, torch.randn(ROWS, N))


def test_nothing_is_loaded_by_a_second_call(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be captured in a CUDA graph, where nothing can be loaded."""
    model = Net()
    fused = epinorm.fuse(copy.deepcopy(model), strategy="planes")
    with torch.no_grad():
        check(model, fused, torch.randn(ROWS, N))
        count = len(gpu.sources)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        check(model, fused, torch.randn(ROWS, N))
    assert len(gpu.sources) == count


@pytest.mark.parametrize("warm", [0, 1, 2, 5])
def test_a_call_that_fails_in_the_middle_can_be_made_again(gpu: Any, warm: int) -> None:
    """From the model's own inputs, which nothing writes over."""
    model = Net()
    fused = epinorm.fuse(copy.deepcopy(model), strategy="planes")
    with torch.no_grad():
        for _ in range(warm):
            check(model, fused, torch.randn(ROWS, N))
        x = torch.randn(ROWS, N)
        gpu.interrupt = lambda: setattr(gpu, "refused", "norm_forward")
        with pytest.raises(RuntimeError, match="failed"):
            fused(x)
        gpu.refused = ""
        for _ in range(3):
            check(model, fused, x)


def test_threads_have_an_x_each(gpu: Any) -> None:
    model = Net()
    fused = epinorm.fuse(copy.deepcopy(model), strategy="planes")
    errors = []

    def run() -> None:
        try:
            with torch.no_grad():
                for _ in range(8):
                    check(model, fused, torch.randn(ROWS, N))
        except BaseException as error:
            errors.append(error)

    with torch.no_grad():
        check(model, fused, torch.randn(ROWS, N))
    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_what_is_tuned_is_what_the_call_was_given(gpu: Any) -> None:
    linear, norm, _ = block()
    fused = epinorm.fuse(Net(block(), nn.Sequential(linear, norm), block()), strategy="planes")
    with recorded() as found, torch.no_grad():
        for _ in range(3):
            fused(torch.randn(ROWS, N))
    assert len(found) == 2
    assert spent(gpu) == 6
    assert not any(problem.spends_x for problem, _ in found)
    assert all(inputs.x.isfinite().all() for _, inputs in found)


def compiled(model: nn.Module, **options: Any) -> Any:
    options = {"strategy": "planes"} | options
    return torch.compile(copy.deepcopy(model), backend=compile_graph, options=options)


def swapped(graphs: list[fx.Graph]) -> int:
    """Operators that may write over x, in all graphs since this was last asked."""
    targets = [node.target for graph in graphs for node in graph.nodes]
    graphs.clear()
    return sum(target in SPENDING_X.values() for target in targets)


@pytest.mark.parametrize("kind", MODELS)
def test_who_spends_x_in_a_compiled_graph(gpu: Any, graphs: Any, kind: type[Net]) -> None:
    """As under ``fuse``, in Python's launches and in native ones."""
    model = kind().eval()
    made, count = compiled(model), COMPILED.get(kind, kind.spent)
    with torch.no_grad():
        for rows in (ROWS, ROWS, ROWS, ROWS, 8, ROWS):
            x = torch.randn(rows, N)
            torch._dynamo.maybe_mark_dynamic(x, 0)
            check(model, made, x)
            assert spent(gpu) == count
    assert swapped(graphs) == count
    assert gpu.replayed


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind is not ChangedLater])
def test_a_compiled_graph_that_trains_spends_nothing(
    gpu: Any, graphs: Any, kind: type[Net]
) -> None:
    """But for what is computed without gradients in between, on that alone."""
    model = kind().eval()
    made = compiled(model)
    for _ in range(3):
        x = torch.randn(ROWS, N, requires_grad=True)
        torch.testing.assert_close(made(x), model(x), rtol=1e-4, atol=1e-4)
        if kind.trains:
            pairs = [
                torch.autograd.grad(sum(t.sum() for t in tree_leaves(m(x))), x)
                for m in (made, model)
            ]
            torch.testing.assert_close(*pairs, rtol=1e-3, atol=1e-3)
        assert spent(gpu) == (kind is WithoutGradients)
    assert swapped(graphs) == (kind is WithoutGradients)


def test_frozen_layers_of_a_compiled_graph(gpu: Any, graphs: Any) -> None:
    """They spend; those behind them do not."""
    model = Net().requires_grad_(False)
    model.c.requires_grad_()
    made = compiled(model)
    for _ in range(5):
        x = torch.randn(ROWS, N)
        grads = [torch.autograd.grad(m(x).sum(), list(m.parameters())[-4:]) for m in (model, made)]
        torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-3)
        assert spent(gpu) == 1


@pytest.mark.parametrize(
    "dtype, devices", [(torch.bfloat16, ("cpu",)), (torch.float64, ("cpu",)), (None, ("cuda",))]
)
def test_graphs_of_other_dtypes_and_devices_stay(
    graphs: Any, monkeypatch: pytest.MonkeyPatch, dtype: Any, devices: Any
) -> None:
    monkeypatch.setattr(dispatch, "SPENDING", devices)
    made = compiled(Net().to(dtype), strategy="epilogue")
    with torch.no_grad():
        made(torch.randn(ROWS, N, dtype=dtype))
    assert str(graphs[0]).count("epinorm.linear_norm.default") == 3
    assert swapped(graphs) == 0


@pytest.mark.parametrize("chain, more", [(CHAIN, 0), (f"add_residual|{CHAIN}|returns(sum)", 1)])
def test_the_operators_that_write_over_x(gpu: Any, chain: str, more: int) -> None:
    """From the first call on, by Python's launches and by native ones; an ordinary one of the same
    facts never."""
    ordinary, spending = list(SPENDING_X.items())[more]
    weight, residual = torch.randn(N, N), torch.randn(ROWS, N)
    rest = (weight, None, None, None, [residual][:more], chain, "planes", False, None)
    for _ in range(5):
        x = torch.randn(ROWS, N)
        mine, expected, before = x.clone(), ordinary(x, *rest), gpu.replayed
        torch.testing.assert_close(spending(mine, *rest), expected)
        assert mine.isnan().all()
        assert x.isfinite().all()
    assert gpu.replayed > before
    columns = x.t().contiguous().t()
    torch.testing.assert_close(spending(columns, *rest), expected)
    assert torch.equal(columns, x)
    torch.library.opcheck(spending, (x, *rest))


def test_inductors_own_code(gpu: Any) -> None:
    """There is no kernel of its own in it. Once more from its cache of graphs."""
    model = Net()
    with fresh_cache(), torch.no_grad():
        for hits in (0, 1):
            torch._dynamo.reset()
            made = compiled(model, fx_graph_cache=True)
            for _ in range(4):
                check(model, made, torch.randn(2, ROWS, N))
                assert spent(gpu) == 2
            assert torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"] == hits


def test_on_the_cpu_nothing_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[Any]()
    monkeypatch.setattr(dispatch, "SPENDING", ("cuda",))
    monkeypatch.setattr(calls, "planned", [lambda problem, _: told.append(problem.spends_x)])
    fused = epinorm.fuse(Net(), strategy="planes")
    with torch.no_grad():
        for _ in range(3):
            fused(torch.randn(ROWS, N))
    assert told
    assert not any(told)
