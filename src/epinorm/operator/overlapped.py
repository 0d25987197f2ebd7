"""Products by columns and rows of a split weight beside the communication that they wait for.

Each process begins with the rows of x that it has, while the others' come; or ends with the rows
of the result that it keeps, while those of others leave. For calls without a gradient, of sizes
where that was measured to be faster (decision 23).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from epinorm.backends.prepack import converted_once
from epinorm.chain.reference import Results
from epinorm.operator.peers import Peers, peers_of
from epinorm.precision import product_precision
from epinorm.said import log_once

OfRows = Callable[[Tensor, slice], Results]
"""What computes rows of x: these, and where they are in the whole."""

DEVICES = ("cuda",)
_LINK = 262e3
"""Bytes a µs from each of two H200, as docs/scale.md has them."""
_MEMORY = 4e6
_RATES = {"native": 6e8, "high": 4e8, "highest": 2.3e8}
"""Operations a µs of a product on an H200."""
_LAUNCHES = 30.0
"""µs that a product more, and what goes with it, costs."""
_LEAST = 1200.0
"""µs of a process' whole product; where it is shorter the host decides, which takes up to half a
millisecond longer."""


def peers_beside(
    group: Any, x: Tensor, weight: Tensor, size: int, gathers: bool, rows: int
) -> Peers | None:
    """The other processes, if their parts of x, or of the sum that is scattered, are worth being
    moved beside the product; rows: of x in all.

    It may be a collective. Processes decide alike, as what they decide by is the same in each.
    """
    if not pays(x, weight, size, gathers, rows):
        return None
    peers = peers_of(group, x.device)
    if peers is None:
        return None
    if peers.is_broken:
        log_once("rows are exchanged by NCCL alone, since a call failed while it exchanged them")
        return None
    moved = rows // size * weight.shape[gathers] * x.element_size()
    has_room = peers.make_room(moved if gathers else moved * (size - 1))
    return peers if has_room else None


def pays(x: Tensor, weight: Tensor, size: int, gathers: bool, rows: int) -> bool:
    """By a model of two H200; n and k are this process'."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    (n, k), part, itemsize = weight.shape, rows // size, x.element_size()
    product = 2 * part * n * k / _RATES[product_precision(x.dtype, "cuda")]
    moving = (size - 1) * part * weight.shape[gathers] * itemsize / _LINK
    # The pieces of y are joined; of a sum each part is read.
    joining = (2 * rows if gathers else (size + 1) * part) * n * itemsize / _MEMORY
    return size * product > _LEAST and min(moving, product) > joining + _LAUNCHES


def beside_gather(compute: OfRows, part: Tensor, weight: Tensor, peers: Peers) -> Results:
    """The results of all rows, of which this process has as many as each other."""
    m, rank = part.shape[0], peers.rank
    whole = part.new_empty((peers.size * m, *part.shape[1:]))
    with peers.exchange(), converted_once(weight):
        peers.part(rank, part, part.shape).copy_(part)
        with peers.copying():
            peers.meet()
            for other in peers.others():
                whole[other * m : (other + 1) * m].copy_(peers.part(other, part, part.shape))
            wait_for_whole = peers.copied()
            peers.meet()  # behind which the parts may be written over
        own = slice(rank * m, (rank + 1) * m)
        found = [compute(part, own)]
        wait_for_whole()
        if rank:
            before = slice(0, rank * m)
            found.insert(0, compute(whole[before], before))
        if rank < peers.size - 1:
            behind = slice(own.stop, len(whole))
            found.append(compute(whole[behind], behind))
    return _joined(found)


def _joined(found: list[Any]) -> Any:
    if isinstance(found[0], Tensor):
        return torch.cat(found)
    return tuple(torch.cat(each) for each in zip(*found, strict=True))


def beside_scatter(
    compute: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor, peers: Peers
) -> Tensor:
    """This process' rows of the sum of what each computes of all; summed in the order of the
    processes, and rounded once."""
    n, rank = peers.size, peers.rank
    m = x.shape[0] // n
    leaving = []  # until they have left
    with peers.exchange(), converted_once(weight):
        with peers.copying():
            peers.meet()  # the others have read what was there before
        for to in (range(rank + 1, n), range(rank)):
            if len(to) == 0:
                continue
            z = compute(x[to.start * m : to.stop * m])
            leaving.append(z)
            with peers.copying():
                for other in to:
                    part = z[(other - to.start) * m : (other - to.start + 1) * m]
                    peers.part(other, z, part.shape, _place(rank, other, n)).copy_(part)
        with peers.copying():
            peers.meet()
        own = compute(x[rank * m : (rank + 1) * m])
        peers.wait()
        return _summed(
            [
                own if r == rank else peers.part(rank, own, own.shape, _place(r, rank, n))
                for r in range(n)
            ]
        )


def _place(sender: int, receiver: int, n: int) -> int:
    """Where among what a process receives is what another has sent."""
    return (sender - receiver - 1) % n


def _summed(parts: list[Tensor]) -> Tensor:
    first, second, *rest = parts
    if not rest:
        return first + second
    total = first.to(torch.promote_types(first.dtype, torch.float32)) + second
    for part in rest:
        total += part
    return total.to(first.dtype)
