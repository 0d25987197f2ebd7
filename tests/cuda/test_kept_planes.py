"""Planes that wait for their backward pass are counted, and given back."""

import pytest
import torch

from epinorm.backends.cuda.fp32 import kept_planes
from epinorm.backends.cuda.fp32.kept_planes import VARIABLE, KeptPlanes, nbytes_kept, room_for
from epinorm.backends.cuda.runtime.device import Gpu
from epinorm.backends.cuda.runtime.recorder import recording

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def hundred_bytes(monkeypatch):
    monkeypatch.setattr(kept_planes, "_limit", lambda device: 100)
    assert nbytes_kept(CPU) == 0
    yield
    assert nbytes_kept(CPU) == 0


def buffer(nbytes):
    return torch.empty(nbytes, dtype=torch.uint8)


def test_what_is_taken_is_no_longer_counted():
    kept = KeptPlanes(buffer(30), buffer(50))
    assert nbytes_kept(CPU) == 80
    assert room_for(20, CPU)
    assert not room_for(21, CPU)
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


def test_the_limit_is_a_share_of_the_gpu_or_what_the_variable_says(monkeypatch):
    monkeypatch.undo()
    limit = kept_planes._limit.__wrapped__
    with recording(Gpu((9, 0), 132, 232448, 233472, memory=1600)):
        assert limit(CPU) == 100
    monkeypatch.setenv(VARIABLE, "2.5")
    assert limit(CPU) == 2_500_000
    monkeypatch.setenv(VARIABLE, "0")
    assert limit(CPU) == 0
    for wrong in ("-1", "inf", "nan", "much"):
        monkeypatch.setenv(VARIABLE, wrong)
        with pytest.raises(ValueError, match=f"{VARIABLE} is a number of megabytes"):
            limit(CPU)
