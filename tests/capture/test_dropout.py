"""Dropout in a captured model's chains: taken in training, gone in eval; others stay PyTorch's."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.decorators import mark_dynamic, mark_unbacked
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import epinorm
from epinorm.backends import cpu, memo
from epinorm.capture import paying
from epinorm.capture.chains import Search
from epinorm.capture.paying import Settings
from epinorm.capture.rewriting import Recorder
from epinorm.problem import Plan, Problem, Strategy
from own_masks import own_masks

K, N, ROWS = 12, 16, 9


class Model(nn.Module):
    def __init__(self, forward: Callable[..., Tensor], p: float = 0.5) -> None:
        super().__init__()
        self.fc, self.norm, self.drop = nn.Linear(K, N), nn.LayerNorm(N), nn.Dropout(p)
        self.drop_, self.rate = nn.Dropout(p, inplace=True), p
        self.written = forward
        self.double()

    def forward(self, x: Tensor, r: Tensor) -> Tensor:
        return self.written(self, x, r)


def step(model: nn.Module, fused: bool = True) -> list[Tensor]:
    """Output and all gradients; a plain model's by the masks of our kernels."""
    torch.manual_seed(3)
    x = torch.randn(ROWS, K, dtype=torch.float64, requires_grad=True)
    r = torch.randn(ROWS, N, dtype=torch.float64, requires_grad=True)
    model.zero_grad()
    with contextlib.nullcontext() if fused else own_masks():
        y = model(x, r)
        torch.rand(5)
        y.sin().sum().backward()
    found = [t.grad for t in (x, r, *model.parameters())]
    return [y.detach(), *(torch.zeros(()) if g is None else g for g in found)]


SPELLINGS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "bert": (
        lambda s, x, r: s.norm(s.drop(s.fc(x)) + r),
        "dropout(0.5)|add_residual|layer_norm(1e-05)",
    ),
    "positional": (
        lambda s, x, r: F.dropout(s.norm(s.fc(x)).relu(), 0.25, True),
        "layer_norm(1e-05)|relu|dropout(0.25)",
    ),
    "named": (
        lambda s, x, r: F.dropout(input=s.norm(s.fc(x)), p=s.rate, training=s.training),
        "layer_norm(1e-05)|dropout(0.5)",
    ),
    "default": (lambda s, x, r: s.norm(F.dropout(s.fc(x))), "dropout(0.5)|layer_norm(1e-05)"),
    "all": (lambda s, x, r: s.norm(F.dropout(s.fc(x), 1.0) + r), "dropout(1)|add_residual"),
    "in place": (lambda s, x, r: s.norm(s.drop_(s.fc(x))), "dropout(0.5)|layer_norm(1e-05)"),
    "twice": (
        lambda s, x, r: F.dropout(s.norm(s.drop(s.fc(x))), 0.1),
        "dropout(0.5)|layer_norm(1e-05)|dropout(0.1)",
    ),
    "rows": (
        lambda s, x, r: s.norm(s.drop(s.fc(x).view(3, 3, N)) + r.view(3, 3, N)).view(ROWS, N),
        "dropout(0.5)|add_residual|layer_norm(1e-05)",
    ),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name: str) -> None:
    written, chain = SPELLINGS[name]
    model = Model(written)
    fused = epinorm.fuse(copy.deepcopy(model))
    for training in (True, False, True):
        got, expected = step(fused.train(training)), step(model.train(training), fused=False)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    assert chain in epinorm.explain(fused).rows[0].chain


