"""Train a fused model on several GPUs or, with gloo, on the processes of a CPU.

    torchrun --nproc-per-node 2 examples/train_parallel.py --layout tensor

Layouts: ddp and fsdp2 split the batch, tensor splits each pair of blocks, mesh does both (rows over
half of the processes, each pair over two). Prints the losses beside those of the same model trained
by one process on the whole batch.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput, parallelize_module
from torch.distributed.tensor.parallel import RowwiseParallel as PlainRowwiseParallel
from torch.nn.parallel import DistributedDataParallel

import epinorm
from epinorm.parallel import ColwiseParallel, RowwiseParallel


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, norm: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(inputs, outputs), norm

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if residual is None:
            return nn.functional.silu(self.norm(self.linear(x)))
        return self.norm(self.linear(x) + residual)


class Pair(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = 4 * width
        self.up = Block(width, hidden, nn.GroupNorm(hidden // 16, hidden))
        self.down = Block(hidden, width, nn.LayerNorm(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x), x)


def network(width: int, depth: int) -> nn.Sequential:
    torch.manual_seed(0)  # the same parameters in every process
    return nn.Sequential(*(Pair(width) for _ in range(depth)), nn.Linear(width, 1))


def split_pairs(model: nn.Sequential, mesh: DeviceMesh) -> None:
    """Tensor parallel: rows lie on all processes before the first pair and behind the last."""
    last = len(model) - 2
    styles = {"0": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0))}
    for i in range(last + 1):
        styles |= {f"{i}.up": ColwiseParallel(), f"{i}.down": RowwiseParallel()}
    styles[f"{last}.down"] = RowwiseParallel(output_layouts=Replicate(), use_local_output=True)
    # Optimizers that update all parameters at once want DTensors on one mesh alone.
    styles[f"{last + 1}"] = PlainRowwiseParallel(input_layouts=Replicate())
    parallelize_module(model, mesh, styles)


def parallel(model: nn.Sequential, layout: str, device: str) -> tuple[nn.Module, int, int]:
    """The fused model; into how many parts a batch is split, and which of them is this process'."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if layout == "ddp":
        return DistributedDataParallel(epinorm.fuse(model)), ranks, rank
    size = {"fsdp2": 1, "tensor": ranks, "mesh": 2}[layout]
    mesh = init_device_mesh(device, (ranks // size, size), mesh_dim_names=("data", "tensor"))
    if size > 1:
        split_pairs(model, mesh["tensor"])
    if size < ranks:
        for block in model:
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    return epinorm.fuse(model), ranks // size, mesh.get_local_rank("data")


def train(
    model: nn.Module, batches: list[tuple[Tensor, Tensor]], part: slice, rate: float
) -> list[float]:
    """The loss of each step's own part of the batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=True)  # GPUs' default
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
    parser.add_argument("--layout", choices=("ddp", "fsdp2", "tensor", "mesh"), default="fsdp2")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--rows", type=int, default=512, help="of the whole batch")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rate", type=float, default=1e-3)
    given = parser.parse_args()

    if "LOCAL_RANK" not in os.environ:
        parser.error("start it by torchrun --nproc-per-node 2 examples/train_parallel.py")
    rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    if given.layout == "mesh" and ranks % 2:
        parser.error(f"--layout mesh takes an even number of processes, got {ranks}")
    if given.rows % ranks:
        parser.error(f"--rows must be divisible by {ranks} processes, got {given.rows}")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=60))

    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(given.steps):
        x = torch.randn(given.rows, given.width, generator=generator)
        batches.append((x.to(device), x.square().mean(1, keepdim=True).to(device)))

    model = network(given.width, given.depth).to(device)
    model, parts, mine = parallel(model, given.layout, device.type)
    rows = given.rows // parts
    part = slice(mine * rows, (mine + 1) * rows)
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
