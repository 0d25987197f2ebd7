"""fp32 attention as products in TF32 where PyTorch allows these.

PyTorch's memory-efficient kernel multiplies in full fp32 whatever the setting for products says.
Where its place is taken, and where not: docs/internals/capture.md, decision 28. In a graph that is
compiled that is decided there; in one that runs as eager does, at each call.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from epinorm.capture.purity import arguments, tensor_of, value_of
from epinorm.capture.spelling import checkpoints, name_of
from epinorm.operator.attention import attend, attention, compiles
from epinorm.operator.dispatch import Uses
from epinorm.operator.undisturbed import has_plain_types, is_only_profiled, untraced, wants_gradient
from epinorm.precision import product_precision

_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_WIDTHS = (64, 128)
"""Of a head, that the kernels have tiles for."""
_FEWEST_ROWS = 64
"""Of queries and of keys; with fewer, other kernels of PyTorch's are as fast."""
_MOST_NUMBERS = 1 << 31
"""That 32 bits count."""
_LARGEST_SCALE = 1e30
"""That is a number of fp32 with log2(e) in it."""
FEWEST_TERMS = {False: 1 << 29, True: 3 << 29}
"""Of the scores' sums, that are worth what the host takes longer; by whether autograd wants a
gradient (decision 28)."""


def take_attention(gm: fx.GraphModule) -> int:
    """Put ``epinorm::attention`` where ``is_taken`` says, in checkpointed parts too; returns how
    often."""
    graph, count = gm.graph, sum(take_attention(inner) for _, inner in checkpoints(gm))
    for node in filter(is_taken, _attentions(graph)):
        _take(graph, node)
        count += 1
    gm.recompile()
    return count


def take_at_calls(gm: fx.GraphModule, uses: Uses) -> int:
    """Let each attention that may be taken look, at its calls, whether it is; returns how many."""
    count = sum(take_at_calls(inner, uses) for _, inner in checkpoints(gm))
    for node in filter(_may_be_taken, _attentions(gm.graph)):
        node.target = Attending(uses)
        count += 1
    gm.recompile()
    return count


def _attentions(graph: fx.Graph) -> Sequence[fx.Node]:
    """PyTorch's, where the model does not choose between its kernels itself."""
    if any(name_of(node) == "_sdpa_kernel" for node in graph.nodes):
        return ()
    return graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)


class Attending:
    """``F.scaled_dot_product_attention``, which is taken where all that it is given says so.

    uses: where the calls that are taken are counted.
    """

    __name__, __module__ = "scaled_dot_product_attention", "epinorm"

    def __init__(self, uses: Uses) -> None:
        self._uses = uses

    @untraced
    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        asks_more = attn_mask is not None or dropout_p != 0.0 or is_causal or enable_gqa
        # Of NumPy's numbers Dynamo makes tensors.
        factor = query.shape[-1] ** -0.5 if scale is None else float(scale)
        asks_more = asks_more or abs(factor) > _LARGEST_SCALE
        if asks_more or not is_taken_now(query, key, value):
            rest = attn_mask, dropout_p, is_causal
            return F.scaled_dot_product_attention(
                *(query, key, value, *rest), scale=scale, enable_gqa=enable_gqa
            )
        self._uses.count += 1
        return attend(query, key, value, factor)


def is_taken_now(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a call's attention is taken: nothing waits for PyTorch's, it would be the
    memory-efficient one, and it takes longer than our launches."""
    tensors = query, key, value
    return (
        product_precision(query.dtype, query.device.type) == "high"
        and query.numel() * key.shape[-2] >= FEWEST_TERMS[wants_gradient(*tensors)]
        and is_only_profiled()
        and has_plain_types(tensors)
        and all(map(_fits, tensors))
        and _have_sizes(*tensors)
        and pytorchs_kernel(*tensors) == SDPBackend.EFFICIENT_ATTENTION.value
        and compiles(*tensors)
    )


def pytorchs_kernel(query: Tensor, key: Tensor, value: Tensor) -> int:
    """PyTorch's choice, by what is enabled and by priority, as a number of ``SDPBackend``."""
    return torch._fused_sdp_choice(query, key, value)


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
    """Whether the node is an attention that is taken, as it is or without its mask, where the graph
    is compiled."""
    if not _may_be_taken(node, without_mask):
        return False
    given = arguments(node, *_ARGUMENTS)
    query, key, value = tensors = [tensor_of(given[name]) for name in _ARGUMENTS[:3]]
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()  # whose place is taken
        and given.get("dropout_p", 0.0) == 0.0
        and isinstance(given.get("scale"), (int, float, type(None)))
        and all(isinstance(size, int) for t in tensors for size in (*t.shape, *t.stride()))
        and all(map(_fits, tensors))
        and _have_sizes(query, key, value)
        and _result_is_as_known(node, query)
    )


def _may_be_taken(node: fx.Node, without_mask: bool = False) -> bool:
    """Whether the node asks for what the kernels compute, of tensors as they read."""
    given = arguments(node, *_ARGUMENTS)
    dropout = given.get("dropout_p", 0.0)  # a node where Dynamo saw several
    return (
        (without_mask or given.get("attn_mask") is None)
        and (dropout == 0.0 or isinstance(dropout, fx.Node))
        and not (given.get("is_causal") or given.get("enable_gqa"))
        and all(_is_of_kind(value_of(given.get(name))) for name in _ARGUMENTS[:3])
    )


def _is_of_kind(tensor: Tensor | None) -> bool:
    return (
        tensor is not None
        and tensor.dim() == 4
        and not is_traceable_wrapper_subclass(tensor)
        and product_precision(tensor.dtype, tensor.device.type) == "high"
        and isinstance(tensor.shape[-1], int)
        and tensor.shape[-1] in _WIDTHS
        and _has_kernels(tensor.device)
    )


def _fits(tensor: Tensor) -> bool:
    return (
        tensor.shape[-2] >= _FEWEST_ROWS
        and not tensor.is_neg()  # whose sign stands beside the memory
        and 0 < tensor.numel() < _MOST_NUMBERS
        and tensor.stride(2) * tensor.shape[2] < _MOST_NUMBERS
    )


def _have_sizes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether no size is broadcast."""
    return key.shape == value.shape and (*query.shape[:2], query.shape[3]) == (
        *key.shape[:2],
        key.shape[3],
    )


def _result_is_as_known(node: fx.Node, query: Tensor) -> bool:
    """Whether the result is as its readers know it: of another dtype under autocast, of another
    layout by other kernels of PyTorch's."""
    result = value_of(node)
    return (
        result is not None
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
