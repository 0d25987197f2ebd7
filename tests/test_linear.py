"""`epinorm.linear`: a chain without a norm, on the CPU by PyTorch's own operations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import epinorm
from epinorm.chain import Chain
from epinorm.operator.functional import apply_chain

M, K, N = 5, 12, 10


def tensors(dtype=torch.float32):
    return [torch.randn(s, dtype=dtype, requires_grad=True) for s in ((M, K), (N, K), (N,), (M, N))]


def operator(x, weight, bias, chain, *operands):
    """Not left to PyTorch's layers, as `epinorm.linear` is on a CPU."""
    facts = (chain, "reference", False, None)
    return torch.ops.epinorm.linear_norm(x, weight, bias, None, None, list(operands), *facts)


@pytest.mark.parametrize("text", ["identity", "gelu", "relu|add_residual|scale(2)"])
def test_text_and_chain(text):
    chain = Chain.parse(text)
    assert chain.norm is None
    assert str(chain) == text
    assert Chain.parse(str(chain)) == chain
    assert chain.is_linear == (text == "identity")


def test_identities_are_dropped_and_all_operations_are_in_front():
    chain = Chain.build(None, "identity|gelu", "relu")
    assert str(chain) == "gelu|relu"
    assert chain.post == ()


@pytest.mark.parametrize(
    ("text", "keeps"),
    [
        *(("identity", False), ("scale(2)|add_residual", False), ("gelu", True)),
        *(("mul_channel", True), ("relu", False), ("dropout(0.5)|add_residual|tanh", False)),
        *(("relu|scale(2)", True), ("mul_channel|sigmoid", True), ("leaky_relu(0.1)", True)),
    ],
)
def test_z_is_kept_only_where_the_gradient_reads_it(text, keeps):
    """And not where the result says as much, which is there anyway."""
    assert Chain.parse(text).keeps_z == keeps


@pytest.mark.parametrize("last", ["relu", "sigmoid", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_from_the_result(last, dtype):
    """Eager's bit for bit; and as after its own layer, the result may not have changed."""
    x, weight, bias, residual = given = tensors(dtype)
    eager = getattr(torch, last)(F.linear(x, weight, bias) * 2 + residual)
    y = operator(x, weight, bias, f"scale(2)|add_residual|{last}", residual)
    dy = torch.randn_like(y)
    expected = torch.autograd.grad(eager, given, dy)
    for found, exact in zip(
        torch.autograd.grad(y, given, dy, retain_graph=True), expected, strict=True
    ):
        assert torch.equal(found, exact)
    saved = y.grad_fn.saved_tensors[0]
    assert saved.data_ptr() == y.data_ptr()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, given, dy)


def test_the_operators_pass_opcheck():
    x, weight, bias, residual = tensors(torch.float64)
    for chain, operands in (
        *(("gelu|add_residual", [residual]), ("identity", [])),
        ("add_residual|sigmoid", [residual]),
    ):
        arguments = (x, weight, bias, None, None, operands, chain, "auto", False, None)
        torch.library.opcheck(torch.ops.epinorm.linear_norm.default, arguments)
        detached = (x.detach(), weight.detach(), bias.detach(), None, None)
        forward = (*detached, [t.detach() for t in operands], *arguments[6:])
        torch.library.opcheck(torch.ops.epinorm.linear_norm_forward.default, forward)


def test_gradients_of_any_order():
    x, weight, bias, residual = tensors(torch.float64)
    gate, shift = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((M, N), (N,)))
    post = "tanh|mul_element|sub_channel|add_residual"

    def run(x, weight, bias, *operands):
        return epinorm.linear(x, weight, bias, post=post, operands=operands)

    given = (x, weight, bias, gate, shift, residual)
    torch.testing.assert_close(
        run(*given), torch.tanh(F.linear(x, weight, bias)) * gate - shift + residual
    )
    assert torch.autograd.gradcheck(run, given)
    assert torch.autograd.gradgradcheck(run, given)


def test_gradients_of_any_order_from_the_result():
    x, weight, bias, residual = tensors(torch.float64)

    def run(*given):
        return operator(x, *given, "add_residual|tanh", residual)

    assert torch.autograd.gradcheck(run, (weight, bias))
    assert torch.autograd.gradgradcheck(run, (weight, bias))
    exact = torch.func.jacrev(lambda w, b: torch.tanh(F.linear(x, w, b) + residual))(weight, bias)
    torch.testing.assert_close(torch.func.jacrev(run)(weight, bias), exact)


def test_under_compile():
    x, weight, bias, residual = tensors()

    def run(x):
        return epinorm.linear(x, weight, bias, post="silu|add_residual", operands=[residual])

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), F.silu(F.linear(x, weight, bias)) + residual)


def test_a_norms_parameters_without_a_norm_are_refused():
    x, weight, bias, _ = tensors()
    with pytest.raises(ValueError, match="norm_weight belongs to a norm, and the chain has none"):
        apply_chain(x, weight, None, bias, None, (), "gelu")
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        epinorm.linear(x, torch.randn(N, K + 1))
