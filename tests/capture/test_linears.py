"""Linears without a norm: taken with what follows them where the plan says so, else left alone."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epinorm

K, N, ROWS = 12, 16, 5


class Gated(nn.Module):
    """q, k and v of one tensor, and a gated feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(K)
        self.q, self.k, self.v = (nn.Linear(K, N, bias=i > 0) for i in range(3))
        self.o = nn.Linear(N, K, bias=False)
        self.gate, self.up = nn.Linear(K, N, bias=False), nn.Linear(K, N, bias=False)
        self.down = nn.Linear(N, K, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (layer(h).unflatten(-1, (4, -1)) for layer in (self.q, self.k, self.v))
        h = x + self.o(F.scaled_dot_product_attention(q, k, v).flatten(-2))
        return h + self.down(F.silu(self.gate(h)) * self.up(h))


class Classifier(nn.Module):
    """Activations in place, a weight used twice, a frozen one, and views between."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(K, K), nn.Linear(K, K, bias=False)
        self.frozen, self.head = nn.Linear(K, N).requires_grad_(False), nn.Linear(N, 3)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.a(x), inplace=True)
        h = F.gelu(self.b(h).reshape(-1, K)) * 2
        return F.linear(self.frozen(h).tanh(), self.head.weight) + self.head.bias


class Turned(nn.Module):
    """Weights kept as (in, out), as GPT2 does, with and without a norm behind."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(K, N)), nn.Parameter(torch.randn(N, N))
        self.bias, self.norm = nn.Parameter(torch.randn(N)), nn.LayerNorm(N)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.addmm(self.bias, x.view(-1, K), self.a).view(*x.shape[:-1], N)
        return self.norm(h @ self.b) + (h @ self.b - self.bias).relu()


class Changing(nn.Module):
    """What stands between the Linear and what would follow it changes what takes part."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.after = nn.Linear(K, N), nn.Linear(N, N)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.fc(x)
        x.add_(1)
        y = torch.relu(h)
        z = y + self.after(torch.tanh(y))
        y.mul_(2)
        return x, y, z * 3


CHAINS = {
    Gated: [
        *("identity",) * 3,
        "add_residual",
        "silu|mul_element",
        "identity",
        "add_residual",
    ],
    Classifier: ["relu", "gelu|scale(2)", "tanh", "identity"],
    Turned: ["identity", "sub_channel|relu"],
}


def pair(make: type[nn.Module], strategy: str = "reference") -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = make()
    return model, epinorm.fuse(copy.deepcopy(model), strategy=strategy)  # type: ignore[arg-type]


def gradients(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    x = x.clone().requires_grad_()
    y = model(x.clone())
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("make", CHAINS)
def test_each_is_taken_with_what_follows_it(make: type[nn.Module]) -> None:
    model, fused = pair(make)
    for rows in (ROWS, 3, 7):  # a size that changes, then one that Dynamo has no number for
        x = torch.randn(2, rows, K)
        for p in (*model.parameters(), *fused.parameters()):
            p.grad = None
        for ours, eagers in zip(gradients(fused, x), gradients(model, x), strict=True):
            assert (ours is None) == (eagers is None)
            if ours is not None:
                torch.testing.assert_close(ours, eagers)
    explained = epinorm.explain(fused)
    assert [row.chain for row in explained.linears] == CHAINS[make]
    assert all(row.fused and row.strategy == "reference" for row in explained.linears)
    assert all(row.fused for row in explained.rows)


def test_a_weight_kept_as_in_out_is_left_alone_in_16_bit() -> None:
    model, fused = pair(Turned)
    x = torch.randn(2, ROWS, K).bfloat16()
    torch.testing.assert_close(fused.bfloat16()(x), model.bfloat16()(x), rtol=0, atol=0)
    assert all("kept as (in, out)" in row.reason for row in epinorm.explain(fused).linears)


def test_what_changes_in_place_stays_where_it_is() -> None:
    model, fused = pair(Changing)
    x = torch.randn(ROWS, K)
    with torch.no_grad():
        for ours, eagers in zip(fused(x.clone()), model(x.clone()), strict=True):
            torch.testing.assert_close(ours, eagers)
    first, second = epinorm.explain(fused).linears
    assert not first.fused
    assert "add_ changes a tensor in place that takes part in it" in first.reason
    assert (second.fused, second.chain) == (True, "identity")


def test_on_the_cpu_they_stay_as_they_are() -> None:
    model, fused = pair(Gated, "auto")
    x = torch.randn(2, ROWS, K)
    torch.testing.assert_close(fused(x), model(x), rtol=0, atol=0)
    explained = epinorm.explain(fused)
    assert len(explained.linears) == 7
    assert not any(row.fused for row in explained.linears)
    line = "7 Linears without a norm by layers: without a norm, PyTorch's product and its operat"
    assert line in " ".join(str(explained).split())
    assert [row["where"] for row in json.loads(explained.to_json())["linears"]] == [
        row.where for row in explained.linears
    ]
    assert line in explained._repr_html_().replace("&#x27;", "'")


def test_they_follow_their_plan_under_a_name_that_norms_have() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm, self.head = nn.Linear(K, N), nn.LayerNorm(N), nn.Linear(N, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.fc(x)))

    model, fused = pair(Both, "cpu")  # no kernel of the CPU serves a Linear alone
    epinorm.fuse(fused, strategy="cpu", strict=True)
    x = torch.randn(ROWS, K)
    torch.testing.assert_close(fused(x), model(x))
    explained = epinorm.explain(fused)
    assert [row.fused for row in (*explained.rows, *explained.linears)] == [True, False]


class Batch(nn.Module):
    """BatchNorm behind a Linear, behind an operation, and behind no Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(K, N), nn.Linear(N, N, bias=False)
        self.first = nn.BatchNorm1d(K)
        self.na, self.nb = nn.BatchNorm1d(N), nn.BatchNorm1d(N, affine=False, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return self.nb(self.b(self.na(self.a(self.first(x))).relu()).tanh())


def test_batch_norm_by_running_statistics_is_of_the_chain() -> None:
    """The statistics are read at each call; in training they are changed, and not read."""
    model, fused = pair(Batch)
    for training in (False, True, False):
        for m in (model, fused):
            m.train(training)
            for p in m.parameters():
                p.grad = None
        x = torch.randn(ROWS, K) * 2 + 1
        for ours, eagers in zip(gradients(fused, x), gradients(model, x), strict=True):
            torch.testing.assert_close(ours, eagers, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(dict(fused.state_dict()), dict(model.state_dict()))
    rows = epinorm.explain(fused).rows
    chains = ["mul_channel|add_channel|relu", "tanh|mul_channel|add_channel"]
    in_training = ["batch_norm(1e-05)|relu", "tanh|batch_norm(0.001)"]
    assert [row.chain for row in rows] == chains + in_training
    assert [row.where for row in rows if row.fused] == ["a → na", "b → nb"] * 2


def test_batch_norm_stays_where_its_chain_does_not_pay() -> None:
    model, fused = pair(Batch, "auto")
    x = torch.randn(ROWS, K)
    torch.testing.assert_close(fused.eval()(x), model.eval()(x), rtol=0, atol=0)
    assert [row.fused for row in epinorm.explain(fused).rows] == [False, False]
