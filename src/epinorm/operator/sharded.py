"""``linear_norm`` of DTensors: what each process computes, and what is communicated in between.

By columns (the weight is sharded along N): x is gathered, each process has its own channels of all
rows. GroupNorm's groups split along N and nothing is exchanged; of LayerNorm and RMSNorm two
numbers a row and process are. By rows (along K): partial products are summed into each process'
own rows, where the rest of the chain is computed (sequence parallelism, Korthikanti et al., 2022).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional

from epinorm.chain import Chain, GroupNorm, LayerNorm, RMSNorm, reference
from epinorm.chain.reference import Results
from epinorm.operator.calls import Facts
from epinorm.operator.checks import named
from epinorm.problem import Inputs

# The first is PyTorch 2.13's name for the second.
_all_gather: Any = getattr(distributed, "all_gather_single", None)
_all_gather = _all_gather or distributed.all_gather_into_tensor


Local = Callable[..., Results]
"""(chain, x, weight, bias, norm_weight, norm_bias, operands) → results, for plain tensors."""

Placements = tuple[Placement, ...]


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
    def size(self) -> int:
        return 1 if self.dim is None else self.mesh.size(self.dim)

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


def layout_of(
    x: DTensor, weight: DTensor, operands: Sequence[Tensor], chain: Chain
) -> Layout | None:
    """The layout of a call; None where PyTorch's own layers have to compute it on the DTensors."""
    mesh, last = weight.device_mesh, x.dim() - 1
    if "row" in chain.operand_kinds or chain.returns_statistics:
        return None
    sharded = [i for i, p in enumerate(weight.placements) if not p.is_replicate()]
    if len(sharded) > 1 or any(weight.placements[i] not in (Shard(0), Shard(1)) for i in sharded):
        return None
    taken = [p if p.is_shard() and _axis(p, last) < last else Replicate() for p in x.placements]
    if not sharded:
        return Layout(mesh, None, "copies", tuple(taken), tuple(taken), last)
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


def _rows_axis(
    x: DTensor, operands: Sequence[Tensor], chain: Chain, mesh: DeviceMesh, dim: int
) -> int:
    """The axis that rows are split along: a residual's, or the first that splits evenly."""
    last = x.dim() - 1
    for kind, operand in zip(chain.operand_kinds, operands, strict=True):
        placement = operand.placements[dim] if isinstance(operand, DTensor) else Replicate()
        if kind == "element" and placement.is_shard() and _axis(placement, last) < last:
            return _axis(placement, last)
    even = (axis for axis in range(last) if x.shape[axis] % mesh.size(dim) == 0)
    return next(even, 0)


class _Summed(torch.autograd.Function):
    """A tensor as it is, whose gradient is summed over the processes that it lies copied on."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> Tensor:
        ctx.placements = tensor.placements
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].redistribute(placements=ctx.placements)


class _SummedTogether(torch.autograd.Function):
    """Vectors as they are, whose gradients one all-reduce sums over dimensions of a mesh."""

    @staticmethod
    def forward(ctx: Any, mesh: DeviceMesh, dims: Sequence[int], *vectors: Tensor) -> Any:
        ctx.mesh, ctx.dims = mesh, dims
        return tuple(vector.view_as(vector) for vector in vectors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        every = torch.cat(gradients)
        for dim in ctx.dims:
            distributed.all_reduce(every, group=ctx.mesh.get_group(dim))
        return None, None, *every.split([len(gradient) for gradient in gradients])


def _vectors(layout: Layout, *vectors: Any) -> list[Any]:
    """This process' part of vectors with one value a channel, or Nones."""
    placements = layout.features
    own = [_local(vector, placements, placements) for vector in vectors]
    copied = layout.summed(placements)
    dims = [i for i, placement in enumerate(copied) if placement.is_partial()]
    trained = [i for i, t in enumerate(own) if t is not None and t.requires_grad]
    if dims and trained:
        summed = _SummedTogether.apply(layout.mesh, dims, *(own[i] for i in trained))
        for i, vector in zip(trained, summed, strict=True):
            own[i] = vector
    return own


