"""The backward products' range guard compiles without spills."""

import pytest

from epinorm.backends.cuda.fp32.rescue import STATIC_BYTES
from epinorm.backends.cuda.fp32.rescue_gradient import rescue_gradient_source, tile_of
from epinorm.backends.cuda.runtime.jit import compiled

pytestmark = pytest.mark.usefixtures("kept_figures")

MOST_REGISTERS = 255
"""Of a thread where a block of 256 has a multiprocessor to itself; more would be spilled."""


# Every arrangement with every sharing out, alternately with and without what is added to.
VARIANTS = [
    ((transposed, aligned), sharing, (i + j) % 2 == 0)
    for i, (transposed, aligned) in enumerate([(False, True), (False, False), (True, True)])
    for j, sharing in enumerate([("sm_90a", 1), ("sm_90a", 8), ("sm_89" if i else "sm_80", 1)])
]
LIMITS = {"sm_80": 163 * 1024, "sm_89": 99 * 1024, "sm_90a": 227 * 1024}
"""Bytes of a block's shared memory."""


@pytest.mark.parametrize("arrangement, sharing, adds", VARIANTS)
def test_compiles_without_spills(arrangement, sharing, adds):
    arch, splits = sharing
    tile = tile_of(LIMITS[arch])
    result = compiled(rescue_gradient_source(*arrangement, splits, arch, tile, adds=adds))
    assert (result.spill_bytes, result.stack_bytes) == (0, 0), result.log
    assert 128 < result.registers <= MOST_REGISTERS  # two accumulators of 64 alone take 128
    assert result.shared_bytes <= STATIC_BYTES
    assert result.shared_bytes + tile.shared_bytes <= LIMITS[arch]
