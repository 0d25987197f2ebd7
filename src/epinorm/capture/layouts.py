"""Whether a result may lie in memory otherwise than in eager: where no reader could tell."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor

from epinorm.capture.purity import changes, is_pure, storage_of, value_of
from epinorm.capture.spelling import computed, name_of, same_shape, sizes_of


def replayed(nodes: Sequence[fx.Node], value: Tensor) -> Tensor | None:
    """What these nodes, each of the one before, make of another value than the first one's own;
    None where they fail."""
    for node in nodes:
        made = _run(node, {node.all_input_nodes[0]: value})
        if not isinstance(made, Tensor):
            return None
        value = made
    return value


def is_unseen(results: Mapping[fx.Node, Tensor], inside: Collection[fx.Node] = ()) -> bool:
    """Whether the graph's outputs are the same, layouts included, where nodes' results lie as these
    example values do; inside: nodes that will not be there.

    What reads them is run once more on example values, until the layouts are eager's again.
    """
    values: dict[fx.Node, Any] = {
        node: value for node, value in results.items() if not _lies_alike(value, value_of(node))
    }
    waiting = {user for node in values for user in node.users}.difference(inside)
    for node in next(iter(results)).graph.nodes if waiting else ():
        if node not in waiting:
            continue
        sees = node.op == "output" or name_of(node) == "as_strided" or not is_pure(node)
        made = None if sees else _run(node, values)
        if made is None:
            return False
        if node.target is F.scaled_dot_product_attention and node.args[0] in values:
            made = _laid_as(values[node.args[0]], made)  # as some kernels do
        expected = node.meta.get("example_value")
        if not isinstance(made, Tensor) or not _lies_alike(made, expected):
            values[node] = made
            waiting |= {*node.users}.difference(inside)
        elif _shares_otherwise(node, made, values):
            return False
    return True


def _run(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """The node's result on example values; None where it raises or is unknown."""

    def of(given: Any) -> Any:
        if not isinstance(given, fx.Node):
            return given
        return values.get(given, given.meta.get("example_value"))

    if node.op not in ("call_function", "call_method"):
        return None
    modes = (value.fake_mode for value in values.values() if isinstance(value, FakeTensor))
    mode: Any = next(modes, nullcontext())
    try:
        with mode, enable_python_dispatcher():
            return computed(node, of)
    except Exception:  # as the model would at its first call
        return None


def _lies_alike(made: Tensor, expected: Tensor | None) -> bool:
    return (
        expected is not None
        and made.dtype == expected.dtype
        and same_shape(made.shape, expected.shape)
        and same_shape(made.stride(), expected.stride())
    )


def _laid_as(query: Tensor, result: Tensor) -> Tensor:
    strides = sizes_of(query.stride())
    order = sorted(range(query.dim()), key=strides.__getitem__, reverse=True)
    back = sorted(range(query.dim()), key=order.__getitem__)
    return result.permute(order).contiguous().permute(back)


def _shares_otherwise(node: fx.Node, made: Tensor, values: Mapping[fx.Node, Any]) -> bool:
    """Whether a result is changed in place that is a view in eager and a copy here, or a copy that
    is a view here."""
    known = [given for given in node.all_input_nodes if isinstance(values.get(given), Tensor)]
    cells = [values[given].untyped_storage()._cdata for given in known]
    shares = made.untyped_storage()._cdata in cells
    shared = storage_of(node) in [storage_of(given) for given in known]
    if shares == shared:
        return False
    return any(storage_of(t) == storage_of(node) for n in node.graph.nodes for t in changes(n))
