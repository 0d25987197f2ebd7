"""The portable kernel compiles for every architecture without a GPU: no spills, and it fits.

Every architecture sees every kind of tile, dtype and loading, but not every pair of them: a whole
product of those would take minutes.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from epinorm.backends.cuda.fp32.planes import split_source
from epinorm.backends.cuda.gemm.portable.text import linear_norm_source, product_source
from epinorm.backends.cuda.plan import portable as portable_plan
from epinorm.backends.cuda.plan.portable import choose_product_tile
from epinorm.backends.cuda.plan.portable_tile import product_shared_bytes, shared_bytes
from epinorm.backends.cuda.runtime.device import Gpu
from epinorm.backends.cuda.runtime.jit import KernelSource, compiled
from epinorm.problem import Problem

sys.path.insert(0, str(Path(__file__).parent))

from problems import EASY, HEAVY, problem_of

pytestmark = pytest.mark.usefixtures("kept_figures")

# Shared memory of a block and of a multiprocessor: CUDA programming guide.
GPUS = {
    "sm_80": Gpu((8, 0), 108, 166912, 167936),
    "sm_86": Gpu((8, 6), 84, 101376, 102400),
    "sm_89": Gpu((8, 9), 142, 101376, 102400),
    "sm_90": Gpu((9, 0), 132, 232448, 233472),
    "sm_100": Gpu((10, 0), 148, 232448, 233472),
    "sm_120": Gpu((12, 0), 170, 101376, 102400),
}
ARCHES = tuple(GPUS)

KINDS = ("bfloat16", "float16", "high", "highest")

# m, k, channels in a group, groups.
SHAPES = {
    "kb62": (1024, 8192, 16, 512),
    "kb62_v0": (128, 512, 32, 8),
    "skinny": (65536, 128, 4, 32),
    "mid": (16384, 1024, 32, 32),
    "wide_groups": (8192, 4096, 128, 32),
    "decode_1": (1, 8192, 16, 512),
}


def check(source: KernelSource, size: int, limit: int) -> None:
    """No spills; the kernel lays out the dynamic shared memory that the launch asks for."""
    layout = f'static_assert(kSharedBytes == {size}, "portable.py adds it up differently");\n'
    result = compiled(dataclasses.replace(source, text=source.text + layout))
    assert (result.spill_bytes, result.stack_bytes) == (0, 0), result.log
    assert result.shared_bytes == 0  # none of it is static
    assert size <= limit


def check_problem(problem: Problem, arch: str, copy_bytes: int = 16, aligned: bool = True) -> None:
    assert portable_plan.why_not(problem) is None
    tile = portable_plan.choose_tile(problem, GPUS[arch])
    assert tile is not None
    instance = portable_plan.instance_for(problem, tile)
    source = linear_norm_source(instance, arch, copy_bytes, aligned)
    check(source, shared_bytes(instance), GPUS[arch].shared_of_block)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", SHAPES)
def test_named_shapes(name, arch):
    """Each shape and each architecture in every kind, with and without training."""
    i, j = list(SHAPES).index(name), ARCHES.index(arch)
    check_problem(problem_of(*SHAPES[name], KINDS[(i + j) % 4], (i + j // 2) % 2 == 0), arch)


GROUP_SIZES = (2, 8, 24, 40, 48, 64, 72, 96, 136, 192, 248, 256, 512)


@pytest.mark.parametrize("channels", GROUP_SIZES)
def test_group_sizes(channels):
    """Training, whose epilogue is the larger one; two architectures for each size."""
    shape = (4096, 1024, channels, max(1, 1024 // channels))
    first = GROUP_SIZES.index(channels)
    for i, kind in enumerate(["bfloat16", "highest"] if channels <= 256 else ["bfloat16"]):
        check_problem(problem_of(*shape, kind, True), ARCHES[(first + 3 * i) % 6])


@pytest.mark.parametrize("kind", ["bfloat16", "highest"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
def test_a_long_chain(arch, kind):
    check_problem(problem_of(*(4096, 1024, 32, 32), kind, True, HEAVY), arch)


@pytest.mark.parametrize(
    "channels, chain, kind, training",
    [
        (16, EASY, "bfloat16", False),
        (16, EASY, "float16", True),
        (512, "group_norm({groups})|hardtanh(-2,2)", "bfloat16", True),
        (32, "add_channel|hardtanh|mish|group_norm({groups})", "bfloat16", True),
        (32, "add_channel|hardtanh|mish|group_norm({groups})", "float16", False),
    ],
)
def test_rounding_as_eager_does(channels, chain, kind, training):
    shape = (1024, 8192, channels, 8192 // channels)
    check_problem(problem_of(*shape, kind, training, f"{chain}|rounding(eager)"), "sm_80")


@pytest.mark.parametrize("copy_bytes", [4, 2])
@pytest.mark.parametrize("arch", ["sm_86", "sm_100"])
def test_rows_at_odd_addresses(arch, copy_bytes):
    check_problem(problem_of(*(4096, 1024, 16, 64), "bfloat16", True), arch, copy_bytes, False)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("planes", [1, 2])
def test_products(planes, arch):
    tile = choose_product_tile(planes, GPUS[arch])
    major_k_a = (planes + ARCHES.index(arch)) % 2 == 0
    size = product_shared_bytes(tile, planes)
    check(product_source(tile, planes, major_k_a, arch), size, GPUS[arch].shared_of_block)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89"])
def test_splitting(arch):
    result = compiled(split_source(2, 8192, True, arch))
    assert (result.spill_bytes, result.stack_bytes) == (0, 0), result.log


def test_instances_differ_only_where_their_text_must():
    """Rows and groups are arguments: other counts share the kernel if they share the tile."""
    first = problem_of(*(4096, 1024, 16, 64), "bfloat16")
    other = problem_of(*(5000, 1032, 16, 65), "bfloat16")
    tile = portable_plan.choose_tile(first, GPUS["sm_80"])
    assert tile is not None
    sources = [
        linear_norm_source(portable_plan.instance_for(p, tile), "sm_80") for p in (first, other)
    ]
    assert sources[0] == sources[1]
