"""The seeds of a graph's dropouts, drawn in as few operations as may be."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Sequence
from typing import Any

from torch import fx

from epinorm.capture.chains import Search
from epinorm.capture.found import Found
from epinorm.capture.purity import tensor_of
from epinorm.capture.spelling import name_of
from epinorm.chain.dropout import draw_seeds

_OF_GRADIENTS = frozenset(
    (
        *("_set_grad_enabled", "_enter_inference_mode", "_exit_inference_mode"),
        *("register_hook", "register_post_accumulate_grad_hook", "retain_grad"),
        "autograd_function_apply",
    )
)
"""What a graph has, or has not, because of gradients. The last is what a Function of autograd's is
there, before PyTorch 2.13 a hook as well; elsewhere its forward is part of the graph."""


def draw_at_once(search: Search, chains: Sequence[Found]) -> dict[fx.Node, list[fx.Node]]:
    """The seeds of each chain, by its last node: drawn at once, for the host's time, where nothing
    in between may change the generator. Whatever gradients depend on does not, so that a graph with
    them draws as one without (reentrant checkpointing)."""
    modes = [
        search.order[node]
        for node, changed in search.effects
        if not changed and name_of(node) not in _OF_GRADIENTS
    ]
    together: dict[Any, list[tuple[int, Found]]] = {}
    for found in sorted(chains, key=lambda found: search.order[found.linear.nodes[0]]):
        if count := found.chain.operand_kinds.count("seed"):
            value = tensor_of(found.linear.x)
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
