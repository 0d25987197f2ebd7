"""How a captured graph spells what a chain is made of: tables, and functions that read one node.

Dynamo has looked through modules and Python already: what is left are PyTorch's functions, Python's
operators and methods of tensors, in each of their spellings.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

from epinorm.capture.purity import arguments, changed_argument, value_of
from epinorm.chain.pointwise import Pointwise, of_call

_nn: Any = torch._C._nn
_SMALLEST = torch.finfo(torch.float32).tiny

_NEGATIONS = (operator.neg, torch.neg, torch.negative)
_NAMES_OF = {
    "add": ("add", "iadd"),
    "sub": ("sub", "isub", "subtract"),
    "mul": ("mul", "imul", "multiply"),
    "div": ("truediv", "itruediv", "div", "divide", "true_divide"),
}
_BINARY: Mapping[Any, str] = {
    target: kind
    for kind, names in _NAMES_OF.items()
    for name in names
    for target in (name, getattr(operator, name, None), getattr(torch, name, None))
    if target is not None
}
_DROPOUTS = (F.dropout, torch.dropout, F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d)
_VIEWS: frozenset[Any] = frozenset(
    (
        *("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous"),
        *("view_as", "reshape_as"),
        *(torch.reshape, torch.flatten, torch.unflatten, torch.squeeze, torch.unsqueeze),
    )
)
_CASTS = ("to", "type_as", "float", "double", "half", "bfloat16", "type")
_LINEARS = (F.linear, _nn.linear)
_PRODUCTS = (operator.matmul, torch.matmul, torch.mm, "matmul", "mm", "__matmul__")


@dataclass(frozen=True)
class Linear:
    """x (..., K) times weight (N, K), plus bias; ``nodes``: what of the graph that is.

    turned: the weight is kept as (K, N).
    """

    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    nodes: tuple[fx.Node, ...]
    turned: bool = False


def name_of(node: fx.Node) -> str:
    """What a reader calls the node's operation."""
    if isinstance(node.target, str):
        return node.target
    return getattr(node.target, "__name__", str(node.target))


_CHECKPOINTING = ("tag_activation_checkpoint", "run_checkpointed")
"""Dynamo's operator, and what a graph that runs as eager does has in its place."""


def checkpoints(gm: fx.GraphModule) -> list[tuple[fx.Node, fx.GraphModule]]:
    """The nodes that checkpoint a captured function, each with that."""
    functions = (node for node in gm.graph.nodes if node.op == "call_function")
    found = [node for node in functions if name_of(node) in _CHECKPOINTING]
    return [(node, getattr(gm, str(node.args[0].target))) for node in found]


def same_shape(a: Any, b: Any) -> bool:
    """Whether two shapes are known to be equal, without adding a guard."""
    return len(a) == len(b) and all(
        i is j or (statically_known_true(i == j)) for i, j in zip(a, b, strict=True)
    )


def computed(node: fx.Node, of: Callable[[Any], Any]) -> Any:
    """What the operation of a node makes of other arguments, each what ``of`` gives for its own."""
    args: Any = fx.node.map_aggregate(node.args, of)
    kwargs: Any = fx.node.map_aggregate(dict(node.kwargs), of)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def sizes_of(shape: Sequence[Any]) -> list[int]:
    """The sizes of a shape; of one that changes, what it was at the call that was captured."""
    hints = [size if isinstance(size, int) else size.node.hint for size in shape]
    return [1 if hint is None else int(hint) for hint in hints]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _base_name(node: fx.Node) -> Any:
    """The node's function, or its method's name as it is without changing in place."""
    if node.op != "call_method":
        return node.target
    name = str(node.target)
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def read_linear(node: fx.Node) -> Linear | None:
    """The linear layer that the node computes; None where it is none."""
    if node.op not in ("call_function", "call_method") or node.kwargs.get("out") is not None:
        return None
    target = node.target
    if target in _LINEARS:
        given = arguments(node, "input", "weight", "bias")
        return _linear(given["input"], given["weight"], given.get("bias"), (node,))
    if target in (torch.addmm, "addmm"):
        return _addmm(node)
    if target in _PRODUCTS:
        given = arguments(node, "input", "other")
        x, right = given.pop("input"), given.pop("mat2", None) or given.pop("other", None)
        return None if given else _product(x, right, None, node)
    if target is torch.einsum or target is torch.functional.einsum:
        return _einsum(node)
    return None


def _linear(x: Any, weight: Any, bias: Any, nodes: tuple[fx.Node, ...]) -> Linear | None:
    there = value_of(x) is not None and (bias is None or _dims(bias) in (0, 1))
    return Linear(x, weight, bias, nodes) if there and _dims(weight) == 2 else None


def _dims(node: Any) -> int | None:
    """How many dimensions its tensor has; None where it is none."""
    value = value_of(node)
    return None if value is None else value.dim()


