"""Training steps and forwards on several GPUs: data parallel and tensor parallel, eager and fused.

    torchrun --nproc-per-node 2 benchmarks/parallel.py --out benchmarks/results/parallel

Data parallel: a step of four blocks of Linear 4096 → 4096, GroupNorm of 256 groups, LeakyReLU; rows
are those of one GPU. Tensor parallel: the pair 4096 → 16384 (GroupNorm, SiLU) → 4096 (residual,
LayerNorm); rows are those of all GPUs. A row has medians in ms, of four steps between two
synchronisations, as a training loop has them: by the wall, and of the host until it has launched
them, each of the slowest rank, as what they compute together is done when that is; "ms_of_ranks"
has all. "one" is one GPU without communication, measured in the same processes at the same time.
Tensor parallel rows are timed after the outputs were compared with those of one GPU.
"block_host_us": what of FSDP2's host time is a block's own, in forward and backward, without
FSDP2's hooks.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import epinorm
from epinorm.backends.cuda.runtime.native import settle
from epinorm.parallel import ColwiseParallel, RowwiseParallel

ROUNDS, SHORT_ROUNDS = 3, 9
MOST_EAGER_ROWS = 8192
"""Beyond, eager's steps take long and no comparison needs them; up to here the host decides some,
and rounds are `SHORT_ROUNDS`."""
STYLES = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def blocks(width: int, count: int, dtype: torch.dtype, device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    made = (
        nn.Sequential(nn.Linear(width, width), nn.GroupNorm(width // 16, width), nn.LeakyReLU())
        for _ in range(count)
    )
    return nn.Sequential(*made).to(device, dtype)


class Pair(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = 4 * width
        self.up = epinorm.LinearNorm(
            width, hidden, norm=epinorm.GroupNorm(hidden // 16), post="silu"
        )
        self.down = epinorm.LinearNorm(hidden, width, norm=epinorm.LayerNorm(), pre="add_residual")

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x), x)


def prepared(model: nn.Sequential, way: str, fused: bool, mesh: DeviceMesh) -> nn.Module:
    if way == "fsdp2":
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    made: nn.Module = epinorm.fuse(model) if fused else model
    return DistributedDataParallel(made, gradient_as_bucket_view=True) if way == "ddp" else made


def timed(
    runs: list[Callable[[], Any]],
    steps: int,
    device: torch.device,
    at_once: int = 4,
    rounds: int = ROUNDS,
) -> list[dict[str, Any]]:
    """Of each run medians of the wall and of the host, ms; at_once: runs between two
    synchronisations. They take turns, so that what else the machine does meets them alike."""
    cuda = device.type == "cuda"
    if cuda:
        settle()
    wall: list[list[float]] = [[] for _ in runs]
    host: list[list[float]] = [[] for _ in runs]
    for turn in range(1 + rounds):  # the first compiles and fills pools
        for i, run in enumerate(runs):
            for step in range(1 + steps):
                if cuda:
                    torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(at_once):
                    run()
                launched = time.perf_counter()
                if cuda:
                    torch.cuda.synchronize()
                if turn and step:
                    wall[i].append((time.perf_counter() - start) / at_once)
                    host[i].append((launched - start) / at_once)
    return [found_of_ranks(median(w), median(h)) for w, h in zip(wall, host, strict=True)]


def found_of_ranks(wall: float, host: float) -> dict[str, Any]:
    """What a row says of seconds of this rank, and of all others."""
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (round(wall * 1e3, 4), round(host * 1e3, 4)))
    walls, hosts = zip(*of_ranks, strict=True)
    return {"ms": max(walls), "host_ms": max(hosts), "ms_of_ranks": list(walls)}


def step_of(model: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], None]:
    def step() -> None:
        model(x).backward(dy)
        model.zero_grad()

    return step


def nodes_of(y: Tensor, x: Tensor) -> list[Any]:
    """The nodes between a block's result and what it is given, but for what accumulates."""
    found: list[Any] = []
    waiting = [y.grad_fn]
    while waiting:
        node = waiting.pop()
        if node in (None, x.grad_fn, *found) or node.name().endswith("AccumulateGrad"):
            continue
        found.append(node)
        waiting += [before for before, _ in node.next_functions]
    return found


