"""Which calls of ours are the last to read their x, so that its memory may be written over.

x is what another of our calls has just made, and stands in the graph in one place alone: no result
of the graph, residual or view. What hooks, attributes and graph breaks take of a module's result is
a result of the graph. The call itself sees what no graph shows: gradients, and modes
(``Caller.spending``).

Behind AOTAutograd the graph shows gradients too: what the backward pass reads is a result of the
forward graph. There operators take the calls' places, and views are nodes that write nothing.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from epinorm.operator import dispatch
from epinorm.operator.dispatch import Caller
from epinorm.operator.schema import SPENDING_X, linear_norm, linear_norm_sum

_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)
"""Of y, which is contiguous, all of its memory again."""


def let_spend(graph: fx.Graph) -> None:
    """Let those calls write over their x."""
    for node in graph.nodes:
        if isinstance(node.target, Caller) and _has_it_alone(node, node.args[0]):
            node.target = node.target.spending


def _has_it_alone(reader: fx.Node, x: fx.Node) -> bool:
    given = [*reader.args[:5], *reader.args[5]]  # type: ignore[misc]
    return len(x.users) == given.count(x) == 1 and _is_made(x)


def _is_made(x: fx.Node) -> bool:
    """Whether x is the y of one of our calls, which has memory of its own whatever computed it."""
    if x.target is not operator.getitem:
        return isinstance(x.target, Caller)
    made, index = x.args
    # Beside the sum, another tensor. Of a call that gives y alone, y[0] is a view of it.
    caller = getattr(made, "target", None)
    return isinstance(caller, Caller) and caller.returns_more and bool(index == 0)


def let_operators_spend(graph: fx.Graph) -> None:
    """The same in a graph that AOTAutograd made: those operators that may write over their x say so
    from now on."""
    for node in graph.nodes:
        if node.target in SPENDING_X and _reads_it_last(node):
            node.target = SPENDING_X[node.target]


def _reads_it_last(reader: fx.Node) -> bool:
    arguments: Any = reader.args
    *given, operands, _, _, _, out_dtype = arguments
    x = given[0]
    value = x.meta.get("val")
    if not isinstance(value, Tensor) or value.dtype != torch.float32:
        return False
    if value.device.type not in dispatch.SPENDING:
        return False
    if out_dtype is not None or [*given, *operands].count(x) > 1:
        return False
    while x.target in _VIEWS and _has_one_reader(x):
        x = x.args[0]
    return _has_one_reader(x) and _is_y(x)


def _has_one_reader(x: fx.Node) -> bool:
    """Besides what asks for its sizes."""
    return sum(user.target is not torch.ops.aten.sym_size.int for user in x.users) == 1


def _is_y(x: fx.Node) -> bool:
    """Whether x is the y of one of our operators in inference."""
    if x.target is not operator.getitem:
        return x.target in (linear_norm, SPENDING_X[linear_norm])
    made, index = x.args
    sums = linear_norm_sum, SPENDING_X[linear_norm_sum]
    return getattr(made, "target", None) in sums and bool(index == 0)