def _transposed(node: Any) -> fx.Node | None:
    """W of a node that is W transposed."""
    if not isinstance(node, fx.Node) or not node.args:
        return None
    swapped = node.args[1:] in ((0, 1), (1, 0), (-1, -2), (-2, -1)) and not node.kwargs
    permuted = node.args[1:] in ((1, 0), (-1, -2)) and not node.kwargs
    turned = (
        (node.op == "call_method" and node.target == "t")
        or node.target is torch.t
        or (node.target is getattr and node.args[1] in ("T", "mT"))
        or node.target in (torch.ops.aten.numpy_T, torch.ops.aten.mT)  # the same since 2.14
        or (node.target in ("transpose", torch.transpose, "swapaxes") and swapped)
        or (node.target == "permute" and permuted)
    )
    inner = node.args[0]
    return inner if turned and _dims(inner) == 2 and isinstance(inner, fx.Node) else None


def _product(x: Any, right: Any, bias: Any, node: fx.Node) -> Linear | None:
    weight = _transposed(right)
    if weight is not None:
        return _linear(x, weight, bias, (node,))
    found = _linear(x, right, bias, (node,)) if _is_parameter(right) else None
    return None if found is None else replace(found, turned=True)


def _is_parameter(node: Any) -> bool:
    value = value_of(node)
    return isinstance(value, torch.nn.Parameter) and isinstance(node, fx.Node)


def _addmm(node: fx.Node) -> Linear | None:
    given = arguments(node, "input", "mat1", "mat2")
    bias, x, right = given.get("input"), given.get("mat1"), given.get("mat2")
    if any(given.pop(scale, 1) != 1 for scale in ("beta", "alpha")):
        return None
    if len(given) > 3 or len(node.args) > 3:
        return None
    return _product(x, right, bias, node) if _dims(bias) == 1 else None


def _einsum(node: fx.Node) -> Linear | None:
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or "->" not in equation:
        return None
    inputs, output = equation.replace(" ", "").split("->")
    if inputs.count(",") != 1:
        return None
    x, weight = inputs.split(",")
    rows = x[:-1]
    if len(weight) != 2 or not x or x[-1] != weight[1] or output != rows + weight[0]:
        return None
    letters = rows.replace("...", "") + weight
    if len(set(letters)) != len(letters):
        return None
    given, of = map(value_of, operands)
    if given is None or of is None or not same_shape(given.shape[-1:], of.shape[1:]):
        return None  # a size of 1 is broadcast
    return _linear(operands[0], operands[1], None, (node,))


def is_view(node: fx.Node) -> bool:
    """Whether the node is a view, or a copy, that keeps the order of values, by sizes alone."""
    named = _base_name(node) in _VIEWS and node.target not in ("view_as", "reshape_as")
    return named and not _names_dtype(node)


def _names_dtype(node: fx.Node) -> bool:
    """Whether it is ``view(dtype)``, which gives no gradients, of the same dtype too."""
    return any(isinstance(each, torch.dtype) for each in (*node.args, *node.kwargs.values()))


def is_view_of_rows(node: fx.Node, x: fx.Node) -> bool:
    """Whether the node is x with other leading dimensions, in the same order, and whole rows."""
    last = [t.shape[-1:] for t in _before_and_after(node, x)]
    return bool(last) and last[0] != () and same_shape(*last)


def is_view_of_parts(node: fx.Node, x: fx.Node, n: Any) -> bool:
    """Whether the node is x, of rows of n in its last dimensions, with these divided or put
    together anew, as into heads."""
    tensors = _before_and_after(node, x)
    return bool(tensors) and all(_rows_in(t.shape, n) for t in tensors)


def _before_and_after(node: fx.Node, x: fx.Node) -> tuple[Tensor, ...]:
    """x's tensor and the node's, where that is a view of x alone, of its dtype, and of no size that
    x itself gives, as ``x.view_as(x)``."""
    if _base_name(node) not in _VIEWS or node.args[:1] != (x,) or _names_dtype(node):
        return ()
    if x in pytree.tree_leaves((node.args[1:], node.kwargs)):
        return ()
    before, after = value_of(x), value_of(node)
    alike = before is not None and after is not None and before.dtype == after.dtype
    return (before, after) if alike else ()  # type: ignore[return-value]


def _rows_in(shape: Sequence[Any], n: Any) -> bool:
    """Whether some last dimensions of a shape are rows of n, and no row has another's part."""
    size = 1
    for part in reversed(shape):
        if not isinstance(part, int) or not isinstance(n, int) or size >= n:
            break
        size *= part
    return size == n


def is_cast(node: fx.Node, x: fx.Node) -> bool:
    """Whether the node is x in another floating dtype or in its own, on the same device."""
    if node.op != "call_method" or node.target not in _CASTS or node.args[0] is not x:
        return False
    before, after = value_of(x), value_of(node)
    return (
        before is not None
        and after is not None
        and after.dtype.is_floating_point
        and after.dtype.itemsize > 1
        and before.device == after.device
        and "memory_format" not in node.kwargs
    )


