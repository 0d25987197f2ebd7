"""The backward products' range guard compiles without spills."""

import pytest

from epinorm.backends.cuda.fp32.rescue import STATIC_BYTES
from epinorm.backends.cuda.fp32.rescue_gradient import TILE, rescue_gradient_source
from epinorm.backends.cuda.runtime.jit import compile_cubin

MOST_REGISTERS = 255
"""Of a thread where a block of 256 has a multiprocessor to itself; more would be spilled."""


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
