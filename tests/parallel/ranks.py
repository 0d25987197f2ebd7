"""Processes of one group: how a test starts them, and how each of them begins and ends.

``serve`` is a process that imports what the workers need, once, and forks the ranks of each job.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SECONDS = 240
"""After which a rank is ended, whatever it waits for."""
IMPORTED = (
    *("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"),
    "torch.distributed.checkpoint",
    *("epinorm.backends.cpu.backend", "epinorm.parallel"),
)
WITHOUT_GPU = (
    *("torch._dynamo.repro.after_dynamo", "torch._inductor.compile_fx", "torch.export._trace"),
    *("torch.profiler", "torch._inductor.fx_passes.joint_graph", "epinorm.capture.backend"),
)
"""What looks for a GPU, which a process that forks ranks of one must not."""


class Launcher:
    """A process that forks ranks; nothing of CUDA is started in it where it starts as a new one."""

    def __init__(self, context: BaseContext | None = None, *imported: str) -> None:
        context = context or multiprocessing.get_context("spawn")
        self.channel, theirs = context.Pipe()
        # A rank compiles by itself, instead of by processes that load PyTorch again.
        environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
        given = (theirs, dict(environment), imported)
        context.Process(target=serve, args=given, daemon=True).start()  # type: ignore[attr-defined]
        theirs.close()

    def run(self, worker: str, ranks: int, folder: Path, *more: str) -> list[tuple[int, str]]:
        """Start ``worker`` once for each rank; the exit status of each and what it printed."""
        self.channel.send([worker, ranks, str(folder), *more])
        statuses = self.channel.recv()
        said = [(folder / f"rank{rank}.txt").read_text() for rank in range(ranks)]
        return list(zip(statuses, said, strict=True))

    def results_of(self, *job: Any) -> list[dict[str, Any]]:
        """What ``finish`` was given in each rank, all of which end well."""
        ended = self.run(*job)
        assert not any(status for status, _ in ended), "\n".join(text for _, text in ended)[-6000:]
        found: list[dict[str, Any]] = json.loads((job[2] / "results.json").read_text())
        return found


@cache
def launcher() -> Launcher:
    """The one of this process, from the tests' server of processes."""
    from processes import context

    return Launcher(context, *WITHOUT_GPU)


def serve(channel: Connection, environment: dict[str, str], imported: tuple[str, ...]) -> None:
    """Fork the ranks of each job, until nobody asks for more; a rank returns from here as its
    worker ends, or raises."""
    os.environ.clear()
    os.environ.update(environment)
    for name in (*IMPORTED, *imported):
        importlib.import_module(name)
    cpu: Any = importlib.import_module("epinorm.backends.cpu")
    guards: Any = importlib.import_module("torch._dynamo.guards")
    cpu.LEAST_VALUES = cpu.LEAST_VALUES_TRAINING = 0  # both as tests/conftest.py has them
    guards.profile_guard_manager = lambda *_: 0.0
    while True:
        try:
            worker, ranks, folder, *more = channel.recv()
        except EOFError:
            return
        pids = []
        for rank in range(ranks):
            if (pid := os.fork()) == 0:
                output = os.open(f"{folder}/rank{rank}.txt", os.O_WRONLY | os.O_CREAT)
                os.dup2(output, 1)
                os.dup2(output, 2)
                signal.alarm(SECONDS)
                sys.argv = [worker, str(rank), str(ranks), folder, *more]
                runpy.run_path(str(HERE / worker), run_name="__main__")
                return
            pids.append(pid)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        channel.send(statuses)


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


def attempt(case: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a case found; where it raises, an infinite error and what it said, so that the others
    run all the same: every rank of a case raises, or waits until the group's timeout."""
    try:
        return case()
    except Exception:
        return {"error": float("inf"), "raised": traceback.format_exc()[-1500:]}


def finish(folder: Path, results: dict[str, Any]) -> None:
    """Leave the group; its first rank writes what each has found to folder/results.json."""
    import torch.distributed as dist

    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, results)
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(every))
    dist.destroy_process_group()
