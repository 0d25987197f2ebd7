"""Dropout in a chain: which values it keeps, its gradients, and where its seed comes from."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import epinorm
from epinorm import GroupNorm, LayerNorm, LinearNorm
from epinorm.chain import Chain
from epinorm.chain.dropout import draw_seeds, drop

M, K, N = 37, 24, 66


def philox(a: int, b: int, key: int) -> tuple[int, int]:
    """Philox-2x32-10 with Python's numbers."""
    for _ in range(10):
        product = 0xD256D193 * a
        a, b = (product >> 32) ^ key ^ b, product & 0xFFFFFFFF
        key = (key + 0x9E3779B9) & 0xFFFFFFFF
    return a, b


def test_philox_of_random123():
    """Its known answers (kat_vectors of Random123)."""
    assert philox(0, 0, 0) == (0xFF1DAE59, 0x6CD10DF2)
    assert philox(*[0xFFFFFFFF] * 3) == (0x2C3F628B, 0xAB4FD7AD)
    assert philox(0x243F6A88, 0x85A308D3, 0x13198A2E) == (0xDD7CE038, 0xF62A4C12)


@pytest.mark.parametrize("seed", [0, 0x7FFFFFFF_FFFFFFFE, -5])
def test_a_value_is_kept_where_its_word_is_below_the_probability(seed):
    rows, columns, p = 5, 7, 0.3
    kept = drop(torch.ones(rows, columns, dtype=torch.float64), torch.tensor([seed]), p) != 0
    key, first = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    for row in range(rows):
        for column in range(columns):
            words = philox((first + row) & 0xFFFFFFFF, column // 2, key)
            assert kept[row, column] == (words[column % 2] < (1 - p) * 2**32)


def masks(p: float, count: int, rows: int = 256, columns: int = 512) -> Tensor:
    """(count, rows, columns) of ones and zeros, as many seeds in a row."""
    ones = torch.ones(rows, columns)
    return torch.stack([drop(ones, s, p) != 0 for s in draw_seeds(count, ones.device)])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_as_many_are_kept_as_should_be(p):
    kept = masks(p, 8).double()
    for dims in ((0, 1, 2), (1, 2), (0, 2), (0, 1)):  # in all, of a seed, a row, a column
        found = kept.mean(dims)
        sigma = math.sqrt(p * (1 - p) / (kept.numel() / found.numel()))
        assert ((found - (1 - p)).abs() < 5 * sigma).all()


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_neighbours_in_rows_columns_and_seeds_are_independent(p):
    kept = masks(p, 8).double() - (1 - p)
    variance = p * (1 - p)
    for dim in range(3):
        for step in (1, 2, 3, 4):
            length = kept.shape[dim] - step
            product = kept.narrow(dim, 0, length) * kept.narrow(dim, step, length)
            sigma = variance / math.sqrt(product.numel())
            assert product.mean().abs() < 5 * sigma, (dim, step)


def test_bits_of_eight_values_are_uniform():
    """Chi-square over the bytes that p = 0.5 makes of eight columns, rows or seeds."""
    kept = masks(0.5, 16).long()
    weights = 2 ** torch.arange(8)
    for order in ((0, 1, 2), (0, 2, 1), (1, 2, 0)):
        values = kept.permute(order).reshape(-1, 8) @ weights
        expected = values.numel() / 256
        chi_square = ((torch.bincount(values, minlength=256) - expected) ** 2 / expected).sum()
        assert abs(float(chi_square) - 255) < 5 * math.sqrt(2 * 255)


def tensors(dtype: torch.dtype = torch.float32, **kw: Any) -> list[Tensor]:
    shapes = ((M, K), (N, K), (N,), (N,), (N,), (M, N))
    return [torch.randn(s, dtype=torch.float64).to(dtype).requires_grad_(**kw) for s in shapes]


def run(leaves: list[Tensor], seeds: list[Tensor], norm: Any, p: float, **kw: Any) -> Tensor:
    x, weight, bias, gamma, beta, residual = leaves
    return epinorm.linear_norm(
        *(x, weight, bias),
        norm=norm,
        norm_weight=gamma,
        norm_bias=beta,
        pre=f"dropout({p})|add_residual",
        post="tanh|dropout(0.25)",
        operands=[seeds[0], residual, seeds[1]],
        **kw,
    )


def gradients(y: Tensor, leaves: list[Tensor], dy: Tensor) -> list[Tensor]:
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("norm", [LayerNorm(), GroupNorm(6)], ids=str)
@pytest.mark.parametrize("rounding", ["once", "eager"])
def test_values_and_gradients_against_float64(dtype, norm, rounding):
    """By the CPU's kernels, for several p: as near as eager's layers with the same mask."""
    leaves, dy = tensors(dtype), torch.randn(M, N, dtype=torch.float64).to(dtype)
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    for p in (0.1, 0.5, 0.9):
        seeds = list(draw_seeds(2, dy.device))
        ours, eager, truth = (
            gradients(run(given, seeds, norm, p, rounding=rounding, strategy=by), given, dy)
            for given, by in ((leaves, "cpu"), (leaves, "reference"), (doubles, "reference"))
        )
        assert torch.equal(ours[0] == 0, truth[0] == 0)
        floor = 2.0**-45 if dtype == torch.float64 else torch.finfo(dtype).eps
        for a, b, exact in zip(ours, eager, truth, strict=True):
            error, allowed = ((t.double() - exact).norm() / exact.norm() for t in (a, b))
            assert error <= 1.1 * allowed + floor, (p, float(error), float(allowed))


@pytest.mark.parametrize("by", ["cpu", "reference"])
def test_probabilities_at_the_ends(by):
    x, weight = torch.randn(M, K), torch.randn(N, K)

    def post(text: str) -> Tensor:
        return epinorm.linear_norm(x, weight, norm=LayerNorm(), post=text, strategy=by)

    assert torch.equal(post("dropout(0)"), post("identity"))
    assert torch.equal(post("dropout(1)"), torch.zeros(M, N))
    x[3, 4] = math.nan
    assert torch.equal(post("dropout(1)").isnan().any(1), torch.arange(M) == 3)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_is_multiplied_as_by_pytorch(value):
    x = torch.full((4, 64), value)
    assert drop(x, torch.tensor([1]), 0.5).isnan().sum() == (
        256 if math.isnan(value) else (drop(torch.ones(4, 64), torch.tensor([1]), 0.5) == 0).sum()
    )
    assert F.dropout(x, 0.5)[F.dropout(torch.ones(1000), 0.5)[:4] > -1].isnan().any()


def test_fp32_scales_as_pytorch_does():
    for p in (0.1, 0.3, 0.9, 0.999):
        x = torch.randn(10_000)
        theirs = F.dropout(x, p)
        ours = drop(x, torch.tensor([7]), p)
        both = (ours != 0) & (theirs != 0)
        assert torch.equal(ours[both], theirs[both])


def test_seeds_come_from_pytorchs_generator():
    x, weight = torch.randn(M, K), torch.randn(N, K)

    def call() -> Tensor:
        return epinorm.linear_norm(x, weight, norm=LayerNorm(), post="dropout(0.5)")

    torch.manual_seed(3)
    first, second = call(), call()
    torch.manual_seed(3)
    assert torch.equal(call(), first)
    assert torch.equal(call(), second)
    assert not torch.equal(first, second)
    state = torch.get_rng_state()
    with torch.random.fork_rng():
        call()
    assert torch.equal(torch.get_rng_state(), state)


def test_two_dropouts_of_a_chain_have_seeds_of_their_own():
    x, weight = torch.randn(512, K), torch.randn(N, K)
    y = epinorm.linear(x, weight, post="dropout(0.5)|dropout(0.5)")
    assert abs((y != 0).double().mean() - 0.25) < 0.02


def test_leading_dimensions_are_folded_to_rows():
    x, weight = torch.randn(3, 5, K), torch.randn(N, K)
    seed = torch.tensor([11])

    def call(x: Tensor) -> Tensor:
        return epinorm.linear_norm(
            x, weight, norm=LayerNorm(), post="dropout(0.5)", operands=[seed]
        )

    for _ in range(2):  # the second goes the short way
        assert torch.equal(call(x).view(15, N), call(x.view(15, K)))


@pytest.mark.parametrize("seed", [torch.tensor([1, 2]), torch.tensor([1.0]), torch.tensor(1)])
def test_what_is_no_seed_is_an_error(seed):
    with pytest.raises(RuntimeError, match="operand 0, a seed, must be"):
        epinorm.linear(torch.randn(2, K), torch.randn(N, K), post="dropout(0.5)", operands=[seed])


@pytest.mark.parametrize("p", [-0.1, 1.5])
def test_what_is_no_probability_is_pytorchs_error(p):
    with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1, but got"):
        Chain.parse(f"dropout({p})")


def test_a_module_in_eval_mode_does_not_drop():
    x, weight, dropout = torch.randn(M, K), torch.randn(N, K), nn.Dropout(0.5)

    def zeros() -> float:
        facts: Any = {"norm": LayerNorm(), "post": ["gelu", dropout], "strategy": "reference"}
        y = epinorm.linear_norm(x, weight, **facts)
        return float((y == 0).double().mean())

    assert zeros() > 0.4
    dropout.eval()
    assert zeros() == 0
    dropout.train()
    dropout.p = 0.9
    assert zeros() > 0.85


@pytest.mark.parametrize("made", ["as it is", "deepcopy", "pickle"])
@pytest.mark.parametrize("given", [nn.Dropout(0.5), nn.Dropout(0.5).eval(), "dropout(0.5)"])
def test_linear_norm_drops_while_it_trains(made, given):
    """Also what was copied in eval mode."""
    model = LinearNorm(K, N, norm=LayerNorm(), post=[given]).eval()
    if made == "deepcopy":
        model = copy.deepcopy(model)
    if made == "pickle":
        model = pickle.loads(pickle.dumps(model))
    x = torch.randn(M, K)
    for mode, drops in ((False, False), (True, True), (False, False), (True, True)):
        y = model.train(mode)(x)
        assert ((y == 0).double().mean() > 0.4) == drops


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_replays_the_mask(reentrant):
    model = LinearNorm(K, N, norm=LayerNorm(), pre="dropout(0.5)", post="dropout(0.5)").double()
    x = torch.randn(M, K, dtype=torch.float64, requires_grad=True)
    leaves, dy = [x, *model.parameters()], torch.randn(M, N, dtype=torch.float64)
    torch.manual_seed(5)
    expected = torch.autograd.grad(model(x), leaves, dy)
    torch.manual_seed(5)
    y = checkpoint(model, x, use_reentrant=reentrant)
    torch.rand(7)  # what else draws before the backward pass
    y.backward(dy)
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert torch.equal(leaf.grad, gradient)


def test_the_operators_pass_opcheck():
    x, weight, bias, gamma, beta, residual = tensors(torch.float64)
    seeds, chain = [torch.tensor([5]), torch.tensor([6])], "dropout(0.5)|layer_norm|dropout(0.1)"
    arguments = (x, weight, bias, gamma, beta, seeds, chain, "auto", False, None)
    torch.library.opcheck(torch.ops.epinorm.linear_norm.default, arguments)
    detached = (t.detach() for t in (x, weight, bias, gamma, beta))
    arguments = (*detached, *arguments[5:])
    torch.library.opcheck(torch.ops.epinorm.linear_norm_forward.default, arguments)
    kept = torch.ops.epinorm.linear_norm_forward(*arguments)[1:]
    wanted = [True] * 5 + [False, False]
    backward = (residual.detach(), *arguments[:6], *kept, *arguments[6:], wanted)
    torch.library.opcheck(torch.ops.epinorm.linear_norm_backward.default, backward)


def test_gradients_of_any_order():
    leaves = tensors(torch.float64)[:3]
    seeds = [torch.tensor([9]), torch.tensor([8])]
    sides: Any = {"pre": "dropout(0.3)", "post": "dropout(0.1)"}

    def call(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return epinorm.linear_norm(*(x, weight, bias), norm=GroupNorm(2), **sides, operands=seeds)

    x, weight, bias = leaves
    small = [t.detach().requires_grad_() for t in (x[:3, :4], weight[:6, :4], bias[:6])]
    assert torch.autograd.gradcheck(call, small)
    assert torch.autograd.gradgradcheck(call, small)


def test_torch_func():
    x, weight, seed = torch.randn(M, K), torch.randn(N, K), torch.tensor([9])

    def loss(weight: Tensor, x: Tensor, *given: Tensor) -> Tensor:
        y = epinorm.linear_norm(x, weight, norm=LayerNorm(), post="dropout(0.5)", operands=given)
        return y.square().sum()

    leaf = weight.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf, x, seed), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(weight, x, seed), expected)
    samples = torch.func.vmap(loss, (None, 0), randomness="different")(weight, x.unsqueeze(1))
    assert samples.shape == (M,)
    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(loss, (None, 0))(weight, x.unsqueeze(1))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_torch_compile_has_one_mask_for_both_passes():
    model = LinearNorm(K, N, norm=LayerNorm(), post="dropout(0.5)")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(M, K)
    for _ in range(2):
        y = compiled(x)
        kept = (y != 0).float()
        assert 0.4 < kept.mean() < 0.6
        model.zero_grad()
        y.backward(torch.ones_like(y))
        torch.testing.assert_close(model.norm.bias.grad, 2 * kept.sum(0))
    assert not torch.equal(compiled(x), y)


@pytest.mark.parametrize("pre", ["dropout(0.3)|add_residual", "gelu|dropout(0.3)"])
def test_what_enters_the_norm_as_a_second_result(pre):
    """A pre-norm residual stream: the mask is the same where backward begins at it."""
    leaves, seed = tensors(), torch.tensor([77])
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    dy, ds = torch.randn(M, N), torch.randn(M, N)
    found = []
    for given, by in ((leaves, "cpu"), (leaves, "reference"), (doubles, "reference")):
        results = epinorm.linear_norm(
            *given[:3],
            norm=LayerNorm(),
            norm_weight=given[3],
            norm_bias=given[4],
            pre=pre,
            operands=[seed, *given[5:]][: 1 + ("residual" in pre)],
            return_sum=True,
            strategy=by,
        )
        wanted = given if "residual" in pre else given[:5]
        weights = [t.to(given[0].dtype) for t in (dy, ds)]
        found.append(
            [*(t.detach() for t in results), *torch.autograd.grad(results, wanted, weights)]
        )
    for ours, eager, exact in zip(*found, strict=True):
        error, allowed = (float((t.double() - exact).norm() / exact.norm()) for t in (ours, eager))
        assert error <= 1.1 * allowed + torch.finfo(torch.float32).eps
