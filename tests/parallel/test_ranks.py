"""What a process imports before it forks ranks of a GPU: CUDA must not have been asked for one."""

from __future__ import annotations

import subprocess
import sys

import pytest
import ranks

CODE = f"""
import importlib
import torch

def is_available():
    raise SystemExit("something asks for a GPU as it is imported")

torch.cuda.is_available = is_available
for name in {ranks.IMPORTED}:
    importlib.import_module(name)
"""


@pytest.mark.slow
def test_what_every_rank_imports_asks_for_no_gpu() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
