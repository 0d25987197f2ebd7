"""A norm over rows of which each process has some channels: two numbers a row are exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from epinorm.chain import Chain, LayerNorm, RMSNorm, reference
from epinorm.chain.reference import Results
from epinorm.operator.collectives import gather
from epinorm.operator.transforms import norm_is_fp32_under_autocast
from epinorm.problem import Inputs

Along = tuple[DeviceMesh, int]
"""A mesh, and its dimension over which channels are split."""


def sharded_norm(
    z: Any, own: Inputs, operands: Sequence[Tensor], chain: Chain, along: Along
) -> Results:
    """The norm, and what is behind it, of rows of which this process has some channels."""
    norm = chain.norm
    assert isinstance(norm, (LayerNorm, RMSNorm))
    wide = z.to(torch.promote_types(z.dtype, torch.float32))
    eps = torch.finfo(wide.dtype).eps if norm.eps is None else norm.eps
    y, _ = _Normalized.apply(wide, along, eps, isinstance(norm, LayerNorm))
    y = y if own.norm_weight is None else y * own.norm_weight
    y = y if own.norm_bias is None else y + own.norm_bias
    under_autocast = torch.is_autocast_enabled(z.device.type) and norm_is_fp32_under_autocast(chain)
    y = y if under_autocast else y.to(z.dtype)
    y = reference.apply_pointwise(y, chain.post, iter(operands))
    return (y, z) if chain.returns_sum else y


class _Normalized(torch.autograd.Function):
    """Rows of which each process has as many channels, normalised, and what they were multiplied by
    for that, a result as second gradients come through it. What is exchanged is combined in the
    order of the processes: equal bits in each of them and at each run."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, along: Along, eps: float, centred: bool) -> Any:
        if centred:  # centred parts, combined as by Chan, Golub and LeVeque (1979)
            squares, mean = torch.var_mean(z, -1, correction=0)
            means, parts = _of_each(torch.stack((mean, squares)), along).unbind(1)
            mean = means.mean(0)
            square = (parts + (means - mean).square()).mean(0)
            z = z - mean.unsqueeze(-1)
        else:
            square = _of_each(z.square().mean(-1), along).mean(0)
        rstd = (square + eps).rsqrt().unsqueeze(-1)
        y = z * rstd
        ctx.save_for_backward(y, rstd)
        ctx.along, ctx.centred = along, centred
        ctx.set_materialize_grads(False)
        return y, rstd

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        (dy, drstd), (y, rstd) = gradients, ctx.saved_tensors
        dy = torch.zeros_like(y) if dy is None else dy
        along = (dy * y).mean(-1)
        if drstd is not None:
            along = along + (drstd * rstd).squeeze(-1) / y.shape[-1]
        if ctx.centred:
            own = torch.stack((along, dy.mean(-1)))
            along, mean = _of_each(own, ctx.along).mean(0).unbind(0)
            dy = dy - mean.unsqueeze(-1)
        else:
            along = _of_each(along, ctx.along).mean(0)
        return (dy - y * along.unsqueeze(-1)) * rstd, None, None, None


def _of_each(own: Tensor, along: Along) -> Tensor:
    """What each process has of this shape, in the order of the processes, along a new first
    dimension."""
    mesh, dim = along
    return gather(own, mesh, dim).view(mesh.size(dim), *own.shape)
