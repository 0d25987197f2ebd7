"""Timing: what is measured, in which order, and that a wrong candidate gets no time."""

import copy
import time

import pytest
import torch
from torch import Tensor, nn

import epinorm
from epinorm.backends.prepack import marked
from epinorm.tools import bench as bench_module
from epinorm.tools.bench import (
    Case,
    bench,
    fp32_precision_set,
    linear_calls,
    model_runner,
    packed_copy,
)
from epinorm.tools.kernelbench.protocol import NoChainError, make_case
from epinorm.tools.timing import (
    Runner,
    Settings,
    gpu_times,
    peak_memory_mb,
    time_interleaved,
    wall_times,
)

CPU = torch.device("cpu")
FAST = Settings(runs=3, cpu_runs=2, cpu_seconds=0.5)
NO_COMPILE = ()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 64)
        self.gn = nn.GroupNorm(8, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.gn(self.fc(x)))


class Wrong(Model):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.fc(x))


def case_of(model: nn.Module, candidate: nn.Module, training: bool = False) -> Case:
    x = torch.rand(16, 32)
    return Case(
        "case", model, candidate, (x,), torch.float32, "highest", CPU, training, "reference"
    )


@pytest.mark.parametrize("training", [False, True])
def test_a_right_candidate_is_timed(training: bool) -> None:
    model = Model()
    row, verification = bench(case_of(model, copy.deepcopy(model), training), FAST, NO_COMPILE)
    assert verification.passed
    assert row.verified
    assert row.pass_ == ("training" if training else "forward")
    for key in ("ours_us", "eager_us", "linear_us"):
        assert 1 < getattr(row, key) < 1e6
    assert row.runs in (2, 3)
    assert set(row.spreads) == {"eager", "linear"}
    assert all(0 < low <= high for low, high in row.spreads.values())
    # What does not exist on a CPU, or was not asked for, is null and not zero.
    for key in ("compile_us", "compile_autotune_us", "ours_prepacked_us", "ours_peak_mb"):
        assert getattr(row, key) is None
    assert row.ours_error == row.eager_error > 0


@pytest.mark.filterwarnings("ignore:prepack keeps nothing")
def test_what_is_timed_as_prepacked_is_fused_as_the_candidate_is() -> None:
    case = make_case(
        "case", Model(), (torch.rand(16, 32),), torch.float32, "highest", CPU, False, "cpu"
    )
    packed = packed_copy(case)
    with torch.no_grad():
        packed(*case.inputs)
    assert [row.strategy for row in epinorm.explain(packed).rows] == ["cpu"]
    assert id(packed.fc.weight) in marked
    assert id(case.candidate.fc.weight) not in marked


def test_a_wrong_candidate_gets_no_time() -> None:
    row, verification = bench(case_of(Model(), Wrong()), FAST, NO_COMPILE)
    assert not verification.passed
    assert not row.verified
    assert row.ours_us is None
    assert row.eager_us is None
    assert "output on" in row.reason


class RightUntilTimed(Model):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1 if self.calls <= 4 else 1.001)


def test_what_goes_wrong_during_timing_is_caught_afterwards() -> None:
    row, verification = bench(case_of(Model(), RightUntilTimed()), FAST, NO_COMPILE)
    assert not verification.passed
    assert not row.verified
    assert row.ours_us is None


def test_a_compiler_that_fails_costs_its_column_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("\nno compiler\nin this place")

    monkeypatch.setattr(torch, "compile", broken)
    model = Model()
    row, _ = bench(case_of(model, copy.deepcopy(model)), FAST, ("compile", "compile_autotune"))
    assert row.verified
    assert row.ours_us > 0
    assert row.compile_us is None
    assert row.compile_reason == "RuntimeError: no compiler"
    assert row.compile_autotune_reason == "RuntimeError: no compiler"


@pytest.mark.slow
def test_torch_compile_is_timed() -> None:
    model = Model()
    row, _ = bench(case_of(model, copy.deepcopy(model)), FAST, ("compile",))
    assert (row.compile_us is None) == (row.compile_reason is not None)
    assert row.compile_reason is None or "ompiler" in row.compile_reason


