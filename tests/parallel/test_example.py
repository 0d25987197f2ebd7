"""examples/train_parallel.py on a mesh of four: two processes share each pair, two the rows."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_parallel.py"


def trained(ranks: int, *arguments: str) -> tuple[float, str]:
    """The largest relative difference of the losses from one process', and all that is printed."""
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    ended = subprocess.run(
        [sys.executable, "-m", *launch, str(EXAMPLE), *arguments],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-8000:]
    found = re.search(r"difference: (\S+)", ended.stdout)
    assert found is not None, ended.stdout
    return float(found[1]), ended.stdout


def test_what_cannot_be_split_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environments = {
        "by torchrun --nproc-per-node 2": {},
        "an even number of processes, got 3": {"LOCAL_RANK": "0", "WORLD_SIZE": "3"},
        "divisible by 2 processes, got 511": {"LOCAL_RANK": "0", "WORLD_SIZE": "2"},
    }
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--layout", "mesh", "--rows", "511"])
    main = runpy.run_path(str(EXAMPLE))["main"]
    for said, environment in environments.items():
        with mock.patch.dict(os.environ, environment), pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert said in capsys.readouterr().err


def test_losses_are_those_of_one_process() -> None:
    small = ["--depth", "2", "--steps", "4", "--width", "64", "--rows", "1024"]
    difference, said = trained(4, "--layout", "mesh", *small)
    assert difference < 2e-6
    told = "2 of 4 chains by epinorm's kernels, 2 left to PyTorch's own layers"  # by rows
    assert told in " ".join(said.split())
