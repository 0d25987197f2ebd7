"""Where a sum lies in memory as its transposed operand does, and who sees it."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import epinorm

B, T, C = 2, 5, 16


class Stream(nn.Module):
    """Two branches of a residual stream that is sequence first within, as CLIP's."""

    def __init__(
        self,
        behind: Callable[[Tensor], Tensor],
        join: Callable[[Tensor, Tensor], Tensor] = operator.add,
    ) -> None:
        super().__init__()
        self.norm, self.norm2, self.last = (nn.LayerNorm(C) for _ in range(3))
        self.fc, self.fc2 = nn.Linear(C, C), nn.Linear(C, C)
        self.behind, self.join = behind, join

    def forward(self, x: Tensor) -> Tensor:
        t = x.permute(1, 0, 2)
        t = self.join(t, self.fc(self.norm(t)))
        t = self.join(t, self.fc2(self.norm2(t)))
        return self.behind(t) if self.behind is not normed else self.last(t)


def normed(t: Tensor) -> Tensor:
    """What does not show how its operand lies."""
    raise NotImplementedError


def viewed(t: Tensor) -> Tensor:
    return t.permute(1, 0, 2).view(t.shape[1], -1)


def returned(t: Tensor) -> Tensor:
    return t


def changed(t: Tensor) -> Tensor:
    """A view in eager, which would be a copy of rows."""
    t.permute(1, 0, 2).reshape(t.shape[1], -1).mul_(2)
    return t


def flattened(t: Tensor) -> Tensor:
    """The numbers as they lie, which has the same strides of either layout."""
    return torch.as_strided(t, (t.numel(),), (1,))


def halved(t: Tensor, h: Tensor) -> Tensor:
    return torch.mul(t, h)


SEEN = [viewed, returned, changed, flattened]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("join", [operator.add, halved])
@pytest.mark.parametrize("behind", [*SEEN, normed])
def test_what_shows_a_transposed_sum_finds_it(
    behind: Callable[[Tensor], Tensor],
    join: Callable[[Tensor, Tensor], Tensor],
    training: bool,
) -> None:
    model = Stream(behind, join).double().train(training)
    fused = epinorm.fuse(copy.deepcopy(model), strategy="reference")
    for count in (B, B + 1):
        x = torch.randn(count, T, C).double()
        ours, theirs = fused(x), model(x)
        assert ours.stride() == theirs.stride()
        torch.testing.assert_close(ours, theirs)
        grads = [
            torch.autograd.grad(y.square().sum(), [*m.parameters()], allow_unused=True)
            for y, m in ((ours, fused), (theirs, model))
        ]
        for a, b in zip(*grads, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b)
    rows = epinorm.explain(fused).rows
    assert all(row.fused for row in rows) == (behind is normed)
    told = [row.reason for row in rows if not row.fused]
    assert all("lies in memory as what it is added to" in reason for reason in told)


def test_a_sum_that_begins_with_the_linear_lies_as_rows() -> None:
    model, x = Stream(returned, lambda t, h: h + t).double(), torch.randn(B, T, C).double()
    fused = epinorm.fuse(copy.deepcopy(model), strategy="reference")
    with torch.no_grad():
        assert fused(x).stride() == model(x).stride() == (B * C, C, 1)
        torch.testing.assert_close(fused(x), model(x))
    assert epinorm.explain(fused).rows[0].chain == "add_residual|layer_norm(1e-05)|returns(sum)"


def test_behind_the_norm_the_chain_ends_before_such_a_sum() -> None:
    class Post(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm = nn.Linear(C, C), nn.LayerNorm(C)

        def forward(self, x: Tensor) -> Tensor:
            t = x.transpose(0, 1)
            return t + self.norm(self.fc(t))

    model, x = Post().double(), torch.randn(B, T, C).double()
    fused = epinorm.fuse(copy.deepcopy(model), strategy="reference")
    assert fused(x).stride() == model(x).stride()
    (row,) = epinorm.explain(fused).rows
    assert row.chain == "layer_norm(1e-05)"
    assert "it ends early: its result lies in memory as what it is added to" in row.reason


def summed(self: Within, row: Tensor) -> Tensor:
    return row + self.fc(row)


def summed_across(self: Within, row: Tensor) -> Tensor:
    t = row.t()
    return t + self.fc(t)


def turned(self: Within, row: Tensor) -> Tensor:
    return self.heads(self.fc(row).unflatten(-1, (4, -1)).transpose(0, 1))


class Within(nn.Module):
    def __init__(self, body: Callable[[Within, Tensor], Tensor], dim: int) -> None:
        super().__init__()
        self.fc, self.heads, self.norm = nn.Linear(C, C), nn.LayerNorm(C // 4), nn.LayerNorm(C)
        self.body, self.dim = body, dim

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.vmap(lambda row: self.body(self, row), self.dim)(x), self.norm(self.fc(x))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("body", [summed, summed_across, turned])
def test_within_vmap_what_may_lie_otherwise_is_left_and_the_rest_is_captured(
    body: Callable[[Within, Tensor], Tensor], dim: int
) -> None:
    model = Within(body, dim).double()
    x = torch.randn(C, C, C).double()
    fused = epinorm.fuse(copy.deepcopy(model), strategy="reference")
    for ours, theirs in zip(fused(x), model(x), strict=True):
        torch.testing.assert_close(ours, theirs)
        assert ours.stride() == theirs.stride()
    assert "layer_norm(1e-05)" in [row.chain for row in epinorm.explain(fused).rows]
