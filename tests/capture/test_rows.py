"""Heads that are normalised by themselves, rows in another order, numbers of whole rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epinorm
from epinorm import LayerNorm, RMSNorm
from epinorm.tools.accuracy import allowed_error, relative_error

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

HEADS, WIDTH = 4, 16


class Heads(nn.Module):
    """q or k: a projection, heads, a norm of each by one weight, and the heads in front."""

    def __init__(self, norm: Callable[..., Tensor], shape: tuple[int, ...] = (WIDTH,)) -> None:
        super().__init__()
        self.q, self.norm = nn.Linear(32, HEADS * WIDTH), norm
        self.weight, self.bias = (nn.Parameter(torch.randn(shape)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.q(x).view(*x.shape[:-1], HEADS, WIDTH), self.weight, self.bias)


def as_layers(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(h, h.shape[-1:], weight, bias).transpose(1, 2) * 0.25


def as_rms(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.rms_norm(h, h.shape[-1:], weight, 1e-6).transpose(1, 2) + bias


def by_hand(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    h = h.transpose(1, 2)  # as Gemma 3 does
    y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
    return (y * (1 + weight)).type_as(h)


def of_own_weights(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Cohere's and Chameleon's heads have a weight each."""
    mean = h.mean(-1, keepdim=True)
    h = (h - mean) * torch.rsqrt((h - mean).square().mean(-1, keepdim=True) + 1e-5)
    return (h * weight + bias).flatten(-2)


def check(
    model: nn.Module, x: Tensor, chains: Sequence[str], strategy: Any = "cpu", seed: int = 0
) -> None:
    """Fused as these chains; values and gradients as near to float64 as eager's."""
    fused = epinorm.fuse(copy.deepcopy(model), strategy=strategy)
    exact = copy.deepcopy(model).double()
    results: list[list[Tensor]] = []
    dy = None
    for m, given in ((fused, x), (model, x), (exact, x.double())):
        given = given.clone().requires_grad_()
        torch.manual_seed(seed)
        y = m(given)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)) if dy is None else dy
        y.backward(dy.to(y))
        trained = [p.grad for p in m.parameters() if p.grad is not None]
        results.append([y.detach(), given.grad, *trained])  # type: ignore[list-item]
    assert results[0][0].stride() == results[1][0].stride()
    assert [row.chain for row in epinorm.explain(fused).rows if row.fused] == [*chains]
    for ours, theirs, truth in zip(*results, strict=True):
        allowed = allowed_error(relative_error(theirs, truth), theirs.dtype)
        assert relative_error(ours, truth) <= allowed


@pytest.mark.parametrize(
    ("norm", "shape", "chain"),
    [
        (as_layers, (WIDTH,), "layer_norm(4,1e-05)|scale(0.25)"),
        (as_rms, (WIDTH,), "rms_norm(4,1e-06)"),
        (by_hand, (WIDTH,), "rms_norm(4,1e-06)"),
        (of_own_weights, (HEADS, WIDTH), "layer_norm(4,1e-05)"),
    ],
)
@pytest.mark.parametrize("strategy", ["cpu", "reference"])
def test_heads_are_normalised_in_the_chain(norm, shape, chain, strategy):
    check(Heads(norm, shape), torch.randn(3, 50, 32), [chain], strategy)


