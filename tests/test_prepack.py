"""What prepack marks, when it lets go, and which changes of a weight it sees; needs no GPU.

tests/gpu/test_prepack.py compares results.
"""

from __future__ import annotations

import copy
import gc
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import epinorm
from epinorm.backends import unpromised
from epinorm.backends.prepack import _hooks, _modules, marked, prepack, prepacked, unprepack

pytestmark = pytest.mark.filterwarnings("ignore:prepack keeps nothing")


@pytest.fixture(autouse=True)
def nothing_left_behind():
    yield
    gc.collect()
    assert not marked
    assert not _modules


def is_marked(weight: torch.Tensor) -> bool:
    entry = marked.get(id(weight))
    return entry is not None and entry.weight() is weight


def test_it_is_public_and_returns_the_model():
    model = nn.Linear(4, 8)
    assert epinorm.prepack(model) is model
    epinorm.unprepack(model)
    with epinorm.prepacked(model) as same:
        assert same is model
        assert is_marked(model.weight)
    assert not marked


def test_it_marks_matrices_and_leaves_the_model_alone():
    model = nn.Sequential(nn.Linear(4, 8), nn.GroupNorm(2, 8), nn.Linear(8, 8, bias=False))
    before = {name: id(p) for name, p in model.named_parameters()}
    attributes = set(model[0].weight.__dict__), set(model[0].__dict__)
    prepack(model)
    assert [is_marked(p) for p in model.parameters()] == [True, False, False, False, True]
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert (set(model[0].weight.__dict__), set(model[0].__dict__)) == attributes
    copied = copy.deepcopy(model)
    assert not any(is_marked(p) for p in copied.parameters())
    unprepack(model)


def test_a_weight_alone_and_a_buffer():
    weight = torch.randn(8, 4)
    prepack(weight)
    assert is_marked(weight)
    unprepack(weight)
    module = nn.Module()
    module.register_buffer("w", torch.randn(8, 4))
    prepack(module)
    assert is_marked(module.w)
    unprepack(module)


def test_marks_die_with_the_weight_and_the_model():
    model = prepack(nn.Linear(4, 8))
    assert len(marked) == 1
    del model
    gc.collect()
    assert not marked


def test_new_parameters_of_a_prepacked_module_are_marked():
    model = prepack(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8)))
    other = nn.Linear(4, 8)
    model[0].weight = nn.Parameter(torch.randn(8, 4))
    assert is_marked(model[0].weight)
    assert len(marked) == 2
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    assert is_marked(model[0].weight)
    assert is_marked(model[1].weight)
    assert len(marked) == 2
    other.weight = nn.Parameter(torch.randn(8, 4))
    assert not is_marked(other.weight)
    unprepack(model)
    model[0].weight = nn.Parameter(torch.randn(8, 4))
    assert not marked


def test_no_hook_is_left_when_nothing_is_prepacked():
    with prepacked(nn.Linear(4, 8)):
        assert len(_hooks) == 2
    assert not _hooks


class Converter:
    """Notes when a weight is converted, and does nothing."""

    nbytes = 8

    def __init__(self) -> None:
        self.converted = 0

    def __call__(self, buffer: int, first: torch.Tensor) -> None:
        self.converted += 1

    def wait_outside_of_capture(self, event: object) -> None:
        raise AssertionError("nothing is captured")


@pytest.fixture
def conversions(monkeypatch):
    """Of a marked weight: how many there were once its planes are asked for."""
    monkeypatch.setattr(unpromised, "current_stream", lambda index: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda stream: None))
    converter = Converter()

    def after(weight):
        assert marked[id(weight)].converted(weight, converter) is not None
        return converter.converted

    return after


def in_place(w: nn.Parameter) -> None:
    w.mul_(2)


def through_a_view(w: nn.Parameter) -> None:
    w.view(-1)[3:5].add_(1)


def detached(w: nn.Parameter) -> None:
    w.detach().add_(1)


def in_inference_mode(w: nn.Parameter) -> None:
    with torch.inference_mode():
        w.add_(1)


def other_data(w: nn.Parameter) -> None:
    w.data = w.data.clone()


def same_address(w: nn.Parameter) -> None:
    """Storage of its own at the address of the old one: only its identity tells."""
    memory = w.untyped_storage()
    w.data = torch.frombuffer(_bytes_of(memory), dtype=torch.float32).view(w.shape)


def _bytes_of(storage: torch.UntypedStorage) -> object:
    import ctypes

    return (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())


def other_stride(w: nn.Parameter) -> None:
    w.data = w.data.as_strided((8, 4), (2, 1))


def counted(w: nn.Parameter) -> None:
    torch.autograd.graph.increment_version(w)


def loaded(w: nn.Parameter) -> None:
    layer = nn.Linear(4, 8)
    layer.weight = w
    layer.load_state_dict(nn.Linear(4, 8).state_dict())


CHANGES = [in_place, through_a_view, detached, in_inference_mode, other_data, same_address]
CHANGES += [other_stride, counted, loaded]


@pytest.mark.parametrize("change", CHANGES)
def test_changes_that_are_seen(change, conversions):
    w = prepack(nn.Parameter(torch.randn(8, 4)))
    kept = w.data  # so that no memory is given back and taken again
    assert [conversions(w) for _ in "ab"] == [1, 1]
    with torch.no_grad():
        change(w)
    assert [conversions(w) for _ in "ab"] == [2, 2]
    del kept


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_step_makes_planes_stale(kind, options, conversions):
    """Fused optimizers leave the version counter alone."""
    model = prepack(nn.Linear(4, 8))
    optimizer = kind(model.parameters(), lr=0.1, **options)
    model(torch.randn(3, 4)).sum().backward()
    assert [conversions(model.weight) for _ in "ab"] == [1, 1]
    optimizer.step()
    assert conversions(model.weight) == 2


def test_weights_of_inference_mode_are_left_alone_with_a_reason():
    with torch.inference_mode():
        model = nn.Linear(4, 8)
    with pytest.warns(UserWarning, match="version counter"):
        prepack(model)
    assert marked[id(model.weight)].converted(model.weight, Converter()) is None


@pytest.mark.parametrize(
    "model, reason",
    [
        (nn.Linear(4, 8), "Linear for now: .*NVIDIA GPUs only, but are on cpu"),
        (nn.Linear(4, 8, dtype=torch.bfloat16), "bfloat16 is multiplied as it is"),
        (nn.LayerNorm(4), "no matrix of weights"),
        (torch.randn(8, 4), "this weight for now: .*on cpu"),
    ],
)
def test_where_nothing_can_be_kept_it_says_why(model, reason):
    with pytest.warns(UserWarning, match=reason):
        prepack(model)
    unprepack(model)


def test_the_same_results_on_the_cpu():
    layer = epinorm.LinearNorm(16, 32, norm=epinorm.GroupNorm(4))
    x = torch.randn(5, 16)
    expected = layer(x)
    with warnings.catch_warnings(), prepacked(layer):
        warnings.simplefilter("error")
        assert torch.equal(layer(x), expected)


def test_what_is_no_model():
    for function in (prepack, unprepack):
        with pytest.raises(TypeError, match=r"nn\.Module or a Tensor, got list"):
            function([nn.Linear(4, 8)])
