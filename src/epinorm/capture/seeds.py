"""The seeds of a graph's dropouts, drawn in as few operations as may be; and masks of its own."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from epinorm.capture.chains import Search
from epinorm.capture.found import Found
from epinorm.capture.purity import value_of
from epinorm.chain.dropout import draw_seeds

_FACTORIES: Mapping[Any, Any] = {
    "new_empty": torch.empty,
    "new_zeros": torch.zeros,
    "new_ones": torch.ones,
}


def make_apart(graph: fx.Graph) -> None:
    """Let what asks a tensor for its dtype and device alone, as masks that are made like it and
    ``type_as``, do without it: it need not be there then."""
    for node in list(graph.nodes):
        if node.op != "call_method" or not node.args:
            continue
        made, casts = _FACTORIES.get(node.target), node.target == "type_as"
        like, given = value_of(node.args[-1 if casts else 0]), value_of(node.args[0])
        if (
            (made is None and not casts)
            or like is None
            or given is None
            or given.device != like.device
        ):
            continue
        plain = type(like) in (Tensor, nn.Parameter, FakeTensor) and not like.is_nested
        if not plain or like.layout is not torch.strided:
            continue
        kind: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
        with graph.inserting_before(node):
            if made is not None:
                new = graph.call_function(made, node.args[1:], kind | dict(node.kwargs))
            else:
                new = graph.call_method("to", (node.args[0], like.dtype))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def draw_at_once(search: Search, chains: Sequence[Found]) -> dict[fx.Node, list[fx.Node]]:
    """The seeds of each chain, by its last node: drawn at once, for the host's time, where nothing
    in between may change the generator."""
    modes = [search.order[node] for node, changed in search.effects if not changed]
    together: dict[Any, list[tuple[int, Found]]] = {}
    for found in chains:
        if count := found.chain.operand_kinds.count("seed"):
            value = value_of(found.linear.x)
            assert value is not None
            between = bisect.bisect(modes, search.order[found.linear.nodes[0]])
            together.setdefault((between, value.device), []).append((count, found))
    seeds: dict[fx.Node, list[fx.Node]] = {}
    for (_, device), drawn in together.items():
        total = sum(count for count, _ in drawn)
        begins = (found.linear.nodes[0] for _, found in drawn)
        first = min(begins, key=search.order.__getitem__)
        with search.graph.inserting_before(first):
            all_seeds = search.graph.call_function(draw_seeds, (total, device))
            each = iter(range(total))
            for count, found in drawn:
                seeds[found.nodes[-1]] = [
                    search.graph.call_function(operator.getitem, (all_seeds, next(each)))
                    for _ in range(count)
                ]
    return seeds
