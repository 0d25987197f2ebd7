"""The experiments that docs cite still compile, without a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from epinorm.cuda.jit import compiled

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "experiments"))

import w_from_registers


@pytest.mark.parametrize("checked", [False, True])
def test_w_from_registers(checked: bool) -> None:
    result = compiled(w_from_registers.mixed_source(checked))
    assert (result.spill_bytes, result.stack_bytes) == (0, 0)
    assert "C75" not in result.log


def test_the_order_along_k_is_one() -> None:
    order = w_from_registers.order_along_k()
    assert sorted(order) == list(range(32))
    lanes = [order[2 * q : 2 * q + 2] + order[8 + 2 * q : 10 + 2 * q] for q in range(4)]
    assert lanes == [[8 * q + i for i in range(4)] for q in range(4)]
