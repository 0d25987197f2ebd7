"""What is told of a captured graph once its nodes are gone: its places and their problems."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from epinorm.backends.cuda.runtime.device import stand_in
from epinorm.capture.attention import unseen
from epinorm.capture.batch_norm import called
from epinorm.capture.distributed import layout_of_found
from epinorm.capture.found import Found, Place
from epinorm.capture.purity import tensor_of, value_of
from epinorm.capture.spelling import name_of, sizes_of
from epinorm.capture.trace import PART
from epinorm.operator.undisturbed import autograd_records
from epinorm.precision import product_precision
from epinorm.problem import Problem


@dataclass(frozen=True)
class Site:
    """One place of a captured graph, without its nodes. ``problem``: None where it cannot be fused.

    weight: id of the tensor that the Linear had, which may be prepacked since; no weak reference,
    which ``swap_tensors`` would refuse. taken: whether our
    operation computes it. split: what each process computes of DTensors, and what is communicated.
    """

    chain: str
    where: str
    obstacle: str = ""
    ends: str = ""
    shape: str = ""
    problem: Problem | None = None
    weight: int | None = None
    taken: bool = True
    split: str = ""


@dataclass(frozen=True)
class Captured:
    """One graph: its places, its Linears without a norm, why Dynamo ended it (empty: it did not
    have to), and what is said of functions of PyTorch's that hold Linears which no graph shows.
    takes_attention: where it is large enough, fp32 attention is ours."""

    sites: tuple[Site, ...]
    linears: tuple[Site, ...] = ()
    broken_by: str = ""
    broken_at: str = ""
    unseen: tuple[str, ...] = ()
    takes_attention: bool = False

    def __str__(self) -> str:
        fused = sum(site.taken for site in self.sites)
        linears = sum(site.taken for site in self.linears)
        return (
            f"{fused} of {len(self.sites)} chains can be fused, and {linears} of "
            f"{len(self.linears)} Linears without a norm"
            + f"; ended by {self.broken_by}"
            * bool(self.broken_by)
        )


def record(
    gm: fx.GraphModule,
    places: Sequence[Place],
    linears: Sequence[Place],
    names: dict[str, str],
    inputs: dict[fx.Node, Any],
) -> Captured:
    """What is told of a graph after its nodes are gone. names: of modules, by the text of their id;
    inputs: what the graph was captured with."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    sites = tuple(_site(place, names, inputs) for place in places)
    others = tuple(_site(place, names, inputs) for place in linears)
    whole = unseen(gm.graph)
    if reason is None or not reason.graph_break:
        return Captured(sites, others, unseen=whole)
    stack = list(reason.user_stack or ())
    at = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else ""
    return Captured(sites, others, str(reason.reason).strip(), at, whole)


def _site(place: Place, names: dict[str, str], inputs: dict[fx.Node, Any]) -> Site:
    where = layer_of(place.linear, names)
    if place.norm is not None:
        where += f" → {layer_of(place.norm, names)}"
    found = place.found
    if found is None:
        text = " → ".join(called(node) for node in (place.linear, *place.path))
        return Site(text, where, place.obstacle, taken=False)
    problem, shape = _problem(found)
    weight = inputs.get(found.linear.weight)
    known = id(weight) if isinstance(weight, Tensor) else None
    layout = layout_of_found(found)
    split = "" if layout is None else str(layout)
    return Site(str(found.chain), where, "", place.ends, shape, problem, known, place.taken, split)


CHANNELS = "epinorm_channels"
"""In the meta of a Linear that is a part of one in the model: the channels of that."""


def layer_of(node: fx.Node, names: dict[str, str]) -> str:
    """The path of the module that a node comes from; a function's name with that of its module."""
    return _path_of(node, names) + node.meta.get(CHANNELS, "")


def _path_of(node: fx.Node, names: dict[str, str]) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    key = next(reversed(stack), None)
    part = node.meta.get(PART, "")
    if key is None:
        return part or name_of(node)
    path, cls = stack[key]
    known = names.get(str(key))
    path = known if known is not None else str(path).partition(".")[2] or str(path)
    if part:
        return f"{path}.{part}".strip(".")
    return path if _is_layer(cls) and path else f"{path}.{name_of(node)}".strip(".")


_LAYERS = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)


def _is_layer(cls: Any) -> bool:
    """Whether a module of the class is one layer, whose path says enough."""
    if not isinstance(cls, type):
        return False
    pytorchs = cls.__module__.startswith("torch.nn.modules") or issubclass(cls, _LAYERS)
    return pytorchs or cls.__name__.endswith("Norm")


def problem_of(found: Found) -> Problem:
    """The problem of a chain as it was captured."""
    return _problem(found)[0]


def _problem(found: Found) -> tuple[Problem, str]:
    x, weight = tensor_of(found.linear.x), tensor_of(found.linear.weight)
    layout, dtype = layout_of_found(found), tensor_of(found.linear.nodes[-1]).dtype
    leading = sizes_of(found.leading)
    m = math.prod(leading)
    n, k = sizes_of(weight.shape[::-1] if found.linear.turned else weight.shape)
    shape, chain = f"{[*leading, k]} → {[*leading, n]}", found.chain
    if layout is not None:
        chain, m, n, k = layout.of_part(chain, m, n, k)
    mixed = x.dtype != dtype or weight.dtype != dtype
    norm_dtype = out_dtype = torch.float32 if mixed else dtype
    if chain.returns_statistics:
        parameters = value_of(found.norm.weight or found.norm.bias)
        norm_dtype, out_dtype = dtype if parameters is None else parameters.dtype, dtype
    reads = [value_of(node) for node in found.reads]
    device = weight.device if stand_in() is None else torch.device("cuda")
    problem = Problem(
        chain=chain,
        m=m,
        k=k,
        n=n,
        dtype=dtype,
        norm_dtype=norm_dtype,
        out_dtype=out_dtype,
        has_bias=found.bias is not None,
        has_norm_weight=chain.norm is not None and found.norm.weight is not None,
        has_norm_bias=chain.norm is not None and found.norm.bias is not None,
        training=autograd_records() and any(t is not None and t.requires_grad for t in reads),
        device=device,
        precision=product_precision(dtype, device.type, (m, k, n)),
    )
    return problem, shape