def block_host_us(model: nn.Module, step: Callable[[], None]) -> dict[str, float]:
    """Medians, µs, of the host within a sharded block's own forward, from the end of FSDP2's hook
    before it to the beginning of the one behind it, and within its own nodes of the backward pass
    together. FSDP2's work between blocks leaves the caches to neither."""
    spent: dict[str, list[list[float]]] = {"forward": [], "backward": []}
    began = [0.0]

    def begin(*_: Any) -> None:
        began[0] = time.perf_counter()

    def end(into: list[float], *_: Any) -> None:
        into.append(time.perf_counter() - began[0])

    def watch(_module: nn.Module, given: tuple[Tensor, ...], y: Tensor) -> None:
        of_pass: dict[str, list[float]] = {name: [] for name in spent}
        end(of_pass["forward"])
        for node in nodes_of(y, given[0]):
            node.register_prehook(begin)
            node.register_hook(partial(end, of_pass["backward"]))
        for name, each in of_pass.items():
            spent[name].append(each)

    for block in model.children():
        block.register_forward_pre_hook(begin)
        block.register_forward_hook(watch, prepend=True)
    for _ in range(20):
        step()
    return {name: round(median(map(sum, each[40:])) * 1e6, 1) for name, each in spent.items()}


def forward_of(model: Callable[[Any], Any], x: Tensor) -> Callable[[], None]:
    def forward() -> None:
        with torch.no_grad():
            model(x)

    return forward


