"""``return_sum=True``: what enters the norm is a result too, with a gradient of its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import epinorm
from epinorm.chain import Chain, reference
from epinorm.operator import dispatch, schema
from epinorm.tools.accuracy import allowed_error, relative_error

M, K, N = 37, 40, 48
RESIDUAL = "add_residual|layer_norm(1e-05)|returns(sum)"
SCALED = "mul_channel|add_residual|group_norm(4,1e-05)|silu|returns(sum)"
CHAINS = (
    RESIDUAL,
    SCALED,
    "rms_norm(1e-06)|scale(2)|returns(sum)",
    "gelu|add_residual|rms_norm(1e-06)|add_residual|returns(sum)",
)
USED = ((True, True), (True, False), (False, True))
"""Which of y and the sum have a gradient."""


def tensors(text: str, dtype: torch.dtype, m: int = M) -> list[Tensor]:
    """x, weight, bias, norm_weight, norm_bias and the operands."""
    kinds = Chain.parse(text).operand_kinds
    shapes = [(m, K), (N, K), (N,), (N,), (N,)]
    shapes += [(N,) if kind == "channel" else (m, N) for kind in kinds]
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def fused(text: str, strategy: str = "auto") -> Any:
    return lambda *t: dispatch.call(*t[:5], t[5:], text, strategy)


def layers(text: str) -> Any:
    return lambda *t: reference.linear_norm(*t[:3], Chain.parse(text), *t[3:5], t[5:])


def step(
    function: Any, given: Sequence[Tensor], gradients: Sequence[Tensor], used: Sequence[bool]
) -> list[Tensor]:
    """Both results and all gradients, zeros where there is none."""
    results = function(*given)
    pairs = [(r, g) for r, g, use in zip(results, gradients, used, strict=True) if use]
    outputs, grads = zip(*pairs, strict=True)
    found = torch.autograd.grad(outputs, given, grads, allow_unused=True)
    pairs = zip(found, given, strict=True)
    return [*results, *(torch.zeros_like(t) if g is None else g for g, t in pairs)]


def converted(given: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [t.detach().to(dtype).requires_grad_(t.requires_grad) for t in given]


EAGER = "|rounding(eager)"
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text, dtype, rounding",
    [
        # Rounding is of 16 bit alone; what backward finds is the sum in the first, z in the second.
        *((text, dtype, "") for text in CHAINS[:2] for dtype in DTYPES),
        *((text, dtype, EAGER) for text in CHAINS for dtype in DTYPES),
    ],
)
def test_both_results_and_all_gradients(text: str, dtype: torch.dtype, rounding: str) -> None:
    given = tensors(text, dtype)
    gradients = [torch.randn(M, N).to(dtype) for _ in range(2)]
    exact, exact_gradients = (converted(t, torch.float64) for t in (given, gradients))
    for used in USED:
        found = step(fused(text + rounding, "cpu"), given, gradients, used)
        eager = step(layers(text), given, gradients, used)
        truth = step(layers(text), exact, exact_gradients, used)
        assert [t.dtype for t in found] == [t.dtype for t in eager]
        for ours, theirs, true in zip(found, eager, truth, strict=True):
            if dtype == torch.float64:
                torch.testing.assert_close(ours, true, rtol=1e-11, atol=1e-11)
            elif not true.any():
                assert not ours.any()
            else:
                limit = allowed_error(relative_error(theirs, true), dtype)
                assert relative_error(ours, true) <= limit
    if rounding and dtype == torch.bfloat16:
        assert (found[1] == eager[1]).float().mean() > 0.999


@pytest.mark.parametrize(
    "text,leading", [*((text, ()) for text in CHAINS), (RESIDUAL, (2, 3)), (CHAINS[3], (2, 3))]
)
def test_what_the_sum_does_not_depend_on_has_no_gradient(text: str, leading: Any) -> None:
    """None in eager's places, where the sum alone is used; a row that the norm makes NaN stays."""
    given = [t.detach() for t in tensors(text, torch.float64, 6)]
    if leading:
        given = [t.view(*leading, -1) if t.shape[0] == 6 else t for t in given]
    given[0][0] = torch.inf
    for t in given:
        t.requires_grad_()
    function = lambda *t: epinorm.operator.functional.apply_chain(*t[:5], t[5:], text, "cpu")  # noqa: E731
    for create_graph in (False, True):
        pairs = []
        for compute in (function, layers(text)):
            total = compute(*given)[1]
            loss = total[-1].square().sum()
            pairs.append(
                torch.autograd.grad(loss, given, None, None, create_graph, allow_unused=True)
            )
        for ours, eager in zip(*pairs, strict=True):
            assert (ours is None) == (eager is None)
            if ours is not None:
                torch.testing.assert_close(ours, eager, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["cpu", "reference"])
