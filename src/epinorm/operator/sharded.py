"""``linear_norm`` of DTensors: what each process computes, and what is communicated in between.

By columns (the weight is sharded along N): x is gathered, each process has its own channels of all
rows. GroupNorm's groups split along N and nothing is exchanged; of LayerNorm and RMSNorm two
numbers a row and process are. By rows (along K): partial products are summed into each process'
own rows, where the rest of the chain is computed (sequence parallelism, Korthikanti et al., 2022).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional

from epinorm.backends.memo import memo
from epinorm.chain import Chain, GroupNorm, reference
from epinorm.chain.reference import Results
from epinorm.operator import overlapped
from epinorm.operator.calls import Facts
from epinorm.operator.checks import named
from epinorm.operator.collectives import (
    Placements,
    Taken,
    dtensor_of,
    gather,
    parts_of,
    scatter_sum,
    sum_over,
)
from epinorm.operator.overlapped import beside_gather, beside_scatter, peers_beside
from epinorm.operator.peers import Peers
from epinorm.operator.sharded_layout import Layout, Placed, layout_of
from epinorm.operator.sharded_norm import sharded_norm
from epinorm.operator.undisturbed import has_plain_types, is_under_autocast, wants_gradient
from epinorm.problem import Inputs

Local = Callable[..., Results]
"""(chain, x, weight, bias, norm_weight, norm_bias, operands) → results, for plain tensors."""


class _SummedTogether(torch.autograd.Function):
    """Vectors as they are, whose gradients one all-reduce sums over dimensions of a mesh."""

    @staticmethod
    def forward(ctx: Any, mesh: DeviceMesh, dims: Sequence[int], *vectors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.mesh, ctx.dims = mesh, dims
        return tuple(vector.view_as(vector) for vector in vectors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        there = [gradient for gradient in gradients if gradient is not None]
        if not there:  # alike in all processes, where the node is reached at all
            return None, None, *gradients
        every = torch.cat(there)
        for dim in ctx.dims:
            every = sum_over(every, ctx.mesh, dim)
        summed = iter(every.split([len(gradient) for gradient in there]))
        return None, None, *(None if g is None else next(summed) for g in gradients)


@dataclass(frozen=True)
class _Ways:
    """What calls with tensors placed alike have in common: the layout; the chain of one operation
    in each process; how x, weight, bias, norm_weight, norm_bias and operands, but for seeds, are
    taken; x's axis that is gathered, and that of partial products which is scattered, or None; the
    dimensions over which gradients of vectors are summed; whether rows may be exchanged beside the
    product, as each process has as many of them, and of the channels, as each other; and the
    results' shape and strides, ``sizes``.

    place: a number that is another one in each process with other values of the results; copied:
    the dimensions over which processes have the same ones.
    """

    layout: Layout
    text: str
    taken: tuple[tuple[Placements, Placements, bool], ...]
    gathers: int | None
    scatters: int | None
    sums: tuple[int, ...]
    exchanges: bool
    sizes: tuple[torch.Size, tuple[int, ...]]
    place: int
    copied: tuple[int, ...]


@memo()
def _ways_of(
    chain: Chain, x: Placed, weight: Placed, operands: tuple[Placed | None, ...]
) -> _Ways | None:
    """None where PyTorch's own layers have to compute it."""
    layout = layout_of(x, weight, operands, chain)
    if layout is None:
        return None
    features, place = layout.features, 0
    gathers, *of_x = _ways_of_x(x, layout)
    own = [*of_x], [weight.placements, layout.summed(weight.placements)], *[[features] * 2] * 3
    taken = [(placements, gradient, False) for placements, gradient in own]
    for kind in chain.operand_kinds:
        placements = features if kind == "channel" else layout.y
        taken += [(placements, layout.summed(placements), kind == "element")] * (kind != "seed")
    sums = tuple(i for i, p in enumerate(layout.summed(features)) if p.is_partial())
    for i, placement in enumerate(layout.y):
        if placement.is_shard():
            place = place * layout.mesh.size(i) + layout.mesh.get_local_rank(i)
    shape = torch.Size((*x.shape[:-1], weight.shape[0]))
    stride = torch.empty(shape, device="meta").stride()
    scatters = layout.splits_evenly(layout.y, shape) if layout.way == "rows" else None
    text = str(layout.of_part(chain, 1, 1, 1)[0])
    # What dropout drops depends on the row.
    exchanges = 0 in (gathers, scatters) and "dropout" not in text
    exchanges = exchanges and not any(size % layout.size for size in weight.shape)
    sizes = shape, stride
    copied = tuple(
        i for i, p in enumerate(layout.y) if p.is_replicate() and layout.mesh.size(i) > 1
    )
    return _Ways(
        layout, text, tuple(taken), gathers, scatters, sums, exchanges, sizes, place, copied
    )


