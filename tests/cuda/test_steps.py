"""What a plan says is launched is what is launched, in that order."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from epinorm.backends.cuda.fp32.rounded_weight import RoundedWeight
from epinorm.backends.cuda.gemm.hopper.fp32_weight import Converting
from epinorm.backends.cuda.plan.planes import product_of
from epinorm.backends.cuda.plan.steps import single_tile
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


CONVERTING = pytest.mark.parametrize(
    "setting, m, k, n, norm",
    [
        ("highest", 128, 8192, 8192, None),
        ("highest", 128, 8192, 8192, "layer_norm"),
        ("highest", 70, 8224, 8192, None),  # half a line of the planes is padding
        ("high", 16384, 3072, 768, None),
    ],
)


@CONVERTING
def test_what_converts_on_the_way_launches_what_its_plan_says(
    setting, m, k, n, norm, gpu, problems
):
    torch.set_float32_matmul_precision(setting)
    found = launches(gpu, m, k, n, norm, "gelu", "", torch.float32, False)
    plan = plan_cuda(problems[0], "auto")
    assert _kernels(plan.forward) == [one["kernel"] for one in found]
    assert plan.forward[0].kernel == "split_and_sample"
    product = product_of(problems[0]) if plan.strategy == "planes" else problems[0]
    made = Converting(product, single_tile(product, "hopper"))
    taken = made.new_ordered(), made.new_x(), made.new_weight()
    assert sum(buffer.nbytes for buffer in plan.scratch) == sum(t.nbytes for t in taken)


@pytest.mark.parametrize(
    "m, k, n, norm",
    [
        (65536, 256, 256, "layer_norm"),
        (16384, 100, 256, "layer_norm"),  # W's last step is padded
        (16384, 512, 512, "layer_norm"),  # in clusters
        (65536, 256, 256, None),
    ],
)
@pytest.mark.parametrize("training", [False, True])
def test_tf32_from_registers_launches_what_its_plan_says(m, k, n, norm, training, gpu, problems):
    """And takes what its plan says for W."""
    torch.set_float32_matmul_precision("high")
    whole_step = (True,) * training
    found = launches(gpu, m, k, n, norm, "relu", "", torch.float32, training, *whole_step)
    plan = plan_cuda(problems[0], "auto")
    backward = [None, *_kernels(plan.backward)] * training
    assert [*_kernels(plan.forward), *backward] == [one.get("kernel") for one in found]
    assert _kernels(plan.forward) == ["round_weight", "linear_norm"]
    taken = RoundedWeight(n, k, torch.device("cpu")).new()
    assert [b.nbytes for b in plan.scratch if b.name == "W as TF32"] == [taken.nbytes]


@pytest.mark.parametrize("setting", ["high", "highest"])
@pytest.mark.parametrize("chain", [(None, "gelu"), ("group_norm(512)", "")])
@pytest.mark.parametrize("training", [False, True])
def test_an_x_without_rows_launches_nothing(setting, chain, training, gpu):
    """Whose plan may be to convert W on the way."""
    torch.set_float32_matmul_precision(setting)
    norm, pre = chain
    facts = (norm, pre, "", torch.float32)
    if training:
        found = launches(gpu, 0, 8192, 8192, *facts, True, True)
    else:
        found = launches(gpu, 0, 8192, 8192, *facts, False)
    assert "linear_norm_fp32_weight" not in [one.get("kernel") for one in found]


def _kernels(steps):
    return [step.kernel for step in steps]
