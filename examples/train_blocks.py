"""Train a network of Linear → GroupNorm → LeakyReLU → x + x blocks, by eager and by epinorm.

    python3 examples/train_blocks.py                          # on this machine's best device
    python3 examples/train_blocks.py --device cpu --width 64 --batch 128 --steps 150 --rate 0.01

The data is generated and the best possible answer is known: y = sin(2 u·x) + (v·x)(w·x) plus normal
noise of standard deviation 0.1, for fixed unit vectors u, v, w. No network can get below a mean
squared error of 0.01, one that answers 0 stays at 1.5.

At each precision the same network starts from the same parameters and sees the same batches: once
by eager, once by epinorm, and a few times more by eager with everything in another order: the rows
of each batch, the inputs' features, the channels of each group, the groups. Orders change nothing
but roundings, so those runs show how far eager is from itself, and epinorm's curve should be no
further from it. The times are of whole steps, optimizer included.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import epinorm
from epinorm.problem import Strategy
from epinorm.tools.results import commit, device_name

NOISE = 0.1
FEATURES = 16
REORDERED_RUNS = 3
WARMUP_STEPS = 3
PRECISIONS = ("highest", "high", "bfloat16")
"""Of fp32's products as PyTorch's setting says; or bf16 by autocast."""
EXACT = "float64"
"""The precision of a run that the others can be held against."""


@dataclass(frozen=True)
class Config:
    """What is trained: ``depth`` blocks of ``width`` channels, in groups of ``channels``."""

    width: int = 2048
    depth: int = 3
    channels: int = 16
    batch: int = 4096
    steps: int = 400
    rate: float = 1e-3


class Block(nn.Module):
    def __init__(self, features: int, width: int, groups: int) -> None:
        super().__init__()
        self.fc = nn.Linear(features, width)
        self.norm = nn.GroupNorm(groups, width)
        self.leaky_relu = nn.LeakyReLU(0.01)

    def forward(self, x: Tensor) -> Tensor:
        x = self.leaky_relu(self.norm(self.fc(x)))
        return x + x


def network(config: Config, device: torch.device, order: int = 0) -> nn.Module:
    """The same parameters each time; ``order``: 0, or which of the equivalent orders they have."""
    torch.manual_seed(0)
    groups = config.width // config.channels
    sizes = [FEATURES, *[config.width] * config.depth]
    blocks = [Block(a, b, groups) for a, b in itertools.pairwise(sizes)]
    model = nn.Sequential(*blocks, nn.Linear(config.width, 1))
    if order:
        reorder(model, config, order)
    return model.to(device)


def feature_order(order: int) -> Tensor:
    """Of the inputs' features; ``order`` 0: as they are."""
    if not order:
        return torch.arange(FEATURES)
    return torch.randperm(FEATURES, generator=torch.Generator().manual_seed(order))


