"""The backend in plain PyTorch: any device, any dtype, bit for bit what the unfused layers give.

What it keeps as ``z`` is the linear's output with its bias already added: adding the bias after
rounding to 16 bits would cost accuracy that eager does not lose. Only its own backward reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from epinorm.chain import BatchNorm, GroupNorm, LayerNorm, Norm
from epinorm.chain.reference import apply_pointwise, batch_statistics, epilogue, normalize
from epinorm.problem import (
    Forward,
    Gradients,
    Inputs,
    Later,
    Layout,
    Plan,
    Problem,
    Run,
    Wanted,
)


class ReferenceExecutable:
    """A problem's two passes in PyTorch's own layers; where a subclass says so, by other means."""

    def __init__(self, problem: Problem, plan: Plan, layout: Layout) -> None:
        self.problem, self.plan, self.y_size = problem, plan, layout.y_size
        self.forward: Run = self._forward if len(layout.y_size) == 2 else self._folded

    def _forward(self, *tensors: Any) -> Forward:
        return self.compute(Inputs(*tensors))

    def _folded(self, x: Tensor, *rest: Any) -> Forward:
        found = self._forward(x.view(self.problem.m, self.problem.k), *rest)
        return found._replace(y=torch.ops.aten._unsafe_view(found.y, self.y_size))

    def backward(
        self,
        inputs: Inputs,
        kept: list[Forward],
        dy: Tensor,
        want: Wanted,
        left: Any = None,
        into: Tensor | None = None,
        dsum: Tensor | None = None,
        later: Later | None = None,
    ) -> Gradients:
        return self.differentiate(inputs, kept.pop(), dy, want, dsum)

    def compute(self, inputs: Inputs) -> Forward:
        """Both of the forward pass: y (M, N), and what backward needs."""
        return forward(self.problem, inputs)

    def differentiate(
        self, inputs: Inputs, kept: Forward, dy: Tensor, want: Wanted, dsum: Tensor | None
    ) -> Gradients:
        """The wanted gradients, from what ``compute`` kept."""
        return backward(self.problem, inputs, kept, dy, want, dsum)


def forward(problem: Problem, inputs: Inputs) -> Forward:
    """Compute y (M, N) with PyTorch's own layers; the statistics come out of the norm itself."""
    chain = problem.chain.filled(inputs.constants)
    z = F.linear(inputs.x, inputs.weight, inputs.bias)
    remaining = iter(inputs.operands)
    u = apply_pointwise(z.to(problem.out_dtype), chain.pre, remaining)
    if chain.norm is None:
        nothing = z.new_empty(0)
        return Forward(u, z if problem.keeps_z else nothing, nothing, nothing)
    y, mean, rstd = _normalize(u, chain.norm, inputs.norm_weight, inputs.norm_bias)
    y = apply_pointwise(y, chain.post, remaining)
    nothing = z.new_empty(0)
    second = u.to(problem.sum_dtype) if chain.returns_sum else None
    if chain.returns_statistics:
        second = batch_statistics(u)
    if not problem.training:
        return Forward(y, nothing, nothing, nothing, second)
    rstd = rstd.to(problem.stats_dtype).reshape(chain.statistics_shape(problem.m, problem.n))
    mean = mean.to(problem.stats_dtype)
    mean = mean.reshape_as(rstd) if chain.centred else mean
    return Forward(y, z if problem.keeps_z else nothing, mean, rstd, second)


