"""InstanceNorm of a Linear's rows, which is a LayerNorm without weights; and where it is none."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epinorm

sys.path.insert(0, str(Path(__file__).parent))

from test_rows import check

K, N, ROWS = 24, 32, 6
NORM = "layer_norm(0.001)"


class Normed(nn.Module):
    """A Linear, and what a test makes of its result."""

    def __init__(self, after: Callable[[Tensor], Tensor], **kwargs: Any) -> None:
        super().__init__()
        self.fc, self.after = nn.Linear(K, N), after
        self.norm = nn.InstanceNorm1d(kwargs.pop("channels", 1), eps=1e-3, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self, self.fc(x))  # type: ignore[call-arg]


class Benchmark(nn.Module):
    """Problem 28 of level 2 of KernelBench, at a small size; it is told another channel count."""

    def __init__(self) -> None:
        super().__init__()
        self.bmm, self.instance_norm = nn.Linear(K, N), nn.InstanceNorm2d(N, eps=1e-5, momentum=0.1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.bmm(x)
        x = self.instance_norm(x.unsqueeze(1).unsqueeze(1)).squeeze(1).squeeze(1)
        x = x + y
        return x * y


def of_function(h: Tensor, *shape: int) -> Tensor:
    return F.instance_norm(h.view(*shape), eps=1e-3).reshape(h.shape) * 0.5


# What is made of the Linear's result, x's shape, the channels of the module, the chain.
SPELLINGS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], int, str]] = {
    "M 1 N": (lambda s, h: s.norm(h.unsqueeze(1)).squeeze(1).relu(), (ROWS, K), 1, NORM + "|relu"),
    "1 M N": (lambda s, h: s.norm(h.view(1, ROWS, N)).view(ROWS, N), (ROWS, K), ROWS, NORM),
    "1 M 1 N": (lambda s, h: of_function(h, 1, ROWS, 1, N), (ROWS, K), 1, NORM + "|scale(0.5)"),
    "M 1 1 N": (lambda s, h: of_function(h, -1, 1, 1, N), (ROWS, K), 1, NORM + "|scale(0.5)"),
    "behind GELU": (lambda s, h: s.norm(F.gelu(h)), (3, ROWS, K), ROWS, "gelu|" + NORM),
    "a row each": (lambda s, h: s.norm(h), (3, ROWS, K), ROWS, NORM),
    "no batch": (lambda s, h: s.norm(h) + 1, (5, K), 5, NORM + "|add(1)"),
    "groups": (lambda s, h: s.norm(h.view(-1, 4, N // 4)), (ROWS, K), 4, "layer_norm(4,0.001)"),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_row_is_normalised_in_the_chain(name: str) -> None:
    torch.manual_seed(0)
    after, shape, channels, chain = SPELLINGS[name]
    check(Normed(after, channels=channels), torch.rand(shape), [chain])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_kernelbenchs_problem_is_one_chain(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, results = Benchmark().to(dtype), []
    fused = epinorm.fuse(copy.deepcopy(model), strategy="reference")
    for rows in (ROWS, 9, 1, 11):
        given = [torch.rand(rows, size, dtype=dtype) for size in (K, N)]
        for m in (fused, model):
            x, y = (t.clone().requires_grad_() for t in given)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                out = m(x, y)
            assert m is fused or "does not match num_features" in str(said[0].message)
            out.square().sum().backward()
            results.append([out.detach(), x.grad, y.grad, *(p.grad for p in m.parameters())])
            m.zero_grad()
        for ours, eagers in zip(*results[-2:], strict=True):
            scale = eagers.abs().max()
            error = 4e-2 if dtype == torch.bfloat16 else 1e-5 if dtype == torch.float32 else 1e-12
            torch.testing.assert_close(ours / scale, eagers / scale, rtol=0, atol=error)
    rows = epinorm.explain(fused).rows
    assert {row.chain for row in rows} == {"layer_norm(1e-05)|add_residual|mul_element"}
    assert {row.where for row in rows} == {"bmm → instance_norm"}
    assert all(row.fused for row in rows)
    assert not epinorm.explain(fused).notes


def test_what_it_warns_of_is_said_when_it_is_captured() -> None:
    x, y = torch.rand(ROWS, K), torch.rand(ROWS, N)
    fused = epinorm.fuse(Benchmark(), strategy="reference")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fused(x, y)
    assert ["does not match num_features" in str(warning.message) for warning in said] == [True]
    assert said[0].filename == nn.modules.module.__file__  # where eager says it: filters go by it
    fused = epinorm.fuse(Benchmark(), strategy="reference")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="does not match"):
            fused(x, y)


REFUSED: dict[str, tuple[Callable[..., Tensor], dict[str, Any], str]] = {
    "weights": (lambda s, h: s.norm(h.unsqueeze(1)), {"affine": True}, "weights of channels"),
    "statistics": (
        lambda s, h: s.norm(h.unsqueeze(1)),
        {"track_running_stats": True},
        "running statistics",
    ),
    "eps": (lambda s, h: F.instance_norm(h.unsqueeze(1), eps=0.0), {}, "eps is not above 0"),
    "images": (
        lambda s, h: F.instance_norm(h.view(-1, 1, 4, N // 4)),
        {},
        "more than the last dimension",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("training", [True, False])
def test_what_is_no_layer_norm_stays(name: str, training: bool) -> None:
    torch.manual_seed(0)
    after, kwargs, why = REFUSED[name]
    model = Normed(after, **kwargs).train(training)
    fused = epinorm.fuse(copy.deepcopy(model))
    for _ in range(2):
        x = torch.rand(ROWS, K)
        torch.testing.assert_close(fused(x), model(x), rtol=0, atol=0)
    torch.testing.assert_close(dict(fused.state_dict()), dict(model.state_dict()))
    (row,) = epinorm.explain(fused).rows
    assert not row.fused
    assert why in row.reason


def test_one_value_a_row_raises_as_eager_does() -> None:
    model = epinorm.fuse(
        nn.Sequential(nn.Linear(K, 1), nn.Unflatten(1, (1, 1)), nn.InstanceNorm1d(1))
    )
    for _ in range(2):
        with pytest.raises(ValueError, match="Expected more than 1 spatial element"):
            model(torch.rand(ROWS, K))


@pytest.mark.parametrize("within", [True, False])
def test_under_autocast_it_stays_in_16_bit(within: bool) -> None:
    """Of a LayerNorm autocast makes fp32: as 16 bit throughout it would be told by nothing else."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(K, N).bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=within):
                return F.instance_norm(self.fc(x).unsqueeze(1)).squeeze(1)

    model = Inner()
    fused = epinorm.fuse(copy.deepcopy(model), strategy="reference")
    x = torch.rand(ROWS, K).bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=not within):
        torch.testing.assert_close(fused(x), model(x), rtol=0, atol=0)
    (row,) = epinorm.explain(fused).rows
    assert "autocast leaves InstanceNorm in 16 bit" in row.reason
