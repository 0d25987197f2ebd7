"""The judge passes what is right and catches each of the zoo's wrong solutions, with its reason."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from epinorm.tools.cli.main import app
from epinorm.tools.judge import process as judge_process
from epinorm.tools.judge.facts import Check, JudgeOptions, Verdict
from epinorm.tools.judge.judge import judge
from epinorm.tools.judge.source import remarks
from epinorm.tools.kernelbench import ProblemError

ZOO = Path(__file__).parent / "zoo"
PROBLEM = ZOO / "problem.py"

# Solution → the check that must catch it, and words of the reason.
WRONG = {
    "zeros": ("accuracy", "error 1.00e+00"),
    "cached": ("accuracy", "bit for bit, the answer to"),
    "cached_by_pointer": ("new inputs", "bit for bit, the answer to input A"),
    "cached_weights": ("new weights", "through .data"),
    "batch_statistics": ("accuracy", "output on rand"),
    "gamma_per_group": ("accuracy", "output on rand"),
    "gamma_ignored": ("gradients", "gradient of gn.weight on rand: missing"),
    "one_pass_variance": ("large mean", "biases far from zero"),
    "tf32": ("accuracy", "output on randn"),
    "fp16_planes": ("outliers", "1e+12 in x against zeros in W"),
    "tf32_setting": ("settings untouched", "fp32 matmul precision from highest to high"),
    "background_thread": ("streams", "still changed after the call had returned"),
    "alias": ("repeatable", "a second call wrote into the output of the first"),
    "writes_input": ("inputs unchanged", "changed its input 0"),
    "unwritten": ("accuracy", "128 of 4096 elements are NaN or Inf"),
    "zero_gradient": ("gradients", "gradient of input 0 on rand: error 1.00e+00"),
    "no_gradient": ("gradients", "does not require grad"),
    "crash": ("public protocol", "signal SIGSEGV"),
    "fake_clock": ("functions untouched", "time.perf_counter_ns"),
    "other_parameters": ("parameters", "lacks gn.weight, gn.bias"),
    "other_seed": ("initial values", "differ from Model's: fc.bias"),
    "constants": ("batch sizes", "has shape (32, 128), eager's has (33, 128)"),
    "not_repeatable": ("repeatable", "changed"),
}

# What each of these does wrong shows in this check alone: no other one may fail with it.
ALONE = (
    "cached_by_pointer", "cached_weights", "one_pass_variance", "tf32_setting", "writes_input",
    "fake_clock", "other_seed", "constants", "not_repeatable", "fp16_planes",
)  # fmt: skip


def judged(name: str, timing: bool = False, **more: object) -> Verdict:
    options = JudgeOptions(**{"timing": timing, "time_limit": 120.0, "seed": 5, **more})
    return judge(PROBLEM, ZOO / f"{name}.py", options)


def check(verdict: Verdict, name: str) -> Check:
    (found,) = [c for c in verdict.checks if c.name == name]
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_the_right_solution_is_clean(dtype: str) -> None:
    verdict = judged("right", timing=dtype == "float32", dtype=dtype)
    assert verdict.clean, verdict.failures
    skipped = [c.name for c in verdict.checks if c.status == "skipped"]
    assert skipped == (["outliers"] if dtype == "float16" else [])
    if dtype == "float32":
        assert [t.pass_ for t in verdict.timings] == ["forward", "training"]
        assert all(t.solution_us > 0 and t.eager_us > 0 for t in verdict.timings)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_wrong_solutions_are_caught_with_their_reason(name: str) -> None:
    verdict = judged(name, timing=True)
    assert not verdict.clean
    assert not verdict.timings
    where, words = WRONG[name]
    caught = check(verdict, where)
    assert caught.status == "failed"
    assert words in caught.reason
    if name in ALONE:
        assert [c.name for c in verdict.failures] == [where]


def test_every_animal_of_the_zoo_is_here_or_needs_a_gpu() -> None:
    gpu = {"side_stream", "side_stream_late"}
    animals = {path.stem for path in ZOO.glob("*.py")} - {"problem", "right"}
    assert animals == set(WRONG) | gpu | {"endless"}


def test_what_never_ends_is_ended() -> None:
    verdict = judged("endless", time_limit=8.0)
    failed = check(verdict, "public protocol")
    assert failed.reason == "did not end within 8 s (it was asked to run the model)"
    assert check(verdict, "accuracy").status == "skipped"


@pytest.mark.parametrize(
    ("text", "where", "words"),
    [
        ("import torch\n", "file", "defines no class ModelNew"),
        ("ModelNew = 3\n", "file", "not a subclass of torch.nn.Module"),
        ("this is no Python\n", "file", "SyntaxError"),
        ("import os\nos._exit(0)\n", "file", "exit code 0 when asked to load the file"),
        ("raise SystemExit(0)\n", "file", "SystemExit at line 1"),
        (
            "import torch\nclass ModelNew(torch.nn.Module):\n"
            "    def __init__(self, a):\n        super().__init__()\n",
            "parameters",
            "takes 2 positional arguments but 4 were given",
        ),
    ],
)
def test_broken_files_are_said(tmp_path: Path, text: str, where: str, words: str) -> None:
    path = tmp_path / "solution.py"
    path.write_text(text)
    verdict = judge(PROBLEM, path, JudgeOptions(time_limit=60.0))
    assert not verdict.clean
    assert verdict.failures[0].name == where
    assert words in verdict.failures[0].reason
    assert len(verdict.failures) == 1


def test_a_result_that_runs_code_when_read_is_refused(tmp_path: Path) -> None:
    right = (ZOO / "right.py").read_text()
    path = tmp_path / "solution.py"
    path.write_text(
        "import torch\n"
        + right
        + "\nclass Trap:\n"
        + "    def __reduce__(self):\n"
        + f"        return (open, ({str(tmp_path / 'trapped')!r}, 'w'))\n"
        + "\n_save = torch.save\n"
        + "torch.save = lambda values, path: _save({'outputs': Trap()}, path)\n"
    )
    verdict = judge(PROBLEM, path, JudgeOptions(time_limit=60.0))
    assert not verdict.clean
    assert "cannot be read as tensors" in verdict.failures[0].reason
    assert not (tmp_path / "trapped").exists()


def test_forward_alone() -> None:
    verdict = judged("no_gradient", training=False)
    assert verdict.clean, verdict.failures
    assert "gradients" not in [c.name for c in verdict.checks]


def test_no_check_is_not_clean() -> None:
    assert not Verdict("p", "s", ()).clean
    assert not Verdict("p", "s", (Check("file", "skipped", ""),)).clean


def test_a_problem_that_is_not_there_is_bad_input() -> None:
    with pytest.raises(ProblemError, match="does not exist"):
        judge(ZOO / "none.py", ZOO / "right.py", JudgeOptions())
    with pytest.raises(ProblemError, match="expected a Python file with ModelNew"):
        judge(PROBLEM, ZOO / "none.py", JudgeOptions())


def test_remarks(tmp_path: Path) -> None:
    path = tmp_path / "solution.py"
    path.write_text(
        "import triton, os\nfrom torch import nn\n"
        "def f(x):\n    try:\n        return torch.matmul(x, x)\n    except E:\n        pass\n"
    )
    assert remarks(path) == (
        "imports triton",
        "calls a library product",
        "holds try and pass, which static checkers of that community reject",
    )


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    run = CliRunner().invoke
    wrong = [str(PROBLEM), str(ZOO / "writes_input.py"), "--device", "cpu"]
    result = run(app, ["judge", *wrong, "--json"])
    assert result.exit_code == 1
    verdict = json.loads(result.stdout)
    assert verdict["clean"] is False
    failed = [c for c in verdict["checks"] if c["status"] == "failed"]
    assert failed == [
        {"check": "inputs unchanged", "status": "failed", "reason": "changed its input 0"}
    ]
    assert verdict["torch"] == torch.__version__
    right = [str(PROBLEM), str(ZOO / "right.py"), "--device", "cpu", "--forward", "--no-timing"]
    result = run(app, ["judge", *right, "--seed", "3"])
    assert result.exit_code == 0
    assert "clean float32 highest on CPU" in result.stdout
    assert "seed 3" in result.stdout
    assert run(app, ["judge", "nothing.py", str(ZOO / "right.py")]).exit_code == 2
    assert run(app, ["judge", *right, "--time-limit", "0"]).exit_code == 2


def test_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    make = tempfile.TemporaryDirectory

    def remembered(*arguments: str) -> tempfile.TemporaryDirectory:
        folder = make(*arguments)
        made.append(Path(folder.name))
        return folder

    monkeypatch.setattr(judge_process.tempfile, "TemporaryDirectory", remembered)
    judged("crash")
    assert made
    assert not any(folder.exists() for folder in made)