def test_runs_are_interleaved_and_nobody_always_follows_the_same() -> None:
    order: list[str] = []
    runners = {name: Runner(lambda name=name: order.append(name)) for name in "abc"}
    time_interleaved(runners, CPU, Settings(runs=30, cpu_runs=30))
    timed = "".join(order[-90:])
    rounds = [timed[at : at + 3] for at in range(0, 90, 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    followed = {name: {timed[at - 1] for at in range(1, 90) if timed[at] == name} for name in "abc"}
    assert all(len(others - {name}) == 2 for name, others in followed.items())
    assert {one[0] for one in rounds} == set("abc")


def test_times_are_microseconds_and_preparing_is_not_counted() -> None:
    runner = Runner(lambda: time.sleep(0.002), lambda: time.sleep(0.02))
    times = time_interleaved({"a": runner}, CPU, Settings(runs=3, cpu_runs=3))
    assert 2000 <= times["a"] < 18_000


def test_a_slow_row_ends_on_a_cpu() -> None:
    runs: list[int] = []
    settings = Settings(runs=1000, cpu_runs=2, cpu_seconds=0.05)
    time_interleaved({"a": Runner(lambda: (time.sleep(0.02), runs.append(1)))}, CPU, settings)
    assert 4 <= len(runs) < 20


def test_cpu_rows_have_no_wall_time_no_gpu_time_and_no_peak() -> None:
    runner = Runner(lambda: None)
    assert gpu_times({"a": runner}, CPU) == {"a": None}
    assert wall_times({"a": runner}, CPU) == {"a": None}
    assert peak_memory_mb(runner, CPU) is None


def test_training_runs_to_every_gradient_and_accumulates_none() -> None:
    model = Model()
    runner = model_runner(model, (torch.rand(16, 32),), training=True)
    runner.prepare()
    runner.run()
    once = {name: p.grad.clone() for name, p in model.named_parameters()}
    assert set(once) == {"fc.weight", "fc.bias", "gn.weight", "gn.bias"}
    runner.prepare()
    assert all(p.grad is None for p in model.parameters())
    runner.run()
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, once[name])


def test_the_linear_alone_gets_the_models_own_input() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    x = torch.rand(3, 4)
    (first, a), (second, b) = linear_calls(model, (x,))
    assert first is model[0]
    assert second is model[2]
    assert torch.equal(a, x)
    assert torch.equal(b, torch.tanh(model[0](x)))
    assert not model[0]._forward_pre_hooks
    assert bench_module.linear_runner(nn.Tanh(), (x,), False) is None


def test_the_precision_is_set_back() -> None:
    before = torch.get_float32_matmul_precision()
    with fp32_precision_set("high"):
        assert torch.get_float32_matmul_precision() == "high"
    with pytest.raises(KeyError), fp32_precision_set("high"):
        raise KeyError
    assert torch.get_float32_matmul_precision() == before


def test_a_case_knows_its_chain_and_sizes() -> None:
    model, x = Model(), torch.rand(16, 32)
    case = make_case("a", model, (x,), torch.float32, "highest", CPU, False)
    assert case.facts == {
        "chain": "group_norm(8,1e-05)|relu",
        "m": 16,
        "k": 32,
        "n": 64,
        "groups": 8,
        "norm": "group_norm",
    }
    assert case.candidate is not model
    assert case.candidate.fc.weight is not model.fc.weight
    assert torch.equal(case.candidate.fc.weight, model.fc.weight)


def test_a_model_of_two_chains_names_both() -> None:
    model = nn.Sequential(Model(), nn.Linear(64, 8), nn.LayerNorm(8))
    case = make_case("a", model, (torch.rand(4, 32),), torch.float32, "highest", CPU, False)
    assert "group_norm(8,1e-05)|relu" in case.facts["chain"]
    assert "layer_norm(1e-05)" in case.facts["chain"]
    assert case.facts.get("m") is None


def test_a_model_without_a_chain_is_refused() -> None:
    with pytest.raises(NoChainError, match="no chain that can be fused"):
        make_case("a", nn.Linear(4, 4), (torch.rand(2, 4),), torch.float32, "highest", CPU, False)
