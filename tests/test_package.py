"""The installed package is complete: kernel texts and the typing marker ship with it."""

import tomllib
from pathlib import Path, PurePosixPath

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
