"""Chains of DTensors: whether they can be fused, and what the graph is told of their placements.

``found`` is a ``chains.Found``, whose room calls this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx

from epinorm.capture.purity import value_of
from epinorm.operator.undisturbed import is_distributed

if TYPE_CHECKING:
    from epinorm.operator.sharded_layout import Layout


def layout_of_found(found: Any) -> Layout | None:
    """How a chain of DTensors is computed; None for plain tensors, and where PyTorch's own layers
    compute it."""
    x: Any = value_of(found.linear.x)
    weight: Any = value_of(found.linear.weight)
    if not is_distributed((x,)) or found.linear.turned:
        return None
    from epinorm.operator.sharded_layout import layout_of  # loads torch.distributed.tensor

    given = iter(found.operands)
    kinds = found.chain.operand_kinds
    operands: Any = [None if kind == "seed" else value_of(next(given)) for kind in kinds]
    return layout_of(x, weight, operands, found.chain)


def unfit(found: Any, values: Sequence[Tensor | None]) -> str | None:
    """Why a chain in which DTensors take part is left to PyTorch's own layers."""
    if not is_distributed(values):
        return None
    if not all(is_distributed((value,)) for value in values):
        return "plain tensors take part in it beside DTensors"
    if found.views and found.chain.has_groups:
        return "a norm of heads on DTensors is PyTorch's own"
    end: Any = value_of(found.nodes[-1])
    if layout_of_found(found) is None or any(p.is_partial() for p in end.placements):
        return "PyTorch's own layers compute it on DTensors of these placements"
    return None


def as_in_eager(graph: fx.Graph, made: fx.Node, of: fx.Node) -> fx.Node:
    """A chain's result as its readers were captured with, where these read its placements: not
    where all of them place it anew."""
    value: Any = value_of(of)
    if not is_distributed((value,)) or all(map(_places, of.users)):
        return made
    placements = tuple(value.placements)  # which a graph's text could not name

    def placed(tensor: Any) -> Any:
        same = tensor.placements == placements
        return tensor if same else tensor.redistribute(placements=placements)

    return graph.call_function(placed, (made,))


def _places(node: fx.Node) -> bool:
    """Whether it is ``DTensor.redistribute``, as this or an older PyTorch captures it."""
    name = getattr(node.target, "__name__", node.target)
    return name in ("redistribute", "prim_redistribute")
