"""The installed package is complete: kernel texts and the typing marker ship with it."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path, PurePosixPath

import pytest

import epinorm

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
from torch import nn

import epinorm

model: nn.Module = epinorm.fuse(nn.Linear(8, 8))
fused: int = epinorm.explain(model).fused
wrong: int = epinorm.unfuse(model)
epinorm.fused
"""


@pytest.mark.slow
def test_a_users_program_is_checked_against_our_types(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(USERS_PROGRAM)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--config-file=",
        "--follow-imports=silent",
    ]
    done = subprocess.run(
        [*command, f"--cache-dir={ROOT / '.mypy_cache'}", str(tmp_path / "program.py")],
        capture_output=True, text=True, env={**os.environ, "MYPYPATH": str(ROOT / "src")},
    )  # fmt: skip
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert len(errors) == 2, done.stdout + done.stderr
    assert "expression has type" in errors[0]
    assert 'Module has no attribute "fused"' in errors[1]


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
        "model = epinorm.fuse(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)))\n"
        "model(torch.ones(4, 8)).sum().backward()\n"
        "print(epinorm.explain(model))\n"
        "import epinorm_cli\n"
        "epinorm_cli.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert "1 of 1 chains fused" in done.stdout, done.stderr
    assert "pip install 'epinorm[cli]'" in done.stderr.splitlines()[-1]
    assert done.returncode == 1


def test_the_base_requirement_is_torch() -> None:
    assert [text.partition(">")[0] for text in PROJECT["project"]["dependencies"]] == ["torch"]
    assert {"cli", "bench", "cu12", "cu13", "docs"} <= set(
        PROJECT["project"]["optional-dependencies"]
    )
