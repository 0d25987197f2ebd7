"""Norms as PyTorch's functions, read from one node of a captured graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from epinorm.capture.purity import BATCH_NORM, arguments, value_of
from epinorm.capture.spelling import same_shape
from epinorm.chain import BatchNorm, GroupNorm, LayerNorm, Norm, RMSNorm, Rounding

_ROWS = ("input", "normalized_shape", "weight", "bias", "eps")
_NORMS: Mapping[Any, tuple[type[Norm], tuple[str, ...]]] = {
    **dict.fromkeys((F.layer_norm, torch.layer_norm), (LayerNorm, _ROWS)),
    **dict.fromkeys(
        (F.rms_norm, torch.rms_norm), (RMSNorm, ("input", "normalized_shape", "weight", "eps"))
    ),
    **dict.fromkeys(
        (F.group_norm, torch.group_norm),
        (GroupNorm, ("input", "num_groups", "weight", "bias", "eps")),
    ),
}
_INSTANCE = (
    *("input", "running_mean", "running_var", "weight", "bias"),
    *("use_input_stats", "momentum", "eps"),
)
_OTHER_NORMS = {
    torch.batch_norm: "torch.batch_norm, and not F.batch_norm",
    F.local_response_norm: "local response norm",
}


@dataclass(frozen=True)
class Running:
    """The nodes of a BatchNorm's running statistics, and how much of the batch's they take over."""

    mean: fx.Node
    variance: fx.Node
    momentum: float


@dataclass(frozen=True)
class NormRead:
    """A norm and the nodes of its weight and bias; None where a chain has no norm. running: what a
    BatchNorm changes."""

    norm: Norm | None
    weight: fx.Node | None = None
    bias: fx.Node | None = None
    running: Running | None = None


def read_norm_function(
    node: fx.Node, x: fx.Node, rounding: Rounding = "once"
) -> NormRead | str | None:
    """The norm of x that the node computes; a str says why it fits no chain; None: it is none."""
    if node.op != "call_function" or x not in node.all_input_nodes:
        return None
    if node.target is F.batch_norm:
        return _batch_norm(node, x, rounding)
    if node.target in _OTHER_NORMS:
        return f"its norm is {_OTHER_NORMS[node.target]}; chains have Layer-, RMS- or GroupNorm"
    if node.target is F.instance_norm:
        return _instance_norm(node, x)
    if node.target not in _NORMS:
        return None
    kind, names = _NORMS[node.target]
    given = arguments(node, *names)
    if given.get("input") is not x or node.all_input_nodes.count(x) != 1:
        return None
    eps: Any = given.get("eps", None if kind is RMSNorm else 1e-5)
    if not (isinstance(eps, (int, float)) or (eps is None and kind is RMSNorm)):
        return "its eps changes from call to call"
    if eps is not None and not eps >= 0:
        return f"its eps is {eps}"
    weight, bias = given.get("weight"), given.get("bias")
    if x in (weight, bias):
        return "its weight or bias is what it normalises"
    try:
        norm = _norm(kind, given, eps, value_of(x))
    except (TypeError, ValueError) as error:
        return str(error)
    return norm if isinstance(norm, str) else NormRead(norm, weight, bias)


def _instance_norm(node: fx.Node, x: fx.Node) -> NormRead | str:
    """InstanceNorm over the last of x's dimensions alone, (B, C, 1, ..., L): a LayerNorm of each
    row of L without a weight, whatever is taken for a sample or a channel.

    But it gives 0 for a row of equal numbers where eps is 0,
    and autocast leaves it in 16 bit.
    """
    given, value = arguments(node, *_INSTANCE), value_of(x)
    eps: Any = given.get("eps", 1e-5)
    if given.get("input") is not x or node.all_input_nodes != [x] or value is None:
        return "its InstanceNorm has weights of channels or keeps running statistics"
    if given.get("use_input_stats", True) is not True:
        return "its InstanceNorm is not by its input's own statistics"
    if not isinstance(eps, (int, float)) or not eps > 0:
        return "its InstanceNorm's eps is not above 0 at each call"
    if value.dim() < 3 or not same_shape(value.shape[2:-1], (1,) * (value.dim() - 3)):
        return "its InstanceNorm is over more than the last dimension"
    if value.dtype.itemsize == 2 and _may_be_under_autocast(node.graph):
        return "autocast leaves InstanceNorm in 16 bit, and chains' norms in fp32"
    return NormRead(LayerNorm(eps=eps))


def _may_be_under_autocast(graph: fx.Graph) -> bool:
    entered = graph.find_nodes(op="call_function", target=torch.amp.autocast_mode._enter_autocast)
    return torch._C._is_any_autocast_enabled() or bool(entered)


def _norm(kind: type[Norm], given: dict[str, Any], eps: Any, x: Any) -> Norm | str:
    if x is None:
        return "its input is no tensor"
    if kind is GroupNorm:
        if not isinstance(given["num_groups"], int):
            return "its num_groups changes from call to call"
        if x.dim() != 2:
            return (
                f"GroupNorm of {x.dim()}-dimensional input normalises dimension 1, which is not "
                "the linear layer's output; LayerNorm, or a flatten before, would"
            )
        return GroupNorm(given["num_groups"], eps=eps)
    shape = given["normalized_shape"]
    shape = [shape] if isinstance(shape, int) else list(shape)
    if len(shape) != 1:
        return f"its norm spans {len(shape)} dimensions; a chain's norm spans the last one"
    if not same_shape(shape, x.shape[-1:]):
        return f"its norm is over {shape[0]} features, its input has {x.shape[-1]}"
    return LayerNorm(eps=eps) if kind is LayerNorm else RMSNorm(eps=eps)


def _batch_norm(node: fx.Node, x: fx.Node, rounding: Rounding) -> NormRead | str:
    """A BatchNorm by the batch's own statistics, whose running ones are changed by tensors that the
    graph holds, as PyTorch's own layer has them."""
    given, value = arguments(node, *BATCH_NORM), value_of(x)
    if given.get("training", False) is not True:
        return "its norm is BatchNorm by running statistics, not over (M, N) in fp32"
    if rounding == "eager":
        return "BatchNorm by statistics of the batch is PyTorch's own under rounding='eager'"
    if value is None or value.dim() != 2:
        return "its norm is BatchNorm by statistics of the batch, of an input that is not (M, N)"
    weight, bias = given.get("weight"), given.get("bias")
    mean: Any = given.get("running_mean")
    variance: Any = given.get("running_var")
    if given.get("input") is not x or x in (weight, bias, mean, variance):
        return "its BatchNorm's parameters are what it normalises"
    eps, momentum = (
        given.get(name, default) for name, default in (("eps", 1e-5), ("momentum", 0.1))
    )
    if not isinstance(eps, (int, float)) or not eps >= 0:
        return f"its BatchNorm's eps is {eps}"
    norm = BatchNorm(eps=eps)
    if mean is None and variance is None:
        return NormRead(norm, weight, bias)
    if not isinstance(momentum, (int, float)):
        return "its BatchNorm's momentum changes from call to call, as momentum=None does"
    buffers = value_of(mean), value_of(variance)
    dtypes = {t.dtype for t in buffers if t is not None}
    if mean is variance or len(dtypes) > 1 or not all(_holds_statistics(t, value) for t in buffers):
        return "its BatchNorm's running statistics are no plain tensors of one value a channel"
    return NormRead(norm, weight, bias, Running(mean, variance, float(momentum)))


def _holds_statistics(running: Tensor | None, value: Tensor) -> bool:
    return (
        running is not None
        and running.dim() == 1
        and same_shape(running.shape, value.shape[-1:])
        and running.dtype in (value.dtype, torch.promote_types(value.dtype, torch.float32))
        and running.device == value.device
        and running.layout is torch.strided
        and not running.requires_grad
        and not is_traceable_wrapper_subclass(running)
    )
