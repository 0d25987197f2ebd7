"""What a bench says in words: with the spread of its runs, and no ratio that is noise."""

from dataclasses import replace
from pathlib import Path

import pytest

from epinorm.tools.judge.facts import Timing
from epinorm.tools.page import html_page
from epinorm.tools.plots import draw
from epinorm.tools.results import merge_rows, read_rows
from epinorm.tools.verdict import spreads, verdict
from readme_tables import markdown_table

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "nvidia-h200.json"
ROW = replace(
    next(row for row in read_rows(RESULTS) if row.pass_ == "forward"),
    ours_us=100.0,
    eager_us=190.0,
    compile_us=102.0,
    runs=30,
    spreads={"eager": [1.7, 2.1], "compile": [0.96, 1.04]},
)


def test_a_spread_is_of_ratios_within_rounds() -> None:
    drift = [100.0 + 50 * i for i in range(30)]  # of both: no ratio sees it
    found = spreads({"ours": drift, "eager": [2 * time for time in drift]})
    assert found == {"eager": [2.0, 2.0]}
    noisy = [*[90.0] * 5, *[120.0] * 20, *[150.0] * 5]
    assert spreads({"ours": [100.0] * 30, "linear": noisy}) == {"linear": [0.9, 1.5]}
    one_outlier = [*[120.0] * 29, 100_000.0]
    assert spreads({"ours": [100.0] * 30, "eager": one_outlier}) == {"eager": [1.2, 1.2]}
    assert spreads({"ours": [1.0], "eager": [2.0]}) == {}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {},
            "Forward: 1.90× eager (1.70 to 2.10 over 30 runs); "
            "not distinguishable from torch.compile (0.96 to 1.04).",
        ),
        (
            {"eager_us": 93.0, "spreads": {"eager": [0.9, 0.96]}, "compile_us": None},
            "Forward: slower than eager, 0.93× (0.90 to 0.96 over 30 runs).",
        ),
        (
            {"pass_": "training", "compile_us": None, "compile_reason": "no compiler"},
            "Forward and backward: 1.90× eager (1.70 to 2.10 over 30 runs); "
            "torch.compile did not run.",
        ),
        (
            {"spreads": None, "compile_us": None},
            "Forward: 1.90× eager (without a spread).",
        ),
        (
            {"verified": False, "ours_us": None},
            "Forward: not verified, so no speed is given.",
        ),
    ],
)
def test_the_verdict_in_words(changes: dict[str, object], said: str) -> None:
    assert verdict(replace(ROW, **changes)) == said


def test_no_ratio_is_shown_where_noise_is_larger() -> None:
    line = markdown_table([ROW]).splitlines()[2]
    assert "| 1.90× | noise |" in line
    assert verdict(ROW) in html_page("a", [ROW])
    assert draw([ROW], "svg") != draw([replace(ROW, spreads=None)], "svg")


def test_a_spread_survives_the_file(tmp_path: Path) -> None:
    merge_rows(tmp_path / "a.json", [ROW])
    assert read_rows(tmp_path / "a.json") == [ROW]


def test_the_judge_gives_no_ratio_that_is_less_than_its_noise() -> None:
    quiet = Timing("forward", 100.0, 200.0, 110.0, 5.0, "its own", 1.1, 1.05)
    assert str(quiet) == "forward: 100 µs, eager 200 µs, 2.00× (1.82 to 2.10) by its own clock"
    busy = replace(quiet, solution_spread=3.0)  # a machine that others use
    assert "not distinguishable from eager (0.67 to 2.10×)" in str(busy)
    assert "2.00×" not in str(busy)
    assert busy.as_json()["speedups"] == [0.6667, 2.1]
