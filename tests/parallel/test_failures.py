"""A rank that raises, dies or has another shape: the others end with an error that says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ranks import launcher

CASES = [("tensor", "raises"), ("tensor", "dies"), ("tensor", "shape"), ("fsdp2", "dies")]
SECONDS = 30
"""The group's timeout, as failing_worker.py sets it."""


@pytest.mark.slow
@pytest.mark.parametrize(("way", "failure"), CASES)
def test_the_others_end_in_time_with_a_clear_error(way: str, failure: str, tmp_path: Path) -> None:
    ended = launcher().run("failing_worker.py", 2, tmp_path, "cpu", failure, way)
    (status, said), (failed, _) = ended
    assert failed not in (0, 3)
    assert status != 0
    if failure == "shape":  # gloo ends the process
        assert "Received data size doesn't match expected size" in said
        return
    assert re.search(r"ended: RuntimeError: .*Connection (closed|reset) by peer", said), said
    assert float(re.search(r"seconds: (\S+)", said)[1]) <= SECONDS  # type: ignore[index]
    assert "same: True" in said
