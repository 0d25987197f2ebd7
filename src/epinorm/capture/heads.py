"""Heads with a norm each, as StableLM's, as one norm of all of them with a weight for each head."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from epinorm.backends.engine import plan_for
from epinorm.capture.chains import Search
from epinorm.capture.layouts import is_unseen
from epinorm.capture.moves import TRANSPOSITIONS
from epinorm.capture.norms import NormRead, read_norm_function
from epinorm.capture.obstacles import WHY_WHOLE
from epinorm.capture.purity import arguments, tensor_of, value_of
from epinorm.capture.sites import problem_of
from epinorm.capture.spelling import is_view, name_of, read_linear, same_shape
from epinorm.capture.trace import StaysWhole, Trace, check_alike, erase
from epinorm.chain import BatchNorm, GroupNorm, RMSNorm

_JOINS = (torch.cat, torch.concat, torch.concatenate)

_NOT_OF_HEADS = (GroupNorm, BatchNorm)


@dataclass(frozen=True)
class _Heads:
    """Rows (..., L, H, D) and the norm of each of H heads, which are put together along ``dim``."""

    rows: fx.Node
    dim: int
    norms: Sequence[NormRead]

    @property
    def given(self) -> list[fx.Node]:
        """The rows, and of all heads the weights and biases that there are."""
        each = (getattr(norm, name) for name in ("weight", "bias") for norm in self.norms)
        return [self.rows, *(node for node in each if node is not None)]

    def of(self, rows: Tensor, *given: Tensor) -> Tensor:
        """The same by one norm."""
        norm: Any = self.norms[0].norm
        heads, shape = len(self.norms), rows.shape[-1:]
        function: Any = F.rms_norm if isinstance(norm, RMSNorm) else F.layer_norm
        y = function(rows, shape, eps=norm.eps)
        y = y * torch.stack(given[:heads]) if given else y
        y = y + torch.stack(given[heads:]) if given[heads:] else y
        return y.transpose(self.dim, -2)


def open_heads(graph: fx.Graph, always: bool) -> None:
    """Put one norm in the place of one for each head where that makes a chain; always: also of a
    chain that its plan leaves to PyTorch."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _JOINS:
            continue
        heads = _heads(node)
        linear: Any = None if heads is None else heads.rows
        while linear is not None and is_view(linear):
            linear = linear.args[0]
        if heads is not None and read_linear(linear) is not None:
            with suppress(StaysWhole):
                _open(graph, node, heads, linear, always)


def _heads(join: fx.Node) -> _Heads | None:
    """What a concatenation puts together, if that is heads with a norm each."""
    given, value = arguments(join, "tensors", "dim"), value_of(join)
    norms: Any = given.get("tensors", ())
    parts: Any = [norm.args[0] for norm in norms if isinstance(norm, fx.Node) and norm.args]
    if value is None or len(parts) < max(2, len(norms)):
        return None
    split = parts[0].args[0] if getattr(parts[0], "target", None) is operator.getitem else None
    if not isinstance(split, fx.Node) or name_of(split) != "split":
        return None
    places = [(split, i) for i in range(len(split.users))]
    if [getattr(part, "args", None) for part in parts] != places:
        return None
    if any(len(node.users) > 1 for node in (*norms, *parts)):
        return None
    turned: Any = split.args[0]
    count, dim, heads = value.dim(), given.get("dim", 0) % value.dim(), value_of(turned)
    one_each = all(tensor_of(part).shape[dim] == 1 for part in parts)
    if not one_each or heads is None or not same_shape(heads.shape, value.shape):
        return None
    if turned.target not in TRANSPOSITIONS or len(turned.users) > 1 or turned.kwargs:
        return None
    if {place % count for place in turned.args[1:]} != {dim, count - 2}:
        return None
    read = [read_norm_function(norm, part) for norm, part in zip(norms, parts, strict=True)]
    found = [norm for norm in read if isinstance(norm, NormRead)]
    kinds = {(norm.norm, norm.weight is None, norm.bias is None) for norm in found}
    if len(found) < len(norms) or len(kinds) > 1 or isinstance(found[0].norm, _NOT_OF_HEADS):
        return None
    return _Heads(turned.args[0], dim, found) if found[0].weight or not found[0].bias else None


def _open(graph: fx.Graph, join: fx.Node, heads: _Heads, linear: fx.Node, always: bool) -> None:
    """Open one; where that is not to be, leave all as it was, and a note why."""
    trace = Trace(graph, join, {}, heads.given)
    given: Any = [value_of(node) for node in heads.given]
    with trace.opening():
        made = trace.run(lambda *_, **__: heads.of(*given))
        result = trace.node_of(made)
        check_alike(made, value_of(join), layout=False)
    new, why = trace.nodes, ""
    if is_unseen({join: made}):
        join.replace_all_uses_with(result)
        for place in Search(graph).places([linear]):
            plan = None if place.found is None else plan_for(problem_of(place.found))
            if plan is not None and (always or plan.strategy != "reference"):
                erase(graph, _needed_by(join, heads.rows))
                return
            why = place.obstacle if plan is None else plan.reason
        result.replace_all_uses_with(join)
    erase(graph, new)
    linear.meta[WHY_WHOLE] = why or "its heads are put together in memory, which a reader sees"


def _needed_by(join: fx.Node, rows: fx.Node) -> list[fx.Node]:
    """The nodes from after the rows to the concatenation, in order."""
    norms: Any = join.args[0]
    parts = [norm.args[0] for norm in norms]
    split = parts[0].args[0]
    return [split.args[0], split, *parts, *norms, join]
