"""Dropout on a GPU: one mask whatever computes it, float64 as the truth, graphs and checkpoints."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import epinorm
from epinorm import GroupNorm, LayerNorm, LinearNorm
from epinorm.chain.dropout import draw_seeds

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
BEFORE, BEHIND = ("dropout({p})|add_residual", ""), ("", "gelu|dropout({p})")
BOTH = ("dropout({p})", "tanh|dropout({p})")

# strategy, dtype and precision, m, k, n, norm, pre and post, p: each kernel that computes a chain.
CASES = [
    ("single", BF16, "highest", 300, 256, 256, LayerNorm(), BEFORE, 0.1),
    ("single", BF16, "highest", 1024, 512, 1024, GroupNorm(64), BOTH, 0.5),
    ("single", BF16, "highest", 16384, 512, 768, LayerNorm(), BEFORE, 0.1),  # in halves
    ("single", F16, "highest", 333, 128, 512, GroupNorm(4), BEHIND, 0.9),
    ("single", F32, "high", 300, 256, 256, LayerNorm(), BEFORE, 0.1),
    ("single", F32, "highest", 1000, 512, 1024, GroupNorm(64), BOTH, 0.1),
    ("single", F32, "highest", 256, 512, 512, None, ("gelu|dropout({p})", ""), 0.1),
    ("single", BF16, "highest", 256, 512, 512, None, ("tanh|dropout({p})|add_residual", ""), 0.5),
    ("planes", F32, "highest", 1000, 768, 768, LayerNorm(), BEFORE, 0.1),
    ("planes", F32, "high", 1000, 768, 768, LayerNorm(), BEFORE, 0.1),
    ("planes", F32, "highest", 515, 512, 3072, LayerNorm(), BOTH, 0.5),
    ("epilogue", F32, "highest", 515, 64, 66, GroupNorm(6), BOTH, 0.5),
    ("epilogue", F32, "highest", 257, 64, 768, LayerNorm(), BEFORE, 0.1),
    ("epilogue", BF16, "highest", 1000, 768, 768, LayerNorm(), BEFORE, 0.1),
    ("epilogue", BF16, "highest", 30, 64, 20000, LayerNorm(), BOTH, 0.3),
    ("epilogue", F64, "highest", 100, 64, 96, GroupNorm(8), BOTH, 0.3),
]


class Step:
    """A training step of one chain with the same seeds and values, by any strategy."""

    def __init__(self, dtype: torch.dtype, m: int, k: int, n: int, norm: Any, chain: Any, p: float):
        self.norm, self.pre, self.post = norm, *(side.format(p=p) for side in chain)
        kinds = epinorm.Chain.build(norm, self.pre, self.post).operand_kinds
        self.dy = self.draw(dtype, m, n)
        self.leaves = [self.draw(dtype, m, k), self.draw(dtype, n, k) / math.sqrt(k)]
        self.leaves += [self.draw(dtype, n) for _ in range(1 if norm is None else 3)]
        self.residuals = [self.draw(dtype, m, n) for kind in kinds if kind == "element"]
        self.kinds, self.seeds = kinds, draw_seeds(kinds.count("seed"), self.dy.device)

    @staticmethod
    def draw(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=F64).to(dtype)

    def run(self, strategy: Any, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        given = [*self.leaves, *self.residuals]
        leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in given]
        residuals, seeds = iter(leaves[len(self.leaves) :]), iter(self.seeds)
        operands = [next(seeds if kind == "seed" else residuals) for kind in self.kinds]
        x, weight, bias, *vectors = leaves[: len(self.leaves)]
        if self.norm is None:
            y = epinorm.linear(
                *(x, weight, bias), post=self.pre, operands=operands, strategy=strategy
            )
        else:
            y = epinorm.linear_norm(
                *(x, weight, bias),
                norm=self.norm,
                norm_weight=vectors[0],
                norm_bias=vectors[1],
                pre=self.pre,
                post=self.post,
                operands=operands,
                strategy=strategy,
            )
        found = torch.autograd.grad(y, leaves, self.dy.to(y.dtype))
        return {"y": y.detach(), **{f"gradient {i}": g for i, g in enumerate(found)}}


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c[:7])))
def test_values_and_gradients_against_float64(case: Any) -> None:
    strategy, dtype, precision, m, k, n, norm, chain, p = case
    torch.set_float32_matmul_precision(precision)
    step = Step(dtype, m, k, n, norm, chain, p)
    ours, again, eager = step.run(strategy), step.run(strategy), step.run("reference")
    truth = step.run("reference", F64)
    if dtype != F64 and chain is not BEFORE:
        assert ((ours["y"] == 0) == (truth["y"] == 0)).double().mean() > 0.999
    floor = 2.0**-44 if dtype == F64 else torch.finfo(dtype).eps
    for name, exact in truth.items():
        assert torch.equal(ours[name], again[name]), name
        error, theirs = (
            float((t[name].double() - exact).norm() / exact.norm()) for t in (ours, eager)
        )
        assert error <= 1.1 * theirs + floor, f"{name}: {error:.3e}, eager {theirs:.3e}"


@pytest.mark.parametrize("precision", ["high", "highest"])
def test_rows_that_are_computed_again_have_the_same_mask(precision: str) -> None:
    """A row that planes do not hold: the range guard's kernel makes the mask once more."""
    torch.set_float32_matmul_precision(precision)
    step = Step(F32, 300, 512, 1024, GroupNorm(64), BOTH, 0.5)
    step.leaves[0][7, :8] *= 2.0**-40  # more elements than a flag lists: the whole row
    ours, truth = step.run("single")["y"], step.run("reference", F64)["y"]
    assert torch.equal(ours[7] == 0, truth[7] == 0)
    assert (ours[7].double() - truth[7]).norm() <= 1e-3 * truth[7].norm()


