"""Casts of weights and of their gradients, many in one launch, in graphs handed to TorchInductor.

Under autocast a compiled step casts each weight and bias down, for the product that reads it alone,
and each of their gradients up: kernels of a few microseconds, a dozen and more a layer, none of
which Inductor can join to a product. Their launches are what such a step waits for. So they are
made together, a few layers at a time: the values are the same, bit for bit.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from epinorm.operator.casts import casts

DEVICES = ("cuda",)
"""Where a launch costs the host more than calling a function."""
MOST_VALUES = 1 << 24
"""Cast at once: 32 MB in 16 bits, which is what may wait in memory longer than it would alone."""

_aten = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default
_PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default)
_VIEWS = (
    *(_aten.view.default, _aten.reshape.default, _aten.permute.default, _aten.t.default),
    *(_aten.transpose.int, _aten.slice.Tensor, _aten.expand.default),
)


def cast_together(graph: fx.Graph) -> None:
    """Make casts together in a graph that AOTAutograd made, forward or backward."""
    early, late = [], []
    for node in graph.find_nodes(op="call_function", target=_CAST):
        if (cast := _of_inputs(node)) is not None:
            early.append(cast)
        elif (cast := _of_gradient(node)) is not None:
            late.append(cast)
    for group in _groups(early):
        _put_together(graph, group, before=group[0].node)
    for group in _groups(late):
        _put_together(graph, group, before=group[-1].node)


@dataclass(frozen=True)
class _Cast:
    """A cast of one tensor, or of several put one behind another."""

    node: fx.Node
    parts: tuple[fx.Node, ...]

    @property
    def kind(self) -> tuple[Any, ...]:
        """What casts that are made together have in common."""
        given, made = _value(self.parts[0]), _value(self.node)
        return made.device, given.dtype, made.dtype


def _of_inputs(node: fx.Node) -> _Cast | None:
    """A cast of what the graph is given, for products and chains alone: it can be made earlier."""
    given = node.args[0]
    assert isinstance(given, fx.Node)
    parts: Any = (given,)
    if given.target is _aten.cat.default and len(given.users) == 1 and not (*given.args, 0)[1]:
        parts = given.args[0]
    if any(part.op != "placeholder" or _is_changed(part) for part in parts):
        return None
    return _Cast(node, tuple(parts)) if _fits(node, parts) and _is_read_whole(node) else None


def _of_gradient(node: fx.Node) -> _Cast | None:
    """A cast of what a product or a chain gives, which the graph returns: it can be made later."""
    given = node.args[0]
    assert isinstance(given, fx.Node)
    source = given.args[0] if given.target is operator.getitem else given
    assert isinstance(source, fx.Node)
    if not _is_product(source) or not _fits(node, (given,)):
        return None
    return _Cast(node, (given,)) if all(n.op == "output" for n in _readers(node)) else None


def _fits(node: fx.Node, parts: Iterable[fx.Node]) -> bool:
    """Whether it casts floating-point numbers that lie one behind another, of known sizes."""
    values = [node.meta.get("val"), *(part.meta.get("val") for part in parts)]
    return all(
        isinstance(t, Tensor)
        and t.device.type in DEVICES
        and t.is_floating_point()
        and all(isinstance(size, int) for size in t.shape)
        and t.is_contiguous()
        for t in values
    )


def _is_product(node: fx.Node) -> bool:
    """Whether it is a kernel that Inductor joins nothing to."""
    return node.target in _PRODUCTS or getattr(node.target, "namespace", "") == "epinorm"


def _is_read_whole(node: fx.Node) -> bool:
    return all(reader.op == "output" or _is_product(reader) for reader in _readers(node))


def _is_changed(node: fx.Node) -> bool:
    """Whether anything in the graph changes a tensor that it is given."""
    users = [*node.users, *_readers(node)]
    schemas = [getattr(user.target, "_schema", None) for user in users if user.op != "output"]
    return any(schema is None or schema.is_mutable for schema in schemas)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """What reads a value, also through views of it."""
    for user in node.users:
        if user.target in _VIEWS:
            yield from _readers(user)
        else:
            yield user


def _groups(found: Iterable[_Cast]) -> list[list[_Cast]]:
    """Those of a kind, in the graph's order, two or more at a time."""
    groups: list[list[_Cast]] = []
    filling: dict[Any, tuple[list[_Cast], int]] = {}
    for cast in found:
        size = _value(cast.node).numel()
        group, values = filling.get(cast.kind, ([], 0))
        if not group or values + size > MOST_VALUES:
            group, values = [], 0
            groups.append(group)
        group.append(cast)
        filling[cast.kind] = group, values + size
    return [group for group in groups if len(group) > 1]


def _put_together(graph: fx.Graph, group: list[_Cast], before: fx.Node) -> None:
    parts = [part for cast in group for part in cast.parts]
    counts = [len(cast.parts) for cast in group]
    with graph.inserting_before(before):
        made = graph.call_function(casts, (parts, counts, _value(group[0].node).dtype))
        made.meta["val"] = [_value(cast.node) for cast in group]
        results = [graph.call_function(operator.getitem, (made, i)) for i in range(len(group))]
    for cast, result in zip(group, results, strict=True):
        result.meta = dict(cast.node.meta)
        joined = cast.node.args[0]
        cast.node.replace_all_uses_with(result)
        graph.erase_node(cast.node)
        if isinstance(joined, fx.Node) and len(cast.parts) > 1:
            graph.erase_node(joined)


def _value(node: fx.Node) -> Tensor:
    value = node.meta["val"]
    assert isinstance(value, Tensor)
    return value
