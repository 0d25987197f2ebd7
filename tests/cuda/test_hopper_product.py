"""The backward products' kernels compile without a GPU, with no spills and wgmma not serialised."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from epinorm.backends.cuda.fp32.gradient_planes import gradient_source
from epinorm.backends.cuda.gemm.hopper.product import add_splits_source
from epinorm.backends.cuda.gemm.hopper.text import product_source
from epinorm.backends.cuda.plan.gradients import planes_taken
from epinorm.backends.cuda.plan.hopper import fold_steps
from epinorm.backends.cuda.plan.hopper_product import TILES, ProductShape, choose, gradient_shape
from epinorm.backends.cuda.plan.hopper_tile import Tile, product_shared_bytes
from epinorm.backends.cuda.runtime.device import Gpu
from epinorm.backends.cuda.runtime.jit import compiled
from epinorm.chain import Chain
from epinorm.problem import Problem

pytestmark = pytest.mark.usefixtures("kept_figures")

SHARED_LIMIT = 227 * 1024
SMS = 132
INSTANCES = [
    (planes, dataclasses.replace(cost.tile, fold_steps=fold), split)
    for planes, costs in TILES.items()
    for cost in costs
    for fold in ((0, 1, 4) if planes == 2 else (4,))
    for split in (False, True)
    if not split or cost.splits
]


@pytest.mark.parametrize(("planes", "tile", "split"), INSTANCES, ids=str)
@pytest.mark.parametrize("major_k_a", [True, False])
def test_the_product_compiles_without_spills(
    planes: int, tile: Tile, split: bool, major_k_a: bool
) -> None:
    result = compiled(product_source(tile, planes, major_k_a, split))
    assert result.spill_bytes == 0
    assert "C75" not in result.log
    assert product_shared_bytes(tile, planes) <= SHARED_LIMIT


@pytest.mark.parametrize(
    ("planes", "tile"),
    [(planes, tile) for planes, tile, split in INSTANCES if not split],
    ids=str,
)
@pytest.mark.parametrize("major_k_a", [True, False])
def test_the_product_that_adds_compiles_without_spills(
    planes: int, tile: Tile, major_k_a: bool
) -> None:
    result = compiled(product_source(tile, planes, major_k_a, adds=True))
    assert result.spill_bytes == 0
    assert "C75" not in result.log


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize(("by_row", "by_column"), [(True, True), (True, False), (False, True)])
def test_splitting_dz_compiles_without_spills(planes: int, by_row: bool, by_column: bool) -> None:
    assert compiled(gradient_source(planes, by_row, by_column, "sm_90a")).spill_bytes == 0


def test_adding_parts_compiles_without_spills() -> None:
    assert compiled(add_splits_source(7)).spill_bytes == 0


@pytest.mark.parametrize(
    ("shape", "tile", "parts"),
    [
        (ProductShape(1024, 8192, 8192, 1), (128, 256), 1),  # kb62's dX
        (ProductShape(8192, 8192, 1024, 1), (128, 192), 1),  # its dW: short sums, a long store
        (ProductShape(1024, 1024, 16384, 2), (128, 128), 2),  # mid's dW: 64 tiles
        (ProductShape(1024, 8192, 8192, 2), (128, 128), 1),
    ],
)
def test_the_tile_follows_the_shape(shape: ProductShape, tile: tuple[int, int], parts: int) -> None:
    chosen = choose(shape, SMS)
    assert ((chosen.tile.block_m, chosen.tile.block_n), chosen.parts) == (tile, parts)


def test_parts_cover_the_sum_and_none_is_empty() -> None:
    for length in (1, 64, 1000, 16384, 65536):
        for rows in (8, 128, 1024):
            shape = ProductShape(rows, 128, length, 1)
            parts = choose(shape, SMS).parts
            steps = -(-shape.steps // parts)
            assert (parts - 1) * steps < shape.steps <= parts * steps


def test_short_sums_fold_more_often() -> None:
    assert [fold_steps(k) for k in (64, 128, 129, 4096, 4097, 8192)] == [0, 0, 1, 1, 4, 4]


def test_products_of_the_backward_pass_fold_each_step() -> None:
    shapes = [ProductShape(4096, 4096, length, 2) for length in (64, 128, 129, 4096, 65536)]
    assert [choose(shape, SMS).tile.fold_steps for shape in shapes] == [0, 0, 1, 1, 1]


def test_behind_a_batch_norm_each_product_of_dw_is_folded() -> None:
    def folds(norm: str, precision: str) -> list[int]:
        given = problem(16384, 4096, 4096, precision, f"{norm}|relu")
        shapes = [gradient_shape(given, of_weight) for of_weight in (False, True)]
        return [choose(shape, SMS).tile.fold_steps for shape in shapes]

    assert folds("batch_norm", "highest") == [1, 0]
    assert folds("group_norm(8)", "highest") == [1, 1]
    assert not gradient_shape(problem(64, 64, 64, "high", "batch_norm"), True).cancels


def problem(m: int, k: int, n: int, precision: str, chain: str = "group_norm(8)|relu") -> Problem:
    return Problem(
        chain=Chain.parse(chain),
        m=m,
        k=k,
        n=n,
        dtype=torch.float32,
        norm_dtype=torch.float32,
        out_dtype=torch.float32,
        has_bias=True,
        has_norm_weight=True,
        has_norm_bias=True,
        training=True,
        device=torch.device("cuda", 0),
        precision=precision,  # type: ignore[arg-type]
    )


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu((9, 0), SMS, SHARED_LIMIT, SHARED_LIMIT + 1024)
    monkeypatch.setattr("epinorm.backends.cuda.runtime.device.gpu_at", lambda index: gpu)


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    ("sizes", "precision", "taken"),
    [
        ((1024, 8192, 8192), "highest", True),
        ((1024, 8192, 8192), "high", True),
        ((16384, 1024, 1024), "highest", True),
        ((32, 64, 64), "highest", False),  # the conversions would cost more than they save
        ((1024, 8190, 8192), "highest", False),  # rows of dX would not be whole 16-byte units
        ((1024, 8192, 8196), "highest", False),
        ((0, 8192, 8192), "highest", False),
    ],
)
def test_planes_are_taken_where_they_pay(
    sizes: tuple[int, int, int], precision: str, taken: bool
) -> None:
    case = problem(*sizes, precision)
    assert planes_taken(case, True, True) == (taken, taken)
    assert planes_taken(case, True, False) == (taken, False)
    assert planes_taken(case, False, True) == (False, taken)
    sixteen_bit = dataclasses.replace(case, dtype=torch.bfloat16)
    assert planes_taken(sixteen_bit, True, True) == (False, False)
