"""PyTorch's functions that hold Linears and norms, opened into the operations they are made of.

To Dynamo, what nn.MultiheadAttention calls is one node. It is run once more on the graph's example
values, as PyTorch wrote it, while a mode notes each operation: the graph then holds the same
operations in the same order. What nn.TransformerEncoderLayer and nn.MultiheadAttention call in eval
without gradients is one kernel's work, whose operations are written here; it stays as it was where
none of them is epinorm's.
"""

from __future__ import annotations

import math
import operator
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from epinorm.backends.cuda.runtime.device import stand_in
from epinorm.capture.purity import arguments, tensor_of, value_of
from epinorm.capture.trace import StaysWhole, Trace, check_alike, erase

SWAPPED = "epinorm_swapped"
"""In the meta of a Linear whose rows (T B, E) are read in the order of (B, T, E): what turns them,
and x in that order."""

_WHY = "epinorm_why_whole"


def _attention(*args: Any, **kwargs: Any) -> Any:
    """``F.multi_head_attention_forward`` past its question whether somebody overrides it."""
    function: Any = F.multi_head_attention_forward
    known = {**function.__globals__, "has_torch_function": lambda _: False}
    return types.FunctionType(function.__code__, known, argdefs=function.__defaults__)(
        *args, **kwargs
    )


def _native_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: None = None,
) -> tuple[Tensor, Tensor | None]:
    """Self-attention of query (B, T, E) without a mask, and its weights (B, [heads,] T, T)."""
    parts = F.linear(query, qkv_weight, qkv_bias).chunk(3, -1)
    q, k, v = (part.unflatten(-1, (num_heads, -1)).transpose(1, 2) for part in parts)
    weights = None
    if need_weights:
        weights = F.softmax(q * math.sqrt(num_heads / embed_dim) @ k.transpose(-2, -1), dim=-1)
        mixed = weights @ v
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        mixed = F.scaled_dot_product_attention(q, k, v)
    return F.linear(mixed.transpose(1, 2).flatten(2), proj_weight, proj_bias), weights


def _native_encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: None = None,
    mask_type: None = None,
) -> Tensor:
    """nn.TransformerEncoderLayer of src (B, T, E) without a mask, in eval."""

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), weight, bias, eps)

    x = norm(src, norm_weight_1, norm_bias_1) if norm_first else src
    projections = (qkv_weight, qkv_bias, proj_weight, proj_bias)
    y, _ = _native_attention(x, x, x, embed_dim, num_heads, *projections, need_weights=False)
    x = src + y
    x = x if norm_first else norm(x, norm_weight_1, norm_bias_1)
    y = norm(x, norm_weight_2, norm_bias_2) if norm_first else x
    y = (F.gelu if use_gelu else F.relu)(F.linear(y, ffn_weight_1, ffn_bias_1))
    x = x + F.linear(y, ffn_weight_2, ffn_bias_2)
    return x if norm_first else norm(x, norm_weight_2, norm_bias_2)


@dataclass(frozen=True)
class _Whole:
    """A function that holds Linears: what it computes in operations, the modules of its parameters
    by their arguments' places, and what is said where it stays whole.

    native: it has a kernel of its own, which other operations only equal but for rounding.
    """

    body: Callable[..., Any]
    parts: Mapping[Any, str]
    said: str
    native: bool = True


