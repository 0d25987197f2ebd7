"""This process' parts of DTensors, what processes exchange of them, and DTensors of parts.

All-gather and reduce-scatter are one collective of torch.distributed's each, and the other's
gradient; the parts of many DTensors are one node of autograd's. DTensor's own ``redistribute``,
``to_local`` and ``from_local`` do the same in many times the host's time, which a pair of blocks
waits for (decision 23).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple

import torch
import torch.distributed as distributed
from torch import Tensor
from torch.distributed import _functional_collectives as traced
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from epinorm.backends.memo import memo
from epinorm.operator.undisturbed import has_plain_types, wants_gradient

try:  # which PyTorch does not promise
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
except ImportError:
    DTensorSpec = None  # type: ignore[assignment, misc]

Placements = tuple[Placement, ...]

# The first are PyTorch 2.13's names for the second.
_known: Any = distributed
_all_gather = getattr(_known, "all_gather_single", None) or _known.all_gather_into_tensor
_reduce_scatter = getattr(_known, "reduce_scatter_single", None) or _known.reduce_scatter_tensor


def gather(part: Tensor, mesh: DeviceMesh, dim: int, axis: int = 0) -> Tensor:
    """Parts of one shape, one behind another along the axis, of the processes along a dimension of
    the mesh."""
    if not wants_gradient(part):
        return _gathered(part, mesh, dim, axis)
    whole: Tensor = _Gather.apply(part, mesh, dim, axis)
    return whole


def scatter_sum(whole: Tensor, mesh: DeviceMesh, dim: int, axis: int = 0) -> Tensor:
    """This process' part of the sum over these processes, which divide the axis evenly."""
    if not wants_gradient(whole):
        return _scattered(whole, mesh, dim, axis)
    part: Tensor = _ScatterSum.apply(whole, mesh, dim, axis)
    return part


def sum_over(part: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """The sum over these processes, perhaps in the memory of the part."""
    if not has_plain_types((part,)):
        return traced.wait_tensor(traced.all_reduce(part, "sum", (mesh, dim)))
    distributed.all_reduce(part, group=mesh.get_group(dim))
    return part


def _gathered(part: Tensor, mesh: DeviceMesh, dim: int, axis: int) -> Tensor:
    n = mesh.size(dim)
    if not has_plain_types((part,)):  # as they are traced
        whole = traced.wait_tensor(traced.all_gather_tensor(part.contiguous(), 0, (mesh, dim)))
    else:
        whole = part.new_empty((n * part.shape[0], *part.shape[1:]))
        _all_gather(whole, part.contiguous(), group=mesh.get_group(dim))
    if axis == 0:
        return whole
    return whole.unflatten(0, (n, -1)).movedim(0, axis).flatten(axis, axis + 1)


def _scattered(whole: Tensor, mesh: DeviceMesh, dim: int, axis: int) -> Tensor:
    n = mesh.size(dim)
    if axis != 0:
        whole = whole.unflatten(axis, (n, -1)).movedim(axis, 0).flatten(0, 1)
    if not has_plain_types((whole,)):
        taken = traced.reduce_scatter_tensor(whole.contiguous(), "sum", 0, (mesh, dim))
        return traced.wait_tensor(taken)
    part = whole.new_empty((whole.shape[0] // n, *whole.shape[1:]))
    _reduce_scatter(part, whole.contiguous(), group=mesh.get_group(dim))
    return part


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, mesh: DeviceMesh, dim: int, axis: int) -> Tensor:
        ctx.along = mesh, dim, axis
        return _gathered(part, mesh, dim, axis)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return scatter_sum(gradients[0], *ctx.along), None, None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, mesh: DeviceMesh, dim: int, axis: int) -> Tensor:
        ctx.along = mesh, dim, axis
        return _scattered(whole, mesh, dim, axis)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gather(gradients[0], *ctx.along), None, None, None


class Taken(NamedTuple):
    """A DTensor, or None, of which a part is wanted: placed so, and its gradient so. is_summand:
    that gradient may be the memory of another's, which a leaf must not have."""

    tensor: Any
    placements: Placements
    gradient: Placements
    is_summand: bool = False


def parts_of(wanted: Sequence[Taken]) -> list[Any]:
    """This process' part of each; the first two are x and the weight."""
    placed = [
        t if t is None or t.placements == placements else t.redistribute(placements=placements)
        for t, placements, *_ in wanted
    ]
    there = [t for t in placed if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in there):
        # What was placed anew does the rest itself.
        ways = tuple(
            (
                way.gradient,
                way.placements if way.tensor is t else way.gradient,
                way.is_summand and t.is_leaf,
            )
            for way, t in zip(wanted, placed, strict=True)
            if t is not None
        )
        parts = iter(_Parts.apply(ways, *there))
    else:
        parts = (t.to_local() for t in there)
    return [None if t is None else next(parts) for t in placed]


class _Parts(torch.autograd.Function):
    """ways: of each the placements of its part's gradient and of what is given back, and whether
    that is a copy."""

    @staticmethod
    def forward(ctx: Any, ways: Sequence[Any], *tensors: DTensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.known = [(t.device_mesh, t.shape, t.stride()) for t in tensors]
        ctx.ways = ways
        # Which gradients read, and nothing else sees whether they change: the part's version is its
        # own.
        x, weight = tensors[:2]
        ctx.save_for_backward(*[x] * weight.requires_grad, *[weight] * x.requires_grad)
        parts = tuple(part.view_as(part) for part in (t.to_local() for t in tensors))
        pairs = zip(parts, tensors, strict=True)
        ctx.mark_non_differentiable(*(part for part, t in pairs if not t.requires_grad))
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        found: list[DTensor | None] = []
        _ = ctx.saved_tensors
        for part, way, known in zip(gradients, ctx.ways, ctx.known, strict=True):
            if part is None:
                found.append(None)
                continue
            (placements, to, is_copy), (mesh, shape, stride) = way, known
            part = part.clone() if is_copy else part
            gradient = dtensor_of(part, mesh, placements, shape, stride)
            found.append(gradient if to == placements else gradient.redistribute(placements=to))
        return None, *found


def dtensor_of(
    part: Tensor,
    mesh: DeviceMesh,
    placements: Placements,
    shape: torch.Size,
    stride: tuple[int, ...],
) -> DTensor:
    """The DTensor of which this process has the part."""
    if DTensorSpec is None or (torch.is_grad_enabled() and part.requires_grad):
        return DTensor.from_local(
            part, mesh, placements, run_check=False, shape=shape, stride=stride
        )
    kept = _spec(mesh, id(mesh), placements, shape, stride, part.dtype)
    return DTensor(part, copy(kept), requires_grad=False)  # PyTorch may change a tensor's own


@memo()
def _spec(
    mesh: DeviceMesh,
    _mesh_id: int,
    placements: Placements,
    shape: torch.Size,
    stride: tuple[int, ...],
    dtype: torch.dtype,
) -> Any:
    """Meshes are equal whose process groups are not."""
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, dtype))
