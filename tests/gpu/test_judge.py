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
    assert all(0.5 < t.speedup < 2 for t in verdict.timings), verdict.timings


@pytest.mark.parametrize("name", ["side_stream", "side_stream_late"])
def test_work_on_a_side_stream_is_caught(name: str) -> None:
    verdict = judged(name)
    assert "streams" in [c.name for c in verdict.failures]
    assert not verdict.timings


LARGE = {"batch_size = 32": "batch_size = 2048", "input_size = 96": "input_size = 4096"}
LARGE |= {"hidden_size = 128": "hidden_size = 4096", "num_groups = 8": "num_groups = 256"}


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """The problem at a size where computing takes twice as long as launching, also on a slow host
    (400 µs a run have been seen)."""
    text = (ZOO / "problem.py").read_text()
    for old, new in LARGE.items():
        text = text.replace(old, new)
    path = tmp_path / "problem.py"
    path.write_text(text)
    return path


@pytest.mark.alone
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_times_of_a_large_problem_are_confirmed(large: Path, dtype: str) -> None:
    options = JudgeOptions(device="cuda", seed=4, time_limit=120.0, dtype=dtype)
    verdict = judge(large, ZOO / "right.py", options)
    assert verdict.clean, verdict.failures
    assert [t.clock for t in verdict.timings] == ["its own", "its own"]
    assert all(0.7 < t.speedup < 1.4 for t in verdict.timings), verdict.timings


@pytest.mark.alone
@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("events", "its times are confirmed, forward"),
        ("works_after_the_clock", "its times are confirmed, forward"),
        ("skips_all_but_the_last", "right in timed runs, forward"),
    ],
)
def test_lies_about_time_are_caught(large: Path, name: str, check: str) -> None:
    options = JudgeOptions(device="cuda", seed=4, time_limit=120.0, training=False)
    verdict = judge(large, ZOO / f"{name}.py", options)
    if verdict.timings:  # where launching takes longer than computing a lie is not believed
        assert "right in" not in check, verdict
        assert [t.clock for t in verdict.timings] == ["the judge's"]
        assert all(t.speedup < 1.4 for t in verdict.timings), verdict.timings
    else:
        assert check in [c.name for c in verdict.failures], verdict.failures


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
