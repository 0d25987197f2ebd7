"""Strategy `planes` and chains without a norm: launches, the tensors they read, their text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from epinorm.backends.cuda.fp32.rescue import rescue_source
from epinorm.backends.cuda.gemm.hopper.text import linear_norm_source
from epinorm.backends.cuda.plan.hopper import candidates, choose_tile, instance_for
from epinorm.backends.cuda.plan.planes import product_of, rest_of
from epinorm.backends.cuda.plan.strategy import plan_cuda
from epinorm.backends.cuda.runtime.jit import compiled
from epinorm.chain import Chain
from epinorm.chain.reference import linear_norm
from epinorm.operator.functional import apply_chain, linear

sys.path.insert(0, str(Path(__file__).parent))

sys.path.insert(0, str(Path(__file__).parents[1]))

from problems import problem_of

from imaginary import H200, believe_in

pytestmark = pytest.mark.usefixtures("kept_figures")

M, K, N = 24, 40, 96


def tensors(text: str) -> tuple[list[Tensor | None], tuple[Tensor, ...]]:
    chain = Chain.parse(text)
    affine = [None, None] if chain.norm is None else [torch.randn(N), torch.randn(N)]
    operands = [
        torch.randn(N) if k == "channel" else torch.randn(M, N) for k in chain.operand_kinds
    ]
    return [torch.randn(M, K), torch.randn(N, K), torch.randn(N), *affine], tuple(operands)


def expected(given: list[Tensor | None], operands: tuple[Tensor, ...], text: str) -> Tensor:
    x, weight, bias, gamma, beta = (None if t is None else t.double() for t in given)
    assert x is not None
    assert weight is not None
    doubles = [t.double() for t in operands]
    return linear_norm(x, weight, bias, Chain.parse(text), gamma, beta, doubles)


@pytest.mark.parametrize(
    ("text", "strategy", "kernels"),
    [
        ("layer_norm|gelu", "planes", ["split", "linear_norm", "rescue", "norm_forward"]),
        (
            "silu|add_residual|mul_channel|group_norm(8)|add_residual|sigmoid",
            "planes",
            ["split", "linear_norm", "rescue", "norm_forward"],
        ),
        ("gelu|add_residual", "single", ["split", "linear_norm", "rescue"]),
        ("identity", "single", ["split", "linear_norm", "rescue"]),
    ],
)
def test_what_is_launched_computes_the_chain(text, strategy, kernels, gpu: Any) -> None:
    given, operands = tensors(text)
    with torch.no_grad():
        for _ in range(3):
            y = apply_chain(*given, operands, text, strategy)
            assert gpu.kinds() == kernels
            torch.testing.assert_close(
                y.double(), expected(given, operands, text), rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize("strategy", ["planes", "epilogue"])
@pytest.mark.parametrize(
    ("text", "training", "over"),
    [
        ("silu|layer_norm|gelu", False, True),
        ("silu|layer_norm|gelu", True, False),
        ("silu|layer_norm|gelu|returns(sum)", False, False),
        ("layer_norm|gelu|returns(sum)", False, False),
    ],
)
def test_y_takes_zs_place_where_nothing_else_reads_z(
    strategy, text, training, over, gpu: Any
) -> None:
    """In Python's launches, and in native ones, of which a graph is made too."""
    given, operands = tensors(text)
    given[0] = torch.randn(2, M // 2, K)
    given[1].requires_grad_(training)
    for _ in range(6):
        found = apply_chain(*given, operands, text, strategy)
        y, *total = found if isinstance(found, tuple) else (found,)
        (norm,) = [launch for launch in gpu.launches if launch.kind == "norm_forward"]
        z_at, y_at = norm.arguments[0], norm.arguments[5]
        assert (z_at == y_at) == over
        assert y.data_ptr() == y_at
        assert all(t.data_ptr() != y_at for t in total)
        exact = expected(given, operands, text)
        exact, *_ = exact if isinstance(exact, tuple) else (exact,)
        torch.testing.assert_close(y.double(), exact, rtol=1e-4, atol=1e-4)
        gpu.launches.clear()
    assert gpu.replayed


def test_before_the_norm_all_is_computed_on_the_way_unless_it_is_kept(gpu: Any) -> None:
    text = "silu|add_residual|layer_norm|mul_channel"
    facts = dict(m=64, k=64, channels=96, groups=1, kind="highest", chain=text)
    problem = problem_of(**facts)
    assert str(product_of(problem).chain) == "silu|add_residual"
    assert str(rest_of(problem).chain) == "layer_norm(1e-05)|mul_channel"
    assert (product_of(problem).has_bias, rest_of(problem).has_bias) == (True, False)
    training = problem_of(**facts, training=True)
    assert str(product_of(training).chain) == "identity"
    assert rest_of(training) == training


def test_a_linear_of_any_leading_dimensions(gpu: Any) -> None:
    x, weight = torch.randn(2, 3, 4, K), torch.randn(N, K)
    with torch.no_grad():
        for _ in range(2):
            y = linear(x, weight, post="gelu", strategy="single")
            torch.testing.assert_close(y, torch.nn.functional.gelu(x @ weight.t()))
    assert y.shape == (2, 3, 4, N)


@pytest.mark.parametrize("kind", ["highest", "high", "bfloat16"])
@pytest.mark.parametrize(("n", "training"), [(768, False), (1000, True), (10, False), (33, True)])
def test_kernels_without_a_norm_do_not_spill(kind: str, n: int, training: bool) -> None:
    problem = problem_of(
        *(512, 1024, n, 1), kind=kind, training=training, chain="mul_channel|gelu|add_residual",
        parameters=(True, False, False),
    )  # fmt: skip
    tile = choose_tile(problem, 132)
    assert tile is not None
    if not tile.converts:
        assert compiled(linear_norm_source(instance_for(problem, tile))).spill_bytes <= 0
    if kind != "bfloat16" and training == (kind == "high"):
        assert compiled(rescue_source(problem, n % 4 == 0, "sm_90a")).spill_bytes <= 0


def test_every_tile_without_a_norm_is_of_whole_chunks() -> None:
    for n in (768, 12, 7, 1):
        problem = problem_of(512, 1024, n, 1, kind="highest", chain="identity")
        assert all(tile.block_n % 8 == 0 for tile in candidates(problem))


@pytest.mark.parametrize(
    ("facts", "strategy"),
    [
        (dict(m=16384, k=768, channels=768, groups=1, chain="add_residual|layer_norm"), "planes"),
        (dict(m=16384, k=768, channels=12, groups=64), "single"),
        (dict(m=8192, k=4096, channels=4096, groups=1, chain="layer_norm|gelu"), "planes"),
        (dict(m=4096, k=2048, channels=2048, groups=1, chain="relu"), "single"),
        (
            dict(m=8192, k=768, channels=768, groups=1, chain="identity", kind="bfloat16"),
            "reference",
        ),
    ],
)
@pytest.mark.parametrize("training", [False, True])
def test_what_is_fastest_is_taken(facts, strategy, training, monkeypatch: Any) -> None:
    """As measured on an H200, at `highest` where nothing else is said."""
    believe_in(monkeypatch, H200)
    problem = problem_of(**{"kind": "highest", **facts}, training=training)
    plan = plan_cuda(problem, "auto")
    assert plan.strategy == strategy, plan.reason
    assert plan.chosen


def test_a_single_row_at_high_is_fp32(gpu: Any) -> None:
    """Two planes, as PyTorch computes it in full fp32 too."""
    torch.set_float32_matmul_precision("high")
    with torch.no_grad():
        for rows, planes in ((1, 2), (2, 1)):
            linear(torch.randn(rows, K), torch.randn(N, K), strategy="single")
            (product,) = [launch for launch in gpu.launches if launch.kind == "linear_norm"]
            assert product.source.problem.planes == planes
            gpu.launches.clear()


def test_without_a_norm_y_has_xs_dtype(monkeypatch: Any) -> None:
    """z and dz would be read in a dtype that they do not have."""
    believe_in(monkeypatch, H200)
    problem = problem_of(64, 64, 64, 1, chain="gelu", out_dtype=torch.float32)
    for strategy in ("auto", "single"):
        plan = plan_cuda(problem, strategy)
        assert plan.strategy == "reference"
        assert "without a norm y has x's dtype" in plan.reason
