"""A chain's numbers may differ at every call: nothing is compiled, opened or kept for them."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import epinorm
from epinorm.backends.cuda.text.chain_text import ChainArguments
from epinorm.chain import Chain
from epinorm.chain.reference import linear_norm as reference
from epinorm.problem import Strategy
from epinorm.tools.accuracy import allowed_error

M, K, N = 32, 48, 64
NORM = epinorm.GroupNorm(8)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {
        name: torch.randn(size, dtype=torch.float64).to(dtype)
        for name, size in (
            ("x", (M, K)), ("weight", (N, K)), ("bias", (N,)), ("norm_weight", (N,)),
            ("norm_bias", (N,)),
        )
    }  # fmt: skip


def error(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


def footprint() -> tuple[int, int, int]:
    """Open files, threads, and files in the cache."""
    cache = Path(os.environ["EPINORM_CACHE_DIR"])
    return (
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
        sum(1 for path in cache.rglob("*") if path.is_file()),
    )


def memory() -> float:
    """Resident MB."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


@pytest.mark.slow
def test_seven_thousand_calls_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPINORM_CACHE_DIR", str(tmp_path))  # others' compilations are not counted
    given = tensors()
    truth = reference(
        *(given[name].double() for name in ("x", "weight", "bias")),
        Chain.build(NORM),
        *(given[name].double() for name in ("norm_weight", "norm_bias")),
    )
    factors = (1 + torch.rand(7000, dtype=torch.float64)).tolist()
    early = first = None
    for i, factor in enumerate(factors):
        y = epinorm.linear_norm(**given, norm=NORM, post=f"scale({factor})", strategy="cpu")
        if i % 500 == 0:
            assert error(y, truth * factor) < 1e-6
        if i == 0:
            first = footprint()
        if i == 4500:  # every cache with a bound is full
            early = memory()
    assert footprint() == first
    assert early is not None
    assert memory() - early < 1  # MB: 400 bytes a call


CHAINS = (
    ("leaky_relu({})", "leaky_relu({})", (0.01, -0.5, 3.0)),
    ("clamp(-{0},{0})|add({0})", "hardtanh(-{0},{0})", (2.0, 3.5, 5.0)),
    ("softplus({},2)", "elu({})|scale({})", (0.5, 2.5, 1.75)),
    ("", "softplus(1,{})|scale({})", (0.25, 3.0, 20.0)),
)


def results(
    compute: Callable[[dict[str, Tensor]], Tensor], leaves: dict[str, Tensor], dy: Tensor
) -> tuple[Tensor, ...]:
    """y, and the gradients of all leaves."""
    y = compute(leaves)
    return tuple(t.detach() for t in (y, *torch.autograd.grad(y, leaves.values(), dy.to(y.dtype))))


@pytest.mark.parametrize(
    "pre,post,values,dtype",
    [
        *((*chain, torch.float32) for chain in CHAINS),
        (*CHAINS[1], torch.float64),
        (*CHAINS[2], torch.bfloat16),
    ],
)
def test_one_kernel_computes_values_and_gradients_with_any_numbers(
    pre: str,
    post: str,
    values: tuple[float, ...],
    dtype: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EPINORM_CACHE_DIR", str(tmp_path))  # as above
    seen = None
    for value in values:
        chain = Chain.build(NORM, pre.format(value, value), post.format(value, value))
        leaves = {name: t.requires_grad_() for name, t in tensors(dtype).items()}
        wide = {name: t.detach().double().requires_grad_() for name, t in leaves.items()}
        dy = torch.randn(M, N, dtype=torch.float64)

        def layers(of: dict[str, Tensor], chain: Chain = chain) -> Tensor:
            linear = (of[name] for name in ("x", "weight", "bias"))
            return reference(*linear, chain, of["norm_weight"], of["norm_bias"])

        def fused(of: dict[str, Tensor], chain: Chain = chain) -> Tensor:
            sides = {"pre": chain.pre, "post": chain.post}
            return epinorm.linear_norm(**of, norm=NORM, **sides, strategy="cpu")

        found = results(fused, leaves, dy)
        seen = seen or footprint()
        assert footprint() == seen  # nothing was compiled but at first
        eager, truth = results(layers, leaves, dy), results(layers, wide, dy)
        for ours, theirs, exact in zip(found, eager, truth, strict=True):
            assert error(ours, exact) <= allowed_error(error(theirs, exact), dtype)


ZEROS = (0.0, -0.0, 0.0)
"""-0.0 after 0.0 and before it."""


@pytest.mark.parametrize("strategy", ["auto", "cpu", "reference"])
@pytest.mark.parametrize("training", [False, True])
def test_zeros_keep_their_signs(strategy: Strategy, training: bool) -> None:
    """0.0 equals -0.0, and what is kept for the one was given to the other."""
    given = tensors()
    for zero in ZEROS:
        leaves = {name: t.requires_grad_(training) for name, t in given.items()}
        y = epinorm.linear_norm(**leaves, norm=NORM, post=f"scale({zero})", strategy=strategy)
        linear = torch.nn.functional.linear(given["x"], given["weight"], given["bias"])
        z = torch.nn.functional.group_norm(linear, 8, given["norm_weight"], given["norm_bias"])
        assert torch.equal(y.signbit(), (z * zero).signbit())
        assert not y.any()


def test_zeros_of_kernels_keep_their_signs() -> None:
    """Of a GPU's: rounded numbers are kept, and a recorded pass is repeated for its own alone."""
    chains = [Chain.parse(f"layer_norm|scale({zero})") for zero in ZEROS]
    kernel = ChainArguments(chains[0].structure, torch.float32)
    assert [str(kernel(chain.arguments)) for chain in chains] == ["(0.0,)", "(-0.0,)", "(0.0,)"]
    assert chains[0].arguments == chains[2].arguments
    assert chains[0].arguments != chains[1].arguments
    assert chains[0] != chains[1]
    assert chains[0] == chains[2]


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(K, N), torch.nn.GroupNorm(8, N)
        self.act, self.factor = torch.nn.LeakyReLU(), 2.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(self.norm(self.linear(x))) * self.factor
        return y


@pytest.mark.parametrize("first", [(), (2.0, 3.0, 0.5)], ids=["constant", "seen to change"])
def test_a_fused_model_sees_signs_and_types_of_its_numbers(first: tuple[float, ...]) -> None:
    """Numbers that are equal, or equal to nothing, as attributes of the model and of its modules;
    a NaN that stays is captured once."""
    model = Scaled()
    fused, x = epinorm.fuse(model, strategy="cpu"), torch.randn(M, K)
    inf, nan = float("inf"), float("nan")
    for value in (*first, *ZEROS, 1, 1.0, True, 2, 2.0, inf, -inf, 1e-320, nan, nan):
        model.factor = value
        y, eager = fused(x), model.act(model.norm(model.linear(x))) * value
        assert torch.equal(y.signbit(), eager.signbit()), value
        torch.testing.assert_close(y, eager, equal_nan=True)
    captured = counters["stats"]["unique_graphs"]
    fused(x)
    assert counters["stats"]["unique_graphs"] == captured
    model.factor = 1.0
    for zero in ZEROS:
        model.act.negative_slope = zero
        eager = model.act(model.norm(model.linear(x)))
        assert torch.equal(fused(x).signbit(), eager.signbit()), zero
