"""Operations that put whole rows in another order, or leave some out: made of x they do the same.

Windows of Swin's attention are put back so between its projection and the sum behind it. A Linear
and what is computed element by element do not ask where a row stands.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from epinorm.capture.layouts import replayed
from epinorm.capture.purity import tensor_of, value_of
from epinorm.capture.spelling import is_view, same_shape

TRANSPOSITIONS = ("transpose", "swapaxes", "swapdims", torch.transpose, torch.swapaxes)
_SIZED = ("view", "reshape", torch.reshape)
"""Views that name the size of each dimension."""


def turns_rows(node: fx.Node, x: fx.Node) -> bool:
    """Whether the node is x with leading dimensions in another order, its last one as it was."""
    value, given = value_of(x), node.args[1:]
    if value is None or node.kwargs or node.args[:1] != (x,) or node.all_input_nodes != [x]:
        return False
    if node.target in ("permute", torch.permute):
        order: Any = given[0] if isinstance(given[0], (tuple, list)) else given
        return order[-1] in (-1, value.dim() - 1)
    return node.target in TRANSPOSITIONS and not _names_last(given, value.dim())


def moves_rows(node: fx.Node, x: fx.Node) -> bool:
    """Whether the node is x with whole rows (of its last dimension) elsewhere, or some of them."""
    value, made = value_of(x), value_of(node)
    if value is None or made is None or node.args[:1] != (x,):
        return False
    if node.target in ("roll", torch.roll):
        dims: Any = node.kwargs.get("dims", node.args[2] if len(node.args) > 2 else None)
        dims = dims if isinstance(dims, (tuple, list)) else (dims,)
        return None not in dims and not _names_last(dims, value.dim())
    if node.target is operator.getitem:
        index: Any = node.args[1]
        whole = isinstance(index, tuple) and all(isinstance(i, slice) for i in index)
        return whole and same_shape(made.shape[-1:], value.shape[-1:])
    return turns_rows(node, x)


def _names_last(dims: Sequence[Any], count: int) -> bool:
    return any(dim in (-1, count - 1) for dim in dims)


def can_move(views: Sequence[fx.Node], k: int) -> bool:
    """Whether these views of rows can be made of rows of k."""
    return all(is_view(node) and _can_be_of(node, k) for node in views)


def _can_be_of(view: fx.Node, k: int) -> bool:
    if view.target in _SIZED:
        return not view.kwargs
    before, after = (tensor_of(node) for node in (view.all_input_nodes[0], view))
    made = replayed([view], before.new_empty((*before.shape[:-1], k)))
    return made is not None and same_shape(made.shape, (*after.shape[:-1], k))


def moved(graph: fx.Graph, x: fx.Node, moves: Sequence[fx.Node], k: int) -> fx.Node:
    """x, of rows of k, with its rows as the moves put those of a Linear's result."""
    for node in moves:
        args = node.args[1:]
        if node.target in _SIZED:
            sizes: Any = args[0] if isinstance(args[0], (tuple, list)) else args
            x = graph.call_method("reshape", (x, *sizes[:-1], k))
        elif node.target != "contiguous":
            x = graph.create_node(node.op, node.target, (x, *args), dict(node.kwargs))
    return x
