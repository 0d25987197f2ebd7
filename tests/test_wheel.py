"""The wheel, installed where nothing else of the project is, computes what PyTorch computes."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
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
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"  # the build leaves files in its tree
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (tree / name).write_bytes((ROOT / name).read_bytes())
    files = (p for p in (ROOT / "src").rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    for path in files:
        copy = tree / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(tree)],
        check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = folder.glob("epinorm-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
        assert sum(file.file_size for file in archive.infolist()) < LARGEST_BYTES
    return folder / "site"


def run(installed: Path, device: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-c", PROGRAM, str(installed), device]
    done = subprocess.run(
        command, env=environment, cwd=installed, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_serves_a_cpu(installed: Path) -> None:
    assert "1 of 1 chains fused" in run(installed, "cpu")


@pytest.mark.gpu
def test_the_wheel_serves_a_gpu(installed: Path) -> None:
    assert "1 of 1 chains fused" in run(installed, "cuda")
