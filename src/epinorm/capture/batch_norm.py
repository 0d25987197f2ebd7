"""BatchNorm by running statistics as what it is, a product and a sum per channel, for as long as a
graph is searched for chains.

Scale and shift are computed from the statistics at each call. What no chain took is BatchNorm
again afterwards.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from epinorm.capture.purity import BATCH_NORM, arguments, value_of
from epinorm.capture.spelling import name_of

_KEY = "epinorm_batch_norm"


def called(node: fx.Node) -> str:
    """``name_of`` a node; of one that stands for a BatchNorm, the name of that."""
    return "batch_norm" if _KEY in node.meta else name_of(node)


def batch_norm_of(nodes: Iterable[fx.Node]) -> fx.Node | None:
    """The first of the nodes that stands for a BatchNorm; None where none does."""
    return next((node for node in nodes if _KEY in node.meta), None)


@dataclass(frozen=True)
class _Affine:
    """A BatchNorm's node, which is idle meanwhile, its arguments by name, and what stands for it:
    in the graph's order, the last two the product and the sum."""

    node: fx.Node
    given: dict[str, Any]
    nodes: list[fx.Node]


class Lowered:
    """The BatchNorms of a graph that normalise (M, N) in fp32 or fp64 by running statistics."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        nodes = graph.find_nodes(op="call_function", target=F.batch_norm)
        self._all = [found for node in nodes if (found := self._lower(node))]

    def _lower(self, node: fx.Node) -> _Affine | None:
        given = arguments(node, *BATCH_NORM)
        x, mean, var, eps = (given.get(n) for n in ("input", "running_mean", "running_var", "eps"))
        value, statistics = value_of(x), value_of(mean)
        eps = 1e-5 if eps is None else eps
        if value is None or statistics is None or value.dim() != 2 or value.dtype.itemsize < 4:
            return None
        if given.get("training", False) is not False or not isinstance(eps, (int, float)):
            return None
        if statistics.dtype != value.dtype:
            return None
        made: list[fx.Node] = []

        def call(function: Any, *args: Any) -> fx.Node:
            made.append(self.graph.call_function(function, args))
            made[-1].meta["example_value"] = statistics
            return made[-1]

        with self.graph.inserting_before(node):
            scale = call(torch.rsqrt, call(torch.add, var, eps))
            weight, bias = given.get("weight"), given.get("bias")
            scale = scale if weight is None else call(torch.mul, scale, weight)
            shift = call(torch.neg, call(torch.mul, mean, scale))
            shift = shift if bias is None else call(torch.add, shift, bias)
            end = call(torch.add, call(torch.mul, x, scale), shift)
        for step in made[-2:]:
            step.meta = {**node.meta, _KEY: True}
        node.replace_all_uses_with(end)
        node.target, node.args, node.kwargs = operator.pos, (), {}  # nothing reads x but the chain
        return _Affine(node, given | {"eps": eps}, made)

    def restore(self) -> None:
        """Make BatchNorm again what no chain took."""
        there = set(self.graph.nodes)
        for affine in self._all:
            node, (*_, product, end) = affine.node, affine.nodes
            if end not in there:
                self.graph.erase_node(node)
                continue
            node.target, node.kwargs = F.batch_norm, {"training": False, "eps": affine.given["eps"]}
            vectors = [affine.given.get(name) for name in BATCH_NORM[1:5]]
            node.args = (product.args[0], *vectors)
            end.replace_all_uses_with(node)
            for step in reversed(affine.nodes):
                self.graph.erase_node(step)
