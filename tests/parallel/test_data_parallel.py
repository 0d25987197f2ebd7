"""FSDP2, FSDP1 and DDP of fused models, in two and four processes on a CPU: worker.py
is one of them."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import launcher

pytestmark = pytest.mark.slow

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


OF_FOUR = ["fully_shard, fuse", "ddp, static graph"]
"""In four processes; the others in two."""
OF_TWO = [case for case in CASES if case not in OF_FOUR]
OTHERS = ["checkpoint", "order"]
READ = {"sharded to plain": True, "plain to sharded": True}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """Of each rank of two, each case."""
    folder = tmp_path_factory.mktemp("ranks")
    return launcher().results_of("worker.py", 2, folder, "cpu", *OF_TWO, *OTHERS)


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """Of each rank of four, theirs."""
    folder = tmp_path_factory.mktemp("ranks")
    return launcher().results_of("worker.py", 4, folder, "cpu", *OF_FOUR, "checkpoint")


def check_gradients(of_rank: dict[str, Any]) -> None:
    """Those of one process, and the same bits twice."""
    assert of_rank["error"] <= 1.1 * of_rank["eager_error"] + 1e-12
    assert of_rank["repeated"]


def check_way(of_rank: dict[str, Any]) -> None:
    assert of_rank["fused"] == 2
    assert of_rank["long"] == 0


@pytest.mark.parametrize("case", OF_TWO)
def test_gradients_are_those_of_one_process_and_repeat_bit_for_bit(case: str, results: Any) -> None:
    for of_rank in results:
        check_gradients(of_rank[case])


@pytest.mark.parametrize("case", OF_TWO)
def test_both_chains_are_fused_and_no_later_call_goes_the_long_way(case: str, results: Any) -> None:
    for of_rank in results:
        check_way(of_rank[case])


@pytest.mark.parametrize("case", OF_FOUR)
def test_four_processes(case: str, of_four: Any) -> None:
    for of_rank in of_four:
        check_gradients(of_rank[case])
        check_way(of_rank[case])
        assert of_rank["checkpoint"] == READ


def test_gradients_of_a_chain_are_reduced_before_the_chain_in_front_of_it_begins(
    results: Any,
) -> None:
    for of_rank in results:
        assert of_rank["order"] == [*["gradient"] * 4, "chain", *["gradient"] * 4]


def test_checkpoints_of_other_layouts(results: Any) -> None:
    for of_rank in results:
        assert of_rank["checkpoint"] == READ
