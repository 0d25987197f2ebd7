"""Processes that copy into each other's memory, here on one GPU: several GPUs are
tests/parallel/on_gpus.py's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

WORKER = Path(__file__).with_name("peers_worker.py")


def run(ranks: int, folder: Path, *more: str) -> list[tuple[int, str]]:
    environment = os.environ | {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(ranks), str(folder), *more],
            env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=150)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, text) for process, text in zip(started, said, strict=True)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_beside_products_are_those_of_one_process(ranks: int, tmp_path: Path) -> None:
    for status, said in run(ranks, tmp_path):
        assert status == 0, said[-3000:]
        assert said.splitlines()[-1] == "right"


def test_a_process_that_dies_ends_the_others(tmp_path: Path) -> None:
    (status, said), _ = run(2, tmp_path, "dies")
    assert status == 0, said[-3000:]
    assert "ended: CUDA error" in said
