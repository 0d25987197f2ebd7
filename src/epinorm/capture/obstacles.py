"""What stands between a Linear and a norm that is not of its chain, for ``explain``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from epinorm.capture.batch_norm import batch_norm_of
from epinorm.capture.found import Found
from epinorm.capture.moves import moves_rows
from epinorm.capture.norms import read_norm_function
from epinorm.capture.purity import changed_argument, is_pure, value_of
from epinorm.capture.regions import exits, read_norm
from epinorm.capture.spelling import (
    is_cast,
    is_dropout,
    is_view,
    name_of,
    read_binary,
    read_linear,
    read_pointwise,
    read_scaled,
    same_shape,
)

IN_DISGUISE = "epinorm_in_disguise"
"""In the meta of a Linear that was a convolution, behind which its rows are columns again."""
_TURNING = ("t", "transpose", "permute", "swapaxes")
WHY_WHOLE = "epinorm_why_one_linear"
"""In the meta of a Linear whose parts reach norms: why they are no Linears of their own."""


def why_no_step(node: fx.Node, x: fx.Node, n: Any, dropout: bool | None = None) -> str:
    """Why a chain of rows of n does not go on from x to the node. dropout: see ``is_dropout``."""
    if dropout:
        return f"{name_of(node)} drops values in a way of its own; eval mode is fused"
    if moves_rows(node, x):
        return (
            f"{name_of(node)} puts its rows in another order: that is served in front of sums, and "
            "where the Linear has no more inputs than outputs"
        )
    if name_of(node) in _TURNING:
        return (
            f"{name_of(node)} makes columns of its rows, and a chain's norm is over rows as the "
            "Linear makes them"
        )
    if takes_apart(node, x, n):
        return (
            f"{name_of(node)} takes its rows apart, and a chain's norm is over all of a row: "
            "an nn.Linear for each part is served, its heads normalised by one norm before they "
            "are transposed"
        )
    return f"{name_of(node)} is not a pointwise operation of a chain"


def why_columns(path: Sequence[fx.Node]) -> str | None:
    """Of a path to a norm that makes columns of rows, and rows of them again: what reads the
    columns in between; None for any other."""
    turns = [node for node in path[:-1] if name_of(node) in _TURNING]
    if len(turns) < 2 or turns[0] is not path[0]:
        return None
    value, made = value_of(path[0].args[0]), value_of(turns[-1])
    if value is None or made is None or not same_shape(value.shape[-1:], made.shape[-1:]):
        return None
    within = path[1 : path.index(turns[-1])]
    between = dict.fromkeys(name_of(node) for node in within if not is_view(node))
    if not between:
        return (
            f"{name_of(path[0])} makes columns of its rows and {name_of(turns[-1])} rows of them "
            "again: without these two it is served"
        )
    return (
        f"{name_of(path[0])} makes columns of its rows, which {', '.join(between)} reads before "
        f"{name_of(turns[-1])} makes them rows again: a chain's operations are over rows"
    )


def late(found: Found, order: Mapping[fx.Node, int]) -> str | None:
    """What the chain reads that is not there yet where what enters its norm is first read."""
    kept = found.kept
    assert kept is not None
    readers = [order[user] for user in kept.users if user not in found.nodes]
    first = min(readers, default=len(order))
    sizes = [node for view in found.views for node in view.all_input_nodes[1:]]
    for node in (*found.reads, *sizes):
        if node is kept:
            return f"{name_of(node)} is a result, and read behind the norm too"
        if order[node] >= first:
            return f"{name_of(node)} is computed after what enters the norm is read"
    return None


def watched(kept: fx.Node, always: bool) -> str | None:
    """What may ask for all of the gradient of what enters a norm: as a result it has but that of
    its other readers. always: also where it has none."""
    value = value_of(kept)
    has_none = not torch.is_grad_enabled() or (value is not None and not value.requires_grad)
    if has_none and not always:
        return None
    for user in kept.users:
        if user.op == "output":
            return f"{name_of(kept)} is returned, and the norm's part of its gradient with it"
        if not is_pure(user) and changed_argument(user) is None:
            return f"{name_of(user)} may ask for the gradient of {name_of(kept)}"
    return None


def takes_apart(node: fx.Node, x: fx.Node, n: Any) -> bool:
    """Whether the node is parts of x's rows of n, or one of these, as q, k and v of one Linear."""
    example = node.meta.get("example_value")
    first = example[0] if isinstance(example, (tuple, list)) and example else example
    given, made = value_of(x), first if isinstance(first, Tensor) else None
    whole = given is not None and made is not None and same_shape(given.shape[-1:], (n,))
    if whole and same_shape(made.shape[-1:], (n,)):  # type: ignore[union-attr]
        return False
    return name_of(node) in PARTING and node.args[:1] == (x,)


def paths_to_norms(start: fx.Node, taken: set[fx.Node], depth: int) -> list[list[fx.Node]]:
    """Nodes from after ``start`` to a norm, through what a chain might one day hold; where it is
    taken apart, to the norm of each part."""
    for user in start.users:
        if read_norm_function(user, start) is not None or batch_norm_of((user,)) is not None:
            return [[user]]
    if depth == 0:
        return []
    for nodes in exits(start):
        if read_norm(nodes, start) is not None:
            return [[nodes[-1]]]
    found: dict[fx.Node, list[fx.Node]] = {}
    for user in start.users:
        if user in taken or not _may_pass(user, start):
            continue
        if found and name_of(user) not in PARTING:
            continue
        for rest in paths_to_norms(user, taken, depth - 1):
            found.setdefault(rest[-1], [user, *rest])
    return [*found.values()]


PARTING = frozenset(
    ("chunk", "split", "tensor_split", "split_with_sizes", "unbind", "narrow", "select", "getitem")
)
_PASSING = frozenset(
    (
        *("view", "reshape", "flatten", "unflatten", "transpose", "permute", "contiguous"),
        *("roll", "squeeze", "unsqueeze", "movedim", "swapaxes"),
        *("mul", "imul", "add", "iadd", "sub"),
        *("t", "T", "dropout", "to", "float", "expand", "flip", "glu"),
        *PARTING,
    )
)
_ELEMENTWISE = frozenset(
    (
        *("sin", "cos", "exp", "log1p", "abs", "pow", "square", "sqrt", "rsub", "truediv", "div"),
        *("where", "masked_fill", "lerp", "clone", "addcmul", "nan_to_num", "prelu", "rrelu"),
    )
)
"""That no chain holds, or not always: told of in front of a norm."""


def _may_pass(node: fx.Node, x: fx.Node) -> bool:
    if node.op == "output" or read_linear(node) is not None:
        return False
    if read_pointwise(node, x) is not None or is_dropout(node) is not None:
        return True
    if read_binary(node, x) or read_scaled(node, x) or is_cast(node, x):
        return True
    name, before, after = name_of(node).strip("_"), value_of(x), value_of(node)
    if name in _ELEMENTWISE and before is not None and after is not None:
        return same_shape(before.shape, after.shape)
    return name in _PASSING and node.args[:1] == (x,)
