"""What happens to a fused model that changes, or is called in a way that is no chain."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import time
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import register_parametrization

import epinorm
from epinorm.operator.dispatch import Caller

K, N, GROUPS, ROWS = 12, 16, 4, 5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(K, N)
        self.norm = nn.GroupNorm(GROUPS, N)
        self.act = nn.LeakyReLU(0.1)
        self.gain = 2.0
        self.late = None

    def forward(self, x):
        h = self.act(self.norm(self.fc(x))) * self.gain
        return h if self.late is None else self.late(h)


SCALE = 3.0


class ReadsGlobal(Model):
    def forward(self, x):
        return self.norm(self.fc(x)) * SCALE


class Adds(Model):
    def forward(self, x, other):
        return self.norm(self.fc(x)) + other


def randomised(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p))
    return model.double()


@pytest.fixture
def pair() -> tuple[Any, Any]:
    model = randomised(Model())
    return model, epinorm.fuse(copy.deepcopy(model))


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(ROWS, K, dtype=torch.float64)


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []

    def counted(way: Any) -> Any:
        def call(caller: Caller, *tensors: Any) -> torch.Tensor | None:
            y = way(caller, *tensors)
            calls.extend([] if y is None else [caller.facts[0]])
            return y

        return call

    for name in ("again", "first"):
        monkeypatch.setattr(Caller, name, counted(getattr(Caller, name)))
    return calls


def assert_same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def double_output(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def double_input(module: nn.Module, inputs: Any) -> Any:
    return tuple(i * 2 for i in inputs)


@pytest.mark.parametrize("layer", ["fc", "norm", "act"])
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_added_after_fusing_run(pair: Any, x: Any, layer: str, kind: str) -> None:
    model, fused = pair
    fused(x)
    counts = []
    for m in (model, fused):
        runs: list[int] = []

        def hook(*args: Any, runs: list[int] = runs) -> Any:
            runs.append(1)
            return {"forward": double_output, "forward_pre": double_input}.get(
                kind, lambda *a: None
            )(*args)

        handle = getattr(getattr(m, layer), f"register_{kind}_hook")(hook)
        if m is fused:
            with pytest.warns(UserWarning, match=f"{layer} has hooks"):
                y = m(x)
        else:
            expected = m(x)
        m(x).sum().backward()
        counts.append(len(runs))
        handle.remove()
    assert_same(y, expected)
    assert counts[0] == counts[1] > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(fused(x), model(x))  # the hooks are gone: fused again


def test_hooks_for_all_modules_run(pair: Any, x: Any) -> None:
    _, fused = pair
    seen: list[type] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, i, o: seen.append(type(m)))
    try:
        with pytest.warns(UserWarning, match="hooks for all modules"):
            fused(x)
    finally:
        handle.remove()
    assert seen == [nn.Linear, nn.GroupNorm, nn.LeakyReLU, type(fused)]


def test_hooks_on_the_fused_module_itself_run_and_it_stays_fused(
    pair: Any, x: Any, fused_calls: list[str]
) -> None:
    model, fused = pair
    for m in pair:
        m.register_forward_hook(double_output)
        m.register_forward_pre_hook(double_input)
    assert_same(fused(x), model(x))
    assert len(fused_calls) == 1


def test_a_hook_on_a_container_that_was_inlined_runs(x: Any) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(K, N), nn.LayerNorm(N))

        def forward(self, x):
            return self.net(x).relu()

    model = randomised(Outer())
    fused = epinorm.fuse(copy.deepcopy(model))
    assert_same(fused(x), model(x))
    for m in (model, fused):
        m.net.register_forward_hook(double_output)
    assert_same(fused(x), model(x))


CHANGES = {
    "attribute": lambda m: setattr(m, "gain", -1.0),
    "eps": lambda m: setattr(m.norm, "eps", 0.5),
    "groups": lambda m: setattr(m.norm, "num_groups", 2),
    "slope": lambda m: setattr(m.act, "negative_slope", -1.0),
    "other activation": lambda m: setattr(m, "act", nn.Tanh()),
    "other norm": lambda m: setattr(m, "norm", nn.LayerNorm(N).double()),
    "custom linear": lambda m: setattr(m, "fc", Doubling(m.fc)),
    "module where there was none": lambda m: setattr(m, "late", nn.Softmax(-1)),
    "forward of a layer": lambda m: setattr(m.norm, "forward", lambda h: h * 3),
    "parametrization": lambda m: register_parametrization(m.fc, "weight", Doubling(nn.Identity())),
    "bias removed": lambda m: setattr(m.fc, "bias", None),
    "norm weight removed": lambda m: setattr(m.norm, "weight", None),
}


class Doubling(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * 2


@pytest.mark.filterwarnings("ignore:epinorm")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_after_fusing_take_effect(pair: Any, x: Any, change: Any) -> None:
    model, fused = pair
    before = fused(x)
    for m in pair:
        change(m)
    assert_same(fused(x), model(x))
    assert not torch.allclose(fused(x), before)


def test_a_changed_global_takes_effect(x: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomised(ReadsGlobal())
    fused = epinorm.fuse(copy.deepcopy(model))
    assert_same(fused(x), model(x))
    monkeypatch.setitem(ReadsGlobal.forward.__globals__, "SCALE", 5.0)
    assert_same(fused(x), model(x))


def test_children_added_to_a_sequential_run(x: Any, fused_calls: list[str]) -> None:
    model = randomised(nn.Sequential(nn.Linear(K, N), nn.LayerNorm(N)))
    fused = epinorm.fuse(copy.deepcopy(model))
    for m in (model, fused):
        m.append(nn.Tanh())
    assert_same(fused(x), model(x))
    assert fused_calls == ["layer_norm(1e-05)|tanh"]


@pytest.mark.parametrize("shape", [(2, N, K), (2, 3, N, K)])
def test_group_norm_of_more_dimensions_runs_layer_by_layer(
    pair: Any, shape: tuple[int, ...]
) -> None:
    model, x = pair[0], torch.randn(*shape, dtype=torch.float64)
    if len(shape) == 4:
        model.norm = nn.GroupNorm(3, 3).double()
    fused = epinorm.fuse(copy.deepcopy(model))
    with pytest.warns(UserWarning, match=rf"{len(shape)}-dimensional input normalises dimension 1"):
        assert_same(fused(x), model(x))


def test_it_warns_once(pair: Any) -> None:
    _, fused = pair
    x = torch.randn(2, N, K, dtype=torch.float64)
    with pytest.warns(UserWarning, match="epinorm: Model: fc → norm runs layer by layer"):
        fused(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fused(x)


def test_strict_raises_instead() -> None:
    fused = epinorm.fuse(randomised(Model()), strict=True)
    with pytest.raises(RuntimeError, match=r"strict=True, but .*normalises dimension 1"):
        fused(torch.randn(2, N, K, dtype=torch.float64))


@pytest.mark.parametrize(
    "other", [torch.randn(ROWS, 1), torch.randn(N), torch.randn(2, ROWS, N), 2.5, 1]
)
@pytest.mark.filterwarnings("ignore:epinorm")
def test_a_sum_with_anything_is_right(x: Any, other: Any) -> None:
    model = randomised(Adds())
    fused = epinorm.fuse(copy.deepcopy(model))
    if isinstance(other, torch.Tensor):
        other = other.double()
    assert_same(fused(x, other), model(x, other))
    assert_same(fused(x, other=other), model(x, other))


def test_a_residual_of_another_dtype_promotes_as_in_eager(x: Any) -> None:
    model = randomised(Adds()).float()
    fused = epinorm.fuse(copy.deepcopy(model))
    other = torch.randn(ROWS, N, dtype=torch.float64)
    with pytest.warns(UserWarning, match="several dtypes"):
        y = fused(x.float(), other)
    assert y.dtype == torch.float64
    torch.testing.assert_close(y, model(x.float(), other), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:epinorm")
def test_mistakes_raise_what_the_model_raises(pair: Any, x: Any) -> None:
    model, fused = pair
    for mistake in (
        lambda m: m(),
        lambda m: m(x, x),
        lambda m: m(y=x),
        lambda m: m(x, x=x),
        lambda m: m("text"),
        lambda m: m(x[:, 1:]),
    ):
        with pytest.raises(Exception) as expected:  # noqa: PT011
            mistake(model)
        with pytest.raises(expected.type):
            mistake(fused)


def test_train_and_eval_switch_dropout(fused_calls: list[str]) -> None:
    model = randomised(nn.Sequential(nn.Linear(K, N), nn.Dropout(0.5), nn.LayerNorm(N), nn.ReLU()))
    fused = epinorm.fuse(copy.deepcopy(model))
    x = torch.randn(ROWS, K, dtype=torch.float64)
    for training, calls in ((True, 0), (False, 1), (True, 1), (False, 2)):
        results = []
        for m in (model, fused):
            torch.manual_seed(7)
            results.append(m.train(training)(x))
        assert_same(*results)
        assert len(fused_calls) == calls


@pytest.mark.parametrize("made_in_eval", ["fused", "copied", "unpickled", "container"])
def test_dropout_trains_where_fusing_saw_eval_mode(made_in_eval: str) -> None:
    """Fusing takes a dropout that is off out of the graph: train() must bring it back."""
    layers = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.5))
    model = nn.Sequential(layers, nn.Flatten()) if made_in_eval == "container" else layers
    epinorm.fuse(model.eval())
    if made_in_eval == "copied":
        model = copy.deepcopy(model)
    if made_in_eval == "unpickled":
        model = pickle.loads(pickle.dumps(model))
    x = torch.randn(1000, 8)
    assert (model(x) == 0).float().mean() < 0.01
    model.train()
    assert 0.45 < (model(x) == 0).float().mean() < 0.55
    model.eval()
    assert (model(x) == 0).float().mean() < 0.01


def test_a_module_that_differs_at_every_call_goes_back_to_its_own_forward(
    pair: Any, x: Any
) -> None:
    model, fused = pair
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(40):
            model.gain = fused.gain = float(step)
            assert_same(fused(x), model(x))
    assert any("differ from call to call" in str(w.message) for w in said)


def test_autocast_gives_what_eager_gives(x: Any) -> None:
    model = randomised(Model()).float()
    fused = epinorm.fuse(copy.deepcopy(model))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, got = model(x.float()), fused(x.float())
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("make", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrised_weights_are_computed_once_a_call(
    make: Any, x: Any, fused_calls: list[str]
) -> None:
    model = randomised(Model())
    make(model.fc)
    model.double()
    fused = epinorm.fuse(copy.deepcopy(model))
    for _ in range(3):  # spectral_norm improves its estimate each time that the weight is read
        assert_same(fused(x), model(x))
    assert len(fused_calls) == 3
    for m in (model, fused):
        m(x).square().sum().backward()
    for a, b in zip(fused.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-9)


def test_functional_transforms(pair: Any) -> None:
    model, fused = pair
    xs = torch.randn(ROWS, K, dtype=torch.float64)
    parameters = dict(model.named_parameters())

    def loss(p: Any, m: nn.Module) -> torch.Tensor:
        return torch.func.functional_call(m, p, (xs,)).square().sum()

    expected = torch.func.grad(loss)(parameters, model)
    got = torch.func.grad(loss)(parameters, fused)
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-9, atol=1e-9)


class Registry(nn.Module):
    known: list[type] = []  # noqa: RUF012

    def __init_subclass__(cls, *, name: str) -> None:
        Registry.known.append(cls)


class Registered(Registry, name="registered"):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(K, N), nn.LayerNorm(N)

    def forward(self, x):
        return self.norm(self.fc(x))


def test_classes_that_register_their_subclasses(x: Any, fused_calls: list[str]) -> None:
    model = randomised(Registered())
    fused = epinorm.fuse(copy.deepcopy(model))
    assert_same(fused(x), model(x))
    assert Registry.known == [Registered]
    assert len(fused_calls) == 1


def test_other_threads_compute_while_one_traces(x: Any) -> None:
    """torch.fx patches nn.Module for the whole process while it traces."""
    model = randomised(Model())
    expected = model(x)
    wrong: list[str] = []
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            try:
                assert_same(model(x), expected)
            except Exception as error:
                wrong.append(repr(error))

    def trace() -> None:
        try:
            for _ in range(20):
                assert epinorm.explain(epinorm.fuse(copy.deepcopy(model))).fused == 1
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=compute), *(threading.Thread(target=trace) for _ in "ab")]
    for thread in threads:
        thread.start()
    for thread in threads[1:]:
        thread.join()
    stop.set()
    threads[0].join()
    assert wrong == []


class Mutates(Model):
    """The input changes in place between the linear layer and the sum: order matters."""

    def forward(self, x, r):
        h = self.fc(x)
        x.mul_(2)
        n = self.norm(h)
        r.add_(1)
        return n + r, F.relu(x)


def test_in_place_changes_between_keep_their_order() -> None:
    model = randomised(Mutates())
    fused = epinorm.fuse(copy.deepcopy(model))
    x, r = torch.randn(ROWS, K).double(), torch.randn(ROWS, N).double()
    (a, b), (c, d) = model(x.clone(), r.clone()), fused(x.clone(), r.clone())
    assert_same(c, a)
    assert_same(d, b)
    mine = x.clone()
    fused(mine, r.clone())
    assert_same(mine, 2 * x)


def test_thousandth_of_the_call_is_checking(pair: Any, x: Any) -> None:
    """Checks must not need a trace: no new program appears over many equal calls."""
    _, fused = pair
    for _ in range(5):
        fused(x)
        fused.eval()
        fused(x)
        fused.train()
    assert len(vars(fused)["_epinorm_programs"]) == 1


def test_classes_are_freed(x: Any) -> None:
    def local_class() -> weakref.ref[type]:
        class Local(Model):
            pass

        model = epinorm.fuse(Local().double())
        model(x)
        pickled = copy.deepcopy(model)
        assert type(pickled) is type(model)
        return weakref.ref(Local)

    classes = [local_class() for _ in range(200)]
    gc.collect()
    assert not any(cls() for cls in classes)


def test_garbage_collection_while_tracing_is_not_taken_for_the_users_calls() -> None:
    class Collects(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm = nn.Linear(8, 16), nn.GroupNorm(4, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.fc(x))

    def on_collection(phase: str, info: dict[str, int]) -> None:
        time.perf_counter()

    gc.callbacks.append(on_collection)
    threshold = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        model = epinorm.fuse(Collects())
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(on_collection)
    assert [row.fused for row in epinorm.explain(model).rows] == [True]
