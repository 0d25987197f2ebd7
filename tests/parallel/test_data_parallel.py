"""FSDP2, FSDP1 and DDP of fused models, in two processes on a CPU: worker.py is one of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("worker.py")
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
    "ddp, bucket views",
    "fsdp1",
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """Of each rank, each case."""
    folder = tmp_path_factory.mktemp("ranks")
    arguments = ["2", str(folder)]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)[-6000:]
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process(case: str, results: Any) -> None:
    for of_rank in results:
        found = of_rank[case]
        assert found["error"] <= 1.1 * found["eager_error"] + 1e-12


@pytest.mark.parametrize("case", CASES)
def test_both_chains_are_fused_and_no_later_call_goes_the_long_way(case: str, results: Any) -> None:
    for of_rank in results:
        found = of_rank[case]
        assert found["fused"] == 2
        assert found["long"] == 0


def test_checkpoints_of_other_layouts(results: Any) -> None:
    for of_rank in results:
        assert of_rank["checkpoint"] == {"sharded to plain": True, "plain to sharded": True}
