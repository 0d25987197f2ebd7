"""Planes that wait for their backward pass: whose, how many, and that they are given back."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import epinorm
from epinorm.backends import memo
from epinorm.backends.cuda.fp32.kept_planes import VARIABLE, KeptPlanes, make_room, nbytes_kept
from epinorm.backends.cuda.runtime.native import settle
from imaginary import imaginary_h200

CPU = torch.device("cpu")


def let_wait(monkeypatch, megabytes):
    monkeypatch.setenv(VARIABLE, megabytes)
    memo.clear()


@pytest.fixture(autouse=True)
def hundred_bytes(monkeypatch):
    let_wait(monkeypatch, "0.0001")
    assert nbytes_kept(CPU) == 0
    yield
    assert nbytes_kept(CPU) == 0
    monkeypatch.undo()
    memo.clear()


def buffer(nbytes):
    return torch.empty(nbytes, dtype=torch.uint8)


def test_what_is_taken_is_no_longer_counted():
    kept = KeptPlanes(buffer(30), buffer(50))
    assert nbytes_kept(CPU) == 80
    assert kept.take_weight().numel() == 50
    assert nbytes_kept(CPU) == 30
    assert kept.take_weight() is None
    assert kept.take_x().numel() == 30
    assert nbytes_kept(CPU) == 0


def test_what_nobody_takes_goes_with_its_holder():
    kept = KeptPlanes(buffer(30), buffer(50))
    kept.take_x()
    del kept
    assert nbytes_kept(CPU) == 0


@pytest.mark.parametrize(
    ("x", "weight", "left"),
    [(True, True, 80), (True, False, 50), (False, True, 30), (False, False, 0)],
)
def test_only_what_the_wanted_gradients_read_is_kept(x, weight, left):
    """dX reads W's planes, dW reads x's."""
    kept = KeptPlanes(buffer(30), buffer(50))
    kept.restrict(x, weight)
    assert nbytes_kept(CPU) == left
    assert (kept.weight is not None, kept.x is not None) == (x, weight)


def test_the_oldest_make_room():
    first, second = KeptPlanes(buffer(30), buffer(20)), KeptPlanes(buffer(40), None)
    assert not make_room(101, CPU)
    assert make_room(10, CPU)
    assert (first.nbytes, second.nbytes) == (50, 40)
    assert make_room(30, CPU)
    assert (first.nbytes, second.nbytes) == (0, 40)
    assert first.take_x() is first.take_weight() is None


def test_those_of_one_layer_wait_unless_the_variable_says_more(monkeypatch):
    let_wait(monkeypatch, "")
    first = KeptPlanes(buffer(10), buffer(10))
    assert make_room(1000, CPU)
    assert first.nbytes == 0


def test_the_limit_is_what_the_variable_says(monkeypatch):
    let_wait(monkeypatch, "2.5")
    assert make_room(2_500_000, CPU)
    assert not make_room(2_500_001, CPU)
    let_wait(monkeypatch, "0")
    assert not make_room(1, CPU)
    for wrong in ("-1", "inf", "nan", "much"):
        let_wait(monkeypatch, wrong)
        with pytest.raises(ValueError, match=f"{VARIABLE} is a number of megabytes"):
            make_room(1, CPU)


def test_a_step_splits_again_what_waited_for_no_layer(monkeypatch):
    """Of three layers the last one's planes wait; under a profiler, which sends calls by way of
    the operators, nobody's."""
    let_wait(monkeypatch, "")
    settle()  # with native code there, a second run of a pass is recorded
    layers = [epinorm.LinearNorm(1024, 1024, norm=epinorm.GroupNorm(64)) for _ in range(3)]
    x = torch.empty(8192, 1024)

    def splits(api):
        y = torch.nn.Sequential(*layers)(x)
        api.launches.clear()
        y.backward(y.detach())
        return sum(launch["kernel"] == "split" for launch in api.launches)

    with imaginary_h200() as api:
        assert splits(api) == 3  # of the first layer x alone, as no gradient of x is wanted
        with torch.autograd.profiler.profile():
            assert splits(api) == 5


@pytest.mark.parametrize("pre", ["", "add_residual"])
def test_scales_of_a_weight_that_was_exchanged_are_not_read(pre, monkeypatch):
    """dz's planes take over W's scales: with those of the old W and planes of the new one, dX would
    be of neither. Where the old one's planes waited too, they are read, as eager reads it."""
    let_wait(monkeypatch, "")
    layer = epinorm.LinearNorm(3072, 768, norm=epinorm.LayerNorm(), pre=pre)
    x, operands = torch.empty(8192, 3072).requires_grad_(), [torch.empty(8192, 768)] * bool(pre)

    def kernels(api, exchanged):
        y = layer(x, *operands)
        if exchanged:
            layer.linear.weight.data = torch.empty(768, 3072)
        api.launches.clear()
        y.backward(y.detach())
        return [launch["kernel"] for launch in api.launches]

    with imaginary_h200() as api:
        for exchanged in (False, True, False):
            found = kernels(api, exchanged)
            assert found.count("split") == bool(pre)
            assert (found[0] == "split") == (exchanged and bool(pre))
