"""One rank of tests/parallel: trains a sharded model and its plain twin, and tells how they differ.

    python worker.py RANK RANKS FOLDER [cpu | cuda]

Rank 0 writes FOLDER/results.json: for each case the largest difference of a gradient or an output
from those of one process on the whole batch, relative to the largest value, and eager's own where
the case rounds; chains fused; calls that went the long way after the second step.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from ranks import finish, start
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import epinorm
from epinorm.operator import dispatch

WIDTH, ROWS, STEPS = 32, 6, 4
Model = Any


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.GroupNorm(4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(self.norm(self.linear(x)))


def plain() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.to(DEVICE)


def sharded(model: nn.Module, root: bool = True, **options: Any) -> nn.Module:
    for block in model:  # type: ignore[attr-defined]
        fully_shard(block, mesh=MESH, **options)
    return fully_shard(model, mesh=MESH, **options) if root else model


def by_blocks(model: nn.Module) -> nn.Module:
    for block in model:  # type: ignore[attr-defined]
        epinorm.fuse(block)
    return model


def ddp(model: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, **options)


def fsdp1(model: nn.Module) -> nn.Module:
    device = torch.zeros((), device=DEVICE).device
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=device)


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
fuse = epinorm.fuse
Make = Callable[[nn.Module, Callable[[nn.Module], nn.Module]], Model]
CASES: dict[str, Make] = {
    "fuse, fully_shard": lambda m, fuse: sharded(fuse(m)),
    "fully_shard, fuse": lambda m, fuse: fuse(sharded(m)),
    "blocks fused, fully_shard": lambda m, fuse: sharded(m if fuse is same else by_blocks(m)),
    "fuse, fully_shard of blocks": lambda m, fuse: sharded(fuse(m), root=False),
    "fully_shard of the root": lambda m, fuse: fully_shard(fuse(m), mesh=MESH),
    "not resharded": lambda m, fuse: fuse(sharded(m, reshard_after_forward=False)),
    "bf16": lambda m, fuse: fuse(sharded(m.float(), mp_policy=BF16)),
    "ddp": lambda m, fuse: ddp(fuse(m)),
    "ddp, fuse": lambda m, fuse: fuse(ddp(m)),
    "ddp, static graph": lambda m, fuse: ddp(fuse(m), static_graph=True),
    "ddp, bucket views": lambda m, fuse: ddp(fuse(m), gradient_as_bucket_view=True),
    "fsdp1": lambda m, fuse: fsdp1(fuse(m)),
}


def same(model: nn.Module) -> nn.Module:
    return model


def whole(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).detach()


def step(model: Model, x: Tensor) -> list[Tensor]:
    """The output, and the gradients where every rank has them whole."""
    model.zero_grad()
    y = model(x)
    y.double().square().mean().backward()
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return [y.detach(), *(whole(p).clone() for p in model.parameters())]
    return [y.detach(), *map(whole, model.parameters())]


def difference(found: list[Tensor], truth: list[Tensor], rank: int) -> float:
    worst = 0.0
    for i, (a, b) in enumerate(zip(found, truth, strict=True)):
        b = b[rank * ROWS : (rank + 1) * ROWS] if i == 0 else b
        worst = max(worst, ((a.double() - b).abs().max() / b.abs().max()).item())
    return worst


def run(make: Make, rank: int, ranks: int) -> dict[str, float]:
    torch._dynamo.reset()
    truth_of, model = plain().double(), make(plain().double(), fuse)
    eager = make(plain().double(), same)
    found = {"error": 0.0, "eager_error": 0.0}
    for i in range(STEPS):
        torch.manual_seed(10 + i)
        x = torch.randn(ranks * ROWS, WIDTH, dtype=torch.float64).to(DEVICE)
        truth = step(truth_of, x)
        mine = x[rank * ROWS : (rank + 1) * ROWS]
        if i == 2:
            LONG.clear()
        found["error"] = max(found["error"], difference(step(model, mine), truth, rank))
        eager_error = difference(step(eager, mine), truth, rank)
        found["eager_error"] = max(found["eager_error"], eager_error)
    found["long"] = len(LONG)
    found["fused"] = epinorm.explain(model).fused
    return found


def checkpoint(folder: Path) -> dict[str, bool]:
    """Written by a fused and sharded model, read by a plain one, and back."""
    fused, read = sharded(fuse(plain())), plain()
    fused(torch.randn(ROWS, WIDTH, device=DEVICE))
    with torch.no_grad():
        for parameter in fused.parameters():
            parameter.mul_(3)
    dcp.save(get_model_state_dict(fused), checkpoint_id=folder / "sharded")
    state = get_model_state_dict(read)
    dcp.load(state, checkpoint_id=folder / "sharded")
    set_model_state_dict(read, state)
    right = plain()
    same = all(
        torch.equal(a, 3 * b) for a, b in zip(read.parameters(), right.parameters(), strict=True)
    )
    dcp.save(get_model_state_dict(right), checkpoint_id=folder / "plain")
    state = get_model_state_dict(fused)
    dcp.load(state, checkpoint_id=folder / "plain")
    set_model_state_dict(fused, state)
    back = all(
        torch.equal(a.full_tensor(), b)  # type: ignore[attr-defined]
        for a, b in zip(fused.parameters(), right.parameters(), strict=True)
    )
    return {"sharded to plain": same, "plain to sharded": back}


LONG: list[Any] = []
_call = dispatch.call


def counted(*arguments: Any) -> Any:
    LONG.append(1)
    return _call(*arguments)


if __name__ == "__main__":
    rank, ranks, folder, DEVICE = start()
    dispatch.call = counted  # type: ignore[assignment]
    MESH = init_device_mesh(DEVICE, (ranks,))
    results: dict[str, Any] = {name: run(make, rank, ranks) for name, make in CASES.items()}
    results["checkpoint"] = checkpoint(folder)
    finish(folder, results)
