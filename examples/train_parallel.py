"""Train a fused model on several GPUs or, with gloo, on the processes of a CPU.

    torchrun --nproc-per-node 2 examples/train_parallel.py --layout fsdp2

Prints the losses beside those of the same model trained by one process on the whole batch.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import epinorm


def network(width: int, depth: int) -> nn.Sequential:
    torch.manual_seed(0)  # the same parameters in every process
    blocks = (
        nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(depth)
    )
    return nn.Sequential(*blocks, nn.Linear(width, 1))


def parallel(model: nn.Sequential, layout: str, device: torch.device) -> nn.Module:
    """The fused model, its parameters copied to every process (ddp) or sharded (fsdp2)."""
    if layout == "ddp":
        return DistributedDataParallel(epinorm.fuse(model))
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    return epinorm.fuse(fully_shard(model, mesh=mesh))


def train(
    model: nn.Module, batches: list[tuple[Tensor, Tensor]], part: slice, rate: float
) -> list[float]:
    """The loss of each step's own part of the batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    losses = []
    for x, target in batches:
        loss = nn.functional.mse_loss(model(x[part]), target[part])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", choices=("ddp", "fsdp2"), default="fsdp2")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--rows", type=int, default=64, help="of one process")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rate", type=float, default=1e-3)
    given = parser.parse_args()

    rank, cuda = int(os.environ["LOCAL_RANK"]), torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=60))
    ranks = dist.get_world_size()

    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(given.steps):
        x = torch.randn(ranks * given.rows, given.width, generator=generator)
        batches.append((x.to(device), x.square().mean(1, keepdim=True).to(device)))

    model = parallel(network(given.width, given.depth).to(device), given.layout, device)
    part = slice(rank * given.rows, (rank + 1) * given.rows)
    losses = torch.tensor(train(model, batches, part, given.rate), device=device)
    dist.all_reduce(losses)
    losses /= ranks

    alone = network(given.width, given.depth).to(device)
    expected = train(alone, batches, slice(None), given.rate)
    if rank == 0:
        print(f"{given.layout} on {ranks} processes, and one process:")
        for i, (ours, one) in enumerate(zip(losses.tolist(), expected, strict=True)):
            print(f"step {i:3}  loss {ours:.6f}  {one:.6f}")
        worst = max(abs(a / b - 1) for a, b in zip(losses.tolist(), expected, strict=True))
        print(f"largest relative difference: {worst:.1e}")
        print(epinorm.explain(model))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
