"""FSDP2, FSDP1 and DDP of fused models, in two processes on a CPU: worker.py is one of them."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import launcher

CASES = [
    "fuse, fully_shard",
    "fully_shard, fuse",
    "blocks fused, fully_shard",
    "fuse, fully_shard of blocks",
    "fully_shard of the root",
    "not resharded",
    "bf16",
    "ddp",
    "ddp, fuse",
    "ddp, static graph",
    "ddp, accumulated in place",
    "fsdp1",
    "blocks compiled, fully_shard",
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """Of each rank, each case."""
    return launcher().results_of("worker.py", 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process_and_repeat_bit_for_bit(case: str, results: Any) -> None:
    for of_rank in results:
        found = of_rank[case]
        assert found["error"] <= 1.1 * found["eager_error"] + 1e-12
        assert found["repeated"]


@pytest.mark.parametrize("case", CASES)
def test_both_chains_are_fused_and_no_later_call_goes_the_long_way(case: str, results: Any) -> None:
    for of_rank in results:
        found = of_rank[case]
        assert found["fused"] == 2
        assert found["long"] == 0


def test_gradients_of_a_chain_are_reduced_before_the_chain_in_front_of_it_begins(
    results: Any,
) -> None:
    for of_rank in results:
        assert of_rank["order"] == [*["gradient"] * 4, "chain", *["gradient"] * 4]


def test_checkpoints_of_other_layouts(results: Any) -> None:
    for of_rank in results:
        assert of_rank["checkpoint"] == {"sharded to plain": True, "plain to sharded": True}