def _local(tensor: Any, placements: Placements, gradient: Placements) -> Any:
    """This process' part of a tensor that is first placed so; gradient: how that of the part is."""
    if tensor is None:
        return None
    if tensor.placements != placements:
        tensor = tensor.redistribute(placements=placements)
    elif gradient != placements and tensor.requires_grad:
        tensor = _Summed.apply(tensor)
    return tensor.to_local(grad_placements=gradient)


@torch.compiler.disable
def call(caller_of: Callable[..., Any], inputs: Inputs, facts: Facts) -> Results:
    """A call of dispatch.py with DTensors, which ``caller_of`` computes in each process."""
    text, strategy, strict, _ = facts

    def local(part: str, *given: Any) -> Results:
        of_norm = Chain.parse(part).norm is not None
        how = (strategy, strict) if of_norm or strategy == "reference" else ("auto", False)
        return caller_of(part, *how)(*given)

    chain, weight = Chain.parse(text), inputs.weight
    results = linear_norm(inputs, chain, local)
    if results is not None:
        return results
    if strict or strategy not in ("auto", "reference"):
        raise RuntimeError(
            f"DTensors of these placements are computed by PyTorch's own layers alone: {chain} of "
            f"a weight {weight.placements}"  # type: ignore[attr-defined]
        )
    z: Any = functional.linear(inputs.x, weight, inputs.bias)
    if isinstance(chain.norm, GroupNorm):  # DTensor would copy it, before 2.13 not contiguous
        copies = [Replicate()] * z.device_mesh.ndim
        z = DTensor.from_local(z.full_tensor().contiguous(), z.device_mesh, copies, run_check=False)
    return reference.epilogue(z, chain, inputs.norm_weight, inputs.norm_bias, inputs.operands)


def linear_norm(inputs: Any, chain: Chain, local: Local) -> Results | None:
    """The chain on DTensors, ``Inputs`` with any leading dimensions, by ``local`` in each process;
    None: ``layout_of`` has none.

    Seeds of dropout are plain tensors; each part of the results takes another. Raises RuntimeError
    where other tensors are plain, or lie on several meshes.
    """
    _check(inputs, chain)
    x, weight, bias, norm_weight, norm_bias, operands, _ = inputs
    layout = layout_of(x, weight, operands, chain)
    if layout is None:
        return None

    def part(tensor: Any, placements: Placements) -> Any:
        return _local(tensor, placements, layout.summed(placements))

    pairs = zip(chain.operand_kinds, operands, strict=True)
    given = [
        operand + _place(layout)
        if kind == "seed"
        else part(operand, layout.features if kind == "channel" else layout.y)
        for kind, operand in pairs
    ]
    x_gradient = tuple(
        Partial() if i == layout.dim and layout.way == "columns" else p
        for i, p in enumerate(layout.x)
    )
    vectors = _vectors(layout, bias, norm_weight, norm_bias)
    own = Inputs(
        *(_local(x, layout.x, x_gradient), part(weight, weight.placements), *vectors, tuple(given))
    )
    shape = torch.Size((*x.shape[:-1], weight.shape[0]))
    part_of_chain = str(layout.of_part(chain, 1, 1, 1)[0])
    if layout.way == "rows":
        z = local(part_of_chain, *own[:2], None, None, None, ())
        z = _whole(z, layout, shape, partial=True).redistribute(placements=layout.y).to_local()
        z = z if own.bias is None else z + own.bias
        results = reference.epilogue(z, chain, own.norm_weight, own.norm_bias, given)
    elif layout.way == "columns" and chain.norm is not None and not chain.has_groups:
        before = sum(op.operand is not None for op in chain.pre)
        z = local(part_of_chain, *own[:3], None, None, own.operands[:before])
        results = _sharded_norm(z, own, own.operands[before:], chain, layout)
    else:
        results = local(part_of_chain, *own[:6])
    if isinstance(results, tuple):
        y, total = (_whole(t, layout, shape) for t in results)
        return y, total
    return _whole(results, layout, shape)


