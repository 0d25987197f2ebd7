"""The backward products' range guard compiles without spills, and shares long sums out."""

import pytest

from epinorm.cuda.jit import compile_cubin
from epinorm.cuda.rescue import STATIC_BYTES
from epinorm.cuda.rescue_gradient import MOST_SPLITS, TILE, rescue_gradient_source, splits_of

MOST_REGISTERS = 255
"""Of a thread where a block of 256 has a multiprocessor to itself; more would be spilled."""
H200 = 132
"""Multiprocessors."""


@pytest.mark.parametrize("arch, splits", [("sm_90a", 1), ("sm_90a", 8), ("sm_80", 1)])
@pytest.mark.parametrize("transposed, aligned", [(False, True), (False, False), (True, True)])
@pytest.mark.parametrize("adds", [False, True])
def test_compiles_without_spills(transposed, aligned, splits, arch, adds):
    source = rescue_gradient_source(transposed, aligned, splits, arch, adds=adds)
    result = compile_cubin(source)
    assert (result.spill_bytes, result.stack_bytes) == (0, 0), result.log
    assert 128 < result.registers <= MOST_REGISTERS  # two accumulators of 64 alone take 128
    assert result.shared_bytes <= STATIC_BYTES
    assert result.shared_bytes + TILE.shared_bytes <= 163 * 1024  # sm_80's largest block


def test_rows_and_columns_that_keep_half_of_the_gpu_at_work_are_not_split():
    assert splits_of(8192, 8192, 8192, H200) == 1
    assert splits_of(8192, 4352, 8192, H200) == 1
    assert splits_of(4352, 8192, 8192, H200) == 1


def test_short_rows_with_long_sums_are_split_as_far_as_blocks_are_left():
    assert splits_of(8192, 4096, 8192, H200) == 2
    assert splits_of(4096, 8192, 8192, H200) == 2  # columns of so many rows
    assert splits_of(1024, 8192, 8192, H200) == MOST_SPLITS
    assert splits_of(8192, 1024, 16384, H200) == MOST_SPLITS
    assert splits_of(128, 128, 65536, H200) == MOST_SPLITS
    assert splits_of(1, 1, 65536, 4) == 2


@pytest.mark.parametrize("length, splits", [(0, 1), (1023, 1), (1024, 2), (4095, 4), (4096, 8)])
def test_short_sums_are_not_split(length, splits):
    assert splits_of(100, 100, length, H200) == splits
