"""Attention in fp32 by products in TF32, as PyTorch's library holds it.

``attention`` is softmax(q kᵀ · scale) v of query (B, H, M, D), key and value (B, H, N, D), and the
logarithm (base 2) of each query's sum (B, H, M), less a number that the backend may choose;
``attention_backward`` reads both. Neither keeps anything of size M N. On a GPU they are
epinorm.backends.cuda.attention, elsewhere these formulas as they stand.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from epinorm.operator.schema import library

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


def _rows_first(like: Tensor) -> Tensor:
    """An empty tensor in the order (B, S, H, D), as PyTorch lays attention's result out."""
    turned = like.transpose(1, 2)
    return torch.empty_like(turned, memory_format=torch.contiguous_format).transpose(1, 2)


@torch.library.impl(library, "attention", "CPU")
def _forward(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = query @ key.mT * scale
    lse = torch.logsumexp(scores, -1)
    mixed = torch.exp(scores - lse[..., None]) @ value
    return _rows_first(mixed).copy_(mixed), lse * _LOG2_E


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
    dq, dk, dv = (_rows_first(t).copy_(t) for t in made)
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
    return _rows_first(query), query.new_empty(query.shape[:3])


@torch.library.register_fake("epinorm::attention_backward", lib=library)
def _fake_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _rows_first(query), _rows_first(key), _rows_first(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _grad_lse: Tensor | None) -> tuple[Any, ...]:
    return (*_backward_operator(grad, *ctx.saved_tensors, ctx.scale), None)


torch.library.register_autograd(
    "epinorm::attention", _differentiate, setup_context=_save, lib=library
)
