"""What PyTorch takes, we take; what nobody takes is told in one sentence."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epinorm

K, N = 12, 16
RARE: dict[str, Any] = {
    "sparse": lambda: torch.randn(9, K).relu().to_sparse(),
    "csr": lambda: torch.randn(9, K).relu().to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(3, K), torch.randn(5, K)]),
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.randn(3, K), torch.randn(5, K)], layout=torch.jagged
    ),
}


def dense(t: Tensor) -> Tensor:
    return torch.cat(list(t.unbind())) if t.is_nested else t


@pytest.mark.filterwarnings("ignore:epinorm", "ignore:.*prototype", "ignore:Sparse CSR")
@pytest.mark.parametrize("first", ["rare", "dense"])
@pytest.mark.parametrize("kind", RARE)
def test_other_layouts_are_computed_as_pytorch_computes_them(kind: str, first: str) -> None:
    """Behind calls of dense tensors too, with which a nested one cannot be compared."""
    torch.manual_seed(0)
    x = RARE[kind]()
    fc, norm = nn.Linear(K, N), nn.LayerNorm(N)
    model = nn.Sequential(fc, norm, nn.GELU())
    fused = epinorm.fuse(copy.deepcopy(model))

    def function(x: Tensor) -> Tensor:
        return epinorm.linear_norm(
            *(x, fc.weight, fc.bias),
            norm=epinorm.LayerNorm(),
            norm_weight=norm.weight,
            norm_bias=norm.bias,
            post="gelu",
        )

    if first == "dense":
        for rows in (5, 7, 7):
            plain = torch.randn(rows, K)
            torch.testing.assert_close(fused(plain), model(plain))
            torch.testing.assert_close(function(plain), model(plain))
    expected = dense(model(x))
    for _ in range(2):
        assert torch.equal(dense(fused(x)), expected)
        assert torch.equal(dense(function(x)), expected)
    with pytest.raises(RuntimeError, match="computed by PyTorch's own layers alone"):
        epinorm.linear_norm(x, fc.weight, norm=epinorm.LayerNorm(), strict=True)


def test_a_sparse_weight() -> None:
    x, weight = torch.randn(9, K), torch.randn(N, K).relu().to_sparse()
    found = epinorm.linear_norm(x, weight, norm=epinorm.LayerNorm())
    assert torch.equal(found, F.layer_norm(F.linear(x, weight), (N,)))


@pytest.mark.parametrize("make", [nn.LayerNorm, lambda n, eps: nn.GroupNorm(4, n, eps)])
@pytest.mark.parametrize("eps", [torch.tensor(1e-3), -0.5, float("nan"), 0], ids=str)
def test_any_eps_of_a_model_does_what_it_does_in_eager(eps: Any, make: Any) -> None:
    model = nn.Sequential(nn.Linear(K, N), make(N, eps=eps))
    fused, x = epinorm.fuse(copy.deepcopy(model)), torch.randn(9, K)
    torch.testing.assert_close(fused(x), model(x), equal_nan=True)
    if isinstance(eps, Tensor):
        for one in (model, fused):
            one[1].eps.fill_(2.0)  # type: ignore[union-attr]
        torch.testing.assert_close(fused(x), model(x))


def test_an_eps_in_a_tensor() -> None:
    assert epinorm.LayerNorm(eps=torch.tensor(0.5)) == epinorm.LayerNorm(eps=0.5)  # type: ignore[arg-type]


X, W = torch.randn(9, K), torch.randn(N, K)
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "weight": ({"weight": None}, TypeError, "weight must be a Tensor, not NoneType"),
    "bias": ({"bias": 3}, TypeError, "bias must be a Tensor, not int"),
    "norm_weight": ({"norm_weight": [1.0]}, TypeError, "norm_weight must be a Tensor, not list"),
    "operand": (
        {"post": "add_residual", "operands": [None]},
        TypeError,
        "operand 0 must be a Tensor, not NoneType",
    ),
    "operands": (
        {"post": "add_residual", "operands": torch.randn(9, N)},
        TypeError,
        "operands must be a list of Tensors, not Tensor",
    ),
    "no operands": ({"operands": None}, TypeError, "operands must be a list of Tensors, not None"),
    "post": ({"post": 3}, TypeError, "int is not a pointwise operation; pass a text such as"),
    "lambda": ({"post": lambda x: x}, TypeError, "<lambda> is not a pointwise operation"),
    "strategy": ({"strategy": "fast"}, ValueError, "unknown strategy 'fast'; known are auto"),
}


@pytest.mark.parametrize("leading", [(), (2,)], ids=["2D", "3D"])
@pytest.mark.parametrize("name", WRONG)
def test_what_nobody_takes_is_told(name: str, leading: tuple[int, ...]) -> None:
    change, error, message = WRONG[name]
    arguments = {"x": X.expand(*leading, 9, K), "weight": W, "norm": epinorm.LayerNorm()} | change
    with pytest.raises(error, match=f"^{message}"):
        epinorm.linear_norm(**arguments)


@pytest.mark.parametrize("eps,error", [("a", TypeError), (None, TypeError), (-1, ValueError)])
def test_an_eps_that_is_none_is_told(eps: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"^eps must be a number >= 0, got {eps!r}$"):
        epinorm.LayerNorm(eps=eps)


def test_an_unknown_strategy_is_refused_before_anything_is_fused() -> None:
    model = nn.Sequential(nn.Linear(K, N), nn.LayerNorm(N))
    with pytest.raises(ValueError, match="unknown strategy 'fast'; known are auto, single"):
        epinorm.fuse(model, strategy="fast")  # type: ignore[arg-type]
    assert type(model) is nn.Sequential


STATE: dict[str, int] = {}


def test_a_graph_goes_on_after_a_dict_was_changed() -> None:
    fused = epinorm.fuse(nn.Sequential(nn.Linear(K, N), nn.LayerNorm(N), nn.GELU()))
    x = torch.randn(2, 3, K)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(x: Tensor) -> tuple[Tensor, Tensor]:
        STATE["calls"] = 1
        post = ["gelu|scale(2)", nn.functional.silu][STATE["calls"]]
        return fused(x), epinorm.linear_norm(x, W, norm=epinorm.LayerNorm(), post=post)

    y, direct = compiled(x)
    torch.testing.assert_close(y, fused(x))
    torch.testing.assert_close(direct, F.silu(F.layer_norm(x @ W.T, (N,))))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(K, N), nn.LayerNorm(N)

    def forward(self, x, residual):
        return F.gelu(self.norm(self.fc(x) + residual)) + residual


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_a_residual_under_cpu_autocast_is_as_in_eager(dtype: Any, low: Any) -> None:
    torch.manual_seed(0)
    model = Residual()
    fused = epinorm.fuse(copy.deepcopy(model))
    x, residual = torch.randn(9, K), torch.randn(9, N, dtype=dtype, requires_grad=True)
    results = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for one in (model, fused):
            with torch.autocast("cpu", low):
                y = one(x, residual)
            results.append(
                [y, *torch.autograd.grad(y.float().sum(), [residual, *one.parameters()])]
            )
    for expected, found in zip(*results, strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected)
