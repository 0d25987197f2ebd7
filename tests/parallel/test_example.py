"""examples/train_parallel.py on a mesh of four: two processes share each pair, two the rows."""

from __future__ import annotations

import os
import re
import runpy
import socket
import sys
from pathlib import Path
from unittest import mock

import pytest
from ranks import launcher

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_parallel.py"


def largest_difference(said: str) -> float:
    """Of the losses, relative, as the example says it."""
    found = re.search(r"difference: (\S+)", said)
    assert found is not None, said
    return float(found[1])


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


def test_losses_are_those_of_one_process(tmp_path: Path) -> None:
    small = ["--depth", "1", "--steps", "3", "--width", "64", "--rows", "1024"]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    command = (port, str(EXAMPLE), "--layout", "mesh", *small)
    ended = launcher().run("example_worker.py", 4, tmp_path, *command)
    said = "\n".join(text for _, text in ended)
    assert not any(status for status, _ in ended), said[-8000:]
    assert largest_difference(said) < 2e-6
    told = "1 of 2 chains by epinorm's kernels, 1 left to PyTorch's own layers"  # by rows
    assert told in " ".join(said.split())
