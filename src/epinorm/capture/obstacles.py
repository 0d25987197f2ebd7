"""What stands between a Linear and a norm that is not of its chain, for who asks why."""

from __future__ import annotations

import torch
from torch import fx

from epinorm.capture.moves import moves_rows
from epinorm.capture.norms import read_norm_function
from epinorm.capture.purity import changed_argument, is_pure, value_of
from epinorm.capture.regions import exits, read_norm
from epinorm.capture.spelling import (
    is_cast,
    is_dropout,
    name_of,
    read_binary,
    read_linear,
    read_pointwise,
)


def why_no_step(node: fx.Node, x: fx.Node, dropout: bool | None) -> str:
    """Why a chain does not go on from x to the node. dropout: see ``is_dropout``."""
    if dropout:
        return f"{name_of(node)} drops values in a way of its own; eval mode is fused"
    if moves_rows(node, x):
        return (
            f"{name_of(node)} puts its rows in another order: that is served in front of sums, and "
            "where the Linear has no more inputs than outputs"
        )
    if name_of(node) in ("t", "transpose", "permute", "swapaxes"):
        return f"{name_of(node)} makes columns of its rows, and the norm is over those"
    return f"{name_of(node)} is not a pointwise operation of a chain"


def watched(kept: fx.Node) -> str | None:
    """What may ask for all of the gradient of what enters a norm: as a result it has but that of
    its other readers."""
    value = value_of(kept)
    if not torch.is_grad_enabled() or (value is not None and not value.requires_grad):
        return None
    for user in kept.users:
        if user.op == "output":
            return f"{name_of(kept)} is returned, and the norm's part of its gradient with it"
        if not is_pure(user) and changed_argument(user) is None:
            return f"{name_of(user)} may ask for the gradient of {name_of(kept)}"
    return None


def path_to_norm(start: fx.Node, taken: set[fx.Node], depth: int) -> list[fx.Node] | None:
    """Nodes from after ``start`` to a norm, through what a chain might one day hold."""
    for user in start.users:
        norm = read_norm_function(user, start)
        if norm is not None:
            return [user]
    if depth == 0:
        return None
    for nodes in exits(start):
        if read_norm(nodes, start) is not None:
            return [nodes[-1]]
    for user in start.users:
        if user in taken or not _may_pass(user, start):
            continue
        rest = path_to_norm(user, taken, depth - 1)
        if rest is not None:
            return [user, *rest]
    return None


_PASSING = frozenset(
    (
        *("view", "reshape", "flatten", "unflatten", "transpose", "permute", "contiguous"),
        *(
            "roll",
            "squeeze",
            "unsqueeze",
            "movedim",
            "swapaxes",
            "mul",
            "imul",
            "add",
            "iadd",
            "sub",
        ),
        *("t", "T", "dropout", "to", "float", "expand", "chunk", "split", "getitem"),
    )
)


def _may_pass(node: fx.Node, x: fx.Node) -> bool:
    if node.op == "output" or read_linear(node) is not None:
        return False
    if read_pointwise(node, x) is not None or is_dropout(node) is not None:
        return True
    if read_binary(node, x) is not None or is_cast(node, x):
        return True
    return name_of(node).strip("_") in _PASSING and node.args[:1] == (x,)
