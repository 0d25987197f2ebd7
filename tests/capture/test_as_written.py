"""Where nothing is gained, a fused model runs its own code."""

import sys

import pytest
import torch
from torch import nn

import epinorm
from epinorm.capture.fuse import fused_of

ROWS, WIDTH = 128, 128  # with a LayerNorm of so many, PyTorch's layers are as fast


def model(norm=None):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), norm or nn.LayerNorm(WIDTH), nn.ReLU())


def runs_own_code(fused, *inputs):
    """Whether a call calls the model's Linear."""
    seen = []

    def profile(frame, event, _):
        if event == "call" and frame.f_code is nn.Linear.forward.__code__:
            seen.append(frame)

    sys.setprofile(profile)
    try:
        fused(*inputs)
    finally:
        sys.setprofile(None)
    return bool(seen)


@pytest.mark.parametrize("grad", [False, True])
def test_nothing_gained(grad):
    fused, x = epinorm.fuse(model()), torch.randn(ROWS, WIDTH)
    with torch.set_grad_enabled(grad):
        eager = epinorm.unfuse(model())
        eager.load_state_dict(fused.state_dict())
        for _ in range(3):
            assert torch.equal(fused(x), eager(x))
        assert runs_own_code(fused, x)
    (row,) = epinorm.explain(fused).rows
    assert row.strategy == "reference"


def test_it_is_looked_at_less_and_less_often(monkeypatch):
    fused, x = epinorm.fuse(model()), torch.randn(ROWS, WIDTH)
    state, made, looked = fused_of(fused), [], []
    captured = state.captured

    def noted(*given):
        looked.append(len(made))
        return captured(*given)

    monkeypatch.setattr(state, "captured", noted)
    with torch.no_grad():
        for call in range(2000):
            made.append(call)
            fused(x)
    assert [b - a for a, b in zip(looked[-3:], looked[-2:], strict=False)] == [257, 1025]


@pytest.mark.slow
def test_what_gains_is_fused_at_its_sizes():
    fused = epinorm.fuse(model(nn.GroupNorm(8, WIDTH)))
    x = torch.randn(ROWS, WIDTH)
    for _ in range(3):
        fused(x)
    assert not runs_own_code(fused, x)


@pytest.mark.slow
def test_a_model_that_changes_is_looked_at_again():
    fused, x = epinorm.fuse(model()), torch.randn(ROWS, WIDTH)
    for _ in range(3):
        fused(x)
    fused[1] = nn.GroupNorm(8, WIDTH)
    for _ in range(300):
        fused(x)
    assert not runs_own_code(fused, x)
    torch.testing.assert_close(fused(x), epinorm.unfuse(fused)(x))


def test_other_arguments_settings_and_modes_are_other_calls():
    class Summed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))

        def forward(self, x, scale=1.0, *, extra=None):
            y = self.inner(x["x"] if isinstance(x, dict) else x) * scale
            return y if extra is None else torch.cat([y, extra])

    fused, x = epinorm.fuse(Summed()), torch.randn(ROWS, WIDTH)
    eager = epinorm.unfuse(Summed())
    eager.load_state_dict(fused.state_dict())
    for _ in range(3):
        for args, kwargs in (((x,), {}), ((x, 2.0), {}), (({"x": x},), {}), ((x,), {"extra": x})):
            assert torch.equal(fused(*args, **kwargs), eager(*args, **kwargs))
    assert runs_own_code(fused, x, 2.0)
    assert not runs_own_code(fused, {"x": x})  # it is not looked into
