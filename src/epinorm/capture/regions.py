"""Norms and activations written out by hand, recognised by what they compute.

A value that several operations use, and all of them towards one result, is the one entrance of a
region with one exit. The region is run in float64 on chosen values; where the result is a norm's or
an activation's to the last digits, it is that one, however it was spelt. Only operations of the
table below may take part, so the function is one of few kinds, and each constant that appears in it
is among the values that are tried.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from epinorm.capture.purity import changed_argument, storage_of, value_of
from epinorm.capture.spelling import computed
from epinorm.chain import LayerNorm, Norm, RMSNorm
from epinorm.chain.pointwise import DEFINITIONS, Pointwise

_MOST_NODES = 24
_WIDEST_NORM = 65536
_ENDS = torch.tensor([math.inf, -math.inf, math.nan], dtype=torch.float64)
_MOST_ROWS = 40

_CASTS = frozenset(("to", "float", "double", "half", "bfloat16", "type_as", "contiguous"))
_ELEMENTWISE = frozenset(
    (
        *("add", "iadd", "sub", "isub", "subtract", "rsub", "mul", "imul", "multiply", "neg"),
        *("truediv", "itruediv", "div", "divide", "true_divide", "reciprocal", "negative"),
        *("pow", "square", "sqrt", "rsqrt", "exp", "expm1", "log1p", "erf", "tanh", "sigmoid"),
        *("softplus", "relu", "relu6", "clamp", "clip", "hardtanh", "hardsigmoid", "silu", "gelu"),
        *("clamp_min", "clamp_max", "maximum", "minimum", "expit"),
    )
)
_REDUCTIONS = frozenset(("mean", "sum", "var", "var_mean", "norm", "linalg_vector_norm"))


def _name(node: fx.Node) -> str:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    name = name.strip("_") if node.op == "call_function" else name.rstrip("_")
    return "pow" if name == "ipow" else name


def _takes_part(node: fx.Node, inside: set[fx.Node]) -> bool:
    """Whether the node computes from the region's values and constants alone, by the table."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = _name(node)
    if name in _CASTS:
        value = value_of(node)
        is_floating = value is not None and value.dtype.is_floating_point
        return is_floating and bool(node.args) and node.args[0] in inside
    if any(given not in inside for given in node.all_input_nodes):
        return False
    if node.target is operator.getitem:
        return isinstance(node.args[1], int)
    return name in _ELEMENTWISE or (name in _REDUCTIONS and _over_rows(node))


def _over_rows(node: fx.Node) -> bool:
    """Whether a reduction is over the last dimension, which it keeps as one of size 1."""
    value = value_of(node.args[0]) if node.args else None
    if value is None or node.kwargs.get("dtype") is not None:
        return False
    place = 2 if _name(node) in ("norm", "linalg_vector_norm") else 1
    dim = node.kwargs.get("dim", node.args[place] if len(node.args) > place else None)
    last = (-1, value.dim() - 1 or -1)
    if isinstance(dim, (tuple, list)):
        dim = dim[0] if len(dim) == 1 else None
    return dim in last and (node.kwargs.get("keepdim") is True or True in node.args[2:])


def exits(entrance: fx.Node, has_readers: bool = False) -> Iterator[list[fx.Node]]:
    """Regions of growing size that only ``entrance`` leads into and only their last node out of;
    has_readers: others may read the entrance too."""
    inside, nodes, before = {entrance}, list[fx.Node](), {entrance}
    node = entrance.next
    while node.op != "root" and len(nodes) < _MOST_NODES:
        if any(given in inside for given in node.all_input_nodes):
            if not _takes_part(node, inside):
                if has_readers and inside.isdisjoint({*node.all_input_nodes} - {entrance}):
                    before.add(node)
                    node = node.next
                    continue
                return
            if _is_seen_elsewhere(node, before):
                return
            inside.add(node)
            nodes.append(node)
            looked_at = inside - {entrance} if has_readers else inside
            open_ones = [n for n in looked_at if any(user not in inside for user in n.users)]
            if open_ones == [node]:
                yield list(nodes)
        before.add(node)
        node = node.next


def _is_seen_elsewhere(node: fx.Node, before: set[fx.Node]) -> bool:
    """Whether the node changes in place what is read behind it by another name, as what a cast to
    the dtype that a tensor has gives. Of the name that it changes later readers read its result."""
    changed = changed_argument(node)
    if changed is None:
        return False
    names = [n for n in before if n is not changed and storage_of(n) == storage_of(node)]
    return any(user is not node and user not in before for n in names for user in n.users)


def _constants(nodes: Sequence[fx.Node]) -> list[float]:
    given = (c for node in nodes for c in (*node.args, *node.kwargs.values()))
    return sorted({float(c) for c in given if isinstance(c, (int, float)) and c == c})


def _run(nodes: Sequence[fx.Node], entrance: fx.Node, x: Tensor) -> Tensor | None:
    """The region's result for x in float64, its casts left out; None where it fails."""
    values: dict[Any, Any] = {entrance: x}

    def of(given: Any) -> Any:
        """A tensor as a copy, which an operation in place may change."""
        value = values.get(given, given)
        return value.clone() if isinstance(value, Tensor) else value

    try:
        for node in nodes:
            values[node] = of(node.args[0]) if _name(node) in _CASTS else computed(node, of)
    except (RuntimeError, TypeError, AttributeError, KeyError):
        return None
    result = values[nodes[-1]]
    return result if isinstance(result, Tensor) and result.dtype == torch.float64 else None


