"""`epinorm tune` without a GPU: what is kept and trusted, what is tried, and what is picked."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1]))

from epinorm.backends import cache, memo
from epinorm.backends import engine as general_plan
from epinorm.backends import reference as reference_backend
from epinorm.backends.cuda.gemm import forward as single
from epinorm.backends.cuda.plan import hopper as hopper_plan
from epinorm.backends.cuda.plan import strategy as cuda_plan
from epinorm.backends.cuda.plan import tuned
from epinorm.backends.cuda.plan.hopper_tile import Tile
from epinorm.backends.cuda.plan.tuned import Choice
from epinorm.chain import Chain
from epinorm.problem import Inputs, Plan, Problem
from epinorm.tools import tune
from epinorm_cli.commands import app
from imaginary import H200, believe_in

GPU = "NVIDIA H200"
SMS = 132
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "matmul_groupnorm_leakyrelu_sum.py")


def problem_of(m: int = 1024, training: bool = False, chain: str = "group_norm(8)") -> Problem:
    # The device is the CPU's, so that stubbed kernels can compute; the plan is told it is a GPU.
    bf16 = torch.bfloat16
    return Problem(
        *(Chain.parse(f"{chain}|leaky_relu(0.01)|scale(2)"), m, 64, 128, bf16, bf16, bf16),
        *(True, True, True, training, torch.device("cpu"), "native"),
    )


def inputs_of(problem: Problem) -> Inputs:
    m, k, n, dtype = problem.m, problem.k, problem.n, problem.dtype
    tensors = torch.randn(m, k), torch.randn(n, k) / 8, torch.randn(n), torch.ones(n)
    return Inputs(*(t.to(dtype) for t in tensors), torch.zeros(n, dtype=dtype), ())


@pytest.fixture
def table(tmp_path, monkeypatch) -> Path:
    """An empty cache folder of its own, and an H200 by name; returns the path of its table."""
    monkeypatch.setenv("EPINORM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tuned, "gpu_name", lambda device: GPU)
    tuned.forget()
    memo.clear()
    yield tuned.path_of(GPU)
    tuned.forget()
    memo.clear()


@pytest.fixture
def hopper(table, monkeypatch) -> dict[Any, float]:
    """Let everything believe in an H200 whose ways take the times of the dictionary returned.

    Ways are (block_m, block_n) or "epilogue"; what is not named takes 100 us.
    """
    times: dict[Any, float] = {}
    believe_in(monkeypatch, H200)
    monkeypatch.setattr(tune, "plan_for", PlanCuda())

    def computing(problem, name):
        def run(inputs):
            found = reference_backend.forward(problem, inputs)
            if not problem.training or inputs.bias is None:
                return found
            # The CUDA backends' z is without the bias, the reference's with it.
            return found._replace(z=(found.z.double() - inputs.bias.double()).to(problem.dtype))

        run.name = name
        return run

    def launch_with(problem, tile, layout):
        return computing(problem, (tile.block_m, tile.block_n))

    def executable_for(problem, plan, layout):
        assert plan.strategy == "epilogue"
        run = computing(problem, "epilogue")
        return SimpleNamespace(forward=lambda *inputs: run(Inputs(*inputs)))

    def timer(runners, device, settings, progress):
        progress(1.0)
        found = {}
        for name, runner in runners.items():
            runner.run()
            run = runner.run.__defaults__[0]
            found[name] = times.get(getattr(run, "name", "epilogue"), 100.0)
        return found

    monkeypatch.setattr(single, "launch_with", launch_with)
    monkeypatch.setattr(tune, "executable_for", executable_for)
    monkeypatch.setattr(tune, "time_interleaved", timer)
    return times


class PlanCuda:
    """``plan_for`` as on a GPU, whatever the problem's device."""

    def __call__(self, problem: Problem) -> Plan:
        return cuda_plan.plan_cuda(problem, "auto")

    def cache_clear(self) -> None:
        general_plan.plan_for.cache_clear()


