"""Attention in fp32 by products in TF32, as PyTorch's library holds it.

``attention`` is softmax(q kᵀ · scale) v of query (B, H, M, D), key and value (B, H, N, D), and the
logarithm (base 2) of each query's sum (B, H, M); nothing of size M N is kept, and it has no
gradients. On a GPU it is epinorm.backends.cuda.attention, elsewhere these formulas as they stand.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from epinorm.operator.schema import library

_LOG2_E = 1 / math.log(2)

library.define(
    "attention(Tensor query, Tensor key, Tensor value, float scale) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
attention = torch.ops.epinorm.attention.default


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


@torch.library.impl(library, "attention", "CUDA")
def _forward_cuda(*arguments: Any) -> tuple[Tensor, Tensor]:
    from epinorm.backends.cuda.attention.launch import run_forward  # Triton is not everywhere

    return run_forward(*arguments)


@torch.library.register_fake("epinorm::attention", lib=library)
def _fake(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _rows_first(query), query.new_empty(query.shape[:3])
