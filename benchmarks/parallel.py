"""A training step of four wide blocks on several GPUs: eager and fused under DDP and FSDP2.

    torchrun --nproc-per-node 2 benchmarks/parallel.py --out rows.json

Four of Linear 4096 → 4096, GroupNorm of 256 groups, LeakyReLU. Rows are those of one GPU. A row has
medians in ms: of the step by the wall, and of the host until it has launched all of it; "one" is
the same on one GPU without communication, measured in the same process.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import epinorm

WARM_UP, STEPS = 6, 12


def blocks(width: int, count: int, dtype: torch.dtype, device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    made = (
        nn.Sequential(nn.Linear(width, width), nn.GroupNorm(width // 16, width), nn.LeakyReLU())
        for _ in range(count)
    )
    return nn.Sequential(*made).to(device, dtype)


def prepared(model: nn.Sequential, way: str, fused: bool, mesh: Any) -> nn.Module:
    if way == "fsdp2":
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    made: nn.Module = epinorm.fuse(model) if fused else model
    return DistributedDataParallel(made, gradient_as_bucket_view=True) if way == "ddp" else made


def timed(model: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> tuple[float, float]:
    cuda = x.device.type == "cuda"
    wall, host = [], []
    for i in range(WARM_UP + STEPS):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        model(x).backward(dy)
        launched = time.perf_counter()
        model.zero_grad()
        if cuda:
            torch.cuda.synchronize()
        if i >= WARM_UP:
            wall.append(time.perf_counter() - start)
            host.append(launched - start)
    return median(wall) * 1e3, median(host) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[4096, 32768])
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--precisions", nargs="+", default=["bf16", "highest"])
    parser.add_argument("--ways", nargs="+", default=["one", "ddp", "fsdp2"])
    parser.add_argument("--out")
    given = parser.parse_args()
    rank, cuda = int(os.environ["LOCAL_RANK"]), torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=60))
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    found = []
    for precision in given.precisions:
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        torch.set_float32_matmul_precision("highest" if precision == "bf16" else precision)
        for rows in given.rows:
            x = torch.randn(rows, given.width, device=device, dtype=dtype)
            dy = torch.randn_like(x)
            for way in given.ways:
                for fused in (False, True):
                    torch._dynamo.reset()
                    model = prepared(blocks(given.width, 4, dtype, device), way, fused, mesh)
                    wall, host = timed(model, x, dy)
                    row = {
                        "way": way, "gpus": dist.get_world_size(), "fused": fused, "rows": rows,
                        "precision": precision,
                        "step_ms": round(wall, 3), "host_ms": round(host, 3),
                        "gpu": torch.cuda.get_device_name(device) if cuda else "cpu",
                        "torch": torch.__version__,
                    }  # fmt: skip
                    found.append(row)
                    if rank == 0:
                        print(json.dumps(row), flush=True)
                        if given.out:  # after each: a job may end early
                            with open(given.out, "w") as file:
                                json.dump(found, file, indent=1)
                    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
