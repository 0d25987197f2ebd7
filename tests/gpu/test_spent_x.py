"""Layers whose x nobody else reads, and may be written over: values, hard inputs and memory.

tests/cuda/test_spent_x.py says which they are.
"""

from __future__ import annotations

import copy
import gc
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from product_case import forced_core

import epinorm
from epinorm.backends.cuda.runtime.native import settle
from epinorm.capture.backend import compile_graph
from epinorm.operator import calls, dispatch
from epinorm.tools.accuracy import allowed_error, relative_error

FLOOR = {"high": 1e-3, "highest": 1e-6}
"""The promise of internals/precision.md, of the terms' magnitude."""
NAN, INF = float("nan"), float("inf")


def norm_block(n: int) -> list[nn.Module]:
    norm = nn.LayerNorm(n)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return [nn.Linear(n, n), norm, nn.SiLU()]


def relu_block(n: int) -> list[nn.Module]:
    return [nn.Linear(n, n), nn.ReLU()]


BLOCKS = {"norm": norm_block, "relu": relu_block}


def net(kind: str, n: int, layers: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(layers) for m in BLOCKS[kind](n))).cuda()


def spared(model: nn.Module, x: Tensor) -> Tensor:
    """By the same kernels, but nothing is written over."""
    with mock.patch.object(dispatch, "SPENDING", ()), torch.no_grad():
        return epinorm.fuse(copy.deepcopy(model))(x)


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.int32)


@pytest.fixture
def problems(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether x is spent, of each problem that is planned."""
    told = list[bool]()
    monkeypatch.setattr(calls, "planned", [lambda problem, _: told.append(problem.spends_x)])
    calls.forget_plans()
    return told


@pytest.mark.parametrize(
    "kind, m, n", [("norm", 1280, 512), ("norm", 1001, 1024), ("relu", 4096, 2048)]
)
def test_values(kind: str, m: int, n: int, precision: str, problems: list[bool]) -> None:
    """In Python's launches, native ones and graphs, with rows of other numbers in between; all that
    the caller has stays as it was, and a second run has the same bits."""
    model = net(kind, n)
    fused = epinorm.fuse(copy.deepcopy(model))
    inputs = [torch.randn(rows, n, device="cuda") for rows in (m, m // 2, m)]
    settle()
    first: dict[int, Tensor] = {}
    with torch.no_grad():
        for _ in range(6):
            for i, x in enumerate(inputs):
                held = [x, *fused.parameters()]
                before = [t.clone() for t in held]
                y = fused(x)
                assert all(torch.equal(bits(a), bits(b)) for a, b in zip(held, before, strict=True))
                assert torch.equal(y, first.setdefault(i, y.clone()))
    assert any(problems)
    for i, x in enumerate(inputs):
        with torch.no_grad():
            truth, eager = copy.deepcopy(model).double()(x.double()), model(x)
        allowed = 1.1 * relative_error(eager, truth) + 4 * torch.finfo(x.dtype).eps
        assert relative_error(first[i], truth) <= allowed
        assert relative_error(first[i], spared(model, x)) <= 4 * FLOOR[precision]


def hard_rows(x: Tensor) -> None:
    """Each of another kind; but for the one of Inf, none overflows behind ``hard_weight``."""
    x[3, 7], x[5, 8] = NAN, 3e38
    x[7] *= 1e-40
    x[11, 4], x[13, 5], x[14, 3:9] = 1e25, 1e-30, 1e-25
    x[17] = 0
    x[19] *= 1e20
    x[23] *= 1e-25
    x[-1, -1], x[-2] = 1e-30, 0.0


def hard_weight(weight: Tensor) -> None:
    """An element that its row's planes hold no other beside, and rows that are flagged whole."""
    weight[5, 9] = 1e10
    weight[17] *= 1e-25
    weight[31] *= 1e-36
    weight[40, 2] = 1e-30


@pytest.mark.parametrize("m, n", [(1280, 2048), (4096, 2048)])
@pytest.mark.parametrize("hard", ["x", "weight", "both"])
def test_hard_values_without_a_norm(
    m: int, n: int, hard: str, precision: str, problems: list[bool]
) -> None:
    """The second layer's x is what the first one makes, nearly the identity; each row and
    each column of its result is as accurate as is promised."""
    model = net("relu", n, 2)
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(n))
        model[0].weight[8, 8] = 2  # which makes an Inf
        model[0].bias.zero_()
        if hard != "x":
            hard_weight(model[2].weight)
    given = torch.rand(m, n, device="cuda")
    if hard != "weight":
        hard_rows(given)
    fused, first = epinorm.fuse(copy.deepcopy(model)), epinorm.fuse(copy.deepcopy(model[:2]))
    settle()
    with torch.no_grad():
        found = [fused(given) for _ in range(5)]
        assert any(problems)
        x, weight, bias = first(given), model[2].weight, model[2].bias
        assert x.isinf().any() == (hard != "weight")
        eager = F.relu(F.linear(x, weight, bias))
        wide = [t.double() for t in (x, weight, bias)]
        truth, terms = F.relu(F.linear(*wide)), F.linear(*(t.abs() for t in wide))
    for y in found:
        assert torch.equal(bits(y), bits(found[0]))
        assert torch.equal(y.isnan(), eager.isnan())
        assert torch.equal(y.isinf(), eager.isinf())
    finite = truth.isfinite().all(1)
    for dim in (1, 0):
        of_eager, ours = (
            (t[finite].double() - truth[finite]).norm(dim=dim) for t in (eager, found[0])
        )
        promised = FLOOR[precision] * terms[finite].norm(dim=dim)
        assert (ours <= torch.maximum(1.1 * of_eager, promised)).all(), dim
    unspent = spared(model, given)
    difference = (found[0][finite].double() - unspent[finite].double()).abs()
    assert (difference <= FLOOR[precision] * terms[finite]).all()