def _has_gradient_of(
    function: Callable[[Tensor], Tensor], nodes: Sequence[fx.Node], entrance: fx.Node, x: Tensor
) -> bool:
    """Whether the region's gradient at x (..., n) is the function's, which kinks tell apart."""
    with torch.inference_mode(False), torch.enable_grad():
        x = x.clone().requires_grad_()
        ours = _run(nodes, entrance, x)
        if ours is None or not ours.requires_grad:
            return False
        made = (ours, function(x))
        towards = torch.linspace(1, 2, x.shape[-1], dtype=x.dtype)
        a, b = (torch.autograd.grad((y * towards).sum(), x)[0] for y in made)
    # Where a gradient is a small difference, its parts are of the size of y / x. Detached: saved by
    # hooks, as here, a graph that no backward pass frees holds its results, and so itself.
    largest, largest_x = (t.detach().abs().amax(-1, keepdim=True) for t in (made[1], x))
    size = (largest / largest_x).nan_to_num()
    return _are_alike(a, b, 1e-9 * (size + b.abs().amax(-1, keepdim=True)))


def _are_alike(a: Tensor, b: Tensor, tolerance: Tensor) -> bool:
    """Whether two tensors of one shape differ by no more than that, and are NaN together."""
    return a.shape == b.shape and bool(
        (((a - b).abs() <= tolerance) | (a == b) | (a.isnan() & b.isnan())).all()
    )


def read_activation(nodes: Sequence[fx.Node], entrance: fx.Node) -> Pointwise | None:
    """The operation without tensors that the region computes; None for none of ours."""
    if any(_name(n) in _REDUCTIONS or n.target is operator.getitem for n in nodes):
        return None
    constants = _constants(nodes)
    kinks = [s * c + d for c in constants for s in (1, -1) for d in (-0.01, 0.0, 0.01)]
    grid = torch.linspace(-12, 12, 241, dtype=torch.float64)
    edges = [*kinks, 0.0, 1e-6, -1e-6, 30.0, 300.0]
    x = torch.cat([grid, torch.tensor(edges, dtype=torch.float64)])
    y, at_ends = _run(nodes, entrance, x), _run(nodes, entrance, _ENDS)
    if y is None or at_ends is None or not y.isfinite().all():
        return None
    # Written out, a function loses digits where it cancels: gelu's left tail.
    tolerance = 1e-13 * x.abs().clamp_min(1)
    for name, definition in DEFINITIONS.items():
        if definition.operand is None and all(
            v is not None for v in definition.parameters.values()
        ):
            function = Pointwise(name)
            if (
                _are_alike(y, function(x), tolerance)
                and _are_alike(at_ends, function(_ENDS), torch.zeros_like(_ENDS))
                and _has_gradient_of(function, nodes, entrance, x)
            ):
                return function
    return None


def read_norm(nodes: Sequence[fx.Node], entrance: fx.Node) -> Norm | None:
    """The norm over rows, without weight and bias, that the region computes; None for none."""
    value = value_of(entrance)
    if value is None or not any(_name(n) in _REDUCTIONS for n in nodes):
        return None
    n = value.shape[-1] if value.dim() else 0
    if not isinstance(n, int) or not 1 < n <= _WIDEST_NORM:
        return None
    constants = _constants(nodes)
    x = _rows(n, constants).view(*[1] * (value.dim() - 2), -1, n)
    y = _run(nodes, entrance, x)
    if y is None:
        return None
    for eps, (norm, function) in itertools.product(
        [c for c in constants if 0 < c < 1] or [0.0], _NORMS.items()
    ):
        expected = function(x, (n,), eps=eps)
        if _are_alike(y, expected, 1e-10 * expected.abs().amax(-1, keepdim=True)):
            of_rows = partial(function, normalized_shape=(n,), eps=eps)
            return norm(eps=eps) if _has_gradient_of(of_rows, nodes, entrance, x) else None
    return None


_NORMS: Mapping[Any, Any] = {RMSNorm: F.rms_norm, LayerNorm: F.layer_norm}


def _rows(n: int, constants: Sequence[float]) -> Tensor:
    """Rows of sizes from where a constant (an eps, a bound) is all to where it is nothing, with
    means of their own, and one of zeros."""
    edges = {abs(c) for c in constants if c} | {1e-6, 1e9}
    first, last = math.log10(min(edges)) - 1, math.log10(max(edges)) + 1
    exponents = torch.arange(first, last, max(1.0, (last - first) / _MOST_ROWS))
    size = torch.cat([10.0 ** exponents.double(), torch.zeros(1)])
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(len(size), n, generator=generator, dtype=torch.float64)
    mean = torch.tensor([0.5, -0.3, 1, 0, 2, -1, 0.1, 0.7], dtype=torch.float64)
    return (x + mean.repeat(len(size))[: len(size), None]) * size[:, None]