_WHOLE: Mapping[Any, _Whole] = {
    F.multi_head_attention_forward: _Whole(
        _attention,
        {5: "in_proj", 11: "out_proj"}
        | {name: name[:6] for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight")},
        "nn.MultiheadAttention's Linears, and a norm behind them, are not seen",
        native=False,
    ),
    torch._native_multi_head_attention: _Whole(
        _native_attention,
        {5: "in_proj", 7: "out_proj"},
        "nn.MultiheadAttention's Linears, and a norm behind them, are not seen in eval without "
        "gradients",
    ),
    torch._transformer_encoder_layer_fwd: _Whole(
        _native_encoder_layer,
        {3: "self_attn.in_proj", 5: "self_attn.out_proj", 14: "linear1", 16: "linear2"}
        | {10: "norm1", 12: "norm2"},
        "nn.TransformerEncoderLayer's Linears and norms are not seen in eval without gradients",
    ),
}


def unseen(graph: fx.Graph) -> tuple[str, ...]:
    """A sentence for each function that holds Linears which the graph does not show."""
    sentences = (
        f"{_WHOLE[node.target].said}: PyTorch computes it as one function, and {node.meta[_WHY]}."
        for node in graph.nodes
        if node.op == "call_function" and _WHY in node.meta
    )
    return tuple(dict.fromkeys(sentences))


@dataclass
class Opened:
    """A function, while its operations stand in its place.

    results: what stands for its results, with their places in a tuple; None for the only one.
    """

    target: Any
    args: Any
    kwargs: Any
    meta: dict[str, Any]
    nodes: list[fx.Node]
    results: dict[Any, fx.Node]

    def close(self, graph: fx.Graph) -> dict[fx.Node, fx.Node]:
        """Put the function back; returns what stands for its operations' results."""
        made, inside = {}, set(self.nodes)
        with graph.inserting_before(self.nodes[0]):
            whole = graph.call_function(self.target, self.args, self.kwargs)
            whole.meta = self.meta
            for index, result in self.results.items():
                item = whole
                if index is not None:
                    item = graph.call_function(operator.getitem, (whole, index))
                    item.meta = {**result.meta}
                result.replace_all_uses_with(item, delete_user_cb=lambda user: user not in inside)
                made[result] = item
        erase(graph, self.nodes)
        return made


def open_functions(graph: fx.Graph, always: bool) -> list[Opened]:
    """Put operations in the place of functions that hold Linears; ``tidy`` is to follow.

    always: also where these gain too little to be worth it (decisions/0025-attention.md).
    """
    opened = []
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _WHOLE:
            try:
                opened.append(_open(graph, node, _WHOLE[node.target], always))
            except StaysWhole as why:
                node.meta[_WHY] = str(why)
    return opened


def _open(graph: fx.Graph, node: fx.Node, whole: _Whole, always: bool) -> Opened:
    query = value_of(node.args[0])
    tensors = [value for given in node.all_input_nodes if (value := value_of(given)) is not None]
    if query is None or any(
        t.is_nested or t.layout is not torch.strided or is_traceable_wrapper_subclass(t)
        for t in tensors
    ):
        raise StaysWhole("its tensors are of a class or layout of their own")
    on_gpu = query.is_cuda or stand_in() is not None
    if whole.native:
        given = arguments(node, *whole.body.__code__.co_varnames[: whole.body.__code__.co_argcount])
        if given.get("mask") is not None:
            raise StaysWhole(
                "its kernel takes masks in a way of its own: "
                "torch.backends.mha.set_fastpath_enabled(False) before the first call shows its "
                "layers"
            )
        if not (always or on_gpu):
            raise StaysWhole("on a CPU its kernel gains more than fusing")
    autocast = torch.is_autocast_enabled(query.device.type)
    if not always and on_gpu and (query.dtype.itemsize == 2 or autocast):
        raise StaysWhole("in 16 bit its operations gain less than they cost the host")
    readers = [(user.args[1], user) for user in node.users if user.target is operator.getitem]
    trace = Trace(graph, node, whole.parts)
    results: dict[Any, fx.Node] = {}
    with trace.opening():
        made = trace.run(whole.body)
        for index, old in readers or [(None, node)]:
            value = made if index is None else made[index]
            check_alike(value, old.meta.get("example_value"))
            results[index] = trace.node_of(value)
    nodes = trace.nodes
    for index, old in readers or [(None, node)]:
        old.replace_all_uses_with(results[index])
    erase(graph, [node, *(old for _, old in readers)])
    nodes += _offer_swapped(graph, results.get(0))
    return Opened(node.target, node.args, node.kwargs, dict(node.meta), nodes, results)


def _offer_swapped(graph: fx.Graph, result: fx.Node | None) -> list[fx.Node]:
    """Attention's rows (T B, E) in the order of (B, T, E), where the result of its out projection
    is turned to that: it then takes no copy, as the heads (B, H, T, D) lie so already."""
    users = [] if result is None else list(result.users)
    if result is None or len(users) != 1 or result.target != "view" or len(result.args) != 4:
        return []
    (turn,), linear, batch = users, result.args[0], result.args[2]
    if turn.target != "transpose" or turn.args[1:] not in ((0, 1), (1, 0)):
        return []
    assert isinstance(linear, fx.Node)
    (rows, *_) = linear.args
    while isinstance(rows, fx.Node) and rows.target in ("view", "reshape", "contiguous"):
        rows = rows.args[0]
    if not isinstance(rows, fx.Node) or rows.target not in ("permute", "transpose"):
        return []
    steps: list[tuple[str, tuple[Any, ...]]] = [("transpose", (1, 2)), ("flatten", (2,))]
    if rows.target == "transpose":  # of (B H, T, D)
        steps.insert(0, ("unflatten", (0, (batch, -1))))
    made: list[Any] = [rows.args[0]]
    with graph.inserting_before(linear):
        for name, arguments_ in steps:
            made.append(graph.call_method(name, (made[-1], *arguments_)))
    x, y = tensor_of(linear.args[0]), tensor_of(turn)
    made[-1].meta["example_value"] = x.view(*y.shape[:-1], x.shape[-1])
    linear.meta[SWAPPED] = turn, made[-1]
    return made[1:]


def close_unused(
    graph: fx.Graph, opened: Sequence[Opened], taken: Collection[fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Put back the functions with kernels of their own none of whose operations is taken; returns
    what stands for these."""
    made: dict[fx.Node, fx.Node] = {}
    for each in opened:
        if _WHOLE[each.target].native and not set(taken).intersection(each.nodes):
            each.args = fx.node.map_arg(each.args, lambda node: made.get(node, node))
            made.update(each.close(graph))
    return made


def tidy(graph: fx.Graph, opened: Sequence[Opened]) -> None:
    """Take out what was noted and is not read."""
    for each in opened:
        for node in reversed(each.nodes):
            if not node._erased and not node.users:
                graph.erase_node(node)