@pytest.mark.parametrize("text", [RESIDUAL, SCALED])
def test_gradcheck(text: str, strategy: str) -> None:
    shapes = [(2, 3), (8, 3), (8,), (8,), (8,)]
    kinds = Chain.parse(text).operand_kinds
    shapes += [(8,) if kind == "channel" else (2, 8) for kind in kinds]
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    function = fused(text, strategy)
    assert gradcheck(function, given, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(function, given)


@pytest.mark.slow
@pytest.mark.parametrize("text, strategy", [(RESIDUAL, "auto"), (SCALED, "reference")])
def test_opcheck(text: str, strategy: str) -> None:
    given = tensors(text, torch.float32, 3)
    facts = (text, strategy, False, None)
    plain = [t.detach() for t in given]
    torch.library.opcheck(schema.linear_norm_sum_forward, (*plain[:5], plain[5:], *facts))
    y, z, mean, rstd, total = schema.linear_norm_sum_forward(*plain[:5], plain[5:], *facts)
    assert z.numel() == (0 if text == RESIDUAL else y.numel())
    kept = (total if text == RESIDUAL else z, mean, rstd)
    wanted = [True] * len(given)

    def backward(v: Sequence[Tensor], dsum: Tensor | None) -> None:
        called = (torch.randn_like(y), *v[:5], v[5:], *kept, *facts, wanted, dsum)
        torch.library.opcheck(schema.linear_norm_backward, called)

    backward(plain, None)
    # Traced with gradients of their own, which takes long: both operators by one chain each.
    if text == RESIDUAL:
        torch.library.opcheck(schema.linear_norm_sum, (*given[:5], given[5:], *facts))
    else:
        backward(given, torch.randn_like(total))


def test_leading_dimensions_and_calls_like_earlier_ones(short: list[bool]) -> None:
    x, weight, bias, gamma, beta, residual = tensors(RESIDUAL, torch.float32, 12)
    x, residual = (t.detach().view(2, 6, -1).requires_grad_() for t in (x, residual))

    def run(*given: Tensor) -> Any:
        return epinorm.linear_norm(
            *given[:3], norm=epinorm.LayerNorm(), norm_weight=given[3], norm_bias=given[4],
            pre="add_residual", operands=given[5:], return_sum=True,
        )  # fmt: skip

    given = [x, weight, bias, gamma, beta, residual]
    expected = layers(RESIDUAL)(*given)
    for _ in range(3):
        for found, true in zip(run(*given), expected, strict=True):
            torch.testing.assert_close(found, true)
        with torch.no_grad():
            for found, true in zip(run(*given), expected, strict=True):
                torch.testing.assert_close(found, true)
    y, total = run(*given)
    (y * 2 + total.square()).sum().backward()
    assert residual.grad is not None
    assert residual.grad.shape == residual.shape
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for found, true in zip(compiled(*given), expected, strict=True):
        torch.testing.assert_close(found, true)


def test_the_module_returns_both() -> None:
    block = epinorm.LinearNorm(K, N, norm=epinorm.LayerNorm(), pre="add_residual", return_sum=True)
    x, residual = torch.randn(5, K), torch.randn(5, N)
    y, total = block(x, residual)
    torch.testing.assert_close(total, block.linear(x) + residual)
    torch.testing.assert_close(y, block.norm(total))


def test_under_autocast_dtypes_are_those_of_the_layers() -> None:
    given = tensors(RESIDUAL, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = fused(RESIDUAL)(*given), layers(RESIDUAL)(*given)
    assert [t.dtype for t in found] == [t.dtype for t in expected]


def test_what_is_saved_is_not_saved_twice() -> None:
    packed: list[Tensor] = []
    given = tensors(RESIDUAL, torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        _, total = fused(RESIDUAL)(*given)
    matrices = [t for t in packed if t.shape == (M, N)]
    # For z and for the residual, which it follows from.
    assert [t.data_ptr() for t in matrices] == [total.data_ptr()] * 2


def test_a_sum_changed_in_place_is_noticed() -> None:
    y, total = fused(RESIDUAL)(*tensors(RESIDUAL, torch.float32))
    with torch.no_grad():
        total.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_checkpointing_and_vmap() -> None:
    given, function = tensors(SCALED, torch.float64), fused(SCALED)
    plain = torch.autograd.grad([t.square().sum() for t in function(*given)], given)
    results = checkpoint(function, *given, use_reentrant=False)
    again = torch.autograd.grad([t.square().sum() for t in results], given)
    assert all(torch.equal(a, b) for a, b in zip(again, plain, strict=True))
    many = torch.stack([given[0], given[0] * 2]).detach()
    rest = [t.detach() for t in given[1:]]
    found = torch.vmap(lambda x: function(x, *rest))(many)
    for i in range(2):
        for ours, true in zip(found, function(many[i], *rest), strict=True):
            torch.testing.assert_close(ours[i], true)


def test_squares_that_overflow_are_pytorchs_own() -> None:
    given = tensors(RESIDUAL, torch.float32)
    with torch.no_grad():
        given[0][3] *= 1e25
    gradients = [torch.randn(M, N) for _ in range(2)]
    found = step(fused(RESIDUAL, "cpu"), given, gradients, (True, True))
    expected = step(layers(RESIDUAL), given, gradients, (True, True))
    for ours, true in zip(found, expected, strict=True):
        assert torch.equal(ours.isnan(), true.isnan())


def test_a_chain_without_norm_has_no_sum() -> None:
    with pytest.raises(ValueError, match="no norm"):
        Chain.parse("gelu|returns(sum)")
    assert str(Chain.parse(SCALED + "|rounding(eager)")) == SCALED + "|rounding(eager)"


def test_a_compiled_step_holds_no_product_of_pytorch() -> None:
    given = tensors(RESIDUAL, torch.float32)
    held: set[str] = set()

    def record(graph: torch.fx.GraphModule, _: Any) -> Any:
        held.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    function = torch.compile(
        fused(RESIDUAL), backend=aot_autograd(fw_compiler=record, bw_compiler=record)
    )
    y, total = function(*given)
    found = torch.autograd.grad((y * y).sum() + total.sum(), given)
    y, total = layers(RESIDUAL)(*given)
    torch.testing.assert_close(found, torch.autograd.grad((y * y).sum() + total.sum(), given))
    assert "epinorm.linear_norm_backward.default" in held
    assert not {target for target in held if "mm" in target or "linear.default" in target}


@pytest.mark.parametrize("text", [RESIDUAL, "layer_norm(1e-05)|gelu"])
@pytest.mark.parametrize("batched", [False, True])
def test_a_tangent_of_the_gradients_of_the_results(batched: bool, text: str) -> None:
    """Forward-mode differentiation of the backward pass alone, of one or of several at once."""
    given = tensors(text, torch.float64)
    results = 1 + (text == RESIDUAL)
    draw = partial(torch.randn, 3, M, N, dtype=torch.float64)
    gradients, tangents = ([draw() for _ in range(results)] for _ in "gt")

    def derivative(function: Any) -> list[Tensor]:
        made = function(*given)

        def backward(*dys: Tensor) -> tuple[Tensor, ...]:
            return torch.autograd.grad(made, given, dys, retain_graph=True)

        with forward_ad.dual_level():
            dual = list(map(forward_ad.make_dual, gradients, tangents))
            if batched:
                found = torch.func.vmap(backward)(*dual)
            else:
                found = backward(*(dy[0] for dy in dual))
            assert not any(gradient.requires_grad for gradient in found)
            return [forward_ad.unpack_dual(gradient).tangent for gradient in found]

    torch.testing.assert_close(derivative(fused(text, "cpu")), derivative(layers(text)))
