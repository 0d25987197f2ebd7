"""What is picked for a problem, and how it is said when nothing fast serves."""

import sys
import types
import warnings
from dataclasses import replace

import pytest
import torch

import epinorm
from epinorm import said
from epinorm.backends import cpu, memo
from epinorm.backends.engine import executable_for, plan_for
from epinorm.chain import Chain
from epinorm.operator import calls
from epinorm.problem import Inputs, Layout, Plan, Problem

FACTS = ("layer_norm", "auto", False, None)


def problem(device="cpu", dtype=torch.float32, m=8, text="group_norm(4)|relu"):
    chain = Chain.parse(text)
    flags = (True, True, True, False)
    return Problem(chain, m, 16, 32, dtype, dtype, dtype, *flags, torch.device(device), "highest")


@pytest.fixture
def fake_cuda(monkeypatch):
    """Stand in for plan.strategy of CUDA; returns what it answers and was asked."""
    asked = []
    module = types.ModuleType("epinorm.backends.cuda.plan.strategy")
    module.__spec__ = types.SimpleNamespace(name="epinorm.backends.cuda.plan.strategy")
    module.answer = Plan("reference", "the GPU is too old")

    def plan_cuda(problem, strategy):
        asked.append(strategy)
        return module.answer

    module.plan_cuda, module.asked = plan_cuda, asked
    monkeypatch.setitem(sys.modules, "epinorm.backends.cuda.plan.strategy", module)
    plan_for.cache_clear()
    said.forget()
    yield module
    plan_for.cache_clear()
    said.forget()


@pytest.fixture
def fake_cpu(monkeypatch):
    """Stand in for epinorm.backends.cpu.supports."""
    answers = types.SimpleNamespace(why_not=None)
    monkeypatch.setattr("epinorm.backends.cpu.supports", lambda problem: answers.why_not)
    plan_for.cache_clear()
    yield answers
    plan_for.cache_clear()


def test_cpu_kernel_where_it_serves(fake_cpu):
    assert plan_for(problem()).strategy == "cpu"
    assert plan_for(problem(), "cpu").strategy == "cpu"
    assert plan_for(problem(), strict=True).strategy == "cpu"


def test_a_plain_norm_of_rows_is_left_to_pytorch_on_a_cpu(fake_cpu):
    """Its own layers are faster there; what else the chain does makes up for it."""
    large = replace(problem(text="layer_norm|silu", m=1024), n=256)
    plan = plan_for(large)
    assert (plan.strategy, plan.chosen) == ("reference", True)
    assert plan_for(large, "cpu").strategy == "cpu"
    rms = replace(large, chain=Chain.parse("rms_norm|silu"))
    assert plan_for(rms).strategy == "reference"
    assert plan_for(replace(rms, training=True)).strategy == "cpu"
    for text in ("add_residual|layer_norm|silu", "group_norm(8)|silu"):
        assert plan_for(replace(large, chain=Chain.parse(text))).strategy == "cpu"


@pytest.mark.parametrize("training", [False, True])
def test_what_costs_more_to_call_than_it_saves_is_left_to_pytorch(fake_cpu, monkeypatch, training):
    monkeypatch.setattr(cpu, "LEAST_VALUES", 2**14)
    monkeypatch.setattr(cpu, "LEAST_VALUES_TRAINING", 2**16)
    least = 2**16 if training else 2**14
    enough = replace(problem(m=least // 64), n=64, training=training)
    small = replace(enough, m=enough.m - 1)
    assert plan_for(enough).strategy == "cpu"
    assert (plan_for(small).strategy, plan_for(small).chosen) == ("reference", True)
    assert plan_for(small, "cpu").strategy == "cpu"


def test_reference_on_the_cpu_where_it_does_not(fake_cpu):
    fake_cpu.why_not = "no compiler was found"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plan_for(problem()) == Plan("reference", "no compiler was found")
    with pytest.raises(RuntimeError, match="strategy 'cpu' cannot serve.*no compiler was found"):
        plan_for(problem(), "cpu")
    with pytest.raises(RuntimeError, match="strict=True.*no compiler was found"):
        plan_for(problem(), strict=True)


@pytest.mark.parametrize("strategy", ["epilogue", "single"])
def test_a_gpu_strategy_does_not_run_on_the_cpu(strategy):
    with pytest.raises(RuntimeError, match=f"{strategy!r} cannot serve.*does not run on a cpu"):
        plan_for(problem(), strategy)


def test_the_cpu_strategy_does_not_run_on_a_gpu():
    with pytest.raises(RuntimeError, match="'cpu' cannot serve.*does not run on a cuda"):
        plan_for(problem("cuda"), "cpu")


def test_unknown_strategy():
    with pytest.raises(ValueError, match="unknown strategy 'fast'; known are auto, single"):
        plan_for(problem(), "fast")


def test_cuda_asks_its_own_plan(fake_cuda):
    fake_cuda.answer = Plan("single", "the group fits one tile")
    assert plan_for(problem("cuda")) is fake_cuda.answer
    assert plan_for(problem("cuda"), "single") is fake_cuda.answer
    assert fake_cuda.asked == ["auto", "single"]


def test_the_reference_on_cuda_warns_once_for_each_reason(fake_cuda):
    with pytest.warns(UserWarning, match="the GPU is too old"):
        plan_for(problem("cuda"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plan_for(problem("cuda", m=9)).strategy == "reference"
    fake_cuda.answer = Plan("reference", "cuda-core is not installed")
    with pytest.warns(UserWarning, match="cuda-core is not installed"):
        plan_for(problem("cuda", m=10))


def test_the_reference_on_cuda_is_an_error_under_strict(fake_cuda):
    with pytest.raises(RuntimeError, match="strict=True.*the GPU is too old"):
        plan_for(problem("cuda"), strict=True)
    with pytest.raises(RuntimeError, match="strategy 'epilogue' cannot serve.*too old"):
        plan_for(problem("cuda"), "epilogue")
    assert plan_for(problem("cuda"), "reference").strategy == "reference"


@pytest.mark.parametrize("strategy", ["reference", "cpu"])
def test_an_executable_computes_both_passes_of_its_plan(strategy):
    asked = problem()
    plan = plan_for(asked, strategy)
    made = executable_for(asked, plan, Layout(16, 16, (8, 32)))
    assert (made.problem, made.plan) == (asked, plan)
    inputs = Inputs(torch.randn(8, 16), torch.randn(32, 16), *torch.randn(3, 32).unbind(), ())
    forward = made.forward(*inputs)
    assert forward.y.shape == (8, 32)


def test_one_clear_plans_and_makes_everything_anew(fake_cpu):
    x, w = torch.randn(3, 5), torch.randn(7, 5)
    first = calls.executable_of(Inputs(x, w, None, None, None, ()), FACTS, False)
    assert calls.executable_of(Inputs(x, w, None, None, None, ()), FACTS, False) is first
    fake_cpu.why_not = "not this one"
    memo.clear()
    again = calls.executable_of(Inputs(x, w, None, None, None, ()), FACTS, False)
    assert (first.plan.strategy, again.plan.strategy) == ("cpu", "reference")


def test_strict_reaches_the_plan(fake_cpu):
    fake_cpu.why_not = "not this one"
    x, w = torch.randn(3, 5), torch.randn(7, 5)
    with pytest.raises(RuntimeError, match="strict=True.*not this one"):
        epinorm.linear_norm(x, w, norm=epinorm.LayerNorm(), strict=True)
