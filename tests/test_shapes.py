"""The named shapes, and the runner that times them, as `make bench-gpu` calls it."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import epinorm
import run as runner
from processes import run_script
from shapes import SHAPES, Shape

ROOT = Path(__file__).parents[1]
RUN = ROOT / "benchmarks" / "run.py"


def test_the_shapes_of_the_design() -> None:
    sizes = {name: (s.m, s.k, s.n, s.groups) for name, s in SHAPES.items()}
    assert sizes == {
        "kb62": (1024, 8192, 8192, 512),
        "kb62_v0": (128, 512, 256, 8),
        "skinny": (65536, 128, 128, 32),
        "mid": (16384, 1024, 1024, 32),
        "wide_groups": (8192, 4096, 4096, 32),
        "decode_1": (1, 8192, 8192, 512),
        "decode_16": (16, 8192, 8192, 512),
        "layer_norm_512": (4096, 512, 512, None),
        "bert_out": (16384, 768, 768, None),
        "bert_ffn": (16384, 3072, 768, None),
        "wide_ln": (8192, 4096, 4096, None),
        "kb_ln": (1024, 8192, 8192, None),
        "dreamer": (1024, 1024, 1024, None),
        "tdmpc2": (1280, 512, 512, None),
        "ln256": (65536, 256, 256, None),
        "groups_12": (16384, 768, 768, 64),
        "groups_1024": (8192, 2048, 8192, 8),
    }


@pytest.mark.parametrize("name", ["bert_out", "dreamer", "tdmpc2"])
def test_a_block_is_fused_as_a_whole(name: str) -> None:
    """With its residual, norm and activation, at a size that a test can compute."""
    shape = dataclasses.replace(SHAPES[name], m=3, k=8, n=16)
    model, inputs = shape.make(torch.float32, "cpu")
    assert len(inputs) == 1 + shape.residual
    (row,) = [row for row in epinorm.explain(model, *inputs).rows if row.fused]
    assert ("add_residual" in row.chain) == shape.residual
    assert shape.block.split()[0].replace("bert", "layer") in row.chain


@pytest.mark.parametrize("groups", [4, None])
def test_a_shape_makes_its_model_and_input(groups: int | None) -> None:
    shape = Shape("small", 3, 5, 8, groups, "nothing")
    model, (x,) = shape.make(torch.bfloat16, "cpu")
    assert x.shape == (3, 5)
    assert x.dtype == torch.bfloat16
    z = torch.nn.functional.linear(x, model.fc.weight, model.fc.bias)
    want = 2 * torch.nn.functional.leaky_relu(model.norm(z), 0.01)
    assert torch.equal(model(x), want)
    again = shape.make(torch.bfloat16, "cpu")[0]
    assert torch.equal(again.fc.weight, model.fc.weight)


ALWAYS = ("--device", "cpu", "--no-compile", "--quick")


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """The runner's exit code and what it prints, with a tenth of a second for a row."""
    monkeypatch.setenv("EPINORM_COMMIT", "f" * 40)
    monkeypatch.setattr(runner, "QUICK", dataclasses.replace(runner.QUICK, cpu_seconds=0.1))
    return lambda *arguments: (runner.main([*ALWAYS, *arguments]), capsys.readouterr().out)


@pytest.mark.slow
def test_the_runner_writes_verified_rows(run: Any, tmp_path: Path) -> None:
    status, said = run("--shapes", "kb62_v0", "--dtypes", "float32", "--out", str(tmp_path))
    assert status == 0, said
    (path,) = tmp_path.iterdir()
    rows = json.loads(path.read_text())
    assert [(r["shape"], r["precision"], r["pass"]) for r in rows] == [
        ("kb62_v0", "highest", "forward"),
        ("kb62_v0", "highest", "training"),
    ]
    for row in rows:
        assert row["verified"]
        assert row["commit"] == "f" * 12
        assert row["chain"] == "group_norm(8,1e-05)|leaky_relu(0.01)|scale(2)"
        assert (row["m"], row["k"], row["n"], row["groups"]) == (128, 512, 256, 8)
        assert min(row["ours_us"], row["eager_us"], row["linear_us"]) > 0
        assert row["compile_us"] is None
        assert 0 < row["ours_error"] < 1e-6
    assert "| kb62_v0 |" in said


def test_the_runner_goes_on_after_a_row_that_breaks(run: Any, tmp_path: Path) -> None:
    status, said = run(
        *("--shapes", "kb62_v0", "--dtypes", "float32", "--out", str(tmp_path)),
        *("--passes", "norm_epilogue_forward,forward"),
    )
    assert status == 1
    assert "times a CUDA kernel" in said
    assert "1 rows in" in said


def test_an_unknown_name_is_said(tmp_path: Path) -> None:
    done = run_script(RUN, *ALWAYS, "--shapes", "kb63", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "'kb63'" in done.stderr
    assert "kb62_v0" in done.stderr
