"""BatchNorm as a norm of a chain: its text, the operators, gradients of any order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

import epinorm
from epinorm.backends.engine import plan_for
from epinorm.chain import BatchNorm, Chain, returns_more
from epinorm.operator import transforms
from epinorm.operator.dispatch import Caller
from epinorm.operator.schema import linear_norm_sum, linear_norm_sum_forward
from epinorm.problem import Problem

M, K, N = 7, 5, 6
TEXT = "tanh|batch_norm(0.001)|silu|mul_channel"
FACTS = (TEXT, "reference", False, None)


def tensors() -> list[Tensor]:
    sizes = [(M, K), (N, K), (N,), (N,), (N,), (N,)]
    return [torch.randn(size, dtype=torch.float64).requires_grad_() for size in sizes]


def by_operator(*given: Tensor) -> Tensor:
    y, statistics = linear_norm_sum(*given[:5], list(given[5:]), *FACTS)
    assert not statistics.requires_grad
    return y


def by_pytorch(*given: Tensor) -> Tensor:
    x, weight, bias, gamma, beta, channel = given
    z = F.linear(x, weight, bias).tanh()
    return F.silu(F.batch_norm(z, None, None, gamma, beta, True, eps=1e-3)) * channel


def test_its_text_reads_back_and_is_not_of_the_public_interface() -> None:
    chain = Chain.parse(TEXT)
    assert str(chain) == TEXT
    assert chain.norm == BatchNorm(eps=1e-3)
    assert chain.returns_statistics
    assert chain.returns_more
    assert not chain.returns_sum
    assert returns_more(TEXT)
    assert not returns_more("layer_norm|silu")
    assert returns_more("layer_norm|returns(sum)")
    assert chain.statistics_shape(M, N) == (N,)
    assert str(Chain(BatchNorm())) == "batch_norm(1e-05)"
    assert not hasattr(epinorm, "BatchNorm")
    with pytest.raises(TypeError, match=r"norm must be epinorm\.GroupNorm, .* got BatchNorm"):
        Chain.build(BatchNorm())
    with pytest.raises(ValueError, match="returns the batch's statistics, and no sum"):
        Chain.parse("batch_norm|returns(sum)")
    with pytest.raises(ValueError, match=r"cannot read 'batch_norm\(2,1e-5\)'"):
        Chain.parse("batch_norm(2,1e-5)")


def test_the_operators_are_registered_as_pytorch_wants_them() -> None:
    given = tensors()
    arguments = (*given[:5], given[5:], *FACTS)
    torch.library.opcheck(linear_norm_sum, arguments)
    torch.library.opcheck(linear_norm_sum_forward, arguments)


def test_values_and_statistics_are_pytorchs() -> None:
    given = tensors()
    y, statistics = linear_norm_sum(*given[:5], given[5:], *FACTS)
    torch.testing.assert_close(y, by_pytorch(*given))
    z = F.linear(*given[:3]).tanh()
    running = [torch.zeros(N, dtype=torch.float64) for _ in range(2)]
    F.batch_norm(z, *running, training=True, momentum=1.0)
    torch.testing.assert_close(list(statistics), running)


def test_gradients_of_first_and_second_order() -> None:
    given = tensors()
    y, expected = by_operator(*given), by_pytorch(*given)
    dy = torch.randn_like(y)
    for ours, theirs in zip(
        torch.autograd.grad(y, given, dy), torch.autograd.grad(expected, given, dy), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
    assert torch.autograd.gradcheck(by_operator, given)
    assert torch.autograd.gradgradcheck(by_operator, given)


def test_transforms_and_tangents() -> None:
    given = tuple(t.detach() for t in tensors())
    tangents = tuple(map(torch.randn_like, given))
    for ours, theirs in zip(
        torch.func.jvp(by_operator, given, tangents),
        torch.func.jvp(by_pytorch, given, tangents),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(given[0], tangents[0])
        y, statistics = linear_norm_sum(dual, *given[1:5], given[5:], *FACTS)
        assert forward_ad.unpack_dual(y).tangent is not None
        assert forward_ad.unpack_dual(statistics).tangent is None

    def loss(weight: Tensor, run: object) -> Tensor:
        return run(given[0], weight, *given[2:]).sin().sum()  # type: ignore[operator,no-any-return]

    ours, theirs = (torch.func.grad(loss)(given[1], run) for run in (by_operator, by_pytorch))
    torch.testing.assert_close(ours, theirs)
    weights = torch.randn(3, N, K, dtype=torch.float64)
    ours = torch.vmap(lambda w: by_operator(given[0], w, *given[2:]))(weights)
    theirs = torch.stack([by_pytorch(given[0], w, *given[2:]) for w in weights])
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("affine", [(True, True), (True, False), (False, False)])
def test_cuda_autocast_leaves_its_parameters_in_fp32(
    low: torch.dtype, affine: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule itself needs no GPU: y is of 16 bits, gradients and statistics are of fp32."""
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda _: low)
    x, weight, bias, gamma, beta = (t.detach().float().requires_grad_() for t in tensors()[:5])
    vectors = [t if there else None for t, there in zip((gamma, beta), affine, strict=True)]
    leaves = [t for t in (x, weight, bias, *vectors) if t is not None]
    for text, dtype in (("relu|batch_norm(1e-05)|gelu", low), ("batch_norm(1e-05)|softplus", None)):
        rest = ([], text, "reference", False, None)
        y, statistics = transforms._autocast_cuda(x, weight, bias, *vectors, *rest)
        if dtype is None:  # PyTorch's layers, which cast nothing here
            assert y.dtype == torch.float32
            continue
        z = F.linear(*(t.to(low) for t in (x, weight, bias))).relu()
        expected = F.gelu(F.batch_norm(z, None, None, *vectors, True))
        assert (y.dtype, statistics.dtype) == (low, torch.float32)
        assert torch.equal(y, expected)
        dy = torch.randn_like(y)
        for ours, theirs in zip(
            *(torch.autograd.grad(each, leaves, dy) for each in (y, expected)), strict=True
        ):
            assert ours.dtype == torch.float32
            assert torch.equal(ours, theirs)
    low_given = [t.detach().to(low).requires_grad_() for t in (x, weight, bias)]
    for operator in (linear_norm_sum, linear_norm_sum_forward):
        facts = ("relu|batch_norm(1e-05)|gelu", "reference", False, low)
        torch.library.opcheck(operator, (*low_given, *vectors, [], *facts))


