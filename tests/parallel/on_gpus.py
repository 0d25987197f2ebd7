"""The tests of this folder on GPUs, by NCCL: ``python on_gpus.py GPUS``."""

from __future__ import annotations

import json
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

    workers = ("worker.py", "tensor_worker.py")
    threads = [threading.Thread(target=collect, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(found) < len(workers):
        return 1

    def is_right(case: str, of_rank: dict[str, Any]) -> bool:
        if case in TENSOR_CASES:
            return bool(of_rank["error"] <= ROUNDINGS and of_rank["repeats"])
        right = of_rank["error"] <= 1.1 * of_rank["eager_error"] + 1e-12
        return bool(right and of_rank["fused"] == 2 and of_rank["long"] == 0)

    wrong = 0
    for worker, cases in zip(workers, (DATA_CASES, TENSOR_CASES), strict=True):
        for case in cases:
            of_ranks = [of_rank[case] for of_rank in found[worker]]
            right = all(is_right(case, of_rank) for of_rank in of_ranks)
            wrong += not right
            print(f"{case:32} {'right' if right else 'WRONG ' + json.dumps(of_ranks)}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
