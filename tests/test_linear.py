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
    [("identity", False), ("scale(2)|add_residual", False), ("gelu", True), ("mul_channel", True)],
)
def test_z_is_kept_only_where_the_gradient_reads_it(text, keeps):
    assert Chain.parse(text).keeps_z == keeps


def test_the_operators_pass_opcheck():
    x, weight, bias, residual = tensors(torch.float64)
    for chain, operands in (("gelu|add_residual", [residual]), ("identity", [])):
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