@torch.no_grad()
def reorder(model: nn.Sequential, config: Config, order: int) -> None:
    """Put features, groups and the channels of each group into another order: the same function."""
    generator = torch.Generator().manual_seed(1000 + order)
    columns = feature_order(order)
    for block in list(model)[:-1]:
        assert isinstance(block, Block)
        groups = torch.randperm(config.width // config.channels, generator=generator)
        inside = torch.stack([torch.randperm(config.channels, generator=generator) for _ in groups])
        rows = (groups[:, None] * config.channels + inside).flatten()
        block.fc.weight.copy_(block.fc.weight[rows][:, columns])
        for vector in (block.fc.bias, block.norm.weight, block.norm.bias):
            vector.copy_(vector[rows])
        columns = rows
    model[-1].weight.copy_(model[-1].weight[:, columns])


class Task:
    """Batches of x (batch, FEATURES) and y (batch, 1), the same ones for every run."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config, self.device = config, device
        directions = torch.randn(FEATURES, 3, generator=torch.Generator().manual_seed(1))
        self.directions = (directions / directions.norm(dim=0)).to(device)

    def batches(self, order: int) -> Iterator[tuple[Tensor, Tensor]]:
        """``order`` 0: as they are drawn; else with rows and features in another order."""
        drawn = torch.Generator(self.device).manual_seed(2)
        shuffled = torch.Generator(self.device).manual_seed(order)
        columns = feature_order(order).to(self.device)
        batch, kind = self.config.batch, {"device": self.device, "generator": drawn}
        while True:
            x = torch.randn(batch, FEATURES, **kind)
            along = x @ self.directions
            y = torch.sin(2 * along[:, :1]) + along[:, 1:2] * along[:, 2:]
            y += NOISE * torch.randn(batch, 1, **kind)
            if order:
                rows = torch.randperm(batch, device=self.device, generator=shuffled)
                x, y = x[rows][:, columns], y[rows]
            yield x, y


@dataclass(frozen=True)
class Run:
    """One training run: the loss before each step, and the time of all steps."""

    precision: str
    who: str
    order: int
    seconds: float
    losses: list[float]


def train(
    config: Config,
    device: torch.device,
    precision: str,
    who: str,
    order: int,
    strategy: Strategy = "auto",
) -> Run:
    """Train from the same parameters; ``who``: "eager" or "epinorm"."""
    model = network(config, device, order)
    kind = torch.float64 if precision == EXACT else torch.float32
    model.to(kind)
    if who == "epinorm":
        model = epinorm.fuse(model, strategy=strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.rate, fused=device.type == "cuda")
    losses = torch.empty(config.steps, device=device, dtype=kind)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with context(precision, device):
            found = model(x.to(kind))
        loss = nn.functional.mse_loss(found.to(kind), y.to(kind))
        loss.backward()
        optimizer.step()
        return loss.detach()

    warm_up(model, step, Task(config, device))
    optimizer.state.clear()
    batches = Task(config, device).batches(order)
    synchronize(device)
    began = time.perf_counter()
    for index in range(config.steps):
        optimizer.param_groups[0]["lr"] = config.rate * (1 - index / config.steps)
        losses[index] = step(*next(batches))
    synchronize(device)
    seconds = time.perf_counter() - began
    return Run(precision, who, order, round(seconds, 4), losses.tolist())


def warm_up(model: nn.Module, step: Any, task: Task) -> None:
    """Compile and load whatever is compiled and loaded, and put the parameters back."""
    before = {name: t.clone() for name, t in model.state_dict().items()}
    for _, batch in zip(range(WARMUP_STEPS), task.batches(0), strict=False):
        step(*batch)
    model.load_state_dict(before)


@contextlib.contextmanager
def context(precision: str, device: torch.device) -> Iterator[None]:
    """The products of fp32 at this precision; or, for bfloat16, autocast."""
    if precision == "bfloat16":
        with torch.autocast(device.type, dtype=torch.bfloat16):
            yield
        return
    yield


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compare(
    config: Config, device: torch.device, precision: str, strategy: Strategy = "auto"
) -> list[Run]:
    """Eager, epinorm, and eager with its rows in other orders; the same setting for all."""
    saved = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "high" else "highest")
    try:
        both = ("eager", "epinorm")
        runs = [train(config, device, precision, who, 0, strategy) for who in both]
        orders = range(1, REORDERED_RUNS + 1)
        return runs + [train(config, device, precision, "eager", order) for order in orders]
    finally:
        torch.set_float32_matmul_precision(saved)


def distance(run: Run, other: Run) -> float:
    """Root mean square, over all steps, of the difference of the losses' logarithms."""
    a, b = (torch.tensor(r.losses, dtype=torch.float64).log() for r in (run, other))
    return (a - b).square().mean().sqrt().item()


def spread(runs: list[Run]) -> tuple[float, float]:
    """How far epinorm is from eager, and the furthest that two runs of eager are apart."""
    eager, ours, *reordered = runs
    pairs = itertools.combinations([eager, *reordered], 2)
    return distance(ours, eager), max(distance(a, b) for a, b in pairs)


def from_exact(runs: list[Run], exact: Run) -> tuple[float, float]:
    """How far epinorm is from the run in float64, and the furthest that a run of eager is."""
    eager, ours, *reordered = runs
    return distance(ours, exact), max(distance(run, exact) for run in (eager, *reordered))


def report(runs: list[Run]) -> str:
    eager, ours = runs[:2]
    ours_from_eager, eager_from_itself = spread(runs)
    last = [sum(run.losses[-10:]) / 10 for run in (eager, ours)]
    return (
        f"{eager.precision:9} eager {eager.seconds:7.2f} s, epinorm {ours.seconds:7.2f} s "
        f"({eager.seconds / ours.seconds:.2f}x); loss {eager.losses[0]:.3f} -> {last[0]:.4f} and "
        f"{last[1]:.4f}; epinorm is {ours_from_eager:.1e} from eager, eager from itself "
        f"{eager_from_itself:.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, default in asdict(Config()).items():
        add(f"--{name}", type=type(default), default=default)
    add("--precisions", default=",".join(PRECISIONS))
    add("--out", type=Path, metavar="FILE", help="write every run's losses as JSON")
    chosen = parser.parse_args()
    config = Config(**{name: getattr(chosen, name) for name in asdict(Config())})
    device = torch.device(chosen.device)
    print(f"{device_name(device)}, {config}", flush=True)
    runs: list[Run] = []
    for precision in chosen.precisions.split(","):
        if precision == "high" and device.type != "cuda":
            continue  # TF32 exists on CUDA alone
        found = compare(config, device, precision)
        print(report(found), flush=True)
        runs += found
    if chosen.out:
        facts = {
            "gpu": device_name(device),
            "torch": torch.__version__,
            "commit": commit(),
            "date": datetime.date.today().isoformat(),
            "machine": platform.machine(),
            "noise": NOISE,
            "config": asdict(config),
            "runs": [asdict(run) for run in runs],
        }
        chosen.out.write_text(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
