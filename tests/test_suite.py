"""``epinorm bench --kernelbench``: KernelBench's rule, ours, and one failure that costs one row."""

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from epinorm.tools.kernelbench.problem import ProblemError
from epinorm.tools.models import suite
from epinorm.tools.models.exported import left_to_pytorch
from epinorm.tools.models.suite import (
    SuiteRow,
    bench_problem,
    geometric_mean,
    problem_files,
    within_tolerance,
)
from epinorm.tools.models.tables import suite_sentence
from epinorm.tools.results import merge_rows, read_rows_of
from epinorm.tools.timing import Settings
from epinorm_cli.commands import app
from readme_tables import suite_table

CPU = torch.device("cpu")
FAST = Settings(runs=2, cpu_runs=2, cpu_seconds=0.1)

PROBLEM = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.bn = nn.BatchNorm1d(width)
        self.gn = nn.GroupNorm(4, width)
        self.first = id(self)

    def forward(self, x):
        assert self.training
        {before}
        return torch.relu(self.gn(self.bn(self.fc(x)) * 2)).sum(dim=1, keepdim=True)

def get_inputs():
    return [torch.rand(16, 32)]

def get_init_inputs():
    return [32]
"""


def write(folder: Path, name: str, before: str = "") -> Path:
    path = folder / name
    path.write_text(PROBLEM.replace("{before}", before))
    return path


def test_a_problem_is_right_and_timed(tmp_path: Path) -> None:
    path = write(tmp_path, "62_Right.py")
    row = bench_problem(62, path, CPU, compile=False, timing=FAST)
    assert row.reason is None
    assert row.right
    assert (row.problem, row.name, row.seeds) == (62, "62_Right", 5)
    assert row.ours_us > 0
    assert row.over("eager") == row.eager_us / row.ours_us
    assert row.compile_us is row.over("compile") is None


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("raise ValueError('no such thing')", "ProblemError: 9_Odd.py: Model.forward"),
        ("x = x * torch.rand_like(x)", "gives another result at each call"),
        ("x = x * float('nan')", "gives no finite number"),
        (
            "x = x + (x.dtype == torch.float32) * (id(self) != self.first) * x.flip(0)",
            "KernelBench's rule passes 0 of 5 seeds, of float64's 5",
        ),
    ],
)
def test_what_is_wrong_is_the_rows_reason(tmp_path: Path, before: str, said: str) -> None:
    row = bench_problem(9, write(tmp_path, "9_Odd.py", before), CPU, compile=False, timing=FAST)
    assert not row.right
    assert row.ours_us is None
    assert said in row.reason


EXPORTED = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        x = self.fc(x)
        x = torch.relu(x)
        return x

def get_inputs():
    return [torch.rand(256, 1024)]

def get_init_inputs():
    return [1024]
"""


@pytest.mark.slow
def test_the_exported_file_is_held_against_the_rule_and_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, file = tmp_path / "76_Exported.py", tmp_path / "out" / "76_Exported.py"
    path.write_text(EXPORTED)
    of = {"compile": False, "timing": FAST, "exported": file, "judging": True}
    row = bench_problem(76, path, CPU, **of)
    assert (row.reason, row.exported_reason) == (None, None)
    assert (row.exported_seeds, row.judged, row.is_right) == (5, True, True)
    assert row.over("eager", "exported") == row.eager_us / row.exported_us
    said = suite_sentence([row])
    assert "1 of 1 exported files are right, " in said
    assert "; of 1 that were judged 1 are clean; " in said
    unclean = replace(row, judged=False, exported_reason="judge: gradients: ...")
    assert "of 2 that were judged 1 are clean, not so " in suite_sentence([row, unclean])
    write = suite.write_exported

    def wrong(problem: Path, to: Path, device: torch.device) -> None:
        write(problem, to, device)
        text = to.read_text()
        assert text.count("x = torch.relu(x)") == 1
        to.write_text(text.replace("x = torch.relu(x)", "x = torch.relu(x) + 1"))

    monkeypatch.setattr(suite, "write_exported", wrong)
    row = bench_problem(76, path, CPU, **of)
    assert row.right
    assert not row.is_right
    assert (row.exported_seeds, row.exported_us, row.judged) == (0, None, None)
    assert "passes 0 of 5 seeds, of float64's 5" in row.exported_reason


