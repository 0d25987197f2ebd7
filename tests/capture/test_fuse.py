"""fuse() leaves a model's results, gradients, state and life as they were."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import epinorm
from own_masks import own_masks

_spec = importlib.util.spec_from_file_location("models", Path(__file__).with_name("models.py"))
assert _spec is not None
assert _spec.loader is not None
models = importlib.util.module_from_spec(_spec)
sys.modules["models"] = models  # pickle finds the classes by this name
_spec.loader.exec_module(models)
ZOO, Case, randomise = models.ZOO, models.Case, models.randomise

CASES = [pytest.param(case, id=name) for name, case in ZOO.items()]


_OPERATORS = ("epinorm::linear_norm", "epinorm::linear_norm_sum")


def fused_calls(model: nn.Module, x: Tensor, kwargs: dict[str, Any]) -> int:
    """How often a call of the model runs the fused operation, as a profiler sees it."""
    torch.manual_seed(1)
    with torch.profiler.profile() as profile:
        model(x, **kwargs)
    return sum(event.name in _OPERATORS for event in profile.events())


def make(case: Case) -> tuple[nn.Module, nn.Module, Tensor]:
    """The model in float64 with all parameters random, a fused copy of it, and an input."""
    model = randomise(case.make()).double()
    return model, epinorm.fuse(copy.deepcopy(model)), torch.randn(*case.shape, dtype=torch.float64)


def run(model: nn.Module, x: Tensor, kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """All outputs and all gradients (of the input and every parameter) of one step."""
    torch.manual_seed(1)  # dropout and noise draw the same values in every run
    x = x.detach().clone().requires_grad_()
    with own_masks() if model._compiled_call_impl is None else contextlib.nullcontext():
        outputs = [t for t in pytree.tree_leaves(model(x, **kwargs)) if isinstance(t, Tensor)]
    loss = sum((t * torch.linspace(-1, 2, t.numel()).to(t).view(t.shape)).sum() for t in outputs)
    gradients = torch.autograd.grad(loss, [x, *model.parameters()], allow_unused=True)
    return outputs, [torch.zeros(()) if g is None else g for g in gradients]


def assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    """Equal to within a few roundings of float64."""
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


# In eval what asks for it alone is another: autocast's cases below are in eval, all of them.
IN_EVAL = [pytest.param(ZOO[n], False, id=f"{n}, eval") for n in ("dropout", "nested sequential")]


@pytest.mark.parametrize(
    ("case", "training"), [*(pytest.param(c, True, id=name) for name, c in ZOO.items()), *IN_EVAL]
)
def test_outputs_and_gradients_are_those_of_the_model(case: Case, training: bool) -> None:
    model, fused, x = make(case)
    model.train(training)
    fused.train(training)
    expected_calls = case.chains if x.numel() else 0  # empty: as it is written
    # With a gradient of x, as below: what is captured for one serves the other.
    assert fused_calls(fused, x.clone().requires_grad_(), case.kwargs) == expected_calls
    for given in (x, torch.rand_like(x)):
        expected, got = run(model, given, case.kwargs), run(fused, given, case.kwargs)
        assert_same(got[0], expected[0])
        assert_same(got[1], expected[1])
    fused.load_state_dict(randomise(copy.deepcopy(model)).state_dict(), strict=True)
    model.load_state_dict(fused.state_dict(), strict=True)
    assert_same(*(run(m, x, case.kwargs)[0] for m in (fused, model)))


@pytest.mark.parametrize("case", CASES)
def test_state_parameters_and_names_stay(case: Case) -> None:
    model = randomise(case.make()).double()
    before = dict(model.named_parameters(remove_duplicate=False))
    names = [name for name, _ in model.named_modules()]
    classes = [type(m) for m in model.modules()]
    state = list(model.state_dict())
    text = repr(model)
    fused = epinorm.fuse(model)
    assert fused is model
    after = dict(fused.named_parameters(remove_duplicate=False))
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert [name for name, _ in fused.named_modules()] == names
    assert [type(m) for m in fused.modules()] == classes
    assert repr(fused) == text
    assert list(fused.state_dict()) == state


def through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, through_pickle, through_torch_save])
@pytest.mark.parametrize("name", ["benchmark", "nested sequential", "dropout", "residual"])
def test_copies_are_the_plain_model_and_can_be_fused(name: str, copied: Any) -> None:
    case = ZOO[name]
    model, fused, x = make(case)
    fused.eval()(x)
    twin = copied(fused)
    assert fused_calls(twin, x, {}) == 0
    for m in (model, twin, fused):
        m.train()
    expected = run(model, x, {})
    for m in (twin, fused, epinorm.fuse(twin)):
        got = run(m, x, {})
        assert_same(got[0], expected[0])
        assert_same(got[1], expected[1])
    assert fused_calls(fused, x, {}) == fused_calls(twin, x, {}) == case.chains
    if copied is not copy.copy:
        assert not {id(p) for p in twin.parameters()} & {id(p) for p in fused.parameters()}


@pytest.mark.parametrize("name", ["nested sequential", "own parameters", "shared modules"])
def test_an_optimizer_made_before_fusing_goes_on(name: str) -> None:
    case = ZOO[name]
    model = randomise(case.make()).double()
    plain = copy.deepcopy(model)
    steps = []
    for m in (model, plain):
        optimizer = torch.optim.AdamW(m.parameters(), lr=0.05, weight_decay=0.1)
        if m is model:
            epinorm.fuse(model)
        generator = torch.Generator().manual_seed(3)
        for _ in range(3):
            x = torch.randn(*case.shape, dtype=torch.float64, generator=generator)
            optimizer.zero_grad()
            m(x).square().mean().backward()
            optimizer.step()
        steps.append([p.detach() for p in m.parameters()])
    for got, expected in zip(*steps, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_fusing_twice_changes_nothing() -> None:
    case = ZOO["several in a row"]
    _, fused, x = make(case)
    once = run(fused, x, case.kwargs)[0]
    assert epinorm.fuse(fused) is fused
    assert_same(run(fused, x, case.kwargs)[0], once)
    assert fused_calls(fused, x, case.kwargs) == case.chains


def test_unfuse_gives_the_model_back() -> None:
    model = models.Row()
    classes = [type(m) for m in model.modules()]
    state = [set(vars(m)) for m in model.modules()]
    epinorm.unfuse(epinorm.fuse(model))
    assert [type(m) for m in model.modules()] == classes
    assert [set(vars(m)) for m in model.modules()] == state


def test_a_model_without_a_chain_comes_back_unchanged() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.BatchNorm1d(4))
    x = torch.randn(3, 4)
    expected = copy.deepcopy(model)(x)
    assert epinorm.fuse(model) is model
    assert torch.equal(model(x), expected)
    (row,) = epinorm.explain(model).rows
    assert not row.fused
    assert "BatchNorm" in row.reason


def test_anything_but_a_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, got function"):
        epinorm.fuse(lambda x: x)
    with pytest.raises(TypeError, match="got int"):
        epinorm.explain(3)


def test_replaced_parameters_and_moves_are_followed() -> None:
    model, fused, x = make(ZOO["benchmark"])
    for m in (model, fused):
        torch.manual_seed(5)
        m.fc.weight = nn.Parameter(torch.randn(models.N, models.K, dtype=torch.float64))
        m.gn.bias = nn.Parameter(torch.randn(models.N, dtype=torch.float64))
    assert_same([fused(x)], [model(x)])
    assert fused_calls(fused, x, {}) == 1
    fused, model, x = fused.float(), model.float(), x.float()
    torch.testing.assert_close(fused(x), model(x), rtol=1e-5, atol=1e-5)
    assert fused_calls(fused, x, {}) == 1
    fused.bfloat16()
    assert fused(x.bfloat16()).dtype == torch.bfloat16


def test_replicas_compute_with_their_own_tensors() -> None:
    """What nn.DataParallel does to a module: children and tensors set anew on shallow copies."""
    _, fused, x = make(ZOO["benchmark"])
    replica = fused._replicate_for_data_parallel()
    for name in ("fc", "gn", "leaky_relu"):
        child = getattr(fused, name)._replicate_for_data_parallel()
        for key, tensor in getattr(fused, name).named_parameters():
            setattr(child, key, tensor.detach() * 2)
        setattr(replica, name, child)
    doubled = copy.deepcopy(fused)
    with torch.no_grad():
        for p in doubled.parameters():
            p.mul_(2)
    fused(x)
    assert_same([replica(x)], [doubled(x)])


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("case", CASES)
def test_autocast_gives_what_the_layers_give(case: Case) -> None:
    model = randomise(case.make()).eval()
    fused = epinorm.fuse(copy.deepcopy(model))
    x = torch.randn(*case.shape)
    kwargs = {k: v.float() if isinstance(v, Tensor) else v for k, v in case.kwargs.items()}
    results = []
    for m in (model, fused):
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results.append(pytree.tree_leaves(m(x, **kwargs)))
    for got, expected in zip(*reversed(results), strict=True):
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


def test_a_line_is_logged_for_each_graph_that_was_fused(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    with caplog.at_level("INFO", logger="epinorm"):
        epinorm.fuse(model)(torch.randn(4, 8))
        model(torch.randn(4, 8))
    (line,) = caplog.messages
    said = "1 of 1 chains can be fused, and 0 of 1 Linears without a norm"
    assert line == f"epinorm: Sequential: {said}"
