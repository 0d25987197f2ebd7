"""200 steps of examples/train_blocks.py on a GPU, against the same run in float64."""

from pathlib import Path

import pytest
import torch

import epinorm
from export_case import load

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_blocks.py"


@pytest.fixture(scope="module")
def example():
    return load(EXAMPLE, "train_blocks")


def test_200_steps_follow_float64_as_closely_as_eager_does(example) -> None:
    device, config = torch.device("cuda"), example.Config(width=1024, batch=2048, steps=200)
    model = epinorm.fuse(example.network(config, device))
    x, _ = next(example.Task(config, device).batches(0))
    model(x).sum().backward()
    assert all(row.fused for row in epinorm.explain(model).rows)
    runs = example.compare(config, device, "highest")
    exact = example.train(config, device, example.EXACT, "eager", 0)
    ours, eager = example.from_exact(runs, exact)
    print(f"from float64: epinorm {ours:.2e}, eager at most {eager:.2e}")
    assert exact.losses[-1] < 0.75 * exact.losses[0]
    assert 0 < ours <= eager