def test_a_file_whose_kernels_did_not_run_is_not_right_on_a_gpu() -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        warnings.warn("another", stacklevel=1)
        assert left_to_pytorch(warned, torch.device("cuda")) is None
        warnings.warn("ModelNew runs PyTorch's own layers here: no kernels", stacklevel=1)
    assert "own layers" in left_to_pytorch(warned, torch.device("cuda"))
    assert left_to_pytorch(warned, CPU) is None


def test_kernelbenchs_tolerance() -> None:
    x = torch.tensor([0.0, 1000.0])
    assert within_tolerance(x + torch.tensor([9e-5, 9e-2]), x)
    assert not within_tolerance(x + torch.tensor([2e-4, 0.0]), x)
    assert not within_tolerance(x[:1], x[1:].expand(2))
    assert not within_tolerance((x,), x)
    assert not within_tolerance(x * torch.nan, x)


def test_the_folder_may_be_the_whole_repository(tmp_path: Path) -> None:
    level = tmp_path / "KernelBench" / "level2"
    level.mkdir(parents=True)
    for name in ("62_B.py", "9_A.py", "1_Conv.py", "notes.py"):
        (level / name).touch()
    assert list(problem_files(tmp_path)) == list(problem_files(level)) == [9, 62]
    with pytest.raises(ProblemError, match="holds no problem"):
        problem_files(tmp_path / "KernelBench" / "level1")


ROW = SuiteRow(
    12, "12_Gemm_Multiply", True, 5, 5, 1, 1, "H200", "2.11", "abc", "2026-01-01",
    ours_us=100.0, eager_us=400.0, compile_us=200.0, ours_error=1e-7, eager_error=2e-7,
)  # fmt: skip


def test_tables_and_means(tmp_path: Path) -> None:
    wrong = replace(ROW, problem=9, name="9_Wrong", right=False, ours_us=None, reason="error")
    slow = replace(ROW, problem=14, name="14_Slow", ours_us=400.0, compile_us=None)
    assert geometric_mean([ROW, slow, wrong]) == pytest.approx(2.0)
    assert geometric_mean([wrong]) is None
    assert "in float64 too, and so ours, in 12;" in suite_sentence([replace(ROW, seeds=4)])
    assert "float64" not in suite_sentence([ROW])
    assert "2 of 3 problems are right; 2.00 times" in suite_sentence([ROW, slow, wrong])
    assert "the least is 1.00 (14_Slow)" in suite_sentence([ROW, slow, wrong])
    table = suite_table([ROW, wrong])
    assert "| 12 Gemm_Multiply | 100 µs | 400 µs | 200 µs | 4.00× | 1.0e-07 / 2.0e-07 |" in table
    assert "| 9 Wrong | not right |" in table
    path = tmp_path / "rows.json"
    merge_rows(path, [ROW, wrong, replace(ROW, ours_us=50.0)])
    assert [row.problem for row in read_rows_of(SuiteRow, path)] == [12, 9]
    assert read_rows_of(SuiteRow, path)[0].ours_us == 50.0


def test_the_command_goes_on_after_a_failure(tmp_path: Path) -> None:
    write(tmp_path, "9_Odd.py", "raise ValueError('no')")
    write(tmp_path, "62_Right.py")
    arguments = ["bench", "--kernelbench", str(tmp_path), "--no-compile", "--runs", "2"]
    arguments += ["--device", "cpu", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 1
    assert [row["right"] for row in json.loads(result.stdout)] == [False, True]
    assert len(list((tmp_path / "out" / "kernelbench").iterdir())) == 1
    result = CliRunner().invoke(app, [*arguments, "--problems", "62"])
    assert result.exit_code == 0, result.output
    assert "1 of 1 problems are right" in result.stdout
    assert CliRunner().invoke(app, ["bench"]).exit_code == 2
    assert CliRunner().invoke(app, [*arguments, "--problems", "63"]).exit_code == 2
