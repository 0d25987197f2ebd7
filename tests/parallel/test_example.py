"""examples/train_parallel.py by torchrun on two processes, which share each pair of blocks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_parallel.py"


def test_losses_are_those_of_one_process() -> None:
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
    ]
    small = [
        "--layout",
        "tensor",
        "--depth",
        "2",
        "--steps",
        "4",
        "--width",
        "64",
        "--rows",
        "1024",
    ]
    ended = subprocess.run(
        [*launch, str(EXAMPLE), *small], capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert float(re.search(r"difference: (\S+)", ended.stdout)[1]) < 2e-6  # type: ignore[index]
    said = " ".join(ended.stdout.split())
    assert "2 of 4 chains by epinorm's kernels, 2 left to PyTorch's own layers" in said  # by rows
