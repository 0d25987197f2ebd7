"""BatchNorm of tokens, ``bn(h.transpose(1, 2)).transpose(1, 2)``, as the one of their rows that it
is, for as long as a graph is searched for chains.

What no chain took is as the model has it again afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from epinorm.capture.layouts import is_unseen
from epinorm.capture.moves import TRANSPOSITIONS
from epinorm.capture.purity import tensor_of, value_of
from epinorm.capture.spelling import WRITTEN_AS, name_of


@dataclass(frozen=True)
class _OfRows:
    """What stands for a BatchNorm of tokens: rows, their norm and tokens again; and the nodes that
    were there, which are out of the graph meanwhile."""

    made: tuple[fx.Node, fx.Node, fx.Node]
    written: tuple[fx.Node, fx.Node, fx.Node]


class OfTokens:
    """The BatchNorms of a graph over (B, C, L) whose inputs and results are transposed, where
    nobody sees that the results then lie in memory as (B, L, C)."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        nodes = graph.find_nodes(op="call_function", target=F.batch_norm)
        found = [written for node in nodes if (written := _of_tokens(node))]
        # Kernels leave (B, C, L) in a row, whatever strides PyTorch says beforehand.
        turned = {a: tensor_of(node).contiguous().transpose(1, 2) for _, node, a in found}
        tokens = {after: tensor_of(after).contiguous() for *_, after in found}
        unseen = bool(found) and is_unseen(turned) and is_unseen(tokens)
        self._all = [self._open(*written) for written in found] if unseen else []

    def _open(self, before: fx.Node, node: fx.Node, after: fx.Node) -> _OfRows:
        x: Any = before.args[0]
        sizes, flat = tensor_of(x).shape[1:], tensor_of(after).reshape(-1, tensor_of(x).shape[-1])
        with self.graph.inserting_before(node):
            rows = self.graph.call_method("flatten", (x, 0, 1))
            norm = self.graph.call_function(F.batch_norm, (rows, *node.args[1:]), node.kwargs)
            back = self.graph.call_method("reshape", (norm, -1, *sizes))
        for made, was, value in (
            (rows, before, tensor_of(x).flatten(0, 1)),
            (norm, node, flat),
            (back, after, flat.reshape(-1, *sizes)),
        ):
            made.meta = {**was.meta, "example_value": value, WRITTEN_AS: name_of(was)}
        after.replace_all_uses_with(back)
        for each in (after, node, before):
            self.graph.erase_node(each)
        return _OfRows((rows, norm, back), (before, node, after))

    def restore(self) -> None:
        """Make what no chain took as it was written."""
        there = set(self.graph.nodes)
        for one in self._all:
            rows, norm, back = one.made
            if norm not in there:
                continue
            now: Any = rows.args[0]
            with self.graph.inserting_before(norm):
                before, node, after = one.written
                for was, given in ((before, before), (node, norm), (after, after)):
                    args = (now, *given.args[1:])  # erased nodes have lost those that they read
                    now = self.graph.create_node(was.op, was.target, args, given.kwargs)
                    now.meta = dict(was.meta)
            back.replace_all_uses_with(now)
            for each in (back, norm, rows):
                self.graph.erase_node(each)


def _of_tokens(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """The BatchNorm's node between those that transpose for it; None where it has no such ones."""
    before: Any = node.args[0] if node.args else None
    if len(node.users) != 1 or not isinstance(before, fx.Node) or [*before.users] != [node]:
        return None
    (after,) = node.users
    if not (_turns(before) and _turns(after) and after.args[0] is node):
        return None
    values = [value_of(each) for each in (before.args[0], node, after)]
    if not all(type(v) is FakeTensor and v.layout is torch.strided for v in values):
        return None
    sizes = tensor_of(after).shape[1:]  # which the view names
    return (before, node, after) if all(isinstance(size, int) for size in sizes) else None


def _turns(node: fx.Node) -> bool:
    """Whether the node is a tensor (B, C, L) as (B, L, C), or the other way round."""
    value, given = value_of(node), node.args[1:]
    if value is None or value.dim() != 3 or node.kwargs or len(node.all_input_nodes) != 1:
        return False
    if node.target in ("permute", torch.permute):
        order: Any = given[0] if isinstance(given[0], (tuple, list)) else given
        return [axis % 3 for axis in order] == [0, 2, 1]
    return node.target in TRANSPOSITIONS and {axis % 3 for axis in given} == {1, 2}  # type: ignore[operator]
