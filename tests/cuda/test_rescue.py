"""The range guard's kernel compiles without a GPU, without spills; its tiles hold whole groups, and
long sums are shared out."""

import dataclasses

import pytest
import torch

from epinorm.backends.cuda.fp32 import rescue
from epinorm.backends.cuda.fp32.rescue import (
    MOST_SPLITS,
    STATIC_BYTES,
    RescueTile,
    rescue_source,
    rescue_tile,
    splits_of,
)
from epinorm.backends.cuda.runtime.jit import compiled
from epinorm.chain import Chain
from epinorm.chain.pointwise import DEFINITIONS
from epinorm.problem import Problem

pytestmark = pytest.mark.usefixtures("kept_figures")

F32 = torch.float32
EASY = "group_norm({groups})|leaky_relu(0.01)|scale(2)"
HEAVY = "gelu|mul_channel|add_residual|group_norm({groups})|add_residual|mish|mul_channel"
EVERY = "|".join(["group_norm({groups})", *(n for n in DEFINITIONS if n not in ("scale", "add"))])
MOST_REGISTERS = 255
"""Of a thread where a block of 256 has a multiprocessor to itself; more would be spilled."""
H200 = 132
"""Multiprocessors."""
SQUARE, WIDE = RescueTile(128, 128, 128), RescueTile(64, 256, 256)

# Channels in a group, chain, training, rows aligned, blocks that share a sum, architecture.
VARIANTS = [
    (2, EASY, True, True, 1, "sm_90a"),
    (4, HEAVY, False, True, MOST_SPLITS, "sm_90a"),
    (16, EASY, False, True, 1, "sm_80"),
    (16, EASY, True, False, MOST_SPLITS, "sm_90a"),
    (16, EVERY, True, True, 1, "sm_90a"),
    (16, EVERY, True, True, 1, "sm_80"),
    (24, HEAVY, True, True, 1, "sm_80"),
    (24, HEAVY, True, False, 1, "sm_90a"),
    (24, HEAVY, True, True, 4, "sm_90a"),
    (64, "silu|rms_norm", True, True, MOST_SPLITS, "sm_90a"),
    (104, EASY, False, True, 1, "sm_90a"),
    (248, HEAVY, True, True, 2, "sm_90a"),
    (248, HEAVY, True, False, MOST_SPLITS, "sm_90a"),
    (256, "layer_norm|gelu", True, True, 1, "sm_89"),
    (768, "add_residual|layer_norm", True, True, 1, "sm_90a"),
    (1024, EVERY, True, False, 1, "sm_90a"),
    (2048, "silu|rms_norm", False, True, 1, "sm_90a"),
]
LIMITS = {"sm_80": 163 * 1024, "sm_89": 99 * 1024, "sm_90a": 227 * 1024}
"""Bytes of a block's shared memory: CUDA programming guide, table of compute capabilities."""


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


def check(problem: Problem, aligned: bool, splits: int, arch: str) -> None:
    limit = LIMITS[arch]
    result = compiled(rescue_source(problem, aligned, arch, limit, splits=splits))
    assert (result.spill_bytes, result.stack_bytes) == (0, 0), result.log
    assert 128 < result.registers <= MOST_REGISTERS  # two accumulators of 64 alone take 128
    assert result.shared_bytes <= STATIC_BYTES
    group = problem.n // problem.groups
    assert result.shared_bytes + rescue_tile(group, limit).shared_bytes <= limit


@pytest.mark.parametrize("group, chain, training, aligned, splits, arch", VARIANTS)
def test_compiles_without_spills(group, chain, training, aligned, splits, arch):
    check(problem_of(group, chain, training), aligned, splits, arch)


def test_absent_parameters_compile_without_spills():
    problem = problem_of(16, has_bias=False, has_norm_weight=False, has_norm_bias=False)
    check(problem, True, 1, "sm_90a")


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
    assert rescue_tile(768) == RescueTile(64, 256, 256, parts=3)
    assert rescue_tile(2048) == RescueTile(64, 256, 256, parts=8)
    for group in (320, 512, 640, 1000, 1536, 1920):
        tile = rescue_tile(group)
        assert tile.columns * tile.parts == group
        assert tile.columns % 4 == 0


@pytest.mark.parametrize("group", [3, 6, 14, 260, 268, 2056, 4096])
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


def test_rows_and_columns_that_keep_a_quarter_of_the_gpu_at_work_are_not_split():
    assert splits_of(SQUARE, 8192, 8192, 8192, H200) == 1
    assert splits_of(SQUARE, 8192, 4352, 8192, H200) == 1
    assert splits_of(SQUARE, 4352, 8192, 8192, H200) == 1


def test_short_rows_with_long_sums_are_split_as_far_as_blocks_are_left():
    assert splits_of(SQUARE, 8192, 4096, 8192, H200) == 2
    assert splits_of(SQUARE, 4096, 8192, 8192, H200) == 2  # columns of so many rows
    assert splits_of(SQUARE, 1024, 8192, 8192, H200) == MOST_SPLITS
    assert splits_of(SQUARE, 8192, 1024, 16384, H200) == MOST_SPLITS
    assert splits_of(SQUARE, 128, 128, 65536, H200) == MOST_SPLITS
    assert splits_of(SQUARE, 1, 1, 65536, 4) == 2


@pytest.mark.parametrize("length, splits", [(0, 1), (1023, 1), (1024, 2), (4095, 4), (4096, 8)])
def test_short_sums_are_not_split(length, splits):
    assert splits_of(SQUARE, 100, 100, length, H200) == splits


def test_splits_follow_the_tile():
    """One flag makes 16 tiles of the rows, or 32 of the columns."""
    assert splits_of(WIDE, 1024, 8192, 8192, H200) == 4
    assert splits_of(SQUARE, 1024, 8192, 8192, H200) == 8


class Stand:
    """In place of a kernel on a GPU that holds 14 clusters at a time."""

    def clusters_at_once(self, *_):
        return 14

    def prepare(self, _signature, grid, _threads, *, cluster, dependent, **_shared):
        return grid, cluster, dependent


@pytest.fixture(params=["sm_90a", "sm_80"])
def arch(request, monkeypatch):
    """Of an imaginary GPU, whose kernels are not compiled."""
    clusters = request.param == "sm_90a"
    monkeypatch.setattr(rescue, "starts_early", lambda device: clusters)
    monkeypatch.setattr(rescue, "arch_of", lambda device: request.param)
    monkeypatch.setattr(rescue, "max_shared_bytes", lambda device: 163 * 1024)
    monkeypatch.setattr(rescue, "sm_count", lambda device: H200)
    rescue.rescue_launch.cache_clear()
    return request.param


@pytest.mark.parametrize(
    "shape, clusters", [((1024, 8192, 8192), 13), ((1000, 8192, 128), 8), ((1024, 64, 8192), None)]
)
def test_no_more_clusters_than_run_at_once_and_none_that_share_columns_badly(
    shape, clusters, arch, monkeypatch
):
    m, k, n = shape
    sources = []
    monkeypatch.setattr(rescue, "load", lambda source, _: sources.append(source) or Stand())
    problem = problem_of(16, chain=f"group_norm({n // 16})", m=m, k=k, n=n)
    launched = rescue.rescue_launch(problem, True)
    splits = MOST_SPLITS if clusters and arch == "sm_90a" else 1
    assert f"constexpr int kSplitK = {splits};\n" in sources[0].text
    if splits > 1:
        assert launched == (clusters * splits, splits, True)
    else:
        blocks = 8 if n == 128 else H200 - 1
        assert launched == (blocks, None, arch == "sm_90a")
