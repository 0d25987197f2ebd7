"""What asks a tensor for its dtype and device alone: made without it, so that it need not be there.

Masks of stochastic depth are made so like the result of a Linear (``y.new_empty``), which a chain
does not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from epinorm.capture.purity import value_of

_FACTORIES: Mapping[Any, Any] = {
    f"new_{function.__name__}": function for function in (torch.empty, torch.zeros, torch.ones)
}


def make_apart(graph: fx.Graph) -> None:
    """Let ``new_empty`` and its kind, and ``type_as``, do without the tensor that they ask."""
    for node in list(graph.nodes):
        if node.op != "call_method" or not node.args:
            continue
        made, casts = _FACTORIES.get(node.target), node.target == "type_as"
        like, given = value_of(node.args[-1 if casts else 0]), value_of(node.args[0])
        if not (made or casts) or like is None or given is None or given.device != like.device:
            continue
        plain = type(like) in (Tensor, nn.Parameter, FakeTensor) and not like.is_nested
        if not plain or like.layout is not torch.strided:
            continue
        kind: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
        with graph.inserting_before(node):
            if made is not None:
                new = graph.call_function(made, node.args[1:], kind | dict(node.kwargs))
            else:
                new = graph.call_method("to", (node.args[0], like.dtype))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
