"""Which calls of ours are the last to read their x or dy, so that its memory may be written over.

x is what another of our calls has just made, and stands in the graph in one place alone: no result
of the graph, residual or view. What hooks, attributes and graph breaks take of a module's result is
a result of the graph. The call itself sees what no graph shows: gradients, and modes
(``Caller.spending``).

Behind AOTAutograd the graph shows gradients too: what the backward pass reads is a result of the
forward graph. There operators take the calls' places, and views are nodes that write nothing. In a
backward graph a layer's dy is mostly what has just been made of the next layer's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from epinorm.chain import Chain
from epinorm.operator import dispatch
from epinorm.operator.dispatch import Caller
from epinorm.operator.halves import dz_is_given
from epinorm.operator.schema import (
    SPENDING_X,
    linear_norm,
    linear_norm_backward,
    linear_norm_backward_begin,
    linear_norm_backward_end,
    linear_norm_sum,
    spending_dy,
)
from epinorm.precision import product_precision

_BACKWARD = (linear_norm_backward, linear_norm_backward_begin)
_WANTED = 14
"""The place of ``wanted`` among their arguments."""
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
    """The same in a graph that AOTAutograd made: those operators that may write over their x or dy
    say so from now on."""
    for node in graph.nodes:
        if node.target in SPENDING_X and _reads_x_last(node):
            node.target = SPENDING_X[node.target]
        elif node.target in _BACKWARD and _reads_dy_last(node):
            found = spending_dy().get((node.target, len(node.meta["val"])))
            if found is not None:
                node.target = found
                _keep_dy_to_the_end(node)


def _reads_x_last(reader: fx.Node) -> bool:
    arguments: Any = reader.args
    *given, operands, _, _, _, out_dtype = arguments
    return out_dtype is None and _is_last(given[0], [*given, *operands], _is_y)


def _reads_dy_last(reader: fx.Node) -> bool:
    arguments: Any = reader.args
    dy, *given, operands, z, mean, rstd, chain, _, _, out_dtype, wanted = arguments[: _WANTED + 1]
    parsed = Chain.parse(chain)
    if out_dtype is not None or dz_is_given(parsed, wanted):
        return False
    if reader.target is linear_norm_backward_begin and _dz_may_be_over_x(parsed, *given[:2]):
        return False
    more = [*arguments[_WANTED + 1 :], *reader.kwargs.values()]
    return _is_last(dy, [dy, *given, *operands, z, mean, rstd, *more], _is_dx)


def _dz_may_be_over_x(chain: Chain, x: fx.Node, weight: fx.Node) -> bool:
    """Whether the first half may have dz in x's planes (``dz_over_x`` of the plan), so that
    dy is better given back before dX."""
    n, k = weight.meta["val"].shape
    kind = x.meta["val"]
    sizes = len(kind), k, n
    precision = product_precision(kind.dtype, kind.device.type, sizes)
    return chain.saves_y and n <= k and precision == "highest"


def _keep_dy_to_the_end(begins: fx.Node) -> None:
    """Let what ends the pass read dy too: dz is there, which the token holds unseen. Else
    TorchInductor gives dy's memory to what it computes between the two."""
    for made in begins.users:
        for user in list(made.users):
            if user.target is linear_norm_backward_end:
                user.args = (*user.args[:4], begins.args[0])
                user.meta.pop("eager_input_vals", None)  # of as many arguments as there were


def _is_last(read: fx.Node, given: list[Any], is_made: Callable[[fx.Node], bool]) -> bool:
    """Whether what is read is what one of ours has made, fp32, for this call and, of all that this
    is given, for this argument alone."""
    value = read.meta.get("val")
    if not isinstance(value, Tensor) or value.dtype != torch.float32:
        return False
    if value.device.type not in dispatch.SPENDING or given.count(read) > 1:
        return False
    while read.target in _VIEWS and _has_one_reader(read):
        read = read.args[0]  # type: ignore[assignment]
    return _has_one_reader(read) and is_made(read)


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


def _is_dx(read: fx.Node) -> bool:
    """Whether it is an x's gradient by one of our operators, or a product of PyTorch's as a Linear
    makes it, which have memory of their own."""
    if read.target is not operator.getitem:
        return read.target in (linear_norm_backward_end, torch.ops.aten.mm.default)
    made, index = read.args
    spending = [op for (of, _), op in spending_dy().items() if of is linear_norm_backward]
    of_x = getattr(made, "target", None) in (linear_norm_backward, *spending)
    return of_x and bool(index == 0) and bool(made.args[_WANTED][0])  # type: ignore[union-attr,index]
