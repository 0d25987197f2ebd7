"""How a call with DTensors is laid out on a mesh: by columns, by rows, or each with own rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from epinorm.chain import Chain
from epinorm.operator.collectives import Placements


@dataclass(frozen=True)
class Layout:
    """How a chain is computed on a mesh. dim: the mesh's dimension that the weight is sharded over,
    None where it is on none; way: "columns", "rows" or, with dim None, "copies".

    x, y: placements of x as the product takes it, and of the results.
    """

    mesh: DeviceMesh
    dim: int | None
    way: str
    x: Placements
    y: Placements
    last: int

    @property
    def over(self) -> int:
        """``dim``, where the weight is sharded."""
        assert self.dim is not None
        return self.dim

    @property
    def size(self) -> int:
        return 1 if self.dim is None else self.mesh.size(self.dim)

    def splits_evenly(self, placements: Placements, shape: Sequence[int]) -> int | None:
        """The axis that placements split over ``dim``, if all parts along it are of one size and
        those of these processes lie one behind another; else None."""
        dim = self.dim
        if dim is None or type(placements[dim]) is not Shard:
            return None
        axis, size = _axis(placements[dim], self.last), 1
        for i, placement in enumerate(placements):
            if placement.is_shard() and _axis(placement, self.last) == axis:
                if i > dim or type(placement) is not Shard:
                    return None
                size *= self.mesh.size(i)
        return None if shape[axis] % size else axis

    def with_over(self, placements: Placements, placement: Placement) -> Placements:
        """The placements, over ``dim`` that one."""
        return (*placements[: self.over], placement, *placements[self.over + 1 :])

    @property
    def features(self) -> Placements:
        """Of a vector with one value a channel of the results."""
        return tuple(Shard(0) if p == Shard(self.last) else Replicate() for p in self.y)

    def summed(self, own: Placements) -> Placements:
        """Of the gradient of a tensor placed as ``own``: what it lies copied on sums its parts."""
        pairs = zip(own, self.y, strict=True)
        return tuple(Partial() if o.is_replicate() and y.is_shard() else o for o, y in pairs)

    def of_part(self, chain: Chain, m: int, n: int, k: int) -> tuple[Chain, int, int, int]:
        """What one process computes in one operation: a chain, and its rows, channels and depth."""
        for i, placement in enumerate(self.x):
            m //= self.mesh.size(i) if i != self.dim and placement.is_shard() else 1
        if self.way == "rows":
            return Chain(None), m, n, k // self.size
        norm = chain.norm
        if norm is not None and chain.has_groups:
            norm = replace(norm, num_groups=norm.num_groups // self.size)
            return replace(chain, norm=norm), m, n // self.size, k
        if self.way == "columns":
            chain = Chain(None, chain.pre, rounding=chain.rounding)
        return chain, m, n // self.size, k

    def __str__(self) -> str:
        if self.dim is None:
            return "each process computes its own rows"
        over = f"over {self.size} processes"
        if self.way == "columns":
            return f"by columns {over}: x is gathered, each has its own channels of all rows"
        return f"by rows {over}: partial products are summed into each one's own rows"


class Placed(NamedTuple):
    """Of a DTensor, what a layout depends on. mesh_id: meshes are equal whose process groups are
    not."""

    device_mesh: DeviceMesh
    placements: Placements
    shape: torch.Size
    mesh_id: int

    @staticmethod
    def of(tensor: Any) -> Placed | None:
        """None for a plain tensor, as a seed is."""
        if not isinstance(tensor, DTensor):
            return None
        mesh = tensor.device_mesh
        return Placed(mesh, tensor.placements, tensor.shape, id(mesh))


def layout_of(x: Any, weight: Any, operands: Sequence[Any], chain: Chain) -> Layout | None:
    """The layout of a call with DTensors, or what is ``Placed`` of them; None where PyTorch's own
    layers have to compute it on the DTensors."""
    mesh, last = weight.device_mesh, len(x.shape) - 1
    if "row" in chain.operand_kinds or chain.returns_statistics:
        return None
    sharded = [i for i, p in enumerate(weight.placements) if not p.is_replicate()]
    if len(sharded) > 1 or any(weight.placements[i] not in (Shard(0), Shard(1)) for i in sharded):
        return None
    taken = [p if p.is_shard() and _axis(p, last) < last else Replicate() for p in x.placements]
    if not sharded:
        return Layout(mesh, None, "copies", tuple(taken), tuple(taken), last)
    if last == 0:  # one row, which cannot be split
        return None
    (dim,), made = sharded, list(taken)
    if weight.placements[dim] == Shard(1):
        taken[dim], made[dim] = Shard(last), Shard(_rows_axis(x, operands, chain, mesh, dim))
        return Layout(mesh, dim, "rows", tuple(taken), tuple(made), last)
    taken[dim], made[dim] = Replicate(), Shard(last)
    size, norm = mesh.size(dim), chain.norm
    splits = norm is None or not chain.has_groups or norm.num_groups % size == 0
    if weight.shape[0] % size or not splits:
        return None
    return Layout(mesh, dim, "columns", tuple(taken), tuple(made), last)


def _axis(placement: Placement, last: int) -> int:
    assert isinstance(placement, Shard)
    return placement.dim if placement.dim >= 0 else placement.dim + last + 1


def _rows_axis(x: Any, operands: Sequence[Any], chain: Chain, mesh: DeviceMesh, dim: int) -> int:
    """The axis that rows are split along: a residual's, or the first that splits evenly."""
    last = len(x.shape) - 1
    for kind, operand in zip(chain.operand_kinds, operands, strict=True):
        placement = Replicate() if operand is None else operand.placements[dim]
        if kind == "element" and placement.is_shard() and _axis(placement, last) < last:
            return _axis(placement, last)
    even = (axis for axis in range(last) if x.shape[axis] % mesh.size(dim) == 0)
    return next(even, 0)
