"""The operators as compiled graphs call them: like an earlier call, they are not dispatched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from epinorm.capture.backend import compile_graph
from epinorm.operator import schema
from watching import SeesOperators

M, K, N = 6, 8, 16
GROUP = "group_norm(4,1e-05)|leaky_relu(0.01)|scale(2.0)"
FACTS: tuple[Any, ...] = ("auto", False, None)
forward, training = schema.linear_norm, schema.linear_norm_forward
backward = schema.linear_norm_backward


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each operator's kernel was reached by way of the dispatcher."""
    count: Counter[str] = Counter()

    def counting(name: str) -> Callable[..., Any]:
        run = getattr(schema, name)

        def counted(*arguments: Any) -> Any:
            count[name] += 1
            return run(*arguments)

        return counted

    for name in ("run_inference", "run_forward", "run_backward"):
        monkeypatch.setattr(schema, name, counting(name))
    return count


def tensors(m: int = M, norm_bias: bool = True, operands: int = 0) -> list[Any]:
    vectors = [torch.randn(N, dtype=torch.float64) for _ in range(3)]
    if not norm_bias:
        vectors[2] = None  # type: ignore[call-overload]
    others = [torch.randn(m, N, dtype=torch.float64) for _ in range(operands)]
    x, weight = torch.randn(m, K, dtype=torch.float64), torch.randn(N, K, dtype=torch.float64)
    return [x, weight, *vectors, others]


def truth(chain: str, given: list[Any], dy: Tensor | None = None) -> list[Tensor]:
    """y by PyTorch's layers, and with dy all gradients."""
    flat = [t.clone().requires_grad_() for t in (*given[:5], *given[5]) if t is not None]
    left = iter(flat)
    again = [None if t is None else next(left) for t in given[:5]]
    y = forward(*again, list(left), chain, "reference", False, None)
    return [y] if dy is None else [y, *torch.autograd.grad(y, flat, dy)]


def step(chain: str, given: list[Any], dy: Tensor, out: Any = None) -> list[Tensor]:
    facts = (chain, "auto", False, out)
    y, *kept = training(*given, *facts)
    wanted = [t is not None for t in (*given[:5], *given[5])]
    return [y, *backward(dy, *given, *kept, *facts, wanted)]


def same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_calls_like_an_earlier_one_are_not_dispatched(dispatched: Counter[str]) -> None:
    for i in range(3):
        given = tensors()
        given[0] = given[0] * 10**i
        dy = torch.randn(M, N, dtype=torch.float64)
        same(forward(*given, GROUP, *FACTS), truth(GROUP, given)[0])
        same(step(GROUP, given, dy), truth(GROUP, given, dy))
    # Twice: the truth's is another strategy.
    assert dispatched == {"run_inference": 1, "run_forward": 2, "run_backward": 1}


@pytest.mark.parametrize(
    "chain, options",
    [
        ("rms_norm(1e-06)|silu", {"norm_bias": False}),
        ("add_residual|layer_norm(1e-05)|gelu|add_residual", {"operands": 2}),
    ],
)
def test_other_chains(chain: str, options: Any, dispatched: Counter[str]) -> None:
    for _ in range(3):
        given, dy = tensors(**options), torch.randn(M, N, dtype=torch.float64)
        found = step(chain, given, dy)
        same(found, truth(chain, given, dy))
    assert dispatched["run_backward"] == 1
    kept = [t for t in training(*given, chain, *FACTS) if not t.numel()]
    again = [t for t in training(*given, chain, *FACTS) if not t.numel()]
    assert all(a is not b for a in kept for b in again)


def strided(given: list[Any]) -> None:
    given[0] = torch.randn(M, 2 * K, dtype=torch.float64)[:, :K]


def copied(given: list[Any]) -> None:
    given[0] = torch.randn(K, M, dtype=torch.float64).t()


def narrow(given: list[Any]) -> None:
    given[:5] = [t.float() for t in given[:5]]


def longer(given: list[Any]) -> None:
    given[0] = torch.randn(M + 5, K, dtype=torch.float64)


def empty(given: list[Any]) -> None:
    given[0] = torch.randn(0, K, dtype=torch.float64)


