"""benchmarks/exported.py, as far as a machine without a GPU can run it."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import exported
from epinorm.tools.kernelbench.problem import load_problem
from epinorm.tools.timing import Settings
from readme_tables import exported_table

PROBLEM = Path(__file__).parent / "zoo" / "problem.py"
SETTINGS = Settings(cpu_runs=2, cpu_seconds=0.1)


def measured(solution: object, pass_: str) -> dict:
    problem = load_problem(PROBLEM)
    assert isinstance(solution, (ModuleType, SimpleNamespace))
    return exported.measure(
        problem, solution, "float32", "highest", pass_, torch.device("cpu"), SETTINGS
    )


@pytest.mark.parametrize("pass_", exported.PASSES)
def test_a_row_has_errors_and_times_of_all_three(pass_: str) -> None:
    row = measured(SimpleNamespace(ModelNew=load_problem(PROBLEM).model_type), pass_)
    assert row["verified"]
    assert row["reason"] is None
    assert row["exported_error"] == row["eager_error_beside_exported"]  # it is eager
    assert min(row[f"{name}_us"] for name in ("exported", "fused", "eager")) > 0
    assert row["exported_over_fused"] == row["exported_us"] / row["fused_us"]
    assert row["exported_speedup"] == row["eager_us"] / row["exported_us"]


class Wrong(nn.Module):
    def __init__(self, *arguments: int) -> None:
        super().__init__()
        self.right = load_problem(PROBLEM).model_type(*arguments)
        self.fc, self.gn = self.right.fc, self.right.gn
        del self.right

    def forward(self, x: Tensor) -> Tensor:
        return self.gn(self.fc(x))


def test_a_wrong_file_has_no_times() -> None:
    row = measured(SimpleNamespace(ModelNew=Wrong), "forward")
    assert not row["verified"]
    assert row["reason"].startswith("exported: ")
    assert not any(key.endswith("_us") for key in row)


def test_a_row_takes_the_place_of_the_one_that_measured_the_same(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    row = dict.fromkeys(exported.KEY, "x") | {"pass": "forward", "exported_us": 1.23456}
    exported.put(path, row)
    exported.put(path, row | {"pass": "start", "stages": {"torch": float("inf")}})
    exported.put(path, row | {"exported_us": 2.0})
    found = json.loads(path.read_text())
    assert [each.get("exported_us") for each in found] == [1.235, 2.0]
    assert [each["pass"] for each in found] == ["start", "forward"]
    assert found[0]["stages"] == {"torch": None}


def test_the_docs_show_what_was_verified(tmp_path: Path) -> None:
    facts = {"dtype": "float32", "precision": "highest", "gpu": "H", "torch": "2", "commit": "c"}
    facts |= {"date": "2026-01-01", "verified": True}
    timed = {"exported_us": 1010.0, "fused_us": 1000.0, "exported_speedup": 4.4}
    rows = [facts | {"pass": "start"}, facts | timed | {"pass": "forward"}]
    rows.append(facts | {"pass": "training", "verified": False})
    (tmp_path / "h.json").write_text(json.dumps(rows))
    assert exported_table(tmp_path).splitlines()[2:] == [
        "| float32 `highest` | forward | 1010 µs | 1000 µs | 1.010 | 4.40× |",
        "| float32 `highest` | training | not verified | – | – | – |",
        "",
        "H, PyTorch 2, commit c, 2026-01-01. Medians of interleaved runs.",
    ]


@pytest.mark.slow
def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    path = tmp_path / "model_new.py"
    path.write_text("raise OSError('not here')\n")
    with pytest.raises(RuntimeError, match=r"model_new.py did not start:(.|\n)*Error"):
        exported.start(path, "float32", "highest")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_it_needs_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="CUDA GPU"):
        exported.main(["--out", str(tmp_path / "rows.json")])
