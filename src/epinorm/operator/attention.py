"""Attention in fp32 by products in TF32, as PyTorch's library holds it.

``attention`` is softmax(q kᵀ · scale) v of query (B, H, M, D), key and value (B, H, N, D), and the
logarithm (base 2) of each query's sum (B, H, M), less a number that the backend may choose;
``attention_backward`` reads both. Neither keeps anything of size M N. On a GPU they are
epinorm.backends.cuda.attention, elsewhere these formulas as they stand. ``attend`` is the same past
the dispatcher, for graphs that nothing compiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from epinorm.backends.cuda.attention import rows_first
from epinorm.backends.memo import cleared_with, memo
from epinorm.operator.autograd import SingleLevel
from epinorm.operator.schema import library
from epinorm.operator.undisturbed import untraced, wants_gradient
from epinorm.precision import product_precision
from epinorm.said import log_once

_LOG2_E = 1 / math.log(2)
_READ = "Tensor query, Tensor key, Tensor value"

for _schema in (
    f"attention({_READ}, float scale) -> (Tensor, Tensor)",
    f"attention_backward(Tensor grad, {_READ}, Tensor mixed, Tensor lse, float scale)"
    " -> (Tensor, Tensor, Tensor)",
):
    library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
attention = torch.ops.epinorm.attention.default
_backward_operator = torch.ops.epinorm.attention_backward.default


@torch.library.impl(library, "attention", "CPU")
def _forward(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = query @ key.mT * scale
    lse = torch.logsumexp(scores, -1)
    mixed = torch.exp(scores - lse[..., None]) @ value
    return rows_first(mixed).copy_(mixed), lse * _LOG2_E


@torch.library.impl(library, "attention_backward", "CPU")
def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixed: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    p = torch.exp(query @ key.mT * scale - lse[..., None] / _LOG2_E)
    dp = grad @ value.mT
    ds = p * (dp - (grad * mixed).sum(-1, keepdim=True)) * scale
    made = ds @ key, ds.mT @ query, p.mT @ grad
    dq, dk, dv = (rows_first(t).copy_(t) for t in made)
    return dq, dk, dv


@torch.library.impl(library, "attention", "CUDA")
def _forward_cuda(*arguments: Any) -> tuple[Tensor, Tensor]:
    from epinorm.backends.cuda.attention.launch import run_forward  # Triton is not everywhere

    return run_forward(*arguments)


@torch.library.impl(library, "attention_backward", "CUDA")
def _backward_cuda(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    from epinorm.backends.cuda.attention.launch import run_backward

    return run_backward(*arguments)


@torch.library.register_fake("epinorm::attention", lib=library)
def _fake(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return rows_first(query), query.new_empty(query.shape[:3])


@torch.library.register_fake("epinorm::attention_backward", lib=library)
def _fake_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return rows_first(query), rows_first(key), rows_first(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _grad_lse: Tensor | None) -> tuple[Any, ...]:
    return (*_backward_operator(grad, *ctx.saved_tensors, ctx.scale), None)


torch.library.register_autograd(
    "epinorm::attention", _differentiate, setup_context=_save, lib=library
)


class _Attend(SingleLevel):
    """``attention`` where nothing but autograd waits for it."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        mixed, lse = passes(query.is_cuda)[0](query, key, value, scale)
        ctx.save_for_backward(query, key, value, mixed, lse)
        ctx.scale = scale
        return mixed

    @staticmethod
    @untraced
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        *tensors, mixed, lse = ctx.saved_tensors
        if (
            product_precision(grad.dtype, grad.device.type) != "high"  # any more
            or torch.is_grad_enabled()  # create_graph
            or forward_ad._current_level >= 0
            or torch._C._functorch.peek_interpreter_stack() is not None
            or torch._C._functorch.is_legacy_batchedtensor(grad)  # is_grads_batched
        ):
            return (*by_products(grad, tensors, ctx.needs_input_grad, ctx.scale), None)
        return (*_backward_operator(grad, *tensors, mixed, lse, ctx.scale), None)


def by_products(
    grad: Tensor, tensors: list[Tensor], wanted: tuple[bool, ...], scale: float
) -> list[Tensor | None]:
    """The gradients by PyTorch's own products, for which they can be differentiated again, as those
    of its memory-efficient kernel cannot."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad(), torch.autocast(grad.device.type, enabled=False):
        query, key, value = fresh = [t.view_as(t) for t in tensors]  # one may come from another
        mixed = torch.softmax(query @ key.mT * scale, -1) @ value
        leaves = [t for t, want in zip(fresh, wanted, strict=False) if want]
        found = iter(torch.autograd.grad(mixed, leaves, grad, create_graph=create_graph))
    return [next(found) if want else None for want in wanted[:3]]


@memo()
def passes(on_gpu: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What computes ``attention`` and its gradient."""
    if not on_gpu:
        return _forward, _backward
    from epinorm.backends.cuda.attention.launch import run_backward, run_forward

    return run_forward, run_backward


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """``attention`` of plain tensors for which nothing but autograd waits, if it ``compiles``."""
    if wants_gradient(query, key, value):
        mixed: Tensor = _Attend.apply(query, key, value, scale)
    else:
        mixed, _ = passes(query.is_cuda)[0](query, key, value, scale)
    return mixed


_tried: dict[tuple[torch.device, int, bool], bool] = {}
cleared_with(_tried.clear)


def compiles(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether there is a Triton here, and a compiler for its launches, that the kernels run with;
    those of the backward pass too where autograd wants one.

    That is tried at the first call of a device and a width, on its first sample; not while a CUDA
    graph is captured, which would hold it. Where memory is short for it, it is tried again later.
    """
    training = wants_gradient(query, key, value)
    kind = query.device, query.shape[-1], training
    known = _tried.get(kind)
    if known is None:
        if query.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        known = _try([t.detach()[:1] for t in (query, key, value)], training)
        if known is not None:
            _tried[kind] = known
    return bool(known)


def _try(tensors: list[Tensor], training: bool) -> bool | None:
    """None: memory was short."""
    try:
        forward, backward = passes(tensors[0].is_cuda)
        with torch.no_grad():
            mixed, lse = forward(*tensors, 1.0)
            if training:
                backward(mixed, *tensors, mixed, lse, 1.0)
    except Exception as error:  # Triton's, a C compiler's, or an import's
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            return None
        said = str(error).strip().splitlines() or [""]
        log_once(f"fp32 attention stays PyTorch's: {type(error).__name__}: {said[0]}")
        return False
    return True
