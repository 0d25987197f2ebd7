"""One rank of test_example.py: a script with the environment that ``torchrun`` would give it.

python example_worker.py RANK RANKS FOLDER PORT SCRIPT [ARGUMENT ...]
"""

from __future__ import annotations

import os
import runpy
import sys

import torch

if __name__ == "__main__":
    rank, ranks, _, port, *command = sys.argv[1:]
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    torch.set_num_threads(1)  # OMP_NUM_THREADS would come too late
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")
