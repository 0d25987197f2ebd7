"""The chain in plain PyTorch, any dtype and device: the definition of correct."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from epinorm.chain import BatchNorm, Chain, GroupNorm, LayerNorm, Norm
from epinorm.chain.pointwise import Pointwise

Results = Tensor | tuple[Tensor, Tensor]
"""y; or y and what enters the norm, where the chain ``returns_sum``, or the batch's statistics."""


def normalize(z: Tensor, norm: Norm, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Normalise z (..., N) as PyTorch's own layer does; weight and bias are (N,) or None."""
    if isinstance(norm, GroupNorm):
        return F.group_norm(z, norm.num_groups, weight, bias, norm.eps)
    if norm.num_groups > 1:  # each part's statistics, one weight and bias for all channels
        heads = z.unflatten(-1, (norm.num_groups, -1)).to(
            torch.promote_types(z.dtype, torch.float32)
        )
        y = normalize(heads, replace(norm, num_groups=1), None, None).flatten(-2)
        y = y if weight is None else y * weight
        return (y if bias is None else y + bias).to(z.dtype)
    if isinstance(norm, BatchNorm):
        return F.batch_norm(z, None, None, weight, bias, training=True, eps=norm.eps)
    if isinstance(norm, LayerNorm):
        return F.layer_norm(z, (z.size(-1),), weight, bias, norm.eps)
    normalized = F.rms_norm(z, (z.size(-1),), weight, norm.eps)
    return normalized if bias is None else normalized + bias


def batch_statistics(z: Tensor) -> Tensor:
    """Of z (M, N), over its rows: means and variances with M - 1 in the denominator, (2, N), in
    fp32 but of fp64; no gradient flows through them. Zeros of no rows."""
    if not z.shape[0]:
        return z.new_zeros((2, z.shape[1]), dtype=torch.promote_types(z.dtype, torch.float32))
    with torch.no_grad(), forward_ad._set_fwd_grad_enabled(False):
        variance, mean = torch.var_mean(z.to(torch.promote_types(z.dtype, torch.float32)), 0)
        return torch.stack((mean, variance))


def apply_pointwise(
    x: Tensor, operations: Sequence[Pointwise], operands: Iterator[Tensor]
) -> Tensor:
    """Apply the operations in order to x (..., N), drawing from operands as they are needed."""
    for operation in operations:
        x = operation(x, next(operands) if operation.operand else None)
    return x


def epilogue(
    z: Tensor,
    chain: Chain,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    operands: Sequence[Tensor] = (),
) -> Results:
    """Everything after the linear layer: z (..., N) with its bias added → y (..., N)."""
    remaining = iter(operands)
    z = apply_pointwise(z, chain.pre, remaining)
    if chain.norm is None:
        return z
    y = apply_pointwise(normalize(z, chain.norm, norm_weight, norm_bias), chain.post, remaining)
    if chain.returns_statistics:
        return y, batch_statistics(z)
    return (y, z) if chain.returns_sum else y


def linear_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    chain: Chain,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    operands: Sequence[Tensor] = (),
) -> Results:
    """The whole chain: x (..., K), weight (N, K), bias (N,) → y (..., N)."""
    return epilogue(F.linear(x, weight, bias), chain, norm_weight, norm_bias, operands)
