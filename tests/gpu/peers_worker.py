"""One of several processes that share a GPU, for test_peers.py: python peers_worker.py RANK RANKS
FOLDER. Leaves with status 0 if rows that are exchanged beside products give what one process does.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from epinorm.operator import overlapped, peers

ROWS, WIDTH = 256, 512


def products(x: Tensor, weights: list[Tensor], group: peers.Peers) -> tuple[Tensor, Tensor]:
    """By columns, then by rows; x: all rows, of which each process takes its own."""
    rank, n = group.rank, group.size
    up, down = (w.chunk(n, i)[rank].contiguous() for i, w in enumerate(weights))
    rows = overlapped.beside_gather(lambda x, _: x @ up.T, x.chunk(n)[rank].contiguous(), up, group)
    assert isinstance(rows, Tensor)
    return rows, overlapped.beside_scatter(lambda x: x @ down.T, rows, down, group)


def check(x: Tensor, weights: list[Tensor], group: peers.Peers) -> None:
    wide = x @ weights[0].T
    truth = (wide @ weights[1].T).chunk(group.size)[group.rank]
    rows, own = products(x, weights, group)
    again = products(x, weights, group)
    assert torch.equal(rows, again[0])
    assert torch.equal(own, again[1])
    torch.testing.assert_close(rows, wide.chunk(group.size, 1)[group.rank].contiguous())
    torch.testing.assert_close(own, truth, rtol=1e-4, atol=1e-3)


def main() -> None:
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    dist.init_process_group(
        "gloo", f"file://{folder}/store", timedelta(seconds=60), rank=rank, world_size=ranks
    )
    peers.host_of = lambda *_: "one"  # whose backend is not gloo
    peers.LEAST_RATE = 0.0  # where processes take turns
    device = torch.device("cuda", 0)
    group = peers.peers_of(dist.group.WORLD, device)
    assert group is not None
    assert peers.peers_of(dist.group.WORLD, device) is group
    turn = 0
    for rows, dtype in [(ROWS, torch.float32), (ROWS, torch.float64), (64 * ROWS, torch.float32)]:
        for _ in range(4):
            torch.manual_seed(turn)
            x, *weights = (
                torch.randn(*shape, device=device, dtype=dtype) / WIDTH**0.25
                for shape in ((rows, WIDTH), (2 * WIDTH, WIDTH), (WIDTH, 2 * WIDTH))
            )
            assert group.make_room(rows * WIDTH * dtype.itemsize)
            if turn % ranks == rank:  # one comes late
                torch.cuda._sleep(20_000_000)
            check(x, weights, group)
            other = torch.cuda.Stream()
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                if turn % ranks == rank:
                    torch.cuda._sleep(20_000_000)
                check(x, weights, group)
            torch.cuda.current_stream().wait_stream(other)
            turn += 1
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert peers.peers_of(dist.group.WORLD, device) is None
        x.sum()
    torch.cuda.synchronize()
    dist.barrier()
    if sys.argv[4:] == ["dies"]:
        group.milliseconds = 3000
        if rank == 1:
            os._exit(0)
        try:
            products(x, weights, group)
            torch.cuda.synchronize()
        except RuntimeError as error:
            print(f"ended: {error}", flush=True)
            os._exit(0)
        os._exit(4)
    print("right", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