def _ways_of_x(x: Placed, layout: Layout) -> tuple[int | None, Placements, Placements]:
    """The axis along which parts of x are gathered for this process' product, if they are; how x
    is placed before, and how the gradient of the part is."""
    if layout.way != "columns":
        return None, layout.x, layout.x
    axis = layout.splits_evenly(x.placements, x.shape)
    if axis is not None and layout.with_over(x.placements, Replicate()) == layout.x:
        return axis, x.placements, x.placements
    return None, layout.x, layout.with_over(layout.x, Partial())


def _summed_together(ways: _Ways, vectors: Sequence[Any]) -> list[Any]:
    """This process' parts of vectors with one value a channel, or Nones, whose gradients are
    summed over the processes that they lie copied on."""
    own = list(vectors)
    trained = [i for i, t in enumerate(own) if t is not None and t.requires_grad]
    if ways.sums and trained:
        given = (own[i] for i in trained)
        summed = _SummedTogether.apply(ways.layout.mesh, ways.sums, *given)
        for i, vector in zip(trained, summed, strict=True):
            own[i] = vector
    return own


@torch.compiler.disable
def call(caller_of: Callable[..., Any], inputs: Inputs, facts: Facts) -> Results:
    """A call of dispatch.py with DTensors, which ``caller_of`` computes in each process."""
    text, strategy, strict, _ = facts

    def local(part: str, *given: Any) -> Results:
        of_norm = Chain.parse(part).norm is not None
        how = (strategy, strict) if of_norm or strategy == "reference" else ("auto", False)
        return caller_of(part, *how)(*given)

    chain, weight = Chain.parse(text), inputs.weight
    # Of a way that was asked for the whole product is computed, or nothing.
    in_pieces = strategy in ("auto", "reference") and not strict
    results = linear_norm(inputs, chain, local, in_pieces)
    if results is not None:
        return results
    if strict or strategy not in ("auto", "reference"):
        raise RuntimeError(
            f"DTensors of these placements are computed by PyTorch's own layers alone: {chain} of "
            f"a weight {weight.placements}"  # type: ignore[attr-defined]
        )
    z: Any = functional.linear(inputs.x, weight, inputs.bias)
    # GroupNorm, DTensor would copy it, before 2.13 not contiguous; seeds are of whole rows.
    if isinstance(chain.norm, GroupNorm) or "seed" in chain.operand_kinds:
        return _on_copies(z, inputs, chain)
    return reference.epilogue(z, chain, inputs.norm_weight, inputs.norm_bias, inputs.operands)


def _on_copies(z: DTensor, inputs: Inputs, chain: Chain) -> Results:
    """What follows the linear, the whole of it in each process, by the first one's seeds."""
    mesh = z.device_mesh

    def whole(tensor: Any) -> Any:
        return tensor.full_tensor().contiguous() if isinstance(tensor, DTensor) else tensor

    operands = tuple(map(whole, inputs.operands))
    operands = tuple(
        _alike(operand.clone(), mesh, range(mesh.ndim)) if kind == "seed" else operand
        for kind, operand in zip(chain.operand_kinds, operands, strict=True)
    )
    vectors = whole(inputs.norm_weight), whole(inputs.norm_bias)
    results = reference.epilogue(whole(z), chain, *vectors, operands)
    copies = [Replicate()] * mesh.ndim
    if isinstance(results, tuple):
        y, total = (DTensor.from_local(t, mesh, copies, run_check=False) for t in results)
        return y, total
    made: Any = DTensor.from_local(results, mesh, copies, run_check=False)
    return made


def _alike(seed: Tensor, mesh: DeviceMesh, dims: Iterable[int]) -> Tensor:
    """One seed for processes that have copies of the results. Their generators may differ, where
    DTensor's own operations set those of GPUs to one state."""
    for dim in dims:
        distributed.broadcast(seed, group=mesh.get_group(dim), group_src=0)
    return seed


