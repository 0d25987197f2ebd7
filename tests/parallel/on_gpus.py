"""The tests of this folder on GPUs, by NCCL: ``python on_gpus.py GPUS``."""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from ranks import results_of
from test_data_parallel import CASES as DATA_CASES
from test_tensor_parallel import CASES as TENSOR_CASES

ROUNDINGS = 16 * 2.0**-53


def main() -> int:
    """Run both workers at once; the number of cases that are wrong."""
    ranks, found = int(sys.argv[1]), {}

    def collect(worker: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            found[worker] = results_of(worker, ranks, Path(folder), "cuda")

    workers = {"worker.py": DATA_CASES, "tensor_worker.py": TENSOR_CASES}
    threads = [threading.Thread(target=collect, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    wrong = 0
    for thread, (worker, cases) in zip(threads, workers.items(), strict=True):
        thread.join()
        wrong += worker not in found
        for case in filter(found[worker][0].__contains__, cases) if worker in found else ():
            of_ranks = [of_rank[case] for of_rank in found[worker]]
            right = all(is_right(of_rank) for of_rank in of_ranks)
            wrong += not right
            print(f"{case:32} {'right' if right else f'WRONG {of_ranks}'}", flush=True)
    return wrong


def is_right(found: dict[str, Any]) -> bool:
    """As the tests ask of a case."""
    if "repeats" in found:
        return bool(found["error"] <= ROUNDINGS and found["repeats"])
    right = found["error"] <= 1.1 * found["eager_error"] + 1e-12
    return bool(right and found["fused"] == 2 and found["long"] == 0)


if __name__ == "__main__":
    sys.exit(main())
