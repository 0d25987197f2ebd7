"""BatchNorm in training next to 16 bits, as under autocast: which chains are found in a graph."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import epinorm
from epinorm.capture.chains import Search
from epinorm.capture.found import Place
from epinorm.capture.sites import problem_of

ROWS, K, N = 10, 12, 16
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


class Graph:
    """A graph with the tensors that Dynamo would have for its nodes."""

    def __init__(self, device: str = "cuda") -> None:
        self.graph, self.mode, self.device = fx.Graph(), FakeTensorMode(), device

    def given(self, dtype: torch.dtype, *shape: int) -> fx.Node:
        name = f"given{len(self.graph.nodes)}"
        return self._with(self.graph.placeholder(name), dtype, shape)

    def made(self, function: Any, args: Any, dtype: torch.dtype, **kwargs: Any) -> fx.Node:
        return self._with(self.graph.call_function(function, args, kwargs), dtype, (ROWS, N))

    def _with(self, node: fx.Node, dtype: torch.dtype, shape: Any) -> fx.Node:
        with self.mode:
            node.meta["example_value"] = torch.empty(shape, dtype=dtype, device=self.device)
        return node

    def linear(self, low: torch.dtype, high: torch.dtype = F32) -> fx.Node:
        given = (self.given(high, ROWS, K), self.given(high, N, K), self.given(high, N))
        return self.made(F.linear, given, low)

    def norm(self, x: fx.Node, dtype: torch.dtype, *parameters: torch.dtype | None) -> fx.Node:
        running = (self.given(F32, N), self.given(F32, N))
        vectors = [None if each is None else self.given(each, N) for each in parameters]
        return self.made(F.batch_norm, (x, *running, *vectors), dtype, training=True)

    def place(self, result: fx.Node) -> Place:
        self.graph.output(result)
        with torch.no_grad():
            (place,) = Search(self.graph).places()
        return place


@pytest.mark.parametrize("low", [BF16, F16])
@pytest.mark.parametrize("parameters", [(F32, F32), (F32, None), (None, F32), (None, None)])
@pytest.mark.parametrize("high", [F32, None])
def test_a_chain_stays_in_16_bits(low: Any, parameters: Any, high: Any) -> None:
    """Of a Linear with fp32 parameters, and of one that has 16 bits itself."""
    g = Graph()
    z = g.made(F.relu, (g.linear(low, high or low),), low)
    y = g.made(F.gelu, (g.norm(z, low, *parameters),), low)
    place = g.place(g.made(F.dropout, (y, 0.1, True), low))
    assert place.found is not None, place.obstacle
    assert str(place.found.chain) == "relu|batch_norm(1e-05)|gelu|dropout(0.1)"
    problem = problem_of(place.found)
    norm_dtype = F32 if F32 in parameters else low
    assert (problem.dtype, problem.norm_dtype, problem.out_dtype) == (low, norm_dtype, low)


def test_what_gives_another_dtype_is_no_part_of_the_chain() -> None:
    g = Graph()
    y = g.made(F.relu, (g.norm(g.linear(BF16), BF16, F32, F32),), BF16)
    place = g.place(g.made(F.softplus, (y,), F32))
    assert place.found is not None
    assert str(place.found.chain) == "batch_norm(1e-05)|relu"
    assert place.ends == "autocast gives it another dtype"


def test_a_residual_behind_it_is_pytorchs() -> None:
    """Operands have the dtype of the norm's parameters."""
    g = Graph()
    residual = g.given(BF16, ROWS, N)
    y = g.norm(g.linear(BF16), BF16, F32, F32)
    place = g.place(g.made(torch.add, (y, residual), BF16))
    assert place.found is not None
    assert str(place.found.chain) == "batch_norm(1e-05)"
    assert "a BatchNorm's chain has no operands" in place.ends


@pytest.mark.parametrize(
    ("parameters", "entering", "residual", "device", "why"),
    [
        ((F32, F32), BF16, True, "cuda", "a BatchNorm's chain has no operands"),
        ((F32, BF16), BF16, False, "cuda", "parameters are bfloat16, float32, and what it norm"),
        ((torch.float64, None), BF16, False, "cuda", "parameters are float64"),
        ((F32, F32), F32, False, "cuda", "autocast gives it another dtype"),
        ((F32, F32), BF16, False, "cpu", "autocast PyTorch's layers mix dtypes on cpu"),
    ],
)
def test_what_is_left_to_pytorch(
    parameters: Any, entering: Any, residual: bool, device: str, why: str
) -> None:
    g = Graph(device)
    z = g.linear(BF16)
    if residual:
        z = g.made(torch.add, (z, g.given(BF16, ROWS, N)), BF16)
    if entering != BF16:
        z = g.made(F.softplus, (z,), entering)
    place = g.place(g.norm(z, entering, *parameters))
    assert place.found is None
    assert why in place.obstacle


def test_fp32_parameters_behind_16_bits_without_autocast() -> None:
    model = nn.Sequential(nn.Linear(K, N), nn.BatchNorm1d(N), nn.ReLU()).bfloat16()
    model[1].float()
    fused = epinorm.fuse(copy.deepcopy(model), strategy="reference")
    for _ in range(2):
        x = torch.randn(64, K).bfloat16()
        y, expected = fused(x), model(x)
        assert y.dtype == BF16
        torch.testing.assert_close(y, expected)
        for each in (y, expected):
            each.float().sin().sum().backward()
        for ours, theirs in zip(fused.parameters(), model.parameters(), strict=True):
            assert isinstance(ours.grad, Tensor)
            assert ours.grad.dtype == ours.dtype
            torch.testing.assert_close(ours.grad, theirs.grad)
        torch.testing.assert_close(fused.state_dict(), model.state_dict(), rtol=1e-3, atol=1e-3)
    (row,) = epinorm.explain(fused).rows
    assert row.fused
    assert row.chain == "batch_norm(1e-05)|relu"
