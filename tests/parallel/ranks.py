"""Processes of one group: how a test starts them, and how each of them begins and ends."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def run(worker: str, ranks: int, folder: Path, *more: str) -> list[tuple[int, str]]:
    """Start ``worker`` once for each rank; the exit status of each and what it printed."""
    started = [
        subprocess.Popen(
            [sys.executable, str(HERE / worker), str(rank), str(ranks), str(folder), *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    said = [process.communicate(timeout=240)[0] for process in started]
    return [(process.returncode, text) for process, text in zip(started, said, strict=True)]


def results_of(worker: str, ranks: int, folder: Path, *more: str) -> list[dict[str, Any]]:
    """What ``finish`` was given in each rank, all of which end well."""
    ended = run(worker, ranks, folder, *more)
    assert not any(status for status, _ in ended), "\n".join(text for _, text in ended)[-6000:]
    found: list[dict[str, Any]] = json.loads((folder / "results.json").read_text())
    return found


def start(seconds: int = 60) -> tuple[int, int, Path, str]:
    """Join the group that the command line names: rank, ranks, folder and type of device."""
    import torch
    import torch.distributed as dist

    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    device = "cuda" if "cuda" in sys.argv[4:] else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        *(f"file://{folder}/store", timedelta(seconds=seconds)),
        rank=rank,
        world_size=ranks,
    )
    return rank, ranks, folder, device


def finish(folder: Path, results: dict[str, Any]) -> None:
    """Leave the group; its first rank writes what each has found to folder/results.json."""
    import torch.distributed as dist

    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, results)
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(every))
    dist.destroy_process_group()
