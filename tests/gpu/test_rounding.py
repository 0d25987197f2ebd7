"""``rounding="eager"`` gives what eager gives, by an evaluator's tolerance: exported and fused."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch

import epinorm
from epinorm.tools.accuracy import relative_error
from epinorm.tools.export.export import export

sys.path.insert(0, str(Path(__file__).parents[1]))

from rounding_problems import PROBLEMS, TOLERANCES, far_off, loaded, problem_text, trials

SEEDS = 20
SIZES = (1024, 8192, 8192)
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda d: str(d)[6:])
NAMES = pytest.mark.parametrize("name", PROBLEMS)


@NAMES
@DTYPES
def test_an_exported_file_passes_on_every_seed(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    problem = loaded(problem_text(name, *SIZES), tmp_path, "problem")
    solution = loaded(export(tmp_path / "problem.py").text, tmp_path, "solution")
    wrong = {}
    with torch.no_grad():
        for seed, (model, inputs) in enumerate(trials(problem, SEEDS, dtype, "cuda")):
            ours = solution.ModelNew().to("cuda", dtype)
            ours.load_state_dict(model.state_dict())
            wrong[seed] = far_off(ours(*inputs), model(*inputs))
    assert not any(wrong.values()), wrong


@NAMES
@DTYPES
@pytest.mark.parametrize("strategy", ["auto", "epilogue"])
def test_a_fused_model_passes_and_is_as_accurate(
    name: str, dtype: torch.dtype, strategy: str, tmp_path: Path
) -> None:
    problem = loaded(problem_text(name, *SIZES), tmp_path, "problem")
    wrong = {}
    with torch.no_grad():
        for seed, (model, inputs) in enumerate(trials(problem, SEEDS, dtype, "cuda")):
            fused = epinorm.fuse(copy.deepcopy(model), rounding="eager", strategy=strategy)  # type: ignore[arg-type]
            ours, eager = fused(*inputs), model(*inputs)
            wrong[seed] = far_off(ours, eager)
            if seed == 0:
                truth = model.double()(*(x.double() for x in inputs))
                assert relative_error(ours, truth) <= 1.05 * relative_error(eager, truth)
    assert not any(wrong.values()), wrong
