"""The backward products' kernels compile without a GPU, with no spills and wgmma not serialised."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from epinorm.chain import Chain
from epinorm.cuda import backward as cuda_backward
from epinorm.cuda import hopper_product
from epinorm.cuda.gradient_planes import gradient_source
from epinorm.cuda.hopper import product_shared_bytes, product_source
from epinorm.cuda.hopper_plan import fold_steps
from epinorm.cuda.jit import compiled
from epinorm.plan import Plan, Problem

SHARED_LIMIT = 227 * 1024


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("major_k_a", [True, False])
def test_the_product_compiles_without_spills(planes: int, major_k_a: bool) -> None:
    tile = hopper_product.TILES[planes]
    source = product_source(tile, planes, torch.float16, torch.float32, True, major_k_a, False)
    result = compiled(source)
    assert result.spill_bytes == 0
    assert "C75" not in result.log
    assert product_shared_bytes(tile, planes) <= SHARED_LIMIT


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("arch", ["sm_90a"])
@pytest.mark.parametrize(
    "entry", ["split_gradient_rows", "gradient_column_max", "split_gradient_columns"]
)
def test_splitting_dz_compiles_without_spills(entry: str, arch: str, planes: int) -> None:
    assert compiled(gradient_source(entry, planes, arch)).spill_bytes == 0


def test_short_sums_fold_more_often() -> None:
    assert [fold_steps(k) for k in (64, 4096, 4097, 8192)] == [1, 1, 4, 4]


def problem(m: int, k: int, n: int, precision: str) -> Problem:
    return Problem(
        chain=Chain.parse("group_norm(8)|relu"),
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


@pytest.mark.parametrize(
    ("sizes", "precision", "planes"),
    [
        ((1024, 8192, 8192), "highest", 2),
        ((1024, 8192, 8192), "high", 1),
        ((32, 64, 64), "highest", 0),  # the conversions would cost more than they save
        ((1024, 8190, 8192), "highest", 0),  # rows of dX would not be whole 16-byte units
        ((1024, 8192, 8196), "highest", 0),
        ((0, 8192, 8192), "highest", 0),
    ],
)
def test_the_core_multiplies_where_it_pays(
    sizes: tuple[int, int, int], precision: str, planes: int
) -> None:
    case = problem(*sizes, precision)
    assert cuda_backward._planes(case, Plan("single", "")) == (planes, planes)
    assert cuda_backward._planes(case, Plan("epilogue", "")) == (0, 0)
    sixteen_bit = dataclasses.replace(case, dtype=torch.bfloat16)
    assert cuda_backward._planes(sixteen_bit, Plan("single", "")) == (0, 0)