def test_a_gate_of_a_complex_parameter_keeps_its_gradient() -> None:
    model = Model(lambda s, x, r: s.norm(s.drop(s.fc(x) * s.gate.abs()) + r))
    model.gate = nn.Parameter(torch.randn(ROWS, 1, dtype=torch.complex128))
    fused = epinorm.fuse(copy.deepcopy(model), strategy="reference")
    for a, b in zip(step(fused), step(model), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


OTHERS: dict[str, Callable[..., Tensor]] = {
    "alpha": lambda s, x, r: s.norm(F.alpha_dropout(s.fc(x), 0.5, s.training)),
    "channels": lambda s, x, r: s.norm(F.dropout1d(s.fc(x), 0.5, s.training)),
    "feature": lambda s, x, r: s.norm(F.feature_alpha_dropout(s.fc(x), 0.5, s.training)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_dropouts_stay_pytorchs(name: str) -> None:
    model = Model(OTHERS[name])
    fused = epinorm.fuse(copy.deepcopy(model))
    for a, b in zip(step(fused), step(model), strict=True):
        assert torch.equal(a, b)
    (row,) = epinorm.explain(fused).rows
    assert not row.fused


def test_probability_and_mode_are_those_of_the_call() -> None:
    model = epinorm.fuse(Model(lambda s, x, r: s.drop(s.norm(s.fc(x)))))

    def zeros() -> float:
        return float((step(model)[0] == 0).double().mean())

    assert 0.3 < zeros() < 0.7
    model.drop.p = 0.9
    assert zeros() > 0.8
    model.drop.eval()
    assert zeros() == 0
    model.drop.train()
    model.drop.p = 0.0
    assert zeros() == 0


@pytest.mark.parametrize("made", ["copy", "eval first"])
def test_what_was_fused_or_copied_in_eval_drops_in_training(made: str) -> None:
    model = epinorm.fuse(Model(lambda s, x, r: s.drop(s.norm(s.fc(x)))).eval())
    step(model)
    if made == "copy":
        model = epinorm.fuse(copy.deepcopy(model))
    assert (step(model)[0] == 0).sum() == 0
    assert (step(model.train())[0] == 0).double().mean() > 0.3


def test_each_call_draws_anew_and_manual_seed_repeats() -> None:
    model = epinorm.fuse(Model(lambda s, x, r: s.norm(s.drop(s.fc(x)) + r)))
    x, r = (torch.randn(ROWS, n, dtype=torch.float64) for n in (K, N))
    torch.manual_seed(1)
    first, second = model(x, r), model(x, r)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(model(x, r), first)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("within", [False, True], ids=["around", "inside"])
def test_checkpointing_replays_the_mask(reentrant: bool, within: bool) -> None:
    def part(s: Any, x: Tensor, r: Tensor) -> Tensor:
        return F.dropout(s.norm(s.drop(s.fc(x)) + r), 0.25, s.training)

    def saves(s: Any, x: Tensor, r: Tensor) -> Tensor:
        return checkpoint(lambda x, r: part(s, x, r), x, r, use_reentrant=False)

    class Around(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor, r: Tensor) -> Tensor:
            return checkpoint(self.inner, x, r, use_reentrant=reentrant)

    plain = Model(part)
    expected = step(epinorm.fuse(copy.deepcopy(plain)))
    fused = epinorm.fuse(Model(saves)) if within else Around(epinorm.fuse(Model(part)))
    fused.load_state_dict(
        {("" if within else "inner.") + name: t for name, t in plain.state_dict().items()}
    )
    for a, b in zip(step(fused), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_replays_the_mask_whichever_graph_runs(
    reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows are PyTorch's own layers' in a step, and none are without gradients; the second
    size's graph serves the first size as well."""
    rows = 64
    monkeypatch.setattr(cpu, "LEAST_VALUES_TRAINING", rows * N)
    memo.clear()
    cases: tuple[tuple[Strategy, Callable[..., Any]], ...] = (
        ("auto", lambda s, x, r: s.norm(s.drop(s.fc(x)) + r)),
        ("auto", lambda s, x, r: (lambda h: (s.norm(h), h))(s.drop(s.fc(x)) + r)),
        ("reference", lambda s, x, r: s.norm(s.drop(s.fc(x)) + r)),
        ("reference", lambda s, x, r: s.norm(s.drop(s.fc(x) * r.mean(-1, keepdim=True)))),
        ("reference", lambda s, x, r: s.drop(s.norm(s.fc(x)) * s.fc(x)[:, :1].sigmoid())),
        ("reference", lambda s, x, r: s.drop(s.fc(x).relu() * r.mean(-1, keepdim=True))),
        ("reference", lambda s, x, r: s.norm(s.drop(s.fc(x).view(-1, 1, N) * r.mean(0)[None]))),
        ("reference", lambda s, x, r: (lambda h: (s.norm(h), h))(s.drop(s.fc(x) * r))),
    )
    for strategy, part in cases:
        model = epinorm.fuse(Model(part), strategy=strategy)
        for sizes in ((rows // 2,) * 4, (rows // 2, 2 * rows)):
            seen: list[list[Tensor]] = [[] for _ in sizes]
            losses = []

            def run(x: Tensor, r: Tensor, runs: list[Tensor], model: nn.Module = model) -> Tensor:
                runs.append(torch.cat([t.flatten() for t in model(x, r)]))
                return runs[-1]

            for m, runs in zip(sizes, seen, strict=True):
                x, r = (torch.randn(m, n, dtype=torch.float64, requires_grad=True) for n in (K, N))
                with set_checkpoint_early_stop(False):
                    losses.append(checkpoint(run, x, r, runs, use_reentrant=reentrant).sum())
            torch.stack(losses).sum().backward()
            for first, again in seen:
                torch.testing.assert_close(again, first, rtol=1e-11, atol=1e-11)


def test_a_switch_of_gradients_between_two_dropouts_draws_the_same() -> None:
    hooks_end_no_graph = TorchVersion(torch.__version__) >= "2.10"

    def forward(s: Any, x: Tensor, r: Tensor) -> Tensor:
        h = s.drop(s.norm(s.fc(x)).relu())
        with torch.no_grad():
            s.seen = h.mean()
        if h.requires_grad and hooks_end_no_graph:
            h.register_hook(lambda _: None)
        h = F.dropout(h.softmax(-1), 0.5)  # PyTorch's own, in between
        return s.norm(s.drop(F.linear(h, s.norm.weight.outer(s.norm.bias))) + r)

    model = epinorm.fuse(Model(forward), strategy="reference")
    for p in model.parameters():
        nn.init.normal_(p)
    x, r = (torch.randn(ROWS, n, dtype=torch.float64, requires_grad=True) for n in (K, N))
    torch.manual_seed(5)
    expected = model(x, r)
    with torch.no_grad():
        torch.manual_seed(5)
        torch.testing.assert_close(model(x, r), expected.detach(), rtol=1e-11, atol=1e-11)


@pytest.mark.usefixtures("interpreted")
def test_the_compiler_backend_takes_it() -> None:
    model = Model(lambda s, x, r: s.norm(s.drop(s.fc(x)) + r) * 2)
    compiled = torch.compile(model, backend="epinorm", fullgraph=True)
    x = torch.zeros(ROWS, K, dtype=torch.float64)
    r = torch.randn(ROWS, N, dtype=torch.float64)
    with torch.no_grad():
        model.fc.bias.fill_(100)

    def kept(y: Tensor) -> Tensor:  # 200 where it is kept, which nothing else reaches
        return y > y.mean(1, keepdim=True)

    torch.manual_seed(1)
    first = compiled(x, r)
    assert 0.3 < kept(first).double().mean() < 0.7
    (gradient,) = torch.autograd.grad(first.sin().sum(), model.fc.bias)
    assert gradient.isfinite().all()
    assert not torch.equal(compiled(x, r), first)
    torch.manual_seed(1)
    assert torch.equal(compiled(x, r), first)


@pytest.mark.slow
def test_a_budget_for_activations_draws_no_seed_again() -> None:
    from torch._functorch import config

    layers = [nn.Linear(K, K), nn.Dropout(0.5), nn.LayerNorm(K)]
    options: Any = {"strategy": "reference"}
    run = torch.compile(nn.Sequential(*layers).double(), backend="epinorm", options=options)
    x, towards = torch.randn(2, 32, K, dtype=torch.float64)
    weights, step = torch.randn(32, K, dtype=torch.float64), 1e-6

    def loss(at: Tensor) -> Tensor:
        torch.manual_seed(5)
        return (run(at) * weights).sum()

    with config.patch(activation_memory_budget=0.5):
        (gradient,) = torch.autograd.grad(loss(x.requires_grad_()), x)
        numeric = (loss(x + step * towards) - loss(x - step * towards)) / (2 * step)
    torch.testing.assert_close((gradient * towards).sum(), numeric, rtol=1e-5, atol=1e-5)


def test_where_pytorchs_layers_compute_the_chain_they_drop_too() -> None:
    """No kernel of ours for the CPU knows fp16."""
    model = Model(lambda s, x, r: s.norm(s.drop(s.fc(x)) + r)).half()
    fused = epinorm.fuse(copy.deepcopy(model))
    x, r = (torch.randn(ROWS, n, dtype=torch.float16) for n in (K, N))
    results = []
    for m in (model, fused):
        torch.manual_seed(2)
        results.append(m(x, r))
    assert torch.equal(*results)
    (row,) = epinorm.explain(fused).rows
    assert not row.fused
    assert "its dropout is PyTorch's own here: the CPU kernels know" in row.reason


SIZES_MARKED: dict[str, tuple[Callable[[Tensor], None], bool]] = {
    "dynamic": (lambda x: mark_dynamic(x, 0), True),
    "one is left": (lambda x: mark_dynamic(x, 0), False),
    "in its range": (lambda x: mark_dynamic(x, 0, min=2, max=3), True),
    "out of its range": (lambda x: mark_dynamic(x, 0, min=2, max=64), False),
    "unbacked": (lambda x: mark_unbacked(x, 0), False),
}


@pytest.mark.parametrize("name", SIZES_MARKED)
def test_sizes_that_are_marked_are_guarded_where_the_marks_allow_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark, taken = SIZES_MARKED[name]
    monkeypatch.setattr(cpu, "LEAST_VALUES_TRAINING", 32 * N)
    memo.clear()
    model = nn.Sequential(nn.Linear(K, N), nn.Dropout(0.5), nn.LayerNorm(N))
    recorder = Recorder(Settings(), model)
    # Below 32 rows the plan is PyTorch's layers: of 15 each, these are 2 samples and no others.
    x = torch.randn(2, 15 if name == "one is left" else 40, K)
    mark(x)
    torch.compile(model, backend=recorder, fullgraph=True)(x).sum().backward()
    (site,) = recorder.graphs[0].sites
    assert (site.obstacle == "") is taken, site.obstacle


def test_whose_a_dropout_behind_a_batch_norm_is_does_not_depend_on_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def plan_for(problem: Problem, *_: Any) -> Plan:
        return Plan("epilogue" if problem.training else "reference", "as it is trained")

    monkeypatch.setattr(paying, "plan_for", plan_for)
    model = nn.Sequential(nn.Linear(K, N), nn.BatchNorm1d(N), nn.Dropout(0.5))
    obstacles = []
    for enabled in (True, False):
        torch._dynamo.reset()
        recorder = Recorder(Settings(), model)
        with torch.set_grad_enabled(enabled):
            torch.compile(model, backend=recorder)(torch.randn(ROWS, K))
        obstacles.append([site.obstacle for site in recorder.graphs[0].sites])
    assert obstacles == [[""], [""]]


def test_the_seeds_of_a_graph_are_drawn_at_once() -> None:
    layers = [nn.Linear(K, K), nn.Dropout(0.5), nn.LayerNorm(K)] * 3
    model = epinorm.fuse(nn.Sequential(*layers))
    model(torch.randn(ROWS, K))
    with torch.profiler.profile() as profile:
        model(torch.randn(ROWS, K))
    names = [event.name for event in profile.events()]
    assert names.count("aten::randint") == 1
    assert names.count("epinorm::linear_norm") == 3


def test_under_autocast_dropout_in_front_of_a_kept_sum_is_fused():
    """A pre-norm block in training: no dtype comes from the seed of its dropout."""
    graph = fx.Graph()

    def on_gpu(node: fx.Node, dtype: torch.dtype, *shape: int) -> fx.Node:
        with FakeTensorMode():
            node.meta["example_value"] = torch.empty(shape, dtype=dtype, device="cuda")
        return node

    x, weight, r = (
        on_gpu(graph.placeholder(name), torch.float32, *shape)
        for name, shape in (("x", (ROWS, K)), ("weight", (N, K)), ("r", (ROWS, N)))
    )
    z = on_gpu(graph.call_function(F.linear, (x, weight)), torch.bfloat16, ROWS, N)
    dropped = on_gpu(graph.call_function(F.dropout, (z, 0.1, True)), torch.bfloat16, ROWS, N)
    total = on_gpu(graph.call_function(torch.add, (dropped, r)), torch.float32, ROWS, N)
    y = on_gpu(graph.call_function(F.layer_norm, (total, (N,))), torch.float32, ROWS, N)
    graph.output((y, on_gpu(graph.call_function(torch.neg, (total,)), torch.float32, ROWS, N)))
    with torch.no_grad():
        (place,) = Search(graph).places()
    assert place.found is not None, place.obstacle
    assert str(place.found.chain) == "dropout(0.1)|add_residual|layer_norm(1e-05)|returns(sum)"