def _normalize(
    u: Tensor, norm: Norm, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    m, n = u.shape
    if isinstance(norm, GroupNorm):
        u = u.contiguous()
        return torch.native_group_norm(u, weight, bias, m, n, 1, norm.num_groups, norm.eps)
    if isinstance(norm, BatchNorm):
        if not m:
            return normalize(u, norm, weight, bias), u.new_zeros(n), u.new_zeros(n)
        return torch.native_batch_norm(u, weight, bias, None, None, True, 0.0, norm.eps)
    if norm.num_groups > 1:
        parts = (m * norm.num_groups, n // norm.num_groups)
        wide = u.view(parts).to(torch.promote_types(u.dtype, torch.float32))
        _, mean, rstd = _normalize(wide, replace(norm, num_groups=1), None, None)
        return normalize(u, norm, weight, bias), mean, rstd
    if isinstance(norm, LayerNorm):
        return torch.native_layer_norm(u, [n], weight, bias, norm.eps)
    y, rstd = torch.ops.aten._fused_rms_norm(u, [n], weight, norm.eps)
    return y if bias is None else y + bias, u.new_empty(0), rstd


def backward(
    problem: Problem,
    inputs: Inputs,
    kept: Forward,
    dy: Tensor,
    want: Wanted,
    dsum: Tensor | None = None,
) -> Gradients:
    """Differentiate the epilogue from the kept z by PyTorch's autograd, then the linear by hand."""
    want_z = want.x or want.weight or want.bias
    leaves = [
        None if t is None else t.detach().requires_grad_(wanted)
        for t, wanted in (
            # Where z decides nothing, any tensor of its size will do.
            (kept.z.to(problem.out_dtype) if kept.z.numel() else dy, want_z),
            (inputs.norm_weight, want.norm_weight),
            (inputs.norm_bias, want.norm_bias),
            *zip(inputs.operands, want.operands, strict=True),
        )
    ]
    z, norm_weight, norm_bias, *operands = leaves
    assert z is not None
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    with _autograd():
        chain = problem.chain.filled(inputs.constants)
        given = iter([t for t in operands if t is not None])
        last = chain.pre[-1].definition.result_gradient if chain.saves_y else None
        u = apply_pointwise(z, chain.pre[:-1] if last else chain.pre, given)
        kept_u = _Kept.apply(u, kept.z.to(u.dtype)) if chain.saves_sum else u
        tail = replace(chain, pre=(), returns_sum=False)
        y: Any = epilogue(kept_u, tail, norm_weight, norm_bias, list(given))
        y = y[0] if chain.returns_statistics else y
        pairs = [(y, last(dy, kept.z) if last else dy)]
        if dsum is not None and u.requires_grad:
            pairs.append((u, dsum.to(u.dtype)))
        outputs, gradients = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(outputs, wanted, gradients) if wanted else ())
    dz, d_norm_weight, d_norm_bias, *d_operands = (
        next(found) if leaf is not None and leaf.requires_grad else None for leaf in leaves
    )
    dx = dweight = dbias = None
    if dz is not None:
        dz = dz.to(problem.dtype)
        dx = dz.mm(inputs.weight) if want.x else None
        dweight = dz.t().mm(inputs.x) if want.weight else None
        dbias = dz.sum(0) if want.bias else None
    single = dx, dweight, dbias, d_norm_weight, d_norm_bias
    return Gradients(*single, tuple(_own(d_operands, (dy, *single))))


class _Kept(torch.autograd.Function):
    """The values that forward kept, with the gradient of what they were computed from."""

    @staticmethod
    def forward(ctx: Any, computed: Tensor, kept: Tensor) -> Tensor:
        return kept.view_as(kept)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return *gradients, None


def _own(
    gradients: Iterable[Tensor | None], others: Iterable[Tensor | None]
) -> Iterator[Tensor | None]:
    """Gradients with memory of their own, as an operator must return them: that of a residual may
    be dy itself, or another residual's."""
    taken = {t.untyped_storage().data_ptr() for t in others if t is not None}
    for gradient in gradients:
        if gradient is not None and gradient.untyped_storage().data_ptr() in taken:
            gradient = gradient.clone(memory_format=torch.contiguous_format)
        if gradient is not None:
            taken.add(gradient.untyped_storage().data_ptr())
        yield gradient


_AUTOGRAD_KEYS = (
    torch._C.DispatchKey.AutogradFunctionality,
    torch._C.DispatchKey.AutogradOther,
    torch._C.DispatchKey.ADInplaceOrView,
)


@contextmanager
def _autograd() -> Iterator[None]:
    """Let autograd record inside an operator's kernel, which runs below it."""
    excluded = [torch._C._dispatch_tls_is_dispatch_key_excluded(key) for key in _AUTOGRAD_KEYS]
    for key in _AUTOGRAD_KEYS:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        with torch.enable_grad():
            yield
    finally:
        for key, was in zip(_AUTOGRAD_KEYS, excluded, strict=True):
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, was)
