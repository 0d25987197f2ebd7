"""What a plan leaves to PyTorch is PyTorch's own: the same bits, the same backward pass."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import epinorm
from epinorm.backends.cuda.runtime.native import native
from epinorm.backends.prepack import prepacked
from epinorm.operator.dispatch import Caller

M, K, N = 6, 16, 24


def tensors() -> list[torch.Tensor]:
    shapes = ((M, K), (N, K), (N,), (N,), (N,), (M, N))
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def eager(x, weight, bias, gamma, beta, residual, factor):
    z = F.linear(x, weight, bias) + residual
    return F.gelu(F.layer_norm(z, (N,), gamma, beta)) * factor


@pytest.mark.parametrize("factor", [3.0, 0.7])
def test_outputs_and_gradients_have_pytorchs_bits(factor):
    text = f"add_residual|layer_norm|gelu|scale({factor})"
    caller = Caller(text, "reference")
    for _ in range(3):  # the first call goes another way than the others
        given = tensors()
        y = caller(*given[:5], tuple(given[5:]))
        truth = eager(*given, factor)
        assert torch.equal(y, truth)
        dy = torch.randn_like(y)
        ours = torch.autograd.grad(y, given, dy)
        for a, b in zip(ours, torch.autograd.grad(truth, given, dy), strict=True):
            assert torch.equal(a, b)


def test_one_caller_serves_other_constants():
    """Chains of one structure share what was found; each keeps its own numbers."""
    x, weight = torch.randn(M, K, requires_grad=True), torch.randn(N, K)
    for factor in (2.0, 5.0, 2.0):
        y = epinorm.linear(x, weight, post=f"scale({factor})", strategy="reference")
        assert torch.equal(y, F.linear(x, weight) * factor)


def test_no_node_of_ours_stands_in_the_graph():
    given = tensors()
    caller = Caller("add_residual|layer_norm|gelu", "reference")
    for _ in range(2):
        y = caller(*given[:5], tuple(given[5:]))
        assert type(y.grad_fn).__name__ == "GeluBackward0"


def test_leading_dimensions_and_no_gradient():
    x, weight = torch.randn(2, 3, K), torch.randn(N, K)
    with torch.no_grad():
        for _ in range(2):
            y = epinorm.linear(x, weight, post="relu", strategy="reference")
            assert torch.equal(y, F.relu(F.linear(x, weight)))


@pytest.fixture
def natively(monkeypatch):
    """Calls that native code has seen go to PyTorch's layers at once, on the CPU too."""
    monkeypatch.setattr("epinorm.operator.native_calls.WORTH", ("cpu",))
    assert native(wait=True) is not None


def test_a_call_like_an_earlier_one_is_not_looked_at_in_python(natively, monkeypatch):
    caller = Caller("add_residual|layer_norm|gelu|scale(3)", "reference")
    for _ in range(2):
        caller(*(given := tensors())[:5], tuple(given[5:]))
    monkeypatch.delattr(Caller, "again")  # Python's look at a call
    for _ in range(2):
        y = caller(*(given := tensors())[:5], tuple(given[5:]))
        truth = eager(*given, 3.0)
        assert torch.equal(y, truth)
        assert type(y.grad_fn) is type(truth.grad_fn)
        dy = torch.randn_like(y)
        ours = torch.autograd.grad(y, given, dy)
        for a, b in zip(ours, torch.autograd.grad(truth, given, dy), strict=True):
            assert torch.equal(a, b)
    assert caller._uses.count == 1  # the first, of which nothing was known


@pytest.mark.filterwarnings("ignore:prepack keeps nothing")
def test_nor_is_a_call_of_a_prepacked_weight(natively, monkeypatch):
    caller = Caller("add_residual|layer_norm|gelu|scale(3)", "reference")
    given, again, looks = tensors(), Caller.again, []
    monkeypatch.setattr(Caller, "again", lambda *asked: looks.append(1) or again(*asked))
    for is_marked in (False, True, False, True):
        with prepacked(given[1]) if is_marked else contextlib.nullcontext():
            for _ in range(2):
                caller(*given[:5], tuple(given[5:]))
            looks.clear()
            assert torch.equal(caller(*given[:5], tuple(given[5:])), eager(*given, 3.0))
            assert not looks


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("other", ["rows", "mode", "no_grad", "setting", "strides", "autocast"])
def test_a_call_unlike_it_is(other, natively):
    caller = Caller("layer_norm|gelu", "reference")
    given = tensors()[:5]
    for _ in range(3):
        caller(*given, ())
    with contextlib.ExitStack() as entered:
        if other == "rows":
            given[0] = torch.randn(M + 1, K)
        elif other == "strides":
            given[0] = torch.randn(K, M).t()
        elif other == "setting":
            entered.callback(torch.set_float32_matmul_precision, "highest")
            torch.set_float32_matmul_precision("high")
        else:
            modes = {"mode": Watching, "no_grad": torch.no_grad}
            modes["autocast"] = lambda: torch.autocast("cpu", torch.bfloat16)
            entered.enter_context(modes[other]())
        assert caller._left.find((*given,)) is None
        found = caller(*given, ())
        truth = F.gelu(F.layer_norm(F.linear(*given[:3]), (N,), *given[3:]))
        assert torch.equal(found, truth)
