"""The tests of this folder on GPUs, by NCCL: ``python on_gpus.py GPUS [CASE ...]``, all without."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from ranks import Launcher
from test_data_parallel import CASES as DATA_CASES
from test_example import EXAMPLE, largest_difference
from test_tensor_parallel import CASES as TENSOR_CASES
from test_tensor_parallel import OTHERS, roundings, unit

FAILURES = [("tensor", "raises"), ("tensor", "dies"), ("tensor", "shape"), ("ddp", "dies")]
FAILURES += [("beside", "dies"), ("beside", "raises")]
LAYOUTS = ("ddp", "fsdp2", "tensor")
LOSSES_DIFFER = 1e-5
"""Relative, at most, in 20 steps of AdamW in fp32, which makes roundings grow."""
SECONDS = 60
"""In which the other rank of two ends: starting, the group's timeout of 10 and what NCCL waits."""
CLEAR = r"Watchdog caught collective operation timeout|ended: \w+: .{20,}"


os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"


def main() -> int:
    """Run all workers at once; the number of cases that are wrong."""
    ranks, asked, found = int(sys.argv[1]), sys.argv[2:], {}

    def collect(worker: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            found[worker] = Launcher().results_of(worker, ranks, Path(folder), "cuda", *asked)

    workers = {"worker.py": DATA_CASES, "tensor_worker.py": TENSOR_CASES + OTHERS}
    others = [] if asked else [threading.Thread(target=fail, args=f) for f in FAILURES]
    others += [] if asked else [threading.Thread(target=train, args=(ranks, w)) for w in LAYOUTS]
    threads = [threading.Thread(target=collect, args=(worker,)) for worker in workers]
    for thread in threads + others:
        thread.start()
    wrong = 0
    for thread, (worker, cases) in zip(threads, workers.items(), strict=True):
        thread.join()
        wrong += worker not in found
        for case in filter(found[worker][0].__contains__, cases) if worker in found else ():
            of_ranks = [of_rank[case] for of_rank in found[worker]]
            right = all(is_right(case, of_rank) for of_rank in of_ranks)
            wrong += not right
            print(f"{case:32} {'right' if right else f'WRONG {of_ranks}'}", flush=True)
    for thread in others:
        thread.join()
    return wrong + WRONG.count(True)


WRONG: list[bool] = []
"""Of each failure and of the example's layouts, whether it ended otherwise than it should."""


def trained(ranks: int, *arguments: str) -> tuple[float, str]:
    """The largest relative difference of the losses from one process', and all that is printed."""
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    ended = subprocess.run(
        [sys.executable, "-m", *launch, str(EXAMPLE), *arguments],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-8000:]
    return largest_difference(ended.stdout), ended.stdout


def train(ranks: int, layout: str) -> None:
    """The example, whose losses have to be one process'."""
    try:
        differs, said = trained(ranks, "--layout", layout)
    except Exception as error:
        differs, said = float("inf"), str(error)
    right = differs < LOSSES_DIFFER
    told = f"right, {differs:.1e}" if right else f"WRONG, {differs}\n{said}"
    print(f"{f'the example, {layout}':32} {told}", flush=True)
    WRONG.append(not right)


def fail(way: str, failure: str) -> None:
    """One of two ranks fails; the other one has to end in time and say why."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        (status, said), (failed, of_failed) = Launcher().run(
            "failing_worker.py", 2, Path(folder), "cuda", failure, way
        )
        seconds = time.monotonic() - began
    clear = re.search(CLEAR, said)
    right = status != 0 and failed not in (0, 3) and clear is not None and seconds < SECONDS
    told = f"{seconds:.0f} s: {clear[0] if clear else said[-2000:] + of_failed[-2000:]}"
    print(
        f"{way} {failure:25} {'right' if right else f'WRONG {status} {failed}'}, {told}", flush=True
    )
    WRONG.append(not right)


def is_right(case: str, found: dict[str, Any]) -> bool:
    """As the tests ask of a case."""
    if "repeats" in found:
        return bool(found["error"] <= roundings(case) * unit(case) and found["repeats"])
    if "raised" in found:
        return False
    right = found["error"] <= 1.1 * found["eager_error"] + 1e-12
    return bool(right and found["fused"] == 2 and found["long"] == 0 and found["repeated"])


if __name__ == "__main__":
    sys.exit(main())
