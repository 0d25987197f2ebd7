"""The command line as a user calls it: output, files, exit codes, one-sentence errors."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import epinorm
from epinorm.tools.console import interruptible, progress
from epinorm.tools.kernelbench import load_problem, protocol
from epinorm_cli.commands import app
from epinorm_cli.options import DTYPES
from processes import Process, as_module, run_python

ROOT = Path(__file__).parents[1]
EXAMPLE = str(ROOT / "examples" / "matmul_groupnorm_leakyrelu_sum.py")
SMALL = (EXAMPLE, "--scale", "64", "--device", "cpu")
STEM = "matmul_groupnorm_leakyrelu_sum"

NO_CHAIN = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.fc(x))

def get_inputs():
    return [torch.rand(4, 8)]

def get_init_inputs():
    return []
"""


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def sentence(result: Any) -> str:
    """The one line that a refused command says; nothing on stdout, no traceback."""
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result.stderr
    return lines[0]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_bench_as_make_run_calls_it(here: Path) -> None:
    done = run_python(as_module("epinorm", "bench", *SMALL, "--no-compile"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "group_norm(8,1e-05)|leaky_relu(0.01)|scale(2)" in done.stdout
    assert "16, 128 → 128, 8 groups" in done.stdout
    *_, forward, training, note, page = done.stdout.splitlines()
    assert page.startswith("page: ")
    assert re.match(r"Forward: .*eager.* \(\d+\.\d\d to \d+\.\d\d over \d+ runs\)\.$", forward)
    assert training.startswith("Forward and backward: ")
    assert note.startswith("On a CPU the product is PyTorch's own")
    for text in ("epinorm ", "eager ", "linear alone", "verified forward", "verified training"):
        assert text in done.stdout
    assert "timing" in done.stderr
    written = {p.name for p in (here / "epinorm-results").iterdir()}
    assert written == {
        f"{STEM}{suffix}" for suffix in (".json", ".runs.json", ".png", ".svg", ".html")
    }
    rows = json.loads((here / "epinorm-results" / f"{STEM}.json").read_text())
    assert [row["pass"] for row in rows] == ["forward", "training"]
    assert all(row["verified"] and row["ours_us"] > 0 for row in rows)


@pytest.mark.parametrize("gpu", [False, True])
def test_make_run_takes_a_problem_that_shows_something_on_this_machine(
    gpu: bool, tmp_path: Path
) -> None:
    (tmp_path / "make").symlink_to(str(shutil.which("make")))
    if gpu:
        (tmp_path / "nvidia-smi").symlink_to("/bin/true")
    command = ["make", "--dry-run", "--assume-old=.venv/.ready", "run"]
    said = subprocess.run(
        command, cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True
    ).stdout
    (file,) = re.findall(r"epinorm bench (\S+) --scale 1\b", said)
    assert file == f"examples/{STEM if gpu else 'groupnorm_rows'}.py"
    load_problem(ROOT / file)


def test_bench_json_is_json_and_nothing_else(here: Path) -> None:
    result = call("bench", *SMALL, "--no-compile", "--forward", "--json", "--out", "there")
    assert result.exit_code == 0, result.stderr
    (row,) = json.loads(result.stdout)
    assert row["pass"] == "forward"
    assert (row["m"], row["k"], row["n"], row["groups"]) == (16, 128, 128, 8)
    assert (here / "there" / f"{STEM}.json").is_file()


def test_bench_without_write_permission_prints_the_results(here: Path) -> None:
    (here / "file").touch()
    result = call("bench", *SMALL, "--no-compile", "--forward", "--out", "file/below")
    assert result.exit_code == 0, result.stderr
    assert "results were not written to file/below" in result.stderr
    (row,) = json.loads(result.stdout[result.stdout.index("[\n") :])
    assert row["ours_us"] > 0


def test_bench_keeps_a_file_that_is_not_its_own(here: Path) -> None:
    (here / f"{STEM}.json").write_text("notes")
    result = call("bench", *SMALL, "--no-compile", "--forward", "--out", ".")
    assert "is not a results file" in result.stderr
    assert (here / f"{STEM}.json").read_text() == "notes"


@pytest.mark.slow
def test_a_killed_bench_leaves_no_half_written_file(here: Path) -> None:
    process = Process(as_module("epinorm", "bench", *SMALL, "--no-compile"))
    process.until_it_says("timing")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(60)
    assert process.returncode == -signal.SIGKILL
    assert not (here / "epinorm-results").exists()


@pytest.fixture
def hears_interrupts() -> Iterator[None]:
    """A suite that was started in the background ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_an_interrupted_bench_says_so(here: Path) -> None:
    process = Process(as_module("epinorm", "bench", *SMALL, "--no-compile"))
    process.until_it_says("verifying")
    time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    _, said = process.communicate(60)
    assert process.returncode == 130
    assert "error: interrupted; no result was written\n" in said
    assert "Traceback" not in said


@pytest.mark.usefixtures("hears_interrupts")
def test_an_interrupt_that_the_interpreter_dropped_counts_at_the_next_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: shown.append(dropped.exc_type))
    with interruptible(), progress("here") as notify:
        notify("first", 0.0)
        for drop in (lambda _: signal.raise_signal(signal.SIGINT), lambda _: [][0]):
            watched = {0}
            known = weakref.ref(watched, drop)
            del watched
            assert known() is None
        with pytest.raises(KeyboardInterrupt):
            notify("second", 0.5)
    assert shown == [IndexError]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with interruptible(), progress("there") as notify:
        notify("first", 0.0)


@pytest.mark.parametrize("dtype", ["fp32", "float64", "bf16", "float16"])
def test_check(dtype: str) -> None:
    result = call("check", *SMALL, "--dtype", dtype)
    assert result.exit_code == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == "verified"
    assert "gradient of fc.weight" in result.stdout
    assert "gradient of gn.bias" in result.stdout
    assert f"forward, {DTYPES[dtype]}" in result.stdout
    assert len(result.stdout.splitlines()) < 24  # one screen


def test_check_json() -> None:
    result = call("check", *SMALL, "--training", "--json")
    assert result.exit_code == 0
    (found,) = json.loads(result.stdout)
    assert found["pass"] == "training"
    assert found["passed"]
    assert len(found["comparisons"]) == 12


class _Wrong(torch.nn.Module):
    def __init__(self, inside: torch.nn.Module) -> None:
        super().__init__()
        self.fc, self.gn, self.leaky_relu = inside.fc, inside.gn, inside.leaky_relu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.leaky_relu(self.fc(x))


@pytest.mark.parametrize("command", ["check", "bench"])
def test_a_wrong_result_exits_1_and_shows_no_speed(
    command: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = protocol.fused_copy

    def wrong(*arguments: object) -> object:
        candidate, explanation = right(*arguments)  # type: ignore[arg-type]
        return _Wrong(candidate), explanation

    monkeypatch.setattr(protocol, "fused_copy", wrong)
    result = call(command, *SMALL)
    assert result.exit_code == 1
    assert "not verified" in result.stdout
    assert "µs" not in result.stdout
    assert " ms" not in result.stdout


def test_explain() -> None:
    result = call("explain", *SMALL)
    assert result.exit_code == 0
    assert "1 of 1 chains fused" in result.stdout
    found = json.loads(call("explain", *SMALL, "--json").stdout)
    assert found["rows"][0]["chain"] == "group_norm(8,1e-05)|leaky_relu(0.01)|scale(2)"


def test_explain_takes_a_whole_model_by_its_factory(here: Path) -> None:
    (here / "mine.py").write_text(
        "import torch\nfrom torch import nn\ndef factory():\n"
        "    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), torch.ones(4, 8)\n"
    )
    result = call("explain", "mine.py:factory", "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    assert "1 of 1 chains fused" in result.stdout
    assert "plans for CPU" in result.stdout
    assert "mine.py:factory" in result.stderr  # and no picture of a factory


def test_explain_says_what_a_gpu_would_do_that_is_not_here(here: Path) -> None:
    (here / "mine.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def factory():\n"
        "    parts = nn.Linear(1024, 1024), nn.GroupNorm(64, 1024), nn.Linear(1024, 512)\n"
        "    return nn.Sequential(*parts), torch.ones(4096, 1024)\n"
    )
    said = {}
    for gpu in (["--gpu", "h100"], ["--gpu", "a100", "--precision", "high"], ["--device", "cpu"]):
        result = call("explain", "mine.py:factory", *gpu)
        assert result.exit_code == 0, result.stderr
        said[gpu[1]] = " ".join(result.stdout.split())
    assert "plans for h100, by estimates, as it is not here" in said["h100"]
    assert "two fp16 planes" in said["h100"]
    assert "1 Linear without a norm by single" in said["h100"]
    assert "one fp16 plane" in said["a100"]
    assert "serve a CPU as they are" in said["cpu"]  # nothing of the others is left
    for wrong in (["--gpu", "v100"], ["--gpu", "h100", "--plan"], ["--gpu", "h100", *SMALL[3:]]):
        result = call("explain", "mine.py:factory", *wrong)
        assert result.exit_code == 2
        assert "--gpu" in sentence(result)


def test_explain_opens_for_a_gpu_what_a_cpu_keeps_whole(here: Path) -> None:
    (here / "mine.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def factory():\n"
        "    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)\n"
        "    return layer.eval().requires_grad_(False), torch.ones(8, 256, 512)\n"
    )
    for gpu, opened in ((["--gpu", "h200"], True), (["--device", "cpu"], False)):
        result = call("explain", "mine.py:factory", *gpu)
        assert ("linear2" in result.stdout) == opened, result.stdout


def test_explain_prints_every_launch_of_the_plan() -> None:
    text = call("explain", *SMALL, "--plan").stdout
    for kernel in ("epinorm_forward", "epinorm_backward"):
        assert kernel in text


def test_info() -> None:
    result = call("info")
    assert result.exit_code == 0
    assert torch.__version__ in result.stdout
    known = json.loads(call("info", "--json").stdout)
    assert {"python", "torch", "gpu", "kernel cache", "supported here"} <= set(known)


def test_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert call("cache").exit_code == 0
    assert "kernels" in call("cache", "list").stdout
    assert "kernels" in json.loads(call("cache", "list", "--json").stdout)
    monkeypatch.setenv("EPINORM_CACHE_SIZE", "abc")
    for command in (["cache"], ["cache", "list", "--json"], ["info"]):
        said = " ".join(call(*command).stdout.split())
        assert "EPINORM_CACHE_SIZE must be a number of bytes" in said
        assert "but got 'abc'" in said
    monkeypatch.setenv("EPINORM_CACHE_DIR", str(tmp_path))  # others need what there is
    cleared = call("cache", "clear")
    assert cleared.exit_code == 0
    assert cleared.stdout.startswith("removed ")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--dtype", "int32"), "got 'int32'"),
        (("--precision", "medium"), "--precision must be one of highest, high, got 'medium'"),
        (("--precision", "high"), "exists on CUDA alone"),
        (("--device", "tpu"), "--device must be cpu, cuda or cuda:N, got 'tpu'"),
        (("--device", "meta"), "got 'meta'"),
        (("--strategy", "fast"), "got 'fast'"),
        (("--scale", "3"), "does not divide batch_size = 1024"),
        (("--scale", "0"), "got 0"),
    ],
)
@pytest.mark.parametrize("command", ["bench", "check"])
def test_bad_options(command: str, options: tuple[str, ...], said: str, here: Path) -> None:
    result = call(command, *SMALL, *options)
    assert result.exit_code == 2
    assert said in sentence(result)
    assert list(here.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_no_gpu() -> None:
    result = call("check", EXAMPLE, "--device", "cuda")
    assert result.exit_code == 2
    assert "sees no CUDA GPU" in sentence(result)


def test_a_strategy_that_cannot_serve_is_said() -> None:
    result = call("check", *SMALL, "--strategy", "single")
    assert result.exit_code == 2
    assert "strategy 'single'" in sentence(result)


@pytest.mark.parametrize("command", ["bench", "check", "explain"])
def test_a_bad_file_is_one_sentence(command: str, here: Path) -> None:
    (here / "broken.py").write_text("class Model(:")
    for name, said in (("missing.py", "does not exist"), ("broken.py", "not valid Python")):
        result = call(command, name)
        assert result.exit_code == 2
        assert said in sentence(result)


def test_a_factory_that_fails_is_one_sentence(here: Path) -> None:
    (here / "failing.py").write_text(
        "def disk(): raise OSError('on fire')\n"
        "def key(): return {}['x']\n"
        "def right(): assert False\n"
    )
    (here / "ends.py").write_text("raise SystemExit(2)")
    raised = {"disk": "OSError: on fire", "key": "KeyError: 'x'", "right": "AssertionError"}
    said = {f"failing.py:{name}": f"failing.py:{name}() raised {e}" for name, e in raised.items()}
    for model, what in (said | {"ends.py:net": "importing it raised SystemExit"}).items():
        result = call("explain", model, "--device", "cpu")
        assert result.exit_code == 2
        assert what in sentence(result)


@pytest.mark.parametrize("command", ["bench", "check"])
def test_a_model_without_a_chain_exits_1(command: str, here: Path) -> None:
    (here / "model.py").write_text(NO_CHAIN)
    result = call(command, "model.py", "--device", "cpu")
    assert result.exit_code == 1
    assert "no chain that can be fused" in sentence(result)
    assert "epinorm bench FILE.py:Model takes it as a whole" in sentence(result)


def test_explain_without_a_chain_exits_1(here: Path) -> None:
    (here / "model.py").write_text(NO_CHAIN)
    result = call("explain", "model.py", "--device", "cpu")
    assert result.exit_code == 1
    assert "no chain" in result.stdout


def test_the_traceback_is_there_for_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPINORM_TRACEBACK", "1")
    result = call("check", "missing.py")
    assert "Traceback" in result.stderr
    assert result.exit_code == 2


def test_help_and_version_need_no_torch() -> None:
    program = (
        "import sys; from epinorm_cli import main; sys.argv = ['epinorm', *sys.argv[1:]]\n"
        "try: main()\n"
        "finally: assert not {'torch', 'epinorm', 'matplotlib'} & set(sys.modules)"
    )
    seconds, said = [], []
    for arguments in (["--help"], ["bench", "--help"], ["--version"], []):
        before = os.times().children_user
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        command = [sys.executable, "-c", program, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert "Traceback" not in done.stderr, done.stderr
        seconds.append(os.times().children_user - before)
        said.append(done.stdout + done.stderr)
    assert min(seconds) < 0.5, seconds  # of the processor; the least, since others use it too
    for name in ("bench", "check", "explain", "info", "cache"):
        assert name in said[0]
        assert name in said[3]
    # What is installed as 2.11.0 may call itself 2.11.0+cu130.
    stated = said[2].partition(", PyTorch ")
    assert (stated[0], stated[2].split("+")[0].strip()) == (
        f"epinorm {epinorm.__version__}",
        torch.__version__.split("+")[0],
    )


def test_what_an_ascii_pipe_cannot_show_is_written_in_plain_letters() -> None:
    ascii_pipe = "import sys; sys.stdout.reconfigure(encoding='ascii', errors='strict')\n"
    done = run_python(ascii_pipe + as_module("epinorm", "explain", *SMALL))
    assert done.returncode == 0, done.stderr
    assert "fc -> gn" in done.stdout


def test_piped_output_has_the_width_it_is_told_and_no_colour() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_COLOR": "1"}
    command = [sys.executable, "-c", "import epinorm_cli; epinorm_cli.main()"]  # without PyTorch
    for columns in (50, 120):
        environment["COLUMNS"] = str(columns)
        options = {"capture_output": True, "text": True, "env": environment}
        text = subprocess.run([*command, "--help"], **options).stdout  # type: ignore[call-overload]
        assert "\x1b" not in text
        assert max(map(len, text.splitlines())) == columns
