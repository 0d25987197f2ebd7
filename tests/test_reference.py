"""The definition of correct, against the same formulas written out in float64."""

import pytest
import torch
import torch.nn.functional as F

from epinorm.backends.reference import backward, forward
from epinorm.chain import Chain, GroupNorm, LayerNorm, RMSNorm, reference
from epinorm.precision import product_precision
from epinorm.problem import Forward, Inputs, Problem, Wanted

NORMS = [GroupNorm(4, eps=1e-3), LayerNorm(eps=1e-3), RMSNorm(eps=1e-3), RMSNorm()]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def written_out(z, norm, gamma, beta):
    """Mean, centred squares, scale: one (row, group) at a time."""
    m, n = z.shape
    groups = norm.num_groups if isinstance(norm, GroupNorm) else 1
    eps = norm.eps if norm.eps is not None else torch.finfo(z.dtype).eps
    v = z.reshape(m, groups, n // groups)
    if not isinstance(norm, RMSNorm):
        v = v - v.mean(2, keepdim=True)
    v = v / (v.square().mean(2, keepdim=True) + eps).sqrt()
    return v.reshape(m, n) * gamma + beta


@pytest.mark.parametrize("norm", NORMS, ids=str)
@pytest.mark.parametrize("draw", [torch.rand, torch.randn])
def test_norms_are_the_formulas(norm, draw):
    z, gamma, beta = (draw(s, dtype=torch.float64) for s in ((5, 12), 12, 12))
    ours = reference.normalize(z, norm, gamma, beta)
    torch.testing.assert_close(ours, written_out(z, norm, gamma, beta), rtol=1e-12, atol=1e-12)


def test_operands_are_drawn_in_order_pre_before_post():
    chain = Chain.build(LayerNorm(), "mul_channel|add_channel", "add_residual|scale(3)")
    x, w, a, b = torch.randn(4, 6), torch.randn(8, 6), torch.randn(8), torch.randn(8)
    r = torch.randn(4, 8)
    expected = (F.layer_norm(F.linear(x, w) * a + b, (8,)) + r) * 3
    assert torch.equal(reference.linear_norm(x, w, None, chain, operands=(a, b, r)), expected)


def make(norm, dtype, training=True, pre="", post="leaky_relu|scale(2)", m=7, out_dtype=None):
    """A problem, its inputs drawn anew, and the plan that the reference backend gets."""
    chain = Chain.build(norm, pre, post)
    out_dtype = out_dtype or dtype
    k, n = 10, 12
    shapes = {"channel": (n,), "element": (m, n)}
    inputs = Inputs(
        torch.randn(m, k).to(dtype),
        torch.randn(n, k).to(dtype),
        torch.randn(n).to(dtype),
        torch.randn(n).to(out_dtype),
        torch.randn(n).to(out_dtype),
        tuple(torch.randn(shapes[kind]).to(out_dtype) for kind in chain.operand_kinds),
    )
    device = torch.device("cpu")
    problem = Problem(
        *(chain, m, k, n, dtype, out_dtype, out_dtype, True, True, True, training, device),
        product_precision(dtype, "cpu"),
    )
    return problem, inputs


def eager(problem, inputs):
    z = F.linear(*inputs[:3]).to(problem.out_dtype)
    return reference.epilogue(z, problem.chain, *inputs[3:5], inputs.operands)


@pytest.mark.parametrize("norm", NORMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("training", [False, True])
def test_backend_forward_is_eager_bit_for_bit(norm, dtype, training):
    problem, inputs = make(norm, dtype, training, "mul_channel", "relu|add_residual")
    found = forward(problem, inputs)
    assert torch.equal(found.y, eager(problem, inputs))
    assert found.y.dtype == dtype


@pytest.mark.parametrize("norm", NORMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [0, 7])
def test_backend_keeps_what_the_interface_says(norm, dtype, m):
    problem, inputs = make(norm, dtype, m=m)
    _, z, mean, rstd, _ = forward(problem, inputs)
    assert (z.shape, z.dtype) == ((m, 12), dtype)
    assert (rstd.shape, rstd.dtype) == ((m, problem.groups), problem.stats_dtype)
    assert mean.dtype == problem.stats_dtype
    assert mean.shape == ((0,) if isinstance(norm, RMSNorm) else (m, problem.groups))
    found = forward(*make(norm, dtype, training=False, m=m))
    assert [t.shape for t in found[1:4]] == [(0,), (0,), (0,)]


@pytest.mark.parametrize("norm", NORMS[:3], ids=str)
def test_backend_statistics_are_those_of_z(norm):
    problem, inputs = make(norm, torch.float64)
    _, z, mean, rstd, _ = forward(problem, inputs)
    v = z.view(problem.m, problem.groups, -1)
    if isinstance(norm, RMSNorm):
        expected = (v.square().mean(2) + norm.eps).rsqrt()
    else:
        torch.testing.assert_close(mean, v.mean(2), rtol=1e-12, atol=1e-14)
        expected = (v.var(2, correction=0) + norm.eps).rsqrt()
    torch.testing.assert_close(rstd, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("norm", NORMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backend_backward_is_eager_bit_for_bit(norm, dtype):
    problem, inputs = make(norm, dtype, True, "mul_channel|silu", "add_residual|relu")
    kept = forward(problem, inputs)
    leaves = [t.requires_grad_() for t in (*inputs[:5], *inputs.operands)]
    dy = torch.randn_like(kept.y)
    expected = torch.autograd.grad(eager(problem, inputs), leaves, dy)
    want = Wanted(True, True, True, True, True, (True, True))
    found = backward(problem, inputs, kept, dy, want)
    for ours, theirs in zip((*found[:5], *found.operands), expected, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.dtype == theirs.dtype


def test_backend_computes_only_what_is_wanted():
    problem, inputs = make(GroupNorm(4), torch.float64, True, "mul_channel", "add_residual")
    kept = forward(problem, inputs)
    dy = torch.randn_like(kept.y)
    for at in range(7):
        flags = [i == at for i in range(7)]
        want = Wanted(*flags[:5], tuple(flags[5:]))  # type: ignore[call-arg]
        found = backward(problem, inputs, kept, dy, want)
        assert [g is not None for g in (*found[:5], *found.operands)] == flags


@pytest.mark.parametrize("in_front", [False, True])
def test_a_residual_gradient_is_memory_of_its_own(in_front):
    both = ["", "add_residual|add_residual"]
    problem, inputs = make(LayerNorm(), torch.float32, True, *both[:: -1 if in_front else 1])
    kept = forward(problem, inputs)
    dy = torch.randn_like(kept.y)
    want = Wanted(False, False, False, False, False, (True, True))
    first, second = backward(problem, inputs, kept, dy, want).operands
    assert torch.equal(first, second)
    assert in_front or torch.equal(first, dy)
    assert len({first.data_ptr(), second.data_ptr(), dy.data_ptr()}) == 3


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_out_dtype_is_that_of_the_norm_and_all_after_it(norm):
    problem, inputs = make(norm, torch.bfloat16, True, "silu", out_dtype=torch.float32)
    y, z, _, rstd, _ = kept = forward(problem, inputs)
    assert (y.dtype, z.dtype, rstd.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    assert torch.equal(y, eager(problem, inputs))
    want = Wanted(True, True, True, True, True, ())
    found = backward(problem, inputs, Forward(*kept), torch.randn_like(y), want)
    dtypes = [g.dtype for g in found[:5]]
    assert dtypes == [torch.bfloat16] * 3 + [torch.float32] * 2
