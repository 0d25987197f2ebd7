"""``accumulate_in_place`` without a GPU: it changes nothing, and leaves nothing behind."""

import copy

import pytest
import torch
from torch import nn

import epinorm
from epinorm import accumulation


def gradients_after_two_batches(inside):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.GroupNorm(6, 48), nn.SiLU())
    fused = epinorm.fuse(copy.deepcopy(model))
    for seed in (1, 2):
        torch.manual_seed(seed)
        x = torch.randn(16, 32)
        if inside:
            with epinorm.accumulate_in_place():
                fused(x).square().sum().backward()
        else:
            fused(x).square().sum().backward()
    return [p.grad for p in fused.parameters()]


def test_a_cpu_adds_as_usual():
    for a, b in zip(*map(gradients_after_two_batches, (False, True)), strict=True):
        assert torch.equal(a, b)


def test_it_ends_with_its_block():
    weight = torch.ones(2, 2, requires_grad=True)
    weight.grad = torch.ones(2, 2)
    seen = []

    def interrupted():
        with epinorm.accumulate_in_place(), epinorm.accumulate_in_place():
            seen.extend(accumulation._streams)
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert len(seen) == 2
    assert accumulation._streams == []
    assert accumulation.existing_gradient(weight) is None
