"""One rank of test_failures.py: the second fails in a training step, the others tell how it ends.

    python failing_worker.py RANK RANKS FOLDER [cpu | cuda] raises | dies | shape WAY

Each other rank prints the error that ends its step, the seconds that it took, and whether the same
model computes the same afterwards, by itself; and leaves with status 3. WAY beside, on GPUs: in
inference, whose rows are exchanged beside the products; CUDA ends with the step.
"""

from __future__ import annotations

import os
import sys
import time

import torch
from ranks import start
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import epinorm
from epinorm.operator import overlapped
from epinorm.parallel import ColwiseParallel, RowwiseParallel

WIDTH, ROWS, SECONDS = 32, 8, 30


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        norm = epinorm.GroupNorm(8)
        self.up = epinorm.LinearNorm(WIDTH, 2 * WIDTH, norm=norm, post="silu")
        self.down = epinorm.LinearNorm(2 * WIDTH, WIDTH, norm=norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


def prepared(model: nn.Module, way: str) -> nn.Module:
    if way in ("tensor", "beside"):
        return parallelize_module(model, MESH, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if way == "fsdp2":
        return epinorm.fuse(fully_shard(model, mesh=MESH))
    return DistributedDataParallel(epinorm.fuse(model))


def step(model: nn.Module, way: str, failing: str) -> None:
    if failing == "raises":
        raise KeyError("a bug of this rank's own")
    if failing == "dies":
        os._exit(9)
    x = torch.randn(ROWS + (failing == "shape"), WIDTH, device=DEVICE)
    split = way in ("tensor", "beside")
    with torch.set_grad_enabled(way != "beside"):
        y = model(DTensor.from_local(x, MESH, [Shard(0)]) if split else x)
    if way != "beside":
        y.square().mean().backward()
    if DEVICE == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    failure, way = sys.argv[-2:]
    if way == "beside":
        overlapped.pays = lambda *_: True
    # NCCL's watchdog sleeps four times as long before it ends the process: a minute by default.
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "500")
    RANK, RANKS, _, DEVICE = start(10 if "cuda" in sys.argv else SECONDS)
    MESH = init_device_mesh(DEVICE, (RANKS,))
    torch.manual_seed(0)
    alone, model = Pair().to(DEVICE), Pair().to(DEVICE)
    x = torch.randn(ROWS, WIDTH, device=DEVICE)
    before = alone(x)
    model = prepared(model, way)
    step(model, way, "")
    began = time.monotonic()
    try:
        for _ in range(3):  # what one rank computed may be its neighbours' last chance to notice
            step(model, way, failure if RANK == 1 else "")
        print("no error", flush=True)
    except Exception as error:
        if RANK == 1:
            raise
        print(f"ended: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
    print(f"seconds: {time.monotonic() - began:.1f}", flush=True)
    if way != "beside":
        print(f"same: {torch.equal(before, alone(x))}", flush=True)
    os._exit(3)  # the group cannot be left in order
