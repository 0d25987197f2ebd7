"""On a GPU where neither a CUDA toolkit nor a C++ compiler can be found."""

import os
from pathlib import Path

from test_wheel import ROOT, run

HOMES = ("CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", "CXX")


def test_it_needs_no_toolkit_and_no_compiler(tmp_path: Path) -> None:
    bare = {name: value for name, value in os.environ.items() if name not in HOMES}
    bare |= {"PATH": str(tmp_path), "EPINORM_CACHE_DIR": str(tmp_path / "cache")}
    assert "1 of 1 chains fused" in run(ROOT / "src", "cuda", bare)