def test_heads_that_look_like_rows_once_turned():
    """(B, H, L, D) with as many rows as heads: what is put together behind is no row."""

    def mixed(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        rows = h.transpose(1, 2).flatten(2)  # of one head
        return F.layer_norm(rows, rows.shape[-1:])

    model, x = Heads(mixed), torch.randn(2, HEADS, 32)
    fused = epinorm.fuse(copy.deepcopy(model), strategy="cpu")
    torch.testing.assert_close(fused(x), model(x), rtol=0, atol=0)
    (row,) = epinorm.explain(fused).rows
    assert not row.fused
    assert "flatten" in row.reason


def attended(h: Tensor) -> Tensor:
    y = F.scaled_dot_product_attention(h, h, h)
    return y.transpose(1, 2).reshape(y.shape[0], -1, HEADS * WIDTH) * 2


def rotated(h: Tensor) -> Tensor:
    turned = torch.cat((-h[..., WIDTH // 2 :], h[..., : WIDTH // 2]), -1)
    return attended(h * 0.6 + turned * 0.8)


TURNED_FIRST: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "attention": (attended, True),
    "rotary": (rotated, True),
    "split": (lambda h: torch.cat([part.exp() for part in h.split(1, 1)], 1), True),
    "returned": (lambda h: h, False),
    "elementwise": (torch.exp, False),
    "a view": (lambda h: h.view(-1, WIDTH) + 1, False),
    "changed in place": (lambda h: h.flatten(1, 2).mul_(2).sum((1, 2)) + h.sum((1, 2, 3)), False),
    "changed as a copy": (lambda h: h.transpose(1, 2).flatten(2).mul_(2) + h[:, 0, :, :1], False),
}


@pytest.mark.parametrize("case", TURNED_FIRST)
def test_heads_turned_before_their_norm_are_fused_where_no_reader_sees_it(case):
    """timm, diffusers: PyTorch's norm of turned heads is contiguous, a chain's result a view."""
    reads, is_served = TURNED_FIRST[case]

    def norm(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return reads(F.layer_norm(h.transpose(1, 2), (WIDTH,), weight, bias))

    model, x = Heads(norm).double(), torch.randn(2, 5, 32).double()
    check(model, x, ["layer_norm(4,1e-05)"] * is_served)
    if not is_served:
        (row,) = epinorm.explain(model, x).rows
        assert "turned behind the norm they are served" in row.reason


class Windows(nn.Module):
    """Swin's: windows of an image, a projection, the image again, rolled and cut, a sum, a norm."""

    def __init__(self, k: int = 16, n: int = 16, drop: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.proj, self.norm, self.drop = nn.Linear(k, n), nn.LayerNorm(n), drop

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, k = x.shape
        rows = (
            F.pad(x, (0, 0, 0, 4 - w % 4, 0, 4 - h % 4)).unflatten(2, (-1, 4)).unflatten(1, (-1, 4))
        )
        y = self.proj(rows.transpose(2, 3).reshape(-1, 16, k))
        y = y.view(b, -1, (w + 4) // 4, 4, 4, y.shape[-1]).permute(0, 1, 3, 2, 4, 5)
        y = torch.roll(y.reshape(b, (h + 4) // 4 * 4, -1, y.shape[-1]), (1, 2), dims=(1, 2))
        y = y[:, :h, :w, :].contiguous()
        y = x[..., : y.shape[-1]] + (y if self.drop is None else self.drop(y, self.training))
        return y + F.gelu(self.norm(y))


SUM = "add_residual|layer_norm(1e-05)|gelu|returns(sum)"


@pytest.mark.parametrize("strategy", ["cpu", "reference"])
def test_windows_are_put_back_before_the_projection(strategy):
    check(Windows(), torch.randn(2, 7, 10, 16), [SUM], strategy)


def test_wider_rows_are_not_turned_first():
    model, x = Windows(k=32), torch.randn(2, 7, 10, 32)
    fused = epinorm.fuse(copy.deepcopy(model), strategy="cpu")
    torch.testing.assert_close(fused(x), model(x), rtol=0, atol=0)
    (row,) = epinorm.explain(fused).rows
    assert "permute puts its rows in another order" in row.reason


@pytest.mark.parametrize(
    ("view", "k", "fused"),
    [
        (lambda h: h.squeeze(), 1, False),
        (lambda h: h.squeeze(1), 4, True),
        (lambda h: h.flatten(-2, -1), 4, True),
        (lambda h: h.unflatten(-1, (1, 8)), 4, False),
        (lambda h: h.unflatten(0, (1, 3)), 4, True),
    ],
)
def test_rows_are_moved_behind_views_that_rows_of_x_have_too(view, k, fused):
    class Moved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm = nn.Linear(k, 8), nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(view(self.fc(x)).roll(1, 0))

    chains = ["layer_norm(1e-05)"] * fused
    check(Moved(), torch.randn(3, 1, k), chains, "reference")


def test_a_view_by_dtype_gives_no_gradients_behind_a_norm_either():
    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm, self.head = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.fc(x).view(torch.float32)))

    model = Viewed()
    fused = epinorm.fuse(copy.deepcopy(model), strategy="reference")
    x, given = torch.randn(3, 4), []
    for each in (model, fused):
        each(x).sum().backward()
        given.append([name for name, p in each.named_parameters() if p.grad is not None])
    assert given[0] == given[1] == ["norm.weight", "norm.bias", "head.weight", "head.bias"]


def of_timm(y: Tensor, training: bool) -> Tensor:
    mask = y.new_empty((len(y),) + (1,) * (y.dim() - 1)).bernoulli_(0.6)
    return y * mask.div_(0.6) if training else y


def of_torchvision(y: Tensor, training: bool) -> Tensor:
    noise = torch.empty([len(y)] + [1] * (y.dim() - 1), dtype=y.dtype, device=y.device)
    return y * noise.bernoulli_(0.6).div_(0.6) if training else y


def of_transformers(y: Tensor, training: bool) -> Tensor:
    mask = 0.6 + torch.rand((len(y),) + (1,) * (y.dim() - 1), dtype=y.dtype, device=y.device)
    return y.div(0.6) * mask.floor_() if training else y


def of_tokens(y: Tensor, training: bool) -> Tensor:
    """One number for each row, whose scale is learnt elsewhere."""
    return y * torch.linspace(0.5, 2, y.shape[-2], dtype=y.dtype)[:, None].expand(*y.shape[:-1], 1)


@pytest.mark.parametrize("drop", [of_timm, of_torchvision, of_transformers, of_tokens])
def test_numbers_of_samples_and_rows_are_read_in_the_chain(drop):
    scale = f"scale({1 / 0.6!r})|" if drop is of_transformers else ""
    check(Windows(drop=drop), torch.randn(6, 7, 10, 16), [f"{scale}mul_row|{SUM}"], seed=3)


def test_masks_are_those_of_eager():
    model, x = Windows(drop=of_timm), torch.randn(64, 3, 4, 16)
    fused = epinorm.fuse(copy.deepcopy(model), strategy="cpu")
    for _ in range(3):
        state = torch.get_rng_state()
        expected = model(x)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        torch.testing.assert_close(fused(x), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(torch.get_rng_state(), after)


class Gated(nn.Module):
    """A diffusion transformer's block: the gate is a row for each sample."""

    def __init__(self, join: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.gate, self.join = nn.Linear(16, 16), nn.Linear(16, 16), join
        self.position, self.norm = nn.Parameter(torch.randn(5, 16)), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x.mean(1)).sin()
        y = self.join(self.fc(x), gate.unsqueeze(1), self.position)
        return self.norm(y) * (1 + gate.unsqueeze(1)) + y


GATES: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], str]] = {
    "of samples": (lambda y, gate, position: 0.5 * y * gate, "scale(0.5)|mul_element"),
    "of samples, first": (lambda y, gate, position: gate * y, "mul_element"),
    "of positions": (lambda y, gate, position: y + position, "add_residual"),
    "of positions, then viewed": (
        lambda y, gate, position: (y + position[None]).flatten(0, 1).unflatten(0, (-1, 5)),
        "add_residual",
    ),
    "of both": (
        lambda y, gate, position: y * gate + position + gate,
        "mul_element|add_residual|add_residual",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", GATES)
@pytest.mark.parametrize("strategy", ["cpu", "reference"])
def test_rows_of_samples_and_positions_are_expanded(case, strategy):
    join, pre = GATES[case]
    chain = f"{pre}|{LayerNorm()}|returns(sum)"
    model = Gated(join)
    fused = epinorm.fuse(copy.deepcopy(model).double(), strategy=strategy)
    model.double()
    with torch.no_grad():
        for samples in (3, 1, 7):  # of one sample its gate is a vector of channels
            x = torch.randn(samples, 5, 16, dtype=torch.float64)
            torch.testing.assert_close(fused(x), model(x))
    assert chain in [row.chain for row in epinorm.explain(fused).rows if row.fused]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["cpu", "reference"])
def test_in_training_rows_that_multiply_are_left(strategy):
    """Backward would keep them expanded, which eager does not; of those that are added, nothing."""
    for case, (join, pre) in GATES.items():
        chains = [] if "mul" in pre else [f"{pre}|{LayerNorm()}|returns(sum)"]
        check(Gated(join), torch.randn(3, 5, 16), chains, strategy)
        fused = epinorm.fuse(Gated(join), strategy=strategy)
        fused(torch.randn(3, 5, 16))
        told = [
            row.reason for row in epinorm.explain(fused).rows if "in inference alone" in row.reason
        ]
        assert bool(told) == ("mul" in pre), case


def test_rows_are_not_expanded_beyond_those_of_the_linear():
    """What broadcasts the Linear's result, and what stands behind the norm."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.fc(x.mean(1, keepdim=True)) + x)

    model, x = Wide(), torch.randn(3, 5, 16)
    fused = epinorm.fuse(copy.deepcopy(model), strategy="cpu")
    torch.testing.assert_close(fused(x), model(x), rtol=0, atol=0)
    (row,) = epinorm.explain(fused).rows
    assert "operands are not broadcast" in row.reason


def test_transposed_rows_are_not_expanded():
    """Of these a sum has the layout."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

        def forward(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
            h = position + self.fc(x)
            return self.norm(h), h

    model, x, position = Positions(), torch.randn(3, 5, 16), torch.randn(16, 5).t()
    fused = epinorm.fuse(copy.deepcopy(model), strategy="reference")
    with torch.no_grad():
        for ours, theirs in zip(fused(x, position), model(x, position), strict=True):
            torch.testing.assert_close(ours, theirs)
            assert ours.stride() == theirs.stride()
    assert "operands are not broadcast" in epinorm.explain(fused).rows[0].reason


def test_groups_of_rows_that_a_view_makes():
    """RWKV's and RetNet's, of tokens."""

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm = nn.Linear(16, 16), nn.GroupNorm(4, 16)

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x) + x
            return self.norm(y.flatten(0, 1)).view(x.shape) * y

    check(Tokens(), torch.randn(3, 5, 16), ["add_residual|group_norm(4,1e-05)|returns(sum)"], "cpu")


def test_a_number_that_is_trained_stays_pytorchs():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm = nn.Linear(8, 16), nn.LayerNorm(16)
            self.scale = nn.Parameter(torch.randn(4, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.fc(x) * self.scale)

    model, x = Scaled(), torch.randn(4, 5, 8)
    fused = epinorm.fuse(copy.deepcopy(model), strategy="cpu")
    for m in (model, fused):
        m(x).square().sum().backward()
    torch.testing.assert_close(fused.scale.grad, model.scale.grad)
    (row,) = epinorm.explain(fused).rows
    assert not row.fused


NORMS = [LayerNorm(num_groups=4), RMSNorm(eps=1e-6, num_groups=8), RMSNorm(num_groups=2)]


@pytest.mark.parametrize("norm", NORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_operation_by_itself(norm, dtype):
    """Values and gradients of norms of parts and of numbers of rows, against float64."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(dtype)

    x, weight, residual, dy = draw(7, 9, 24), draw(64, 24) / 5, draw(7, 9, 64), draw(7, 9, 64)
    vectors, rows = [draw(64) for _ in range(3)], draw(7, 9, 1)

    def run(strategy: Any, to: torch.dtype) -> list[Tensor]:
        leaves = [t.to(to).requires_grad_() for t in (x, weight, *vectors, residual)]
        a, w, bias, gamma, beta, added = leaves
        y = epinorm.linear_norm(
            *(a, w, bias),
            **{"norm": norm, "norm_weight": gamma, "norm_bias": beta},
            pre="mul_row|add_residual",
            post="silu",
            operands=[rows.to(to), added],
            strategy=strategy,
        )
        return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(to))]

    truth = run("reference", torch.float64)
    for ours, theirs, exact in zip(run("cpu", dtype), run("reference", dtype), truth, strict=True):
        allowed = allowed_error(relative_error(theirs, exact), dtype)
        assert relative_error(ours, exact) <= allowed


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_no_rows(norm):
    x, weight = torch.randn(2, 0, 24), torch.randn(64, 24, requires_grad=True)
    for strategy in ("auto", "reference"):
        y = epinorm.linear_norm(x, weight, norm=norm, strategy=strategy)
        with torch.no_grad():
            assert epinorm.linear_norm(x, weight, norm=norm, strategy=strategy).shape == y.shape
        assert y.shape == (2, 0, 64)
        (found,) = torch.autograd.grad(y.sum(), weight)
        assert torch.equal(found, torch.zeros(64, 24))


def test_what_is_wrong_with_numbers_of_rows_is_said():
    x, weight = torch.randn(4, 8), torch.randn(16, 8)
    facts: Any = {"norm": LayerNorm(), "pre": "mul_row"}
    with pytest.raises(RuntimeError, match=r"operand 0 must have shape \[4, 1\]"):
        epinorm.linear_norm(x, weight, operands=[torch.randn(4)], **facts)
    with pytest.raises(RuntimeError, match=r"one value per row of the output, \[2, 2, 1\]"):
        epinorm.linear_norm(x.view(2, 2, 8), weight, operands=[torch.randn(4, 1)], **facts)
    asking = torch.randn(4, 1, requires_grad=True)
    with pytest.raises(ValueError, match="mul_row, one value a row, must not ask for a gradient"):
        epinorm.linear_norm(x, weight, operands=[asking], **facts)

    def total(numbers: Tensor) -> Tensor:
        return epinorm.linear_norm(x, weight, operands=[numbers], strategy="cpu", **facts).sum()

    with pytest.raises(ValueError, match="mul_row, one value a row, must not ask for a gradient"):
        torch.func.grad(total)(torch.randn(4, 1))
    with pytest.raises(RuntimeError, match="divisible by num_groups"):
        epinorm.linear_norm(x, weight, norm=LayerNorm(num_groups=3))
    with pytest.raises(ValueError, match="torch.nn has no layer"):
        epinorm.LinearNorm(8, 16, norm=RMSNorm(num_groups=4))