def test_fp32_parameters_next_to_16_bits_leave_no_operands() -> None:
    x, weight, bias, gamma, beta, channel = (t.detach().bfloat16() for t in tensors())
    with pytest.raises(RuntimeError, match=r"has no tensor operands, but tanh\|batch_norm.* has"):
        linear_norm_sum(x, weight, bias, gamma.float(), beta.float(), [channel], *FACTS)
    with pytest.raises(RuntimeError, match=r"norm_bias must have dtype torch\.float32, but got"):
        linear_norm_sum(x, weight, bias, gamma.float(), beta, [], "batch_norm", *FACTS[1:])


def test_a_caller_gives_both_and_autograd_sees_one() -> None:
    caller = Caller(TEXT, "reference")
    for _ in range(3):
        given = tensors()
        y, statistics = caller(*given[:5], tuple(given[5:]))
        assert statistics.shape == (2, N)
        assert not statistics.requires_grad
        torch.testing.assert_close(y, by_pytorch(*given))
        with torch.no_grad():
            again, same = caller(*given[:5], tuple(given[5:]))
        torch.testing.assert_close((again, same), (y.detach(), statistics))


def test_one_row_and_three_dimensions_are_refused() -> None:
    given = tensors()
    with pytest.raises(
        ValueError,
        match=r"Expected more than 1 value per channel when training, got "
        r"input size torch\.Size\(\[1, 6\]\)",
    ):
        linear_norm_sum(given[0][:1], *given[1:5], given[5:], *FACTS)
    with pytest.raises(ValueError, match="with BatchNorm x must be 2D"):
        Caller(TEXT, "reference")(given[0][None], *given[1:5], tuple(given[5:]))


def test_the_cpu_leaves_it_to_pytorch() -> None:
    problem = Problem(
        *(Chain.parse(TEXT), 512, 512, 512, *(torch.float32,) * 3, True, True, True),
        *(True, torch.device("cpu"), "native"),
    )
    assert plan_for(problem).strategy == "reference"
    with pytest.raises(RuntimeError, match="strategy 'cpu' cannot serve this chain"):
        plan_for(problem, "cpu")