def _check(inputs: Any, chain: Chain) -> None:
    x, weight = inputs[:2]
    seeds = [f"operand {i}" for i, kind in enumerate(chain.operand_kinds) if kind == "seed"]
    for name, tensor in named(inputs):
        if tensor is None or name in seeds:
            continue
        if not isinstance(tensor, DTensor):
            raise RuntimeError(
                f"{name} is a torch.Tensor beside DTensors: all must be DTensors, as "
                "DTensor.from_local and distribute_tensor make them"
            )
        if tensor.device_mesh != weight.device_mesh:
            raise RuntimeError(
                f"{name} lies on {tensor.device_mesh}, weight on {weight.device_mesh}: "
                "they must be on one mesh"
            )
    if x.shape[-1] != weight.shape[1]:
        raise RuntimeError(
            f"mat1 and mat2 shapes cannot be multiplied ({list(x.shape)} and "
            f"{list(weight.shape[::-1])})"
        )


def _place(layout: Layout) -> int:
    """A number that is another one in each process with other values of the results."""
    place, mesh = 0, layout.mesh
    for i, placement in enumerate(layout.y):
        if placement.is_shard():
            place = place * mesh.size(i) + mesh.get_local_rank(i)
    return place


def _whole(part: Any, layout: Layout, shape: torch.Size, partial: bool = False) -> DTensor:
    placements = list(layout.y)
    if partial:
        assert layout.dim is not None
        placements[layout.dim] = Partial()
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part, layout.mesh, placements, run_check=False, shape=shape, stride=stride
    )


def _sharded_norm(
    z: Any, own: Inputs, operands: Sequence[Tensor], chain: Chain, layout: Layout
) -> Results:
    """The norm, and what is behind it, of rows of which this process has some channels."""
    norm = chain.norm
    assert isinstance(norm, (LayerNorm, RMSNorm))
    wide = z.to(torch.promote_types(z.dtype, torch.float32))
    eps = torch.finfo(wide.dtype).eps if norm.eps is None else norm.eps
    y = _Normalized.apply(wide, layout, eps, isinstance(norm, LayerNorm))
    y = y if own.norm_weight is None else y * own.norm_weight
    y = y if own.norm_bias is None else y + own.norm_bias
    y = reference.apply_pointwise(y.to(z.dtype), chain.post, iter(operands))
    return (y, z) if chain.returns_sum else y


class _Normalized(torch.autograd.Function):
    """Rows of which each process has as many channels, normalised; what is exchanged is combined in
    the order of the processes: equal bits in each of them and at each run."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, layout: Layout, eps: float, centred: bool) -> Tensor:
        if centred:  # centred parts, combined as by Chan, Golub and LeVeque (1979)
            squares, mean = torch.var_mean(z, -1, correction=0)
            means, parts = _of_each(torch.stack((mean, squares)), layout).unbind(1)
            mean = means.mean(0)
            square = (parts + (means - mean).square()).mean(0)
            z = z - mean.unsqueeze(-1)
        else:
            square = _of_each(z.square().mean(-1), layout).mean(0)
        rstd = (square + eps).rsqrt().unsqueeze(-1)
        y = z * rstd
        ctx.save_for_backward(y, rstd)
        ctx.layout, ctx.centred = layout, centred
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (dy,), (y, rstd) = gradients, ctx.saved_tensors
        along = (dy * y).mean(-1)
        if ctx.centred:
            own = torch.stack((along, dy.mean(-1)))
            along, mean = _of_each(own, ctx.layout).mean(0).unbind(0)
            dy = dy - mean.unsqueeze(-1)
        else:
            along = _of_each(along, ctx.layout).mean(0)
        return (dy - y * along.unsqueeze(-1)) * rstd, None, None, None


def _of_each(own: Tensor, layout: Layout) -> Tensor:
    """What each process has of this shape, in the order of the processes, along a new first
    dimension."""
    every = own.new_empty((layout.size * own.shape[0], *own.shape[1:]))
    _all_gather(every, own.contiguous(), group=layout.mesh.get_group(layout.dim))
    return every.view(layout.size, *own.shape)
