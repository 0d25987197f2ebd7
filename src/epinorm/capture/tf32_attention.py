"""fp32 attention as products in TF32 where PyTorch allows these, for ``backend="epinorm"``.

PyTorch's memory-efficient kernel multiplies in full fp32 whatever the setting for products says.
Where its place is taken, and where not: docs/internals/capture.md, decision 28.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from epinorm.capture.purity import tensor_of, value_of
from epinorm.capture.spelling import arguments, checkpoints, name_of
from epinorm.operator.attention import attention
from epinorm.precision import product_precision

_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_WIDTHS = (64, 128)
"""Of a head, that the kernels have tiles for."""
_FEWEST_ROWS = 64
"""Of queries and of keys; with fewer, other kernels of PyTorch's are as fast."""
_MOST_NUMBERS = 1 << 31
"""That 32 bits count."""


def take_attention(gm: fx.GraphModule) -> int:
    """Put ``epinorm::attention`` where ``is_taken`` says, in checkpointed parts too; returns how
    often."""
    graph, count = gm.graph, sum(take_attention(inner) for _, inner in checkpoints(gm))
    if any(name_of(node) == "_sdpa_kernel" for node in graph.nodes):
        return count  # the model chooses itself
    for node in filter(is_taken, list(graph.nodes)):
        _take(graph, node)
        count += 1
    gm.recompile()
    return count


def _take(graph: fx.Graph, node: fx.Node) -> None:
    given = arguments(node, *_ARGUMENTS)
    tensors = tuple(given[name] for name in _ARGUMENTS[:3])
    scale = given.get("scale")
    if scale is None:
        scale = tensor_of(tensors[0]).shape[-1] ** -0.5
    with graph.inserting_before(node):
        made = graph.call_function(attention, (*tensors, float(scale)))
        mixed = graph.call_function(operator.getitem, (made, 0))
    mixed.meta = {**node.meta}
    node.replace_all_uses_with(mixed)
    graph.erase_node(node)


def is_taken(node: fx.Node, without_mask: bool = False) -> bool:
    """Whether the node is an attention that is taken, as it is or without its mask."""
    if node.target is not F.scaled_dot_product_attention:
        return False
    given = arguments(node, *_ARGUMENTS)
    tensors = [value_of(given.get(name)) for name in _ARGUMENTS[:3]]
    return (
        (without_mask or given.get("attn_mask") is None)
        and given.get("dropout_p", 0.0) == 0.0
        and not (given.get("is_causal") or given.get("enable_gqa"))
        and isinstance(given.get("scale"), (int, float, type(None)))
        and torch.backends.cuda.mem_efficient_sdp_enabled()  # whose place is taken
        and all(map(_is_taken, tensors))
        and _fit_together(node, *tensors)
    )


def _is_taken(tensor: Tensor | None) -> bool:
    if tensor is None or tensor.dim() != 4 or is_traceable_wrapper_subclass(tensor):
        return False
    sizes = (*tensor.shape, *tensor.stride())
    return (
        product_precision(tensor.dtype, tensor.device.type) == "high"
        and all(isinstance(size, int) for size in sizes)
        and tensor.shape[-1] in _WIDTHS
        and tensor.shape[-2] >= _FEWEST_ROWS
        and 0 < tensor.numel() < _MOST_NUMBERS
        and tensor.stride(2) * tensor.shape[2] < _MOST_NUMBERS
        and _has_kernels(tensor.device)
    )


def _fit_together(node: fx.Node, query: Any, key: Any, value: Any) -> bool:
    """Whether no size is broadcast, and the result is as its readers know it: of another dtype
    under autocast, of another layout by other kernels of PyTorch's."""
    result = value_of(node)
    return (
        key.shape == value.shape
        and (*query.shape[:2], query.shape[3]) == (*key.shape[:2], key.shape[3])
        and result is not None
        and result.dtype == query.dtype
        and (result.transpose(1, 2).is_contiguous() or _layout_is_unseen(node))
    )


def _layout_is_unseen(node: fx.Node) -> bool:
    """Whether the result is only read as (B, M, H, D), by what asks for no layout of it."""
    return all(
        user.target == "transpose"
        and sorted(user.args[1:]) == [1, 2]  # type: ignore[type-var]
        and all(reader.target in ("contiguous", "reshape") for reader in user.users)
        for user in node.users
    )


def _has_kernels(device: torch.device) -> bool:
    """Whether the kernels were measured on such a GPU; TorchInductor needs Triton there as well."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)
