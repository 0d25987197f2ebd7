"""One rank of tests/parallel: trains a sharded model and its plain twin, and tells how they differ.

    python worker.py RANK RANKS FOLDER [cpu | cuda [CASE ...]]

Rank 0 writes FOLDER/results.json: for each case how outputs and gradients differ from those of one
process on the whole batch (root of the mean square of relative differences), and eager's own;
chains fused; calls that went the long way after the second step; whether a step repeats its bits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from ranks import attempt, finish, start
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import epinorm
from epinorm.capture.backend import compile_graph
from epinorm.operator import dispatch

WIDTH, ROWS, STEPS = 32, 24, 4
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


def compiled(model: nn.Module, fuse: Callable[[nn.Module], nn.Module]) -> Any:
    return model if fuse is same else torch.compile(model, backend=compile_graph)


def compiled_blocks(model: nn.Module, fuse: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(*(compiled(block, fuse) for block in model))  # type: ignore[attr-defined]


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
    "ddp, accumulated in place": lambda m, fuse: ddp(fuse(m), gradient_as_bucket_view=True),
    "fsdp1": lambda m, fuse: fsdp1(fuse(m)),
    "blocks compiled, fully_shard": lambda m, fuse: sharded(compiled_blocks(m, fuse)),
}


def same(model: nn.Module) -> nn.Module:
    return model


def whole(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).detach()


def step(model: Model, x: Tensor, micro_batches: int = 1) -> list[Tensor]:
    """The output, and the gradients where every rank has them whole."""
    model.zero_grad()
    outputs = []
    for i, part in enumerate(x.chunk(micro_batches)):
        waits = i + 1 < micro_batches and isinstance(model, DistributedDataParallel)
        with model.no_sync() if waits else nullcontext(), epinorm.accumulate_in_place():
            y = model(part)
            (y.double().square().mean() / micro_batches).backward()
        outputs.append(y.detach())
    y = torch.cat(outputs)
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return [y, *(whole(p).clone() for p in model.parameters())]
    return [y, *map(whole, model.parameters())]


def differences(found: list[Tensor], truth: list[Tensor], rank: int) -> list[float]:
    """Each tensor's relative difference, in the 2-norm."""
    y = truth[0][rank * ROWS : (rank + 1) * ROWS]
    pairs = zip(found, (y, *truth[1:]), strict=True)
    return [((a.double() - b).norm() / b.norm()).item() for a, b in pairs]


def run(make: Make, rank: int, ranks: int, micro_batches: int) -> dict[str, float]:
    torch._dynamo.reset()
    truth_of, model = plain().double(), make(plain().double(), fuse)
    eager = make(plain().double(), same)
    errors: dict[str, list[float]] = {"error": [], "eager_error": []}
    for i in range(STEPS):
        torch.manual_seed(10 + i)
        x = torch.randn(ranks * ROWS, WIDTH, dtype=torch.float64).to(DEVICE)
        truth = step(truth_of, x)
        mine = x[rank * ROWS : (rank + 1) * ROWS]
        if i == 2:
            LONG.clear()
        for key, one in (("error", model), ("eager_error", eager)):
            errors[key] += differences(step(one, mine, micro_batches), truth, rank)
    found = {key: mean(e * e for e in of_all) ** 0.5 for key, of_all in errors.items()}
    found["long"] = len(LONG)
    first = [t.clone() for t in step(model, mine, micro_batches)]
    found["repeated"] = all(map(torch.equal, first, step(model, mine, micro_batches)))
    found["fused"] = epinorm.explain(model).fused or operators(model, mine)
    return found


def operators(model: Model, x: Tensor) -> int:
    """How many chains a compiled model computes by one operation."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(model, x)
    return sum(e.count for e in profile.key_averages() if e.key == "epinorm::linear_norm_forward")


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


def reduced_before(make: Make) -> list[str]:
    """In which order, in a backward pass, gradients are ready for their all-reduce, and the first
    of two chains begins its own."""
    torch._dynamo.reset()
    model, seen = make(plain(), fuse), []

    def note(bucket: Any) -> Any:
        seen.extend(["gradient"] * len(bucket.gradients()))
        ready: torch.futures.Future[Tensor] = torch.futures.Future()
        ready.set_result(bucket.buffer())
        return ready

    model.register_comm_hook(None, lambda _, bucket: note(bucket))
    for _ in range(STEPS):  # buckets are arranged after the first
        y = model(torch.randn(ROWS, WIDTH, device=DEVICE))
        seen.clear()
        y.grad_fn.next_functions[0][0].register_prehook(lambda *_: seen.append("chain"))
        y.sum().backward()
    return seen


LONG: list[Any] = []
_call = dispatch.call


def counted(*arguments: Any) -> Any:
    LONG.append(1)
    return _call(*arguments)


if __name__ == "__main__":
    rank, ranks, folder, DEVICE = start()
    dispatch.call = counted  # type: ignore[assignment]
    MESH = init_device_mesh(DEVICE, (ranks,))
    cases: dict[str, Callable[[], Any]] = {
        name: partial(run, make, rank, ranks, 2 if "accumulated" in name else 1)
        for name, make in CASES.items()
    }
    cases["checkpoint"] = partial(checkpoint, folder)
    cases["order"] = partial(reduced_before, lambda m, fuse: ddp(fuse(m), bucket_cap_mb=1e-6))
    asked = sys.argv[5:] or cases
    finish(folder, {name: attempt(cases[name]) for name in asked if name in cases})