class Bench:
    """What all rows have in common, and where they go."""

    def __init__(self, given: argparse.Namespace) -> None:
        rank, cuda = int(os.environ["LOCAL_RANK"]), torch.cuda.is_available()
        self.device = torch.device("cuda", rank) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        backend = "nccl" if cuda else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=60))
        self.mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        self.given = given
        self.gpu = torch.cuda.get_device_name(self.device) if cuda else "cpu"
        self.rows: list[dict[str, Any]] = []

    def note(self, precision: str, **facts: Any) -> None:
        row = {
            **facts, "precision": precision, "gpus": dist.get_world_size(), "gpu": self.gpu,
            "torch": torch.__version__, "commit": os.environ.get("COMMIT", ""),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }  # fmt: skip
        self.rows.append(row)
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
            if self.given.out:  # after each: a job may end early
                folder = Path(self.given.out)
                folder.mkdir(parents=True, exist_ok=True)
                name = self.gpu.lower().replace(" ", "-")
                (folder / f"{name}-x{dist.get_world_size()}.json").write_text(
                    json.dumps(self.rows, indent=1) + "\n"
                )

    def data(self, precision: str, dtype: torch.dtype, rows: int) -> None:
        x = torch.randn(rows, self.given.width, device=self.device, dtype=dtype)
        dy = torch.randn_like(x)
        torch._dynamo.reset()
        kinds = [
            (fused, way)
            for fused, way in product(map(bool, self.given.fused), self.given.ways)
            if fused or rows <= MOST_EAGER_ROWS
        ]
        models = [
            prepared(blocks(self.given.width, 4, dtype, self.device), way, fused, self.mesh)
            for fused, way in kinds
        ]
        runs = [step_of(model, x, dy) for model in models]
        rounds = ROUNDS if rows > MOST_EAGER_ROWS else SHORT_ROUNDS
        times = timed(runs, 2, self.device, rounds=rounds)
        for (fused, way), found in zip(kinds, times, strict=True):
            self.note(precision, what="blocks", way=way, fused=fused, rows=rows, **found)
        for (fused, way), model, run in zip(kinds, models, runs, strict=True):
            if way == "fsdp2" and rows == min(self.given.rows):
                facts: dict[str, Any] = {"what": "block_host_us", "way": way, "fused": fused}
                self.note(precision, **facts, rows=rows, **block_host_us(model, run))

    def tensor(self, precision: str, dtype: torch.dtype) -> None:
        """The pair on one GPU and split, fused; outputs compared before anything is timed."""
        width, rows, n = self.given.width, self.given.pair_rows, dist.get_world_size()
        one, split = Pair(width), Pair(width)
        torch.manual_seed(0)
        for a, b in zip(one.parameters(), split.parameters(), strict=True):
            nn.init.normal_(a, std=width**-0.5 / 2)
            b.data.copy_(a.data)
        one, split = one.to(self.device, dtype), split.to(self.device, dtype)
        parallelize_module(split, self.mesh, STYLES)
        x = torch.randn(rows, width, device=self.device, dtype=dtype)
        dist.broadcast(x, 0)
        mine = x.chunk(n)[dist.get_rank()]
        parts = DTensor.from_local(mine.clone(), self.mesh, [Shard(0)])
        with torch.no_grad():
            a, b = one(x).chunk(n)[dist.get_rank()].float(), split(parts).to_local().float()
            again = split(parts).to_local().float()
        differs = ((a - b).abs().max() / a.abs().max()).item()
        x.requires_grad_()
        parts.requires_grad_()
        dy = torch.randn_like(x)
        dist.broadcast(dy, 0)
        dy_parts = DTensor.from_local(dy.chunk(n)[dist.get_rank()].clone(), self.mesh, [Shard(0)])
        for model, given, g, way in ((one, x, dy, "one"), (split, parts, dy_parts, "tensor")):
            facts: dict[str, Any] = {"what": "pair", "way": way, "fused": True, "rows": rows}
            if way == "tensor":
                facts |= {"difference": differs, "repeats": torch.equal(b, again)}
            for name, run in (
                ("forward", forward_of(model, given)),
                ("step", step_of(model, given, g)),
            ):
                found = timed([run], 2, self.device)[0]
                self.note(precision, **facts, **{"pass": name}, **found)

    def links(self) -> None:
        """Collectives by themselves, for docs/scale.md's cost model; MiB of the whole."""
        if self.device.type != "cuda":
            return
        n = dist.get_world_size()
        for mib in (1, 32, 128, 512):
            whole = torch.empty(mib << 19, dtype=torch.bfloat16, device=self.device)
            part = torch.empty(whole.numel() // n, dtype=torch.bfloat16, device=self.device)
            for name, run in (
                ("all_gather", partial(dist.all_gather_into_tensor, whole, part)),
                ("reduce_scatter", partial(dist.reduce_scatter_tensor, part, whole)),
                ("all_reduce", partial(dist.all_reduce, whole)),
            ):
                self.note("bf16", what=name, mib=mib, **timed([run], 2, self.device, 10)[0])


def set_precision(precision: str) -> None:
    torch.set_float32_matmul_precision("highest" if precision == "bf16" else precision)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", default=["pair", "links", "blocks"])
    parser.add_argument("--rows", type=int, nargs="+", default=[4096, 32768])
    parser.add_argument("--pair-rows", type=int, default=8192)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--precisions", nargs="+", default=["bf16", "highest"])
    parser.add_argument("--ways", nargs="*", default=["one", "ddp", "fsdp2"])
    parser.add_argument("--fused", type=int, nargs="+", default=[1, 0], help="0: eager, 1: fused")
    parser.add_argument("--out", help="a folder")
    bench = Bench(parser.parse_args())
    settings = [
        (p, torch.bfloat16 if p == "bf16" else torch.float32) for p in bench.given.precisions
    ]
    parts = bench.given.parts
    for rows in bench.given.rows if "blocks" in parts else ():
        for precision, dtype in settings:
            set_precision(precision)
            bench.data(precision, dtype, rows)
    for precision, dtype in settings if "pair" in parts else ():
        set_precision(precision)
        bench.tensor(precision, dtype)
    if "links" in parts:
        bench.links()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
