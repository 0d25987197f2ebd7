"""scripts/kernels.py: a chain's plan and kernels, without a GPU."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "kernels.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("kernels", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_it_prints_the_plan_and_writes_the_kernels(script, tmp_path, capsys):
    sizes = ["8", "16", "32"]
    gpu = ["--gpu", "a100", "--strategy", "epilogue", "--lineinfo"]
    assert script.main([str(tmp_path / "out"), "layer_norm|relu", *sizes, *gpu]) == 0
    said = capsys.readouterr().out
    names = ["1-norm_forward", "2-norm_forward", "3-norm_backward", "4-norm_column_sums"]
    assert [line.partition(":")[0] for line in said.splitlines() if "registers, " in line] == names
    assert "backward  1 norm_backward" in said
    for name in names:
        base = tmp_path / "out" / name
        entry = name.partition("-")[2]
        assert f"{entry}(" in base.with_suffix(".cu").read_text()
        assert f".entry {entry}(" in base.with_suffix(".ptx").read_text()
        assert b".debug_line" in base.with_suffix(".cubin").read_bytes()