def other_tile(problem: Problem) -> Tile:
    """A candidate that the model does not choose, with a shape that no other candidate has."""
    chosen = hopper_plan.choose_tile(problem, SMS)
    tiles = list(hopper_plan.candidates(problem))
    shapes = [(t.block_m, t.block_n) for t in tiles]
    return next(t for t in tiles if t != chosen and shapes.count((t.block_m, t.block_n)) == 1)


# ---- the table on disk ----


def test_what_is_remembered_is_there_in_the_next_process(table):
    problem = problem_of()
    choice = Choice("single", other_tile(problem), 12.5)
    assert tuned.choice(problem, hopper_plan.candidates) is None
    assert tuned.remember(problem, choice) is None
    tuned.forget()
    assert tuned.choice(problem, hopper_plan.candidates) == choice
    assert tuned.choice(dataclasses.replace(problem, m=1025), hopper_plan.candidates) is None
    assert tuned.remember(problem_of(m=7), Choice("epilogue", None, 3.0)) is None
    tuned.forget()
    assert tuned.choice(problem, hopper_plan.candidates) == choice
    assert tuned.choice(problem_of(m=7), hopper_plan.candidates).strategy == "epilogue"


@pytest.mark.parametrize(
    "changed",
    [
        dict(m=2048),
        dict(k=128),
        dict(n=256),
        dict(training=True),
        dict(dtype=torch.float16),
        dict(out_dtype=torch.float32),
        dict(chain=Chain.parse("group_norm(4)")),
        dict(dtype=torch.float32, precision="high"),
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_the_key_holds_what_matters(changed, table):
    problem = problem_of()
    assert tuned.key_of(dataclasses.replace(problem, **changed)) != tuned.key_of(problem)


def test_precisions_have_keys_of_their_own():
    high = dataclasses.replace(problem_of(), dtype=torch.float32, precision="high")
    assert tuned.key_of(high) != tuned.key_of(dataclasses.replace(high, precision="highest"))


def test_another_gpu_has_a_table_of_its_own(table, monkeypatch):
    problem = problem_of()
    tuned.remember(problem, Choice("epilogue", None, 1.0))
    monkeypatch.setattr(tuned, "gpu_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert tuned.choice(problem, hopper_plan.candidates) is None
    monkeypatch.setattr(tuned, "gpu_name", lambda device: None)
    assert tuned.choice(problem, hopper_plan.candidates) is None
    assert "no GPU" in tuned.remember(problem, Choice("epilogue", None, 1.0))


def test_the_file_is_private_and_nothing_half_written_is_left(table):
    tuned.remember(problem_of(), Choice("epilogue", None, 1.0))
    assert [p.name for p in table.parent.iterdir()] == [table.name]
    assert stat.S_IMODE(table.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(table.stat().st_mode) == 0o600
    assert cache.list_entries() == []
    assert cache.info().problem is None


def damage(table: Path, how: str) -> None:
    text = json.loads(table.read_text())
    entry = next(iter(text["choices"].values()))
    if how == "not JSON":
        table.write_text("{")
    elif how == "not text":
        table.write_bytes(b"\xff\xfe\x00")
    elif how == "writable by others":
        table.chmod(0o622)
    elif how == "a link":
        table.rename(table.with_name("elsewhere"))
        table.symlink_to("elsewhere")
    elif how == "unreadable":
        table.unlink()
        table.mkdir()
    else:
        if how == "a tile's field":
            entry["tile"]["block_m"] = "64"
        elif how == "a bool for a number":
            entry["tile"]["stages"] = True
        elif how == "a field too many":
            entry["tile"]["source"] = "x"
        elif how == "a strategy":
            entry["strategy"] = "cpu"
        elif how == "no tile":
            entry["tile"] = None
        elif how == "a time":
            entry["microseconds"] = float("nan")
        elif how == "another GPU's":
            text["gpu"] = "NVIDIA H100"
        else:
            assert how == "a version"
            text["version"] = 0
        table.write_text(json.dumps(text))


@pytest.mark.parametrize(
    "how",
    [
        *("not JSON", "not text", "writable by others", "a link", "unreadable"),
        *("a tile's field", "a bool for a number", "a field too many", "a strategy", "no tile"),
        *("a time", "another GPU's", "a version"),
    ],
)
def test_a_table_that_cannot_be_trusted_is_ignored_with_one_warning(how, table):
    problem = problem_of()
    modelled = hopper_plan.choose_tile(problem, SMS)
    tuned.remember(problem, Choice("single", other_tile(problem), 1.0))
    damage(table, how)
    tuned.forget()
    memo.clear()
    with pytest.warns(RuntimeWarning, match="what `epinorm tune` measured is not used"):
        assert hopper_plan.choose_tile(problem, SMS) == modelled
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert hopper_plan.choose_tile(problem_of(m=512), SMS) is not None


LATER_FIELDS = ("fp32_weight", "fp32_input", "register_a")
"""Of a tile, that tables were written without."""


@pytest.mark.parametrize("lacking", [LATER_FIELDS, LATER_FIELDS[-1:]])
def test_a_table_from_before_a_field_was_there_is_read(lacking, table):
    problem = problem_of()
    tile = other_tile(problem)
    tuned.remember(problem, Choice("single", tile, 1.0))
    text = json.loads(table.read_text())
    for entry in text["choices"].values():
        for name in lacking:
            del entry["tile"][name]
    table.write_text(json.dumps(text))
    tuned.forget()
    memo.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert hopper_plan.choose_tile(problem, SMS) == tile


@pytest.mark.filterwarnings("ignore:epinorm")
def test_a_folder_that_cannot_be_made_is_said(table):
    table.parent.parent.write_text("a file where the folder should be")
    reason = tuned.remember(problem_of(), Choice("epilogue", None, 1.0))
    assert reason is not None
    assert str(table.parent.parent) in reason


def test_another_users_file_is_not_trusted(table, monkeypatch):
    tuned.remember(problem_of(), Choice("epilogue", None, 1.0))
    tuned.forget()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.warns(RuntimeWarning, match="belongs to another user"):
        assert tuned.choice(problem_of(), hopper_plan.candidates) is None


# ---- what the plan makes of it ----


def test_the_plan_takes_the_tuned_tile(hopper):
    problem = problem_of()
    tile, modelled = other_tile(problem), hopper_plan.choose_tile(problem, SMS)
    tuned.remember(problem, Choice("single", tile, 7.0))
    memo.clear()
    assert hopper_plan.choose_tile(problem, SMS) == tile
    assert hopper_plan.choose_tile(problem, SMS, True) == tile
    plan = cuda_plan.plan_cuda(problem, "auto")
    assert plan.strategy == "single"
    assert f"tiles of {tile.block_m} x {tile.block_n}" in plan.reason
    assert "`epinorm tune` measured it fastest here, at 7.0 us" in plan.reason
    tuned.clear()
    memo.clear()
    assert hopper_plan.choose_tile(problem, SMS) == modelled


def test_the_plan_takes_epilogue_where_that_was_faster(hopper):
    problem = problem_of()
    modelled = hopper_plan.choose_tile(problem, SMS)
    tuned.remember(problem, Choice("epilogue", None, 7.0))
    memo.clear()
    plan = cuda_plan.plan_cuda(problem, "auto")
    assert plan.strategy == "epilogue"
    assert "`epinorm tune` measured it fastest" in plan.reason
    # By name the single kernel is still there, with the model's tile.
    assert cuda_plan.plan_cuda(problem, "single").strategy == "single"
    assert hopper_plan.choose_tile(problem, SMS) == modelled


def test_a_tile_that_is_no_candidate_is_never_launched(hopper):
    problem = problem_of()
    modelled, plan = hopper_plan.choose_tile(problem, SMS), cuda_plan.plan_cuda(problem, "auto")
    tuned.remember(problem, Choice("single", Tile(128, 100000, 50), 0.1))
    tuned.forget()
    memo.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert hopper_plan.choose_tile(problem, SMS) == modelled
        assert cuda_plan.plan_cuda(problem, "auto") == plan


def test_tf32_tiles_measured_with_conversions_say_nothing_of_prepacked_weights(table):
    high = dataclasses.replace(
        problem_of(), dtype=torch.float32, norm_dtype=torch.float32, out_dtype=torch.float32,
        precision="high",
    )  # fmt: skip
    ordinary, prepacked = (hopper_plan.choose_tile(high, SMS, kept) for kept in (False, True))
    other = next(t for t in hopper_plan.candidates(high) if t not in (ordinary, prepacked))
    tuned.remember(high, Choice("single", other, 1.0))
    memo.clear()
    assert hopper_plan.choose_tile(high, SMS) == other
    assert hopper_plan.choose_tile(high, SMS, True) == prepacked


# ---- tuning ----


def test_the_fastest_way_is_picked_and_remembered(hopper):
    problem = problem_of()
    tile, before = other_tile(problem), hopper_plan.choose_tile(problem, SMS)
    hopper[tile.block_m, tile.block_n] = 50.0
    found = tune.tune(problem, inputs_of(problem), most=100)
    assert found is not None
    assert found.before == ("single", before)
    assert found.best.tile == tile
    assert (found.best.microseconds, found.before_microseconds) == (50.0, 100.0)
    assert found.not_kept is None
    assert {t.way for t in found.trials} == {
        ("epilogue", None), *(("single", t) for t in hopper_plan.candidates(problem))
    }  # fmt: skip
    assert hopper_plan.choose_tile(problem, SMS) == tile
    json.dumps(found.as_json())


def test_epilogue_is_picked_where_it_wins(hopper):
    problem = problem_of(training=False)
    hopper["epilogue"] = 20.0
    found = tune.tune(problem, inputs_of(problem))
    assert found.best.way == ("epilogue", None)
    assert len(found.trials) <= tune.MOST_TILES + 2
    assert cuda_plan.plan_cuda(problem, "auto").strategy == "epilogue"


def test_a_difference_within_the_noise_changes_nothing(hopper):
    problem = problem_of()
    tile, before = other_tile(problem), hopper_plan.choose_tile(problem, SMS)
    hopper[tile.block_m, tile.block_n] = 99.5
    assert tune.tune(problem, inputs_of(problem), most=100).best.tile == before


def test_a_way_that_is_wrong_is_not_timed(hopper, monkeypatch):
    problem = problem_of()
    tile = other_tile(problem)
    hopper[tile.block_m, tile.block_n] = 1.0
    right = single.launch_with

    def sometimes_wrong(problem, candidate, layout):
        run = right(problem, candidate, layout)
        if candidate != tile:
            return run

        def wrong(inputs):  # gamma left out: right for a new layer's ones
            return run(inputs._replace(norm_weight=torch.ones_like(inputs.norm_weight)))

        wrong.name = (tile.block_m, tile.block_n)
        return wrong

    monkeypatch.setattr(single, "launch_with", sometimes_wrong)
    found = tune.tune(problem, inputs_of(problem), most=100)
    trial = next(t for t in found.trials if t.tile == tile)
    assert trial.microseconds is None
    assert trial.refused.startswith("error of y")
    assert found.best.tile != tile


@pytest.mark.parametrize("spoiled", ["z", "mean", "rstd"])
def test_what_backward_needs_is_verified_too(spoiled, hopper, monkeypatch):
    problem = problem_of(training=True)
    tile, inputs = other_tile(problem), inputs_of(problem)._replace(bias=None)
    hopper[tile.block_m, tile.block_n] = 1.0
    right = single.launch_with

    def sometimes_wrong(problem, candidate, layout):
        run = right(problem, candidate, layout)
        if candidate != tile:
            return run

        def wrong(inputs):
            found = run(inputs)
            return found._replace(**{spoiled: torch.full_like(getattr(found, spoiled), torch.nan)})

        return wrong

    monkeypatch.setattr(single, "launch_with", sometimes_wrong)
    found = tune.tune(problem, inputs, most=100)
    assert next(t for t in found.trials if t.tile == tile).refused.startswith(f"error of {spoiled}")


def test_a_tile_that_does_not_compile_is_left_out(hopper, monkeypatch):
    problem = problem_of()
    tile, right = other_tile(problem), single.launch_with

    def sometimes_failing(problem, candidate, layout):
        if candidate == tile:
            raise RuntimeError("ptxas said no")
        return right(problem, candidate, layout)

    monkeypatch.setattr(single, "launch_with", sometimes_failing)
    found = tune.tune(problem, inputs_of(problem), most=100)
    trial = next(t for t in found.trials if t.tile == tile)
    assert trial.refused == "it cannot be compiled: ptxas said no"


def test_nothing_to_tune_without_rows(hopper):
    assert tune.tune(problem_of(m=0), inputs_of(problem_of(m=0))) is None


def test_unguarded_tiles_of_fp32_are_not_tried(hopper):
    wide = dataclasses.replace(
        problem_of(chain="group_norm(1)"), n=2048, dtype=torch.float32,
        norm_dtype=torch.float32, out_dtype=torch.float32, precision="highest",
    )  # fmt: skip
    assert tune.ways_of(wide) == [("planes", None), ("epilogue", None)]


@pytest.mark.filterwarnings("ignore:epinorm")
def test_a_measurement_that_cannot_be_kept_is_still_told(hopper, table):
    table.parent.parent.write_text("a file where the folder should be")
    found = tune.tune(problem_of(), inputs_of(problem_of()))
    assert found.best.microseconds == 100.0
    assert str(table.parent.parent) in found.not_kept


def test_the_problems_of_a_model_are_recorded():
    from epinorm import fuse

    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GroupNorm(4, 32))
    fused, x = fuse(model), torch.randn(8, 16)
    fused(x)
    with tune.recorded() as found:
        with torch.no_grad():
            fused(x)
            fused(x)
        fused(x)
    assert [(p.m, p.k, p.n, p.training) for p, _ in found] == [
        (8, 16, 32, False),
        (8, 16, 32, True),
    ]
    assert found[0][1].x.data_ptr() == x.data_ptr()
    with tune.recorded() as again:
        pass
    fused(x)
    assert again == []


# ---- the command ----


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["tune", *arguments])


def test_without_a_hopper_gpu_it_is_one_sentence_and_exit_1(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = call(EXAMPLE, "--scale", "64")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "there is no CUDA GPU here" in result.stderr


def test_another_gpu_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(tune, "capability", lambda device: (8, 0))
    assert "but NVIDIA A100 has 8.0" in tune.why_not(torch.device("cuda"))
    result = call(EXAMPLE, "--device", "cuda")
    assert result.exit_code == 1
    assert "NVIDIA A100 has 8.0" in result.stderr


def test_neither_file_nor_clear_is_refused():
    result = call()
    assert result.exit_code == 2
    assert "takes a FILE" in result.stderr
    result = call(EXAMPLE, "--clear")
    assert result.exit_code == 2
    assert "takes no FILE" in result.stderr


def test_clear_forgets(table):
    tuned.remember(problem_of(), Choice("epilogue", None, 1.0))
    tuned.remember(problem_of(m=9), Choice("epilogue", None, 1.0))
    result = call("--clear")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "forgot 2 tuned shapes\n"
    assert not table.exists()
    assert call("--clear").stdout == "forgot 0 tuned shapes\n"


@pytest.fixture
def command(hopper, monkeypatch):
    """The command as on an H200, computing on the CPU."""
    monkeypatch.setattr(tune, "why_not", lambda device: None)
    return hopper


def test_the_command_shows_and_keeps_what_it_measured(command, table):
    result = call(EXAMPLE, "--scale", "64", "--dtype", "bf16", "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("16, 128 → 128, bfloat16 native, forward") == 2
    assert "the plan's choice is the fastest" in result.stdout
    assert "remembered for this GPU" in result.stdout
    assert len(json.loads(table.read_text())["choices"]) == 2


def test_the_command_as_json(command, table):
    command["epilogue"] = 10.0
    result = call(EXAMPLE, "--scale", "64", "--dtype", "bf16", "--forward", "--json")
    assert result.exit_code == 0, result.stderr
    (row,) = json.loads(result.stdout)
    assert row["gpu"] == GPU
    assert row["trials"][row["best"]]["strategy"] == "epilogue"
    assert row["trials"][row["best"]]["microseconds"] == 10.0
    assert row["not_kept"] is None
