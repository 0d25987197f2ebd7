"""What a plan says is launched is what is launched, in that order."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from epinorm.backends.cuda.plan.strategy import plan_cuda
from epinorm.operator import calls

sys.path.insert(0, str(Path(__file__).parents[1]))

from imaginary import CASES, KINDS, imaginary_h200, launches


@pytest.fixture(scope="module")
def gpu():
    before = torch.get_float32_matmul_precision()
    with imaginary_h200() as api:
        yield api
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def problems():
    """All that are planned during the test."""
    found = []
    calls.forget_plans()
    calls.planned.append(lambda problem, inputs: found.append(problem))
    yield found
    calls.planned.pop()
    calls.forget_plans()


@pytest.mark.parametrize("core, whole_step", [("auto", True), ("auto", False), ("portable", True)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_a_training_step_launches_what_its_plan_says(
    case, kind, core, whole_step, gpu, problems, monkeypatch
):
    monkeypatch.setenv("EPINORM_CORE", core)
    dtype, setting = KINDS[kind]
    torch.set_float32_matmul_precision(setting)
    found = launches(gpu, *CASES[case], dtype, True, whole_step)
    launched = [one.get("kernel") for one in found]
    plan = plan_cuda(problems[0], "auto")
    if plan.strategy == "reference":  # PyTorch's own layers launch what they launch
        assert not any(name and name[:6] != "aten::" for name in launched)
        return
    assert [*_kernels(plan.forward), None, *_kernels(plan.backward)] == launched
    assert all(step.reason for step in (*plan.forward, *plan.backward))
    hash(plan)


def _kernels(steps):
    return [step.kernel for step in steps]
