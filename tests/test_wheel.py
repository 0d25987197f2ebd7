"""The wheel, installed where nothing else of the project is, computes what PyTorch computes."""

import email
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from processes import run_python

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
URL = "https://example.org/epinorm"
LARGEST_BYTES = 5_000_000  # beyond PyTorch, of a base install

PROGRAM = """
import sys
import torch
import epinorm
assert sys.argv[1] in epinorm.__file__, epinorm.__file__
device = sys.argv[2]
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GroupNorm(8, 64), torch.nn.SiLU())
model.to(device)
x = torch.randn(2048, 64, device=device)
expected = model(x)
epinorm.fuse(model, strict=True)
torch.testing.assert_close(model(x), expected)
model(x).sum().backward()
print(epinorm.explain(model))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """sdist and wheel as `make build` makes them, in a clone that came from the web."""
    folder = tmp_path_factory.mktemp("built")
    subprocess.run(
        ["bash", str(ROOT / "scripts" / "build.sh"), sys.executable, str(folder)],
        check=True, capture_output=True, env={**os.environ, "PROJECT_URL": f"{URL}.git"},
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def installed(built: Path) -> Path:
    """By pip into a folder of its own, where the wheel's is the only epinorm."""
    (wheel,) = built.glob("epinorm-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert sum(file.file_size for file in archive.infolist()) < LARGEST_BYTES
    pip = (sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet")
    subprocess.run([*pip, "--target", str(built / "site"), str(wheel)], check=True)
    return built / "site"


def test_metadata_has_links_and_names_what_a_base_install_needs(installed: Path) -> None:
    (found,) = installed.glob("*.dist-info/METADATA")
    metadata = email.message_from_string(found.read_text("utf-8"))
    links = dict(link.split(", ") for link in metadata.get_all("Project-URL", []))
    assert links["Source"] == URL
    assert links["Changelog"].endswith("/CHANGELOG.md")
    assert {"Documentation", "Issues"} <= set(links)
    needed = [text for text in metadata.get_all("Requires-Dist", []) if "extra ==" not in text]
    assert needed == ["torch>=2.9"]


def test_the_sdist_is_the_whole_source(built: Path) -> None:
    (sdist,) = built.glob("epinorm-*.tar.gz")
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("CHANGELOG.md", "Makefile", "tests/conftest.py", "docs/index.md", ".ci/run"):
        assert name in packed
    there = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py")}
    assert there <= packed


def run(installed: Path, device: str, environment: dict[str, str]) -> str:
    command = [sys.executable, "-c", PROGRAM, str(installed), device]
    environment = {**environment, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        command, env=environment, cwd=installed, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_is_installed_with_it(installed: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, str(installed / "bin" / "epinorm"), "--version"]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.startswith("epinorm ")


def test_the_wheel_serves_a_cpu(installed: Path) -> None:
    arguments = f"import sys\nsys.argv = ['-c', {str(installed)!r}, 'cpu']\n"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = run_python(arguments + PROGRAM, environment, installed)
    assert "1 of 1 chains fused" in done.stdout, done.stderr
    assert done.returncode == 0
