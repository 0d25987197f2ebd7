"""Operands of a chain that do not have its result's shape: which may be, and how they are given."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from epinorm.capture.purity import value_of
from epinorm.capture.spelling import is_row, is_rows_parts, same_shape, sizes_of
from epinorm.operator.calls import own_view
from epinorm.operator.undisturbed import is_distributed


def holds_whole_rows(given: Tensor, value: Tensor) -> bool:
    """Whether ``given`` holds whole rows, to be expanded to those of ``value``: gates of samples,
    as diffusion transformers have, and of positions."""
    pairs = zip(reversed(given.shape), reversed(value.shape), strict=False)
    return (
        1 < given.dim() <= value.dim()
        and same_shape(given.shape[-1:], value.shape[-1:])
        and not same_shape(given.shape, value.shape)
        and all((isinstance(a, int) and a == 1) or same_shape((a,), (b,)) for a, b in pairs)
        and not is_distributed((given, value))
        and lies_in_order(given)
    )


def lies_in_order(given: Tensor) -> bool:
    """Whether its dimensions lie as those of rows; of a transposed operand a sum has the layout."""
    pairs = zip(sizes_of(given.stride()), sizes_of(given.shape), strict=True)
    strides = [stride for stride, size in pairs if size != 1]
    return strides == sorted(strides, reverse=True)


def holds_channels(given: Tensor, value: Tensor, n: Any, is_turned: bool) -> bool:
    """Whether ``given``, of no more dimensions than ``value``, holds a number for each channel of
    rows of n or of parts of these, or one for all of them. is_turned: the parts' order is another.
    """
    return given.dim() <= value.dim() and (
        is_row(given, value)
        or (not is_turned and is_rows_parts(given, value, n))
        or _is_one_for_all(given, value, n)
    )


def _is_one_for_all(given: Tensor, value: Tensor, n: Any) -> bool:
    """Whether it is one number, such as a gate that is learned, to be repeated for n channels. Of
    another dtype it would have no say in the result's, as one for each channel has."""
    return (
        all(isinstance(size, int) and size == 1 for size in given.shape)
        and (given.dtype, given.device) == (value.dtype, value.device)  # a number may be elsewhere
        and isinstance(n, int)
        and n > 0
        and not is_distributed((given, value))
    )


def holds_one_each(given: Tensor, value: Tensor) -> bool:
    """Whether ``given`` holds a number for each row, or for each sample, as stochastic depth's."""
    return (
        given.dim() == value.dim() > 1
        and given.shape[-1] == 1
        and all(
            a == 1 or same_shape((a,), (b,)) for a, b in zip(given.shape, value.shape, strict=True)
        )
    )


def may_ask_gradient(node: fx.Node) -> bool:
    """Whether a gradient may come to what the node makes where gradients are enabled, whatever the
    mode is now: if it is made of a floating tensor, or a complex one, that the graph is given."""
    waiting, seen = [node], set[fx.Node]()
    while waiting:
        each = waiting.pop()
        value = value_of(each)
        if each in seen or (value is not None and not _may_have_gradient(value.dtype)):
            continue
        if value is not None and each.op in ("placeholder", "get_attr"):
            return True
        seen.add(each)
        waiting += each.all_input_nodes
    return False


def _may_have_gradient(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def as_matrix(x: Tensor) -> Tensor:
    """x (..., K) as (M, K)."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def rows_like(operand: Tensor, x: Tensor, n: int) -> Tensor:
    """An operand whose rows of n are those of x (..., K), with x's leading dimensions."""
    return operand.reshape(*x.shape[:-1], n)


def as_own(result: Tensor) -> Tensor:
    """A view of a chain's result, which in eager is none and so may be changed in place by what has
    a gradient, though it was made without one. Where it has one the chain may have saved it, and
    has to see changes."""
    if result.requires_grad or type(result) is not Tensor or torch.compiler.is_compiling():
        return result
    return own_view(result, result.shape)


def expanded_like(operand: Tensor, x: Tensor, n: int) -> Tensor:
    """An operand that broadcasts as one of rows of n, with x's leading dimensions."""
    return operand.expand(*x.shape[:-1], n).contiguous()


def one_each(operand: Tensor, x: Tensor) -> Tensor:
    """Numbers of samples or rows, (B, 1, ..., 1), as one for each row of x (..., K): (..., 1)."""
    return operand.expand(*x.shape[:-1], 1)
