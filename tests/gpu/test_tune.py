"""`epinorm tune` on a Hopper GPU: every way is right, the fastest is kept, and calls take it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from product_case import make_product, matmul_precision

import epinorm
from epinorm.backends import memo
from epinorm.backends.cuda.executable import CudaExecutable
from epinorm.backends.cuda.gemm.forward import launch_with
from epinorm.backends.cuda.plan import hopper as hopper_plan
from epinorm.backends.cuda.plan import tuned
from epinorm.backends.cuda.plan.hopper_tile import Tile
from epinorm.backends.cuda.plan.strategy import wanted_core
from epinorm.backends.cuda.plan.tuned import Choice
from epinorm.backends.cuda.runtime.device import sm_count
from epinorm.backends.engine import plan_for
from epinorm.problem import Layout, Plan
from epinorm.tools import tune
from epinorm.tools.accuracy import allowed_error, relative_error
from epinorm.tools.timing import Settings

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available()
    or torch.cuda.get_device_capability() != (9, 0)
    or wanted_core() == "portable",
    reason="needs a Hopper GPU and its core",
)

FEW = Settings(runs=10, warmup=2)


@pytest.fixture(autouse=True)
def no_table():
    """Nothing tuned before or after; the folder is the test run's own (conftest.py)."""
    tuned.clear()
    memo.clear()
    yield
    tuned.clear()
    memo.clear()


def call(case, strategy="auto"):
    """The problem as a user calls it."""
    x, weight, bias, norm_weight, norm_bias = case.inputs[:5]
    return epinorm.linear_norm(
        *(x, weight, bias),
        norm=epinorm.GroupNorm(case.problem.groups),
        norm_weight=norm_weight,
        norm_bias=norm_bias,
        post="leaky_relu(0.01)|scale(2)",
        strategy=strategy,
    )


@pytest.mark.parametrize("kind", ["bfloat16", "high", "highest"])
@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
def test_every_way_is_right_and_the_fastest_is_taken(kind, training):
    case = make_product(1000, 520, 64, 8, kind, training=training)
    problem = case.problem
    with matmul_precision(problem.precision):
        found = tune.tune(problem, case.inputs, most=4, settings=FEW)
        assert found is not None
        tiles = [trial for trial in found.trials if trial.strategy == "single"]
        assert len(tiles) >= 2
        assert [trial.refused for trial in tiles] == [None] * len(tiles)
        assert all(0 < trial.microseconds < 1000 for trial in tiles)
        assert found.best.microseconds == min(
            t.microseconds for t in found.trials if t.microseconds is not None
        ) or (found.best.way == found.before)
        assert found.not_kept is None
        tuned.forget()
        plan = plan_for(problem)
        assert plan.strategy == found.best.strategy
        if found.best.tile in hopper_plan.candidates(problem):
            assert hopper_plan.choose_tile(problem, sm_count()) == found.best.tile
        result = call(case)
        if plan.strategy == "single":
            case.check()  # of this very pass, so with the tile that is remembered
    error = relative_error(result, case.truth["y"])
    theirs = max(relative_error(y["y"], case.truth["y"]) for y in case.yardsticks)
    assert error <= allowed_error(theirs, problem.dtype)


def test_a_call_changes_with_the_table():
    """What is remembered reaches calls that were planned already, and can be taken back.

    Bit for bit what each way gives by itself: a product rounded to 16 bits before the norm
    (`epilogue`) and one that is not (`single`) differ in many last bits.
    """
    case = make_product(300, 520, 16, 16)
    problem, untuned = case.problem, call(case)
    modelled = hopper_plan.choose_tile(problem, sm_count())
    other = next(t for t in hopper_plan.candidates(problem) if t.block_m != modelled.block_m)
    layout = Layout(problem.k, problem.k, (problem.m, problem.n))
    single = launch_with(problem, other, layout)(case.inputs).y
    made = CudaExecutable(problem, Plan("epilogue", ""), layout)
    epilogue = made.forward(*case.inputs).y
    assert not torch.equal(single, epilogue)
    for choice, expected in (
        (Choice("single", other, 1.0), single),
        (Choice("epilogue", None, 1.0), epilogue),
        (Choice("single", other, 2.0), single),
    ):
        assert tuned.remember(problem, choice) is None
        memo.clear()
        plan = plan_for(problem)
        assert plan.strategy == choice.strategy
        assert "measured it fastest" in plan.reason
        assert torch.equal(call(case), expected)
    assert hopper_plan.choose_tile(problem, sm_count()) == other
    tuned.clear()
    memo.clear()
    assert hopper_plan.choose_tile(problem, sm_count()) == modelled
    assert torch.equal(call(case), untuned)


def test_a_tile_that_cannot_be_launched_is_never_launched():
    case = make_product(300, 520, 16, 16)
    expected = {strategy: call(case, strategy) for strategy in ("auto", "single")}
    assert tuned.remember(case.problem, Choice("single", Tile(128, 4096, 40), 0.1)) is None
    memo.clear()
    for strategy, result in expected.items():
        assert torch.equal(call(case, strategy), result)