def linear_norm(inputs: Any, chain: Chain, local: Local, in_pieces: bool = True) -> Results | None:
    """The chain on DTensors, ``Inputs`` with any leading dimensions, by ``local`` in each process;
    None: ``layout_of`` has none. in_pieces: it may compute some of the rows.

    Seeds of dropout are plain tensors; each part of the results takes another. Raises RuntimeError
    where other tensors are plain, or lie on several meshes.
    """
    _check(inputs, chain)
    x, weight, bias, norm_weight, norm_bias, operands, _ = inputs
    placed: Any = (Placed.of(x), Placed.of(weight), tuple(map(Placed.of, operands)))
    ways = _ways_of(chain, *placed)
    if ways is None:
        return None
    layout, kinds = ways.layout, chain.operand_kinds
    others = (t for t, kind in zip(operands, kinds, strict=True) if kind != "seed")
    tensors = (x, weight, bias, norm_weight, norm_bias, *others)
    part_of_x, part_of_weight, *parts = parts_of(
        [Taken(t, *way) for t, way in zip(tensors, ways.taken, strict=True)]
    )
    rest = iter(parts[3:])
    given = tuple(
        _alike(operand + ways.place, layout.mesh, ways.copied) if kind == "seed" else next(rest)
        for kind, operand in zip(kinds, operands, strict=True)
    )
    peers = None
    if in_pieces and ways.exchanges and part_of_x.device.type in overlapped.DEVICES:
        peers = _peers(ways, (part_of_x, part_of_weight, *parts))
    if ways.gathers is not None and peers is None:
        part_of_x = gather(part_of_x, layout.mesh, layout.over, ways.gathers)
    own = Inputs(*(part_of_x, part_of_weight, *_summed_together(ways, parts[:3]), given))
    if layout.way == "columns" and peers is not None:
        local = partial(_beside_gather, local, peers)
    if layout.way == "rows":
        z = _sum_of_products(own, ways, local, peers)
        z = z if own.bias is None else z + own.bias.to(z.dtype)  # as the Linear's, under autocast
        results = reference.epilogue(z, chain, own.norm_weight, own.norm_bias, given)
    elif layout.way == "columns" and chain.norm is not None and not chain.has_groups:
        before, along = sum(op.operand is not None for op in chain.pre), (layout.mesh, layout.over)
        z = local(ways.text, *own[:3], None, None, own.operands[:before])
        results = sharded_norm(z, own, own.operands[before:], chain, along)
    else:
        results = local(ways.text, *own[:6])
    if isinstance(results, tuple):
        y, total = (_whole(t, ways) for t in results)
        return y, total
    return _whole(results, ways)


def _peers(ways: _Ways, own: Sequence[Any]) -> Peers | None:
    """The processes that exchange rows beside the product, if it is to be computed so; own: this
    process' parts, x and the weight first."""
    x, weight = own[:2]
    if wants_gradient(*own) or is_under_autocast() or not has_plain_types(own):
        return None
    layout, gathers = ways.layout, ways.layout.way == "columns"
    rows = x.shape[:-1].numel() * (layout.size if gathers else 1)
    return peers_beside(layout.mesh.get_group(layout.over), x, weight, layout.size, gathers, rows)


def _beside_gather(
    local: Local,
    peers: Peers,
    text: str,
    x: Tensor,
    weight: Tensor,
    *rest: Any,
) -> Results:
    *vectors, operands = rest
    kinds = Chain.parse(text).operand_kinds

    def compute(x: Tensor, rows: slice) -> Results:
        pairs = zip(kinds, operands, strict=True)
        given = tuple(t[rows] if kind == "element" else t for kind, t in pairs)
        return local(text, x, weight, *vectors, given)

    return beside_gather(compute, x.contiguous(), weight, peers)


def _sum_of_products(own: Inputs, ways: _Ways, local: Local, peers: Peers | None) -> Any:
    """This process' rows of the sum of what each computes by rows of the weight."""

    def compute(x: Tensor) -> Any:
        return local(ways.text, x, own.weight, None, None, None, ())

    if peers is not None:
        return beside_scatter(compute, own.x, own.weight, peers)
    z: Any = compute(own.x)
    if ways.scatters is not None:
        return scatter_sum(z, ways.layout.mesh, ways.layout.over, ways.scatters)
    return _SumOfParts.apply(z, ways)


class _SumOfParts(torch.autograd.Function):
    """As DTensor adds and splits them, in parts of several sizes too."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, ways: _Ways) -> Tensor:
        ctx.ways = ways
        layout = ways.layout
        sums = layout.with_over(layout.y, Partial())
        whole = dtensor_of(z.detach(), layout.mesh, sums, *ways.sizes)
        return whole.redistribute(placements=layout.y).to_local()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        layout = ctx.ways.layout
        parts = dtensor_of(gradients[0], layout.mesh, layout.y, *ctx.ways.sizes)
        whole = parts.redistribute(placements=layout.with_over(layout.y, Replicate()))
        return whole.to_local(grad_placements=layout.with_over(layout.y, Partial())), None


def _whole(part: Any, ways: _Ways) -> DTensor:
    return dtensor_of(part, ways.layout.mesh, ways.layout.y, *ways.sizes)


def _check(inputs: Any, chain: Chain) -> None:
    x, weight = inputs[:2]
    seeds = [f"operand {i}" for i, kind in enumerate(chain.operand_kinds) if kind == "seed"]
    given = [(name, t) for name, t in named(inputs) if t is not None and name not in seeds]
    for name, tensor in given:
        if not isinstance(tensor, DTensor):
            raise RuntimeError(
                f"{name} is a torch.Tensor beside DTensors: all must be DTensors, as "
                "DTensor.from_local and distribute_tensor make them"
            )
    for name, tensor in given:
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
