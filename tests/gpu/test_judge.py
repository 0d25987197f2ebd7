"""The judge on a GPU: what only streams and events can show."""

from pathlib import Path

import pytest

from epinorm.tools.judge.facts import JudgeOptions, Verdict
from epinorm.tools.judge.judge import judge

ZOO = Path(__file__).parents[1] / "zoo"


def judged(name: str, **more: object) -> Verdict:
    options = JudgeOptions(**{"device": "cuda", "seed": 4, "time_limit": 120.0, **more})
    return judge(ZOO / "problem.py", ZOO / f"{name}.py", options)


@pytest.mark.alone
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_right_solution_is_clean(dtype: str) -> None:
    verdict = judged("right", dtype=dtype)
    assert verdict.clean, verdict.failures
    assert [t.pass_ for t in verdict.timings] == ["forward", "training"]


@pytest.mark.parametrize("name", ["side_stream", "side_stream_late"])
def test_work_on_a_side_stream_is_caught(name: str) -> None:
    verdict = judged(name)
    assert "streams" in [c.name for c in verdict.failures]
    assert not verdict.timings


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("tf32_setting", "settings untouched"),
        ("unwritten", "accuracy"),
        ("cached_by_pointer", "new inputs"),
        ("cached_weights", "new weights"),
        ("writes_input", "inputs unchanged"),
        ("one_pass_variance", "large mean"),
    ],
)
def test_what_the_cpu_catches_is_caught_here_too(name: str, check: str) -> None:
    verdict = judged(name, timing=False)
    assert check in [c.name for c in verdict.failures]