def without_bias(given: list[Any]) -> None:
    given[2] = None


def negative(given: list[Any]) -> None:
    given[0] = torch._neg_view(given[0])


@pytest.mark.parametrize(
    "change",
    [strided, copied, narrow, longer, empty, without_bias, negative],
    ids=lambda f: f.__name__,
)
def test_what_changes_between_calls(change: Callable[[list[Any]], None]) -> None:
    for i in range(4):
        given = tensors()
        if i % 2:
            change(given)
        dy = torch.randn(given[0].shape[0], N, dtype=given[0].dtype)
        exact = [t if t is None or isinstance(t, list) else t.double() for t in given]
        for a, b in zip(step(GROUP, given, dy), truth(GROUP, exact, dy.double()), strict=True):
            torch.testing.assert_close(a, b.to(a.dtype))


def test_an_expanded_gradient_and_other_wishes(dispatched: Counter[str]) -> None:
    given = tensors()
    y, *kept = training(*given, GROUP, *FACTS)
    right = truth(GROUP, given, torch.full_like(y, 2.0))[1:]
    for _ in range(2):
        dy = torch.tensor(2.0, dtype=torch.float64).expand(M, N)
        for wanted in ([True] * 5, [False, True, False, True, False]):
            found = backward(dy, *given, *kept, GROUP, *FACTS, wanted)
            same(found, [g for g, want in zip(right, wanted, strict=True) if want])
    assert dispatched["run_backward"] == 2


def test_a_chains_own_numbers_are_its_own() -> None:
    given = tensors()
    for factor in (2.0, 5.0, 2.0):
        chain = f"layer_norm(1e-05)|scale({factor})"
        same(forward(*given, chain, *FACTS), truth(chain, given)[0])


def test_autograd_and_modes_still_see_the_operator(dispatched: Counter[str]) -> None:
    given = tensors()
    for _ in range(2):
        forward(*given, GROUP, *FACTS)
    with SeesOperators() as mode:
        forward(*given, GROUP, *FACTS)
    assert mode.seen[0] is forward
    given[1].requires_grad_()
    for _ in range(2):
        y = forward(*given, GROUP, *FACTS)
        assert y.requires_grad
        with torch.no_grad():
            assert not forward(*given, GROUP, *FACTS).requires_grad
    by_sample = torch.vmap(lambda row: forward(row[None], *given[1:], GROUP, *FACTS)[0])
    same(by_sample(given[0]), y)


def test_a_mistake_is_the_same_error_at_every_call() -> None:
    given = tensors()
    for _ in range(2):
        forward(*given, GROUP, *FACTS)
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            forward(given[0][:, 1:], *given[1:], GROUP, *FACTS)
        kept = training(*given, GROUP, *FACTS)[1:]
        with pytest.raises(RuntimeError, match="must be of shape"):
            backward(given[0], *given, *kept, GROUP, *FACTS, [True] * 5)


def test_a_compiled_training_step_is_not_dispatched(dispatched: Counter[str]) -> None:
    def without_code(gm: Any, inputs: Any, **_: Any) -> Any:
        from torch._functorch.aot_autograd import aot_module_simplified
        from torch._inductor.decomposition import select_decomp_table

        keep = lambda gm, _: gm  # noqa: E731
        return aot_module_simplified(gm, inputs, keep, keep, decompositions=select_decomp_table())

    model = nn.Sequential(nn.Linear(K, N), nn.GroupNorm(4, N), nn.LeakyReLU()).double()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch._inductor.compile_fx.compile_fx", without_code)
        compiled = torch.compile(model, backend=compile_graph)
        for i in range(5):
            if i == 2:  # the first call runs in the thread state of its compilation
                dispatched.clear()
            x = torch.randn(M, K, dtype=torch.float64, requires_grad=True)
            leaves = [x, *model.parameters()]
            y, right = compiled(x), model(x)
            dy = torch.randn_like(y)
            same(y, right)
            same(torch.autograd.grad(y, leaves, dy), torch.autograd.grad(right, leaves, dy))
    torch._dynamo.reset()
    assert not dispatched
