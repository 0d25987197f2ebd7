"""Tensors that a call makes: the short way, and only on the device that it knows."""

from __future__ import annotations

import pytest
import torch

from epinorm.backends import unpromised
from epinorm.backends.cuda.runtime import prepared

SIZES = [(), (3,), (0,), (2, 3), (0, 3), (3, 0), (2, 3, 4), (5, 1, 2)]


@pytest.mark.parametrize("size", SIZES)
def test_it_is_as_torch_empty_makes_it(size, monkeypatch):
    """The same function for the CPU stands in for the GPU's."""
    short = torch._C._dynamo.guards._empty_strided_cpu
    monkeypatch.setattr(unpromised, "empty_strided", short)
    monkeypatch.setattr(unpromised, "current_device", lambda: 1)
    new = prepared.new_tensor(size, torch.bfloat16, torch.device("cuda", 1))
    like = torch.empty(size, dtype=torch.bfloat16)
    made, again = new(), new()
    assert (made.dtype, made.shape, made.stride()) == (like.dtype, like.shape, like.stride())
    assert made is not again
    with torch.inference_mode():
        assert new().is_inference()


def test_another_current_device_is_noticed_at_each_call(monkeypatch):
    made, current = [], [1]
    monkeypatch.setattr(unpromised, "empty_strided", lambda *_: made.append("short"))
    monkeypatch.setattr(unpromised, "current_device", lambda: current[0])
    monkeypatch.setattr(torch, "empty", lambda *_, device, **__: made.append(device.index))
    new = prepared.new_tensor((2, 3), torch.float32, torch.device("cuda", 1))
    for current[0] in (1, 0, 1):
        new()
    assert made == ["short", 1, "short"]


@pytest.mark.parametrize("name", ["empty_strided", "current_device"])
def test_a_pytorch_without_it_goes_the_long_way(name, monkeypatch):
    monkeypatch.setattr(unpromised, name, None)
    monkeypatch.setattr(torch, "empty", lambda *_, device, **__: device)
    device = torch.device("cuda", 1)
    assert prepared.new_tensor((2,), torch.float32, device)() == device
