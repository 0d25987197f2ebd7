"""Attention masks that hide nothing, or what ``is_causal`` hides, left out of a captured graph.

Transformers leaves such masks out in eager and makes them where it is traced, as nothing can look
into a tensor there; with a mask attention does without its fastest kernels. What a mask is made of
says what is in it, where no input takes part: ranges and comparisons, which are computed here once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from epinorm.capture.purity import arguments, changes, is_pure, storage_of, value_of
from epinorm.capture.spelling import computed, name_of, same_shape
from epinorm.capture.tf32_attention import is_taken
from epinorm.precision import product_precision

_KNOWN = frozenset(
    (
        *("arange", "ones", "zeros", "full", "new_ones", "new_zeros", "ones_like", "zeros_like"),
        *("add", "sub", "mul", "neg", "diff", "cumsum", "eq", "ne", "lt", "le", "gt", "ge"),
        *("and_", "or_", "invert", "logical_and", "logical_or", "logical_not", "bitwise_and"),
        *("bitwise_or", "bitwise_not", "getitem", "unsqueeze", "squeeze", "expand", "view"),
        *("reshape", "tril", "triu", "to", "bool", "long", "int", "t", "transpose"),
    )
)
_LARGEST = 1 << 26
"""Values of a tensor that is looked into."""
_BEFORE_CAUSAL = ("query", "key", "value", "attn_mask", "dropout_p")


def leave_out_masks(graph: fx.Graph) -> None:
    """Take away the masks of attentions that say nothing, or what ``is_causal`` says as well."""
    values = _Constants(graph)
    attentions = graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
    for node in attentions:
        if len(node.args) > len(_BEFORE_CAUSAL):
            continue
        given = arguments(node, *_BEFORE_CAUSAL)
        mask = values.of(given.get("attn_mask"))
        if given.get("is_causal") or not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            continue
        is_causal = not mask.all()
        query, key = value_of(given["query"]), value_of(given["key"])
        if not _has_no_more_sizes(mask, query, key):
            continue  # of the result as well; or it does not fit, which PyTorch says
        if _is_causal(mask, query, key) if is_causal else not _gains_by_mask(node, query):
            node.args = tuple(given.pop(name) for name in _BEFORE_CAUSAL[:3])
            node.kwargs = given | {"attn_mask": None, "is_causal": is_causal}


def _gains_by_mask(node: fx.Node, query: Tensor | None) -> bool:
    """Whether without a mask PyTorch's own kernel computes it, and slower: in fp32 that does not
    follow the setting for products, while with a mask attention is two of them in TF32."""
    if query is None or product_precision(query.dtype, query.device.type) != "high":
        return False
    return not is_taken(node, without_mask=True)


def _has_no_more_sizes(mask: Tensor, query: Tensor | None, key: Tensor | None) -> bool:
    """Whether the mask is broadcast to the scores, and these not to the mask."""
    if query is None or key is None:
        return False
    scores = (*query.shape[:-1], key.shape[-2])
    pairs = zip(reversed(mask.shape), reversed(scores), strict=False)
    return mask.dim() <= len(scores) and all(a == 1 or same_shape((a,), (b,)) for a, b in pairs)


def _is_causal(mask: Tensor, query: Tensor | None, key: Tensor | None) -> bool:
    """Whether the mask has its rows and columns, none of them broadcast, and is the lower half."""
    if query is None or key is None or mask.shape[-2:] != (query.shape[-2], key.shape[-2]):
        return False
    return torch.equal(mask, torch.ones_like(mask).tril())


class _Constants:
    """Values, on the CPU, of nodes that follow from no input."""

    def __init__(self, graph: fx.Graph) -> None:
        self._found: dict[fx.Node, Any] = {}
        changed = (changes(n) if is_pure(n) else n.all_input_nodes for n in graph.nodes)
        self._changed = {storage_of(given) for nodes in changed for given in nodes} - {None}

    def of(self, node: Any) -> Any:
        """The value; None where an input takes part, or what is not known or changed here."""
        if not isinstance(node, fx.Node):
            return None
        if node not in self._found:
            self._found[node] = self._compute(node)
        return self._found[node]

    def _compute(self, node: fx.Node) -> Any:
        example = node.meta.get("example_value")
        if isinstance(example, Tensor) and (
            not all(isinstance(size, int) for size in example.shape)
            or example.numel() > _LARGEST
            or storage_of(node) in self._changed
        ):
            return None
        if node.op not in ("call_function", "call_method"):
            return None
        name = name_of(node)  # before PyTorch 2.10 comparisons are methods: __eq__
        if (name.strip("_") if name.startswith("__") else name) not in _KNOWN:
            return None
        if any(self.of(given) is None for given in node.all_input_nodes):
            return None
        with torch.no_grad(), torch.device("cpu"):
            try:
                return computed(node, self._concrete)
            except (RuntimeError, TypeError, ValueError, IndexError):
                return None

    def _concrete(self, given: Any) -> Any:
        if isinstance(given, fx.Node):
            return self.of(given)
        return torch.device("cpu") if isinstance(given, torch.device) else given
