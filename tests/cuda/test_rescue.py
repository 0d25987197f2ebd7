"""The range guard's kernel compiles without a GPU, without spills; its tiles hold whole groups."""

import dataclasses

import pytest
import torch

from epinorm.chain import Chain
from epinorm.cuda.jit import compile_cubin
from epinorm.cuda.rescue import RescueTile, rescue_source, rescue_tile
from epinorm.plan import Problem
from epinorm.pointwise import DEFINITIONS

F32 = torch.float32
EASY = "group_norm({groups})|leaky_relu(0.01)|scale(2)"
HEAVY = "gelu|mul_channel|add_residual|group_norm({groups})|add_residual|mish|mul_channel"
EVERY = "|".join(["group_norm({groups})", *(n for n in DEFINITIONS if n not in ("scale", "add"))])
MOST_REGISTERS = 255
"""Of a thread where a block of 256 has a multiprocessor to itself; more would be spilled."""

VARIANTS = [
    (2, EASY, True),
    (4, HEAVY, False),
    (16, EASY, False),
    (16, EASY, True),
    (16, EVERY, True),
    (24, HEAVY, True),
    (64, "silu|rms_norm", True),
    (104, EASY, False),
    (248, HEAVY, True),
    (256, "layer_norm|gelu", True),
]


def problem_of(group: int, chain: str = EASY, training: bool = True, **changes: object) -> Problem:
    groups = 8 if "group_norm" in chain else 1
    problem = Problem(
        chain=Chain.parse(chain.format(groups=groups)),
        m=1024,
        k=64,
        n=group * groups,
        dtype=F32,
        norm_dtype=F32,
        out_dtype=F32,
        has_bias=True,
        has_norm_weight=True,
        has_norm_bias="rms" not in chain,
        training=training,
        device=torch.device("cuda", 0),
        precision="highest",
    )
    return dataclasses.replace(problem, **changes)


def check(problem: Problem, aligned: bool, arch: str) -> None:
    result = compile_cubin(rescue_source(problem, aligned, arch))
    assert (result.spill_bytes, result.stack_bytes) == (0, 0), result.log
    assert 128 < result.registers <= MOST_REGISTERS  # two accumulators of 64 alone take 128


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("group, chain, training", VARIANTS)
def test_compiles_without_spills(group, chain, training, arch):
    check(problem_of(group, chain, training), True, arch)


@pytest.mark.parametrize("group, chain", [(16, EASY), (24, HEAVY), (248, HEAVY)])
def test_unaligned_rows_compile_without_spills(group, chain):
    check(problem_of(group, chain), False, "sm_90a")


def test_absent_parameters_compile_without_spills():
    problem = problem_of(16, has_bias=False, has_norm_weight=False, has_norm_bias=False)
    check(problem, True, "sm_90a")


def test_tiles_hold_whole_groups_and_waste_little():
    for group in (2, 4, *range(8, 257, 8)):
        tile = rescue_tile(group)
        assert tile.columns % group == 0
        assert tile.columns % 4 == 0  # flags are read four at a time
        assert tile.rows * tile.width == 128 * 128
        assert tile.columns > tile.width / 2
    assert rescue_tile(16) == RescueTile(128, 128, 128)
    assert rescue_tile(72) == RescueTile(64, 256, 216)
    assert rescue_tile(256) == RescueTile(64, 256, 256)


# Bytes of a block's shared memory: CUDA programming guide, table of compute capabilities.
@pytest.mark.parametrize("arch, limit", [("sm_80", 163 * 1024), ("sm_89", 99 * 1024)])
def test_static_and_dynamic_shared_memory_fit(arch, limit):
    for group in (2, 256):
        result = compile_cubin(rescue_source(problem_of(group), True, arch, limit))
        assert result.shared_bytes + rescue_tile(group, limit).shared_bytes <= limit
        assert result.spill_bytes == 0


@pytest.mark.parametrize("group", [1, 3, 6, 12, 264, 512])
def test_groups_that_do_not_fit_are_refused(group):
    with pytest.raises(ValueError, match=f"but got {group}"):
        rescue_tile(group)


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match="float32 throughout"):
        rescue_source(problem_of(16, dtype=torch.bfloat16), True, "sm_90a")


def test_every_item_is_counted_once():
    tile = rescue_tile(16)
    assert tile.items(1, 16) == 8
    assert tile.items(1024, 8192) == 8 * 64
    assert tile.items(1025, 129) == 2 * 2 * 8