def test_hard_values_before_a_norm(precision: str, problems: list[bool]) -> None:
    """Columns of x that no plane holds beside the others, rows of NaN, and a hard weight."""
    m, n = 1280, 512
    model = net("norm", n, 2)
    with torch.no_grad():
        model[1].weight[5], model[1].weight[9], model[1].bias[9] = 1e12, 1e-30, 0.0
        model[3].weight[:, 5] *= 1e-12
        model[3].weight[6, 11] = 1e4
        model[3].weight[17] *= 1e-25
    given = torch.randn(m, n, device="cuda")
    given[3, 7], given[5] = NAN, INF
    fused, first = epinorm.fuse(copy.deepcopy(model)), epinorm.fuse(copy.deepcopy(model[:3]))
    settle()
    with torch.no_grad():
        found = [fused(given) for _ in range(5)]
        assert any(problems)
        x = first(given)
        eager, truth = model[3:](x), copy.deepcopy(model[3:]).double()(x.double())
    finite = truth.isfinite().all(1)
    assert 0 < (~finite).sum() < m
    for y in found:
        assert torch.equal(bits(y), bits(found[0]))
        assert torch.equal(y.isnan(), eager.isnan())
    allowed = allowed_error(relative_error(eager[finite], truth[finite]), torch.float32)
    assert relative_error(found[0][finite], truth[finite]) <= 1.1 * allowed
    assert relative_error(found[0][finite], spared(model, given)[finite]) <= 4 * FLOOR[precision]


@pytest.mark.parametrize("warm", [1, 5])
@pytest.mark.parametrize("kind", BLOCKS)
def test_a_cuda_graph_replays_it(kind: str, warm: int, precision: str) -> None:
    """Captured by the user behind one call, or behind native ones."""
    m, n = (1024, 1024) if kind == "norm" else (4096, 2048)
    fused, x = epinorm.fuse(net(kind, n)), torch.randn(m, n, device="cuda")
    settle()
    with torch.no_grad():
        for _ in range(warm):
            fused(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = fused(x)
        for _ in range(3):
            x.copy_(torch.randn_like(x))
            graph.replay()
            replayed = y.clone()
            assert torch.equal(replayed, fused(x))


def compiled(model: nn.Module, **settings: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(copy.deepcopy(model), backend=compile_graph, **settings)


SETTINGS = [
    {},
    {"dynamic": True},
    {"mode": "reduce-overhead"},
    {"mode": "max-autotune"},
    {"options": {"graph_partition": True, "triton.cudagraphs": True}},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("kind, shape", [("norm", (1280, 512)), ("relu", (4, 1024, 2048))])
def test_compiled_values(
    kind: str, shape: Any, settings: Any, precision: str, problems: list[bool]
) -> None:
    """What the caller has stays as it was, and a second run has the same bits."""
    model = net(kind, shape[-1])
    made, inputs = compiled(model, **settings), [torch.randn(shape, device="cuda") for _ in "ab"]
    first: dict[int, Tensor] = {}
    with torch.no_grad():
        for _ in range(5):
            for i, x in enumerate(inputs):
                held = [x, *made.parameters()]
                before = [t.clone() for t in held]
                y = made(x).clone()
                assert all(torch.equal(bits(a), bits(b)) for a, b in zip(held, before, strict=True))
                assert torch.equal(y, first.setdefault(i, y))
        assert any(problems)
        for i, x in enumerate(inputs):
            assert relative_error(first[i], spared(model, x)) <= 4 * FLOOR[precision]


def peak_of(model: nn.Module, x: Tensor) -> int:
    """Bytes at most beyond what was there before; as they were asked for, not rounded to blocks."""
    for _ in range(8):
        model(x)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    model(x)
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


@pytest.mark.parametrize("how", [lambda m: epinorm.fuse(copy.deepcopy(m)), compiled])
@pytest.mark.parametrize(
    "kind, m, n, layers", [("norm", 1280, 512, 4), ("norm", 1024, 1024, 5), ("relu", 4096, 2048, 4)]
)
def test_inference_holds_one_copy_of_w_more_than_eager(
    kind: str, m: int, n: int, layers: int, how: Any, precision: str
) -> None:
    """With its scales and flags, 5 bytes a row, and those of the first layer's x, the user's."""
    if forced_core() != "hopper" or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the portable core's planes of x have memory of their own")
    model, x = net(kind, n, layers), torch.randn(m, n, device="cuda")
    settle()
    with torch.no_grad():
        eager, ours = (peak_of(each, x) for each in (model, how(model)))
    assert ours <= eager + 4 * n * n + 5 * (m + n), (eager, ours)
