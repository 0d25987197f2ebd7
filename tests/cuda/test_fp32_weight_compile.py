"""The Hopper kernels that convert W or x on the way compile without a GPU: no spills, no stalls."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest

from epinorm.backends.cuda.fp32.planes import split_shape
from epinorm.backends.cuda.gemm.hopper.fp32_weight import (
    converting_source,
    split_and_sample_source,
)
from epinorm.backends.cuda.plan import hopper as hopper_plan
from epinorm.backends.cuda.plan.hopper_tile import (
    SHARED_LIMIT,
    Tile,
    fp32_input_tiles,
    fp32_shared_bytes,
    fp32_weight_tiles,
    stages_of_fp32,
)
from epinorm.backends.cuda.plan.planes import product_of
from epinorm.backends.cuda.runtime.jit import Compiled, compiled
from epinorm.problem import Problem

sys.path.insert(0, str(Path(__file__).parent))

from problems import EASY, HEAVY, problem_of

pytestmark = pytest.mark.usefixtures("kept_figures")

TILES = fp32_weight_tiles(1)
TWO_PLANES = fp32_weight_tiles(2)[0]
SMS = 132


FEW_REGISTERS_BYTES = 80
"""Twenty registers on the stack in halves, where accumulators and fragments take 208 of 240."""
FEW_SPILLS_BYTES = 850
"""What all instructions together move there: the most where a sum is written, too."""


def check(problem: Problem, tile: Tile, writes_plane: bool = False) -> Compiled:
    instance = hopper_plan.instance_for(problem, tile)
    source = converting_source(instance, writes_plane)
    exchange = " + kExchanges * 8" if tile.fp32_input else ""
    layout = (
        f"static_assert(kBarrierOffset + kBarrierBytes{exchange} == {fp32_shared_bytes(instance)}, "
        '"hopper_tile.py and the kernel lay it out differently");\n'
    )
    result = compiled(dataclasses.replace(source, text=source.text + layout))
    assert result.stack_bytes <= (FEW_REGISTERS_BYTES if tile.in_halves else 0), result.log
    assert result.spill_bytes <= (FEW_SPILLS_BYTES if tile.in_halves else 0), result.log
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


@pytest.mark.parametrize(
    "channels, chain", [(2, EASY), (64, HEAVY), (128, "rms_norm|silu"), (16, "gelu")]
)
def test_two_planes(channels, chain):
    groups = 1 if "rms" in chain else 4096 // channels
    check(problem_of(128, 4096, channels, groups, "highest", False, chain), TWO_PLANES)


@pytest.mark.parametrize("parameters", [(False, False, False), (True, False, True)])
def test_absent_parameters(parameters):
    check(problem_of(kind="high", parameters=parameters), TILES[0])


OF_INPUT = [
    (16, "add_residual", False),
    (16, "gelu", True),
    (256, "layer_norm|relu", False),
    (12, EASY, True),
    (16, HEAVY, False),
    (16, HEAVY, True),
]


@pytest.mark.parametrize("channels, chain, training", OF_INPUT)
def test_converting_x(channels, chain, training):
    groups = 1 if "layer" in chain else 48
    problem = problem_of(16384, 768, channels, groups, "high", training, chain)
    tiles = [tile for tile in hopper_plan.candidates(problem) if tile.fp32_input]
    assert tiles
    for tile in tiles if training else tiles[:1]:
        check(problem, tile, training)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("channels", [272, 384, 576, 768])
@pytest.mark.parametrize("ending", ["", "|returns(sum)"])
@pytest.mark.parametrize("pre", ["", "add_residual|", "gelu|"])
def test_converting_x_in_halves(pre, ending, channels, training):
    problem = problem_of(16384, 768, channels, 1, "high", False, f"{pre}layer_norm{ending}")
    tiles = [t for t in hopper_plan.candidates(problem) if t.fp32_input and t.in_halves]
    assert tiles or (pre == "add_residual|" and channels == 272)
    problem = dataclasses.replace(problem, training=training)
    assert not training or not {*tiles} & {*hopper_plan.candidates(problem)}
    for tile in tiles:
        check(problem, tile, training)


@pytest.mark.parametrize("tile", [*TILES, TWO_PLANES, *fp32_input_tiles(8, 256)], ids=str)
def test_the_rings_fit_and_one_slot_more_does_not(tile):
    stage, kind = 128 * 256, "highest" if tile == TWO_PLANES else "high"
    instance = hopper_plan.instance_for(problem_of(1024, 8192, 16, 512, kind), tile)
    assert fp32_shared_bytes(instance) <= SHARED_LIMIT < fp32_shared_bytes(instance) + stage
    assert stages_of_fp32(instance) >= 3


def test_x_is_converted_where_w_has_few_rows():
    for m, k, n, taken in (
        (16384, 3072, 768, True),
        (8192, 4096, 4096, False),
        (64, 768, 768, False),
    ):
        problem = problem_of(m, k, 16, n // 16, "high", chain="add_residual")
        tile = hopper_plan.choose_tile(problem, SMS)
        assert tile is not None
        assert tile.fp32_input == taken, str(tile)


@pytest.mark.parametrize(
    "planes, columns, both, aligned",
    [(1, 4, False, True), (1, 1000, True, False), (1, 8192, True, True), (2, 8192, False, True)],
)
def test_what_comes_before(planes, columns, both, aligned):
    shape = split_shape(1024, columns, SMS)
    result = compiled(split_and_sample_source(planes, columns, aligned, shape, both))
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


@pytest.mark.parametrize(
    "m, k, taken", [(64, 8192, True), (128, 8192, True), (128, 32768, True), (4096, 8192, False)]
)
def test_so_it_is_at_highest(m, k, taken):
    problem = problem_of(m, k, kind="highest")
    chosen = hopper_plan.choose_tile(problem, SMS)
    assert chosen is not None
    assert chosen.fp32_weight == taken
    for other in (
        hopper_plan.choose_tile(problem, SMS, prepacked=True),
        hopper_plan.choose_tile(problem, SMS, converts=False),
        hopper_plan.choose_tile(dataclasses.replace(problem, training=True), SMS),
        hopper_plan.choose_tile(dataclasses.replace(problem, k=128), SMS),
    ):
        assert other is not None
        assert not other.fp32_weight


def test_it_is_for_a_weight_as_it_is():
    problem = problem_of(kind="high")
    for other in (
        hopper_plan.choose_tile(problem, SMS, prepacked=True),
        hopper_plan.choose_tile(problem, SMS, converts=False),
        hopper_plan.choose_tile(problem_of(kind="highest"), SMS),
        hopper_plan.choose_tile(problem_of(kind="bfloat16"), SMS),
        hopper_plan.choose_tile(problem_of(channels=24, groups=256, kind="high"), SMS),
        hopper_plan.choose_tile(problem_of(k=8190, kind="high"), SMS),
    ):
        assert other is not None
        assert not other.fp32_weight


def test_a_prepacked_weight_is_left_where_converting_x_on_the_way_is_faster():
    problem = product_of(problem_of(16384, 3072, 768, 1, kind="high", chain="layer_norm"))
    assert problem.chain.norm is None
    for prepacked in (False, True):
        tile = hopper_plan.choose_tile(problem, SMS, prepacked)
        assert tile is not None
        assert tile.fp32_input