@pytest.mark.parametrize("strategy", ["single", "planes", "epilogue"])
def test_inference_has_the_same_mask(strategy: Any) -> None:
    """As a reentrant checkpoint needs it: its forward pass is without gradients."""
    step = Step(F32, 300, 512, 256, LayerNorm(), BOTH, 0.5)
    trained = step.run(strategy)["y"]
    with torch.no_grad():
        x, weight, bias, gamma, beta = step.leaves
        y = epinorm.linear_norm(
            *(x, weight, bias),
            norm=step.norm,
            norm_weight=gamma,
            norm_bias=beta,
            pre=step.pre,
            post=step.post,
            operands=list(step.seeds),
            strategy=strategy,
        )
    assert torch.equal(y == 0, trained == 0)
    torch.testing.assert_close(y, trained, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_as_many_are_kept_as_should_be(p: float) -> None:
    x, weight = torch.randn(8192, 64, device="cuda"), torch.randn(2048, 64, device="cuda")
    y = epinorm.linear_norm(x, weight, norm=LayerNorm(), post=f"dropout({p})")
    kept = (y != 0).double()
    for dims in ((0, 1), (0,), (1,)):
        found = kept.mean(dims)
        sigma = math.sqrt(p * (1 - p) / (kept.numel() / found.numel()))
        assert ((found - (1 - p)).abs() < 6 * sigma).all()


def test_a_graph_draws_anew_at_each_replay() -> None:
    model = LinearNorm(256, 256, norm=LayerNorm(), pre="dropout(0.5)", post="dropout(0.5)").cuda()
    x = torch.randn(300, 256, device="cuda")

    def step() -> Tensor:
        model.zero_grad()
        y = model(x)
        y.sum().backward()
        return y

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    found = []
    for _ in range(2):
        torch.cuda.manual_seed(11)
        for _ in range(2):
            graph.replay()
            found.append((y.clone(), model.norm.bias.grad.clone()))
    assert not torch.equal(found[0][0], found[1][0])
    for first, second in zip(found[:2], found[2:], strict=True):
        assert torch.equal(first[0], second[0])
        assert torch.equal(first[1], second[1])
    for y, gradient in found:  # y's zeros are those that the gradient knows of
        torch.testing.assert_close(gradient, 2 * (y != 0).float().sum(0))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_checkpointing_replays_the_mask(reentrant: bool, dtype: torch.dtype) -> None:
    model = LinearNorm(768, 768, norm=LayerNorm(), pre="dropout(0.5)", dtype=dtype, device="cuda")
    x = torch.randn(1000, 768, device="cuda", dtype=dtype, requires_grad=True)
    leaves, dy = [x, *model.parameters()], torch.randn(1000, 768, device="cuda", dtype=dtype)
    torch.manual_seed(5)
    expected = torch.autograd.grad(model(x), leaves, dy)
    torch.manual_seed(5)
    y = checkpoint(model, x, use_reentrant=reentrant)
    torch.rand(7, device="cuda")
    y.backward(dy)
    for leaf, gradient in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad, gradient)


def test_autocast_drops_with_the_same_seed() -> None:
    x, weight = torch.randn(300, 256, device="cuda"), torch.randn(256, 256, device="cuda")
    seed = torch.tensor([3], device="cuda")

    def call() -> Tensor:
        return epinorm.linear_norm(
            x, weight, norm=LayerNorm(), post="dropout(0.5)", operands=[seed]
        )

    with torch.autocast("cuda", torch.bfloat16):
        low = call()
    assert torch.equal(low == 0, call() == 0)
