"""The Hopper kernel that converts W on the way compiles without a GPU: no spills, no stalls."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest

from epinorm.backends.cuda.fp32.planes import split_shape
from epinorm.backends.cuda.gemm.hopper.fp32_weight import (
    fp32_weight_source,
    split_and_sample_source,
)
from epinorm.backends.cuda.plan import hopper as hopper_plan
from epinorm.backends.cuda.plan.hopper_tile import (
    SHARED_LIMIT,
    Tile,
    fp32_weight_tiles,
    stages_of_weight,
)
from epinorm.backends.cuda.plan.hopper_tile import fp32_weight_shared_bytes as shared_bytes
from epinorm.backends.cuda.runtime.jit import Compiled, compiled
from epinorm.problem import Problem

sys.path.insert(0, str(Path(__file__).parent))

from problems import EASY, HEAVY, problem_of

TILES = fp32_weight_tiles()
SMS = 132


def check(problem: Problem, tile: Tile, writes_plane: bool = False) -> Compiled:
    source = fp32_weight_source(hopper_plan.instance_for(problem, tile), writes_plane)
    layout = (
        f"static_assert(kBarrierOffset + kBarrierBytes == {shared_bytes(tile)}, "
        '"gemm/hopper/fp32_weight.py and the kernel lay it out differently");\n'
    )
    result = compiled(dataclasses.replace(source, text=source.text + layout))
    assert (result.spill_bytes, result.stack_bytes) == (0, 0), result.log
    assert result.shared_bytes == 0  # all of it is dynamic
    assert not re.search(r"C75\d\d|serializ", result.log), result.log
    return result


@pytest.mark.parametrize("index, channels", list(enumerate([2, 4, 8, 16, 32, 64, 128])))
def test_group_sizes(index, channels):
    """Either tile, training or not, in turn: each is a kernel to compile."""
    training = index % 4 >= 2
    check(problem_of(1024, 4096, channels, 64, "high", training), TILES[index % 2], training)


@pytest.mark.parametrize(
    "chain, training",
    [
        *((EASY, True), (HEAVY, False), (HEAVY, True), ("gelu|group_norm({groups})|sigmoid", True)),
        ("dropout(0.1)|group_norm({groups})|silu|dropout(0.2)", True),
    ],
)
def test_chains(chain, training):
    check(problem_of(1024, 8192, 16, 512, "high", training, chain), TILES[-1], training)


@pytest.mark.parametrize("parameters", [(False, False, False), (True, False, True)])
def test_absent_parameters(parameters):
    check(problem_of(kind="high", parameters=parameters), TILES[0])


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.block_m} rows")
def test_the_rings_fit_and_one_slot_more_does_not(tile):
    stage = 128 * 256
    assert shared_bytes(tile) <= SHARED_LIMIT < shared_bytes(tile) + stage
    assert stages_of_weight(tile) >= 3


@pytest.mark.parametrize(
    "columns, both, aligned", [(4, False, True), (1000, True, False), (8192, True, True)]
)
def test_what_comes_before(columns, both, aligned):
    shape = split_shape(1024, columns, SMS)
    result = compiled(split_and_sample_source(columns, aligned, shape, both))
    assert (result.spill_bytes, result.stack_bytes) == (0, 0)


@pytest.mark.parametrize(
    "m, k, taken",
    [(128, 8192, True), (1024, 8192, True), (2048, 8192, True), (8192, 8192, False)],
)
def test_it_is_taken_where_x_has_few_rows(m, k, taken):
    problem = problem_of(m, k, kind="high")
    chosen = hopper_plan.choose_tile(problem, SMS)
    assert chosen is not None
    assert chosen.fp32_weight == taken


def test_it_is_for_one_plane_of_a_weight_as_it_is():
    problem = problem_of(kind="high")
    for other in (
        hopper_plan.choose_tile(problem, SMS, prepacked=True),
        hopper_plan.choose_tile(problem, SMS, fp32_weight=False),
        hopper_plan.choose_tile(problem_of(kind="highest"), SMS),
        hopper_plan.choose_tile(problem_of(kind="bfloat16"), SMS),
        hopper_plan.choose_tile(problem_of(channels=24, groups=256, kind="high"), SMS),
        hopper_plan.choose_tile(problem_of(k=8190, kind="high"), SMS),
    ):
        assert other is not None
        assert not other.fp32_weight
