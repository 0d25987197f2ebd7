"""The training run of examples/train_blocks.py, small and on the CPU."""

import dataclasses
from pathlib import Path

import pytest
import torch

from export_case import load

EXAMPLE = Path(__file__).parent.parent / "examples" / "train_blocks.py"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def example():
    module = load(EXAMPLE, "train_blocks")
    module.REORDERED_RUNS = 2
    return module


@pytest.fixture(scope="module")
def config(example):
    return example.Config(width=64, depth=2, channels=16, batch=128, steps=200, rate=0.01)


@pytest.fixture(scope="module")
def runs(example, config):
    """By epinorm's own kernels: ``auto`` leaves sizes as small as these to PyTorch."""
    return example.compare(config, CPU, "highest", "cpu")


@pytest.mark.slow
def test_epinorm_learns_what_eager_learns(example, runs):
    """Where answering 0 costs 1.5; and no further from eager than eager is from itself."""
    for run in runs[:2]:
        assert sum(run.losses[-10:]) / 10 < 0.5
        assert run.losses[0] > 1.5
    ours, itself = example.spread(runs)
    assert 0 < itself < 1e-3
    assert 0 < ours <= itself


@pytest.mark.slow
def test_200_steps_follow_float64_as_closely_as_eager_does(example, config, runs):
    exact = example.train(config, CPU, example.EXACT, "eager", 0)
    ours, eager = example.from_exact(runs, exact)
    assert 0 < ours <= eager


@pytest.mark.slow
def test_the_distance_sees_a_slightly_wrong_step(example, config):
    """A learning rate one part in ten thousand too large is far outside eager's own spread."""
    short = dataclasses.replace(config, steps=40)
    runs = example.compare(short, CPU, "highest")
    wrong = dataclasses.replace(short, rate=short.rate * 1.0001)
    other = example.train(wrong, CPU, "highest", "epinorm", 0)
    assert example.distance(other, runs[0]) > 10 * example.spread(runs)[1]


def test_a_reordered_network_is_the_same_function(example, config):
    x, y = next(example.Task(config, CPU).batches(0))
    other_x, other_y = next(example.Task(config, CPU).batches(3))
    plain, reordered = (example.network(config, CPU, order).double() for order in (0, 3))
    losses = [
        torch.nn.functional.mse_loss(model(inputs.double()), target.double()).item()
        for model, inputs, target in ((plain, x, y), (reordered, other_x, other_y))
    ]
    assert not torch.equal(x, other_x)
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_both_runs_start_alike_and_warming_up_leaves_no_trace(example, config):
    two = dataclasses.replace(config, steps=2)
    first, second = (example.train(two, CPU, "highest", "eager", 0) for _ in range(2))
    assert first.losses == second.losses
    fresh = example.network(two, CPU)
    x, y = next(example.Task(two, CPU).batches(0))
    loss = torch.nn.functional.mse_loss(fresh(x), y)
    assert first.losses[0] == pytest.approx(loss.item(), rel=1e-6)
