"""The operation as functions: ``linear_norm``, and ``linear`` where there is no norm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from epinorm.chain import Chain, Norm, Rounding
from epinorm.chain.pointwise import PointwiseLike
from epinorm.chain.reference import Results
from epinorm.operator.dispatch import call, caller_of
from epinorm.problem import Strategy

Pointwise = str | PointwiseLike | Iterable[PointwiseLike]


class _Options(TypedDict, total=False):
    """Of both overloads, as the function itself has them."""

    norm_weight: Tensor | None
    norm_bias: Tensor | None
    pre: Pointwise
    post: Pointwise
    operands: Sequence[Tensor]
    rounding: Rounding
    strategy: Strategy
    strict: bool


@overload
def linear_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, norm: Norm,
    return_sum: Literal[False] = False, **options: Unpack[_Options],
) -> Tensor: ...  # fmt: skip


@overload
def linear_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, norm: Norm,
    return_sum: Literal[True], **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def linear_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    pre: Pointwise = (),
    post: Pointwise = (),
    operands: Sequence[Tensor] = (),
    return_sum: bool = False,
    rounding: Rounding = "once",
    strategy: Strategy = "auto",
    strict: bool = False,
) -> Results:
    """Compute ``post(norm(pre(x @ weight.T + bias)))`` as one operation.

    x is (..., K), and (M, K) for GroupNorm; weight (N, K); bias, norm_weight and norm_bias (N,)
    or None; operands the tensors that ``pre`` and ``post`` take, in their order: (N,) for
    ``mul_channel`` and ``add_channel``, the output's shape for ``add_residual``, (..., 1) for
    ``mul_row``, which gives that no gradient. All of one floating dtype and on one device; returns
    (..., N) of that dtype. ``dropout(p)`` drops at each call, an nn.Dropout while it is in
    training; what it keeps is decided by a seed, an int64 of shape (1,) that is drawn from
    PyTorch's generator, or all are given among operands, in place:
    equal seeds drop equally. Under autocast dtypes follow
    PyTorch's layers. ``return_sum``: return ``(y, s)`` with ``s = pre(x @ weight.T + bias)``, the
    residual stream of a pre-norm transformer; autograd knows s as a result beside y, not on the way
    to it. ``rounding``: in 16 bit, "once" rounds y alone;
    "eager" the linear's output, the norm's and that of each operation, as PyTorch's own layers do:
    less accurate, and what they give but for sums in another order.

    Raises what PyTorch's own layers raise for shapes, dtypes and devices that do not fit;
    ValueError or TypeError for an unknown operation or rounding; RuntimeError where ``strategy``
    cannot serve the call, or where ``strict`` and nothing faster than PyTorch does.
    """
    if not isinstance(operands, (list, tuple)):
        raise TypeError(f"operands must be a list of Tensors, not {type(operands).__name__}")
    chain = _chain_text(norm, pre, post, rounding, return_sum)
    return apply_chain(x, weight, bias, norm_weight, norm_bias, operands, chain, strategy, strict)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    post: Pointwise = (),
    operands: Sequence[Tensor] = (),
    strategy: Strategy = "auto",
    strict: bool = False,
) -> Tensor:
    """Compute ``post(x @ weight.T + bias)`` as one operation: fp32 on the tensor cores, as accurate
    as PyTorch's setting says.

    x is (..., K), weight (N, K), bias (N,) or None, operands as for ``linear_norm``; returns
    (..., N). Raises as ``linear_norm`` does.
    """
    chain = _chain_text(None, (), post, "once", False)
    y = apply_chain(x, weight, bias, None, None, operands, chain, strategy, strict)
    assert isinstance(y, Tensor)
    return y


def _chain_text(
    norm: Norm | None, pre: Pointwise, post: Pointwise, rounding: Rounding, return_sum: bool
) -> str:
    # Texts alone may be remembered: a module's constants can change between calls.
    # Dynamo traces through a cache, and warns of it each time.
    facts: Any = norm, pre, post, rounding, return_sum
    are_texts = (isinstance(pre, str) or pre == ()) and (isinstance(post, str) or post == ())
    if are_texts and not torch.compiler.is_compiling():
        return _known_chain_text(*facts)
    return str(Chain.build(*facts))


@lru_cache(maxsize=1024)
def _known_chain_text(*facts: Any) -> str:
    return str(Chain.build(*facts))


def apply_chain(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    operands: Sequence[Tensor],
    chain: str,
    strategy: Strategy = "auto",
    strict: bool = False,
) -> Results:
    """``linear_norm`` for a chain that is already canonical text: the path of modules."""
    if not isinstance(x, Tensor):
        if has_torch_function_unary(x):  # torch.fx traces with a stand-in
            return handle_torch_function(
                *(apply_chain, (x,), x, weight, bias, norm_weight, norm_bias, operands, chain),
                *(strategy, strict),
            )
        raise TypeError(f"x must be a Tensor, not {type(x).__name__}")
    if torch.compiler.is_compiling():
        return call(
            *(x, weight, bias, norm_weight, norm_bias, tuple(operands), chain, strategy, strict)
        )
    caller = caller_of(chain, strategy, strict)
    return caller(x, weight, bias, norm_weight, norm_bias, tuple(operands))
