"""Processes of one group: how a test starts them, and how each of them begins and ends.

As a program: imports what the workers need, once, and the modules that it is given, and forks the
ranks of each job that a line of its standard input names.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SECONDS = 240
"""After which a rank is ended, whatever it waits for."""
IMPORTED = (
    *("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"),
    *("epinorm.backends.cpu.backend", "epinorm.parallel"),
)
WITHOUT_GPU = (
    *("torch._dynamo.repro.after_dynamo", "torch._inductor.compile_fx", "torch.export._trace"),
    *("torch.profiler", "epinorm.capture.backend"),
)
"""What may look for a GPU, which a process that forks ranks of one must not."""


class Launcher:
    """A process that forks ranks; nothing of CUDA is started in it."""

    def __init__(self, *imported: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, *imported],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # A rank compiles by itself, instead of by processes that load PyTorch again.
            env=os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"},
        )

    def run(self, worker: str, ranks: int, folder: Path, *more: str) -> list[tuple[int, str]]:
        """Start ``worker`` once for each rank; the exit status of each and what it printed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps([worker, ranks, str(folder), *more]), file=self.process.stdin, flush=True)
        statuses = json.loads(self.process.stdout.readline())
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
    """The one of this process; it ends with its standard input."""
    return Launcher(*WITHOUT_GPU)


def serve() -> None:
    """Fork the ranks of each job; the first returns from here as its worker ends, or raises, and
    the others leave at once: Python takes a second to take down all that is imported."""
    for line in sys.stdin:
        worker, ranks, folder, *more = json.loads(line)
        pids = []
        for rank in range(ranks):
            if (pid := os.fork()) == 0:
                output = os.open(f"{folder}/rank{rank}.txt", os.O_WRONLY | os.O_CREAT)
                os.dup2(output, 1)
                os.dup2(output, 2)
                signal.alarm(SECONDS)
                sys.argv = [worker, str(rank), str(ranks), folder, *more]
                runpy.run_path(str(HERE / worker), run_name="__main__")
                if rank > 0:
                    sys.stdout.flush()
                    os._exit(0)
                return
            pids.append(pid)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(statuses), flush=True)


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


if __name__ == "__main__":
    for name in (*IMPORTED, *sys.argv[1:]):
        importlib.import_module(name)
    cpu: Any = importlib.import_module("epinorm.backends.cpu")
    guards: Any = importlib.import_module("torch._dynamo.guards")
    cpu.LEAST_VALUES = cpu.LEAST_VALUES_TRAINING = 0  # both as tests/conftest.py has them
    guards.profile_guard_manager = lambda *_: 0.0
    serve()
