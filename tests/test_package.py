"""The installed package is complete: kernel texts and the typing marker ship with it."""

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

import pytest

import epinorm
from processes import run_python

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "epinorm"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def data_files() -> list[PurePosixPath]:
    return [
        PurePosixPath(path.relative_to(PACKAGE).as_posix())
        for path in sorted(PACKAGE.rglob("*"))
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts
    ]


def test_every_data_file_is_declared() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["epinorm"]
    left_out = [
        str(file) for file in data_files() if not any(file.match(pattern) for pattern in patterns)
    ]
    assert data_files()
    assert not left_out, f"add a pattern to package-data in pyproject.toml for {left_out}"


def test_every_folder_with_python_files_is_a_package() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    left_out = [str(f) for f in sorted(folders) if not (f / "__init__.py").is_file()]
    assert not left_out, f"setuptools does not find {left_out}: add an __init__.py"


def test_the_typing_marker_is_there() -> None:
    assert (PACKAGE / "py.typed").is_file()


def test_every_public_name_is_listed_and_there() -> None:
    assert {"explain", "fuse", "unfuse"} <= set(epinorm.__all__) <= set(dir(epinorm))
    for name in epinorm.__all__:
        assert getattr(epinorm, name) is not None
    with pytest.raises(AttributeError, match="'epinorm' has no attribute 'fused'"):
        epinorm.fused  # noqa: B018


USERS_PROGRAM = """
import torch
import torch.nn.functional as F
from torch import nn

import epinorm

x, weight = torch.randn(4, 8), torch.randn(16, 8)
model = epinorm.fuse(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), rounding="eager")
first: nn.Module = model[0]
fused: int = epinorm.explain(model).fused
plain: nn.Sequential = epinorm.unfuse(model)
with epinorm.prepacked(model), epinorm.accumulate_in_place():
    epinorm.prepack(model)(x)
epinorm.unprepack(model)
layer: nn.Module = epinorm.LinearNorm(8, 16, norm=epinorm.GroupNorm(4), post=nn.LeakyReLU(0.1))
one: torch.Tensor = epinorm.linear(x, weight, post=torch.relu)
y: torch.Tensor = epinorm.linear_norm(x, weight, norm=epinorm.LayerNorm(eps=1e-6), post=[F.silu])
y, residual = epinorm.linear_norm(x, weight, norm=epinorm.RMSNorm(), return_sum=True)
chain: epinorm.Chain = epinorm.Chain.parse("layer_norm(1e-5)|gelu")
"""
WRONG = """wrong: int = epinorm.unfuse(model)
epinorm.fused
epinorm.GroupNorm(8, 256)
epinorm.fuse(model, strategy="fast")
"""
CHECKERS = {
    "mypy": ("--strict", "--config-file=mypy.ini", "--cache-dir=cache"),
    "pyright": ("--pythonpath", sys.executable),
}
MYPY = """[mypy]
follow_imports = silent
[mypy-torch.*]
follow_imports = skip
[mypy-torch,torch.nn.*,torch._C.*,torch._tensor,torch.types]
follow_imports = silent
"""
"""What the program has of PyTorch; all of it takes four times as long."""


@pytest.mark.slow
@pytest.mark.parametrize("checker", CHECKERS)
def test_a_users_program_is_checked_against_our_types(tmp_path: Path, checker: str) -> None:
    if find_spec(checker) is None and "CI" not in os.environ:
        pytest.skip(f"{checker} is not installed")
    (tmp_path / "program.py").write_text(USERS_PROGRAM + WRONG)
    settings = {"typeCheckingMode": "strict", "extraPaths": [str(ROOT / "src")]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    (tmp_path / "mypy.ini").write_text(MYPY)
    done = subprocess.run(
        [sys.executable, "-m", checker, *CHECKERS[checker], "program.py"], cwd=tmp_path,
        capture_output=True, text=True, env={**os.environ, "MYPYPATH": str(ROOT / "src")},
    )  # fmt: skip
    lines = {int(n) for n in re.findall(r"program\.py:(\d+).* error: ", done.stdout)}
    before = USERS_PROGRAM.count("\n")
    assert lines == {before + i for i in range(1, 5)}, done.stdout + done.stderr


def test_the_library_needs_torch_alone() -> None:
    """What the extras bring is imported by the command and by reports, never by the library."""
    extras = ("rich", "typer", "matplotlib")
    code = (
        "import sys\n"
        f"hidden = {extras!r}\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in hidden:\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "import torch, epinorm\n"
        "model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))\n"
        "model = epinorm.fuse(model, strategy='cpu')\n"
        "model(torch.ones(4, 8)).sum().backward()\n"
        "print(epinorm.explain(model))\n"
        "import epinorm_cli\n"
        "epinorm_cli.main()\n"
    )
    done = run_python(code)
    assert "1 of 1 chains fused" in done.stdout, done.stderr
    assert "pip install 'epinorm[cli]'" in done.stderr.splitlines()[-1]
    assert done.returncode == 1


def test_the_base_requirement_is_torch() -> None:
    assert [text.partition(">")[0] for text in PROJECT["project"]["dependencies"]] == ["torch"]
    assert {"cli", "bench", "cu12", "cu13", "docs"} <= set(
        PROJECT["project"]["optional-dependencies"]
    )


WORK = """
import sys
events = 0
def count(frame, event, given):
    global events
    events += 1
sys.setprofile(count)
import torch
before = events
import epinorm
print(before, events - before)
"""


@pytest.mark.slow
def test_importing_takes_little_beside_pytorch() -> None:
    """In calls of functions: a share of seconds is another on a machine that does other work."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", WORK]  # PyTorch is imported where `run_python` begins
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    torch_calls, own_calls = map(int, done.stdout.split())
    assert 10_000 < own_calls < 0.035 * torch_calls, "importing epinorm became slow"


SEEN = """
import sys, torch
sys.dont_write_bytecode = True
seen = []
def note(event, given):
    acts = ("socket", "subprocess", "_thread", "tempfile")
    written = event == "open" and set(given[1] or "") & set("wax+")
    if written or event.partition(".")[0] in acts or event in ("os.mkdir", "os.fork"):
        seen.append((event, given))
sys.addaudithook(note)
import epinorm
print(seen)
"""


def test_importing_writes_nothing_and_starts_nothing() -> None:
    """As the page of settings says."""
    done = run_python(SEEN)
    assert done.stdout == "[]\n", done.stderr


def test_the_version_is_the_same_wherever_it_stands() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    released = re.findall(r"^## (\d\S*)", changelog, re.MULTILINE)
    cited = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.MULTILINE)
    assert [released[0]] == cited == [epinorm.__version__]
    assert changelog.index("## Unreleased") < changelog.index(f"## {released[0]}")


def test_the_matrix_begins_at_the_oldest_pytorch_that_is_accepted() -> None:
    (asked,) = re.findall(
        r"^TORCH_VERSIONS \?= (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    (oldest,) = PROJECT["project"]["dependencies"]
    assert oldest == f"torch>={asked.split()[0].rpartition('.')[0]}"
