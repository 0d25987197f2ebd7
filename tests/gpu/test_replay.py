"""Passes that are repeated by one native call give the bits of those that Python launches."""

import pytest
import torch

from epinorm.backends import memo
from epinorm.backends.cuda.runtime.native import native
from epinorm.operator.dispatch import Caller

pytestmark = pytest.mark.gpu

CASES = [
    ("layer_norm(1e-05)|mish", "planes", torch.float32, 300, 512, 512),
    ("rms_norm|silu", "planes", torch.float32, 128, 1024, 1024),
    ("group_norm(16)|leaky_relu(0.1)", "single", torch.float32, 256, 512, 256),
    ("add_residual|layer_norm(1e-12)", "single", torch.bfloat16, 512, 768, 768),
    ("add_residual|layer_norm(1e-12)", "epilogue", torch.bfloat16, 512, 768, 768),
    ("group_norm(8)|silu|dropout(0.5)", "single", torch.bfloat16, 256, 512, 256),
]


@pytest.fixture(autouse=True, scope="module")
def compiled():
    native(wait=True)


def step(caller, given, dy):
    """y and all gradients."""
    leaves = [None if t is None else t.clone().requires_grad_() for t in given]
    x, weight, bias, gamma, beta, *operands = leaves
    torch.manual_seed(3)
    y = caller(x, weight, bias, gamma, beta, tuple(operands))
    y.backward(dy.clone())
    return [y.detach(), *[t.grad for t in leaves if t is not None]]


def draw(chain, dtype, m, k, n, seed):
    torch.manual_seed(seed)

    def new(*size):
        return torch.randn(*size, device="cuda", dtype=dtype)

    operands = [new(m, n)] if "residual" in chain else []
    beta = None if "rms" in chain else new(n)
    return [new(m, k), new(n, k) / k**0.5, new(n), new(n), beta, *operands], new(m, n)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0].split('(')[0]}-{c[1]}-{c[3]}")
def test_the_bits_are_those_of_the_first_call(case):
    chain, strategy, dtype, m, k, n = case
    inputs = [draw(chain, dtype, m, k, n, seed) for seed in range(3)]
    first = []
    for given, dy in inputs:
        memo.clear()
        first.append(step(Caller(chain, strategy), given, dy))
    memo.clear()
    caller, keep = Caller(chain, strategy), []
    for round_ in range(5):
        for (given, dy), expected in zip(inputs, first, strict=True):
            found = step(caller, given, dy)
            keep.append(found if round_ % 2 else found[0])  # addresses change
            for ours, theirs in zip(found, expected, strict=True):
                assert torch.equal(ours, theirs)
    leaves = [None if t is None else t.clone().requires_grad_() for t in inputs[0][0]]
    y = caller(*leaves[:5], tuple(leaves[5:]))
    assert y.grad_fn.name() == "LinearNormBackward"  # native code's, not Python's


def test_a_step_is_captured_in_a_graph():
    chain, strategy, dtype, m, k, n = CASES[0]
    caller = Caller(chain, strategy)
    given, dy = draw(chain, dtype, m, k, n, 0)
    expected = step(caller, given, dy)
    leaves = [None if t is None else t.clone().requires_grad_() for t in given]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            for leaf in leaves:
                leaf.grad = None
            caller(*leaves[:5], ()).backward(dy)
        for leaf in leaves:
            leaf.grad = None
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = caller(*leaves[:5], ())
        y.backward(dy)
    for leaf in leaves:
        leaf.grad.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    found = [y.detach(), *[t.grad for t in leaves if t is not None]]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_a_second_backward_through_a_retained_graph():
    chain, strategy, dtype, m, k, n = CASES[0]
    caller = Caller(chain, strategy)
    given, dy = draw(chain, dtype, m, k, n, 0)
    expected = step(caller, given, dy)
    for _ in range(4):
        leaves = [None if t is None else t.clone().requires_grad_() for t in given]
        y = caller(*leaves[:5], ())
        wanted = [t for t in leaves if t is not None]
        for _ in range(3):
            found = torch.autograd.grad(y, wanted, dy, retain_graph=True)
            for ours, theirs in zip(found, expected[1:], strict=True):
                torch.testing.assert_close(ours, theirs)
