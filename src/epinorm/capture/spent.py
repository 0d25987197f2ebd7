"""Which calls of ours are the last to read their x, so that its memory may be written over.

x is what another of our calls has just made, and stands in the graph in one place alone: no result
of the graph, residual or view. What hooks, attributes and graph breaks take of a module's result is
a result of the graph. The call itself sees what no graph shows: gradients, and modes
(``Caller.spending``).
"""

from __future__ import annotations

import operator

from torch import fx

from epinorm.operator.dispatch import Caller


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