def is_dropout(node: fx.Node) -> bool | None:
    """True for dropout that drops, False for one that does nothing, None for anything else."""
    if node.op != "call_function" or node.target not in _DROPOUTS:
        return None
    given = arguments(node, "input", "p", "training", "inplace")
    p = given.get("p", 0.5)
    default = node.target not in (F.alpha_dropout, F.feature_alpha_dropout)
    return not (given.get("training", default) is False or (_is_number(p) and p == 0))


def read_pointwise(node: fx.Node, x: fx.Node) -> Pointwise | None:
    """The operation that the node applies to x and to constants; None where it is none of ours."""
    if node.op not in ("call_function", "call_method"):
        return None
    target = _base_name(node)
    if node.all_input_nodes != [x]:
        return None
    if target in _BINARY:
        return _with_constant(node, x, _BINARY[target])
    first = node.args[0] if node.args else node.kwargs.get("input")
    if first is not x:
        return None
    if target in _NEGATIONS or target in ("neg", "negative"):
        return Pointwise("scale", (-1.0,))
    return of_call(target, node.args, node.kwargs)


def _operands_of(node: fx.Node) -> tuple[Any, Any, Any] | None:
    """The two operands of a sum, difference, product or quotient, and ``alpha``."""
    alpha = node.kwargs.get("alpha", 1)
    if set(node.kwargs) - {"alpha", "other", "input"} or not _is_number(alpha):
        return None
    both = (*node.args, *(node.kwargs[k] for k in ("input", "other") if k in node.kwargs))
    return (*both, alpha) if len(both) == 2 else None


def _with_constant(node: fx.Node, x: fx.Node, kind: str) -> Pointwise | None:
    """x and a number, or x and itself."""
    operands = _operands_of(node)
    if operands is None:
        return None
    left, right, alpha = operands
    if left is x and right is x:
        return Pointwise("scale", (2.0,)) if kind == "add" and alpha == 1 else None
    other, x_is_left = (right, True) if left is x else (left, False)
    if not _is_number(other):
        return None
    c = float(other) * (alpha if x_is_left else 1)
    if c != c:
        return None
    if kind == "mul":
        return Pointwise("scale", (c,))
    if kind == "div":
        # PyTorch's CUDA kernel multiplies by the reciprocal too, its CPU kernel divides: the same
        # but for rounding where that is a normal number. c / x is another function.
        is_normal = x_is_left and _SMALLEST <= abs(c) <= 1 / _SMALLEST
        return Pointwise("scale", (1.0 / c,)) if is_normal else None
    if not x_is_left and (alpha != 1 or kind == "sub"):
        return None
    return Pointwise("add", (c if kind == "add" else -c,))


def read_binary(node: fx.Node, x: fx.Node) -> tuple[str, fx.Node] | None:
    """ "add", "mul" or "sub" and the tensor that x is added to, multiplied with or loses."""
    kind = _BINARY.get(_base_name(node)) if node.op in ("call_function", "call_method") else None
    operands = _operands_of(node) if kind in ("add", "mul", "sub") else None
    if kind is None or operands is None or operands[2] != 1:
        return None
    left, right, _ = operands
    if (left is x) == (right is x) or changed_argument(node) not in (None, x):
        return None
    if kind == "sub" and right is x:
        return None
    other = right if left is x else left
    return (kind, other) if isinstance(value_of(other), Tensor) else None


def read_scaled(node: fx.Node, x: fx.Node) -> tuple[float, float | fx.Node] | None:
    """c and the number or tensor to which the node adds c x, as ``1 - x`` or ``torch.add(r, x,
    alpha=c)``; None for anything else, and for what ``read_binary`` reads."""
    if node.op not in ("call_function", "call_method"):
        return None
    is_turned = node.target is torch.rsub
    kind = "sub" if is_turned else _BINARY.get(_base_name(node))
    operands = _operands_of(node) if kind in ("add", "sub") else None
    if operands is None or changed_argument(node) is not None:
        return None
    *both, alpha = operands
    left, right = reversed(both) if is_turned else both
    c = float(-alpha if kind == "sub" else alpha)
    if right is not x or left is x or c == 1 or not math.isfinite(c):
        return None
    if _is_number(left):
        return (c, float(left)) if left == left and node.all_input_nodes == [x] else None
    return (c, left) if value_of(left) is not None else None


def is_row(given: Tensor, value: Tensor) -> bool:
    """Whether ``given`` holds one value for each of the last dimension of ``value``."""
    if not given.dim() or not same_shape(given.shape[-1:], value.shape[-1:]):
        return False
    alone = all(isinstance(n, int) and n == 1 for n in given.shape[:-1])
    return alone and not (value.dim() > 1 and same_shape(given.shape, value.shape))


def is_rows_parts(given: Tensor, value: Tensor, n: Any) -> bool:
    """Whether ``given`` holds one value for each of the last dimensions of ``value``, rows of n."""
    count = given.dim()
    return 1 < count < value.dim() and (
        same_shape(given.shape, value.shape[-count:]) and given.numel() == n
    )
