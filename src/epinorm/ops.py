"""The operators that PyTorch sees: ``epinorm::linear_norm`` and the two that autograd needs.

``linear_norm`` returns y alone. Where a gradient may be wanted it runs ``linear_norm_forward``,
which also returns what ``linear_norm_backward`` needs; both are operators of their own, so that a
compiled graph holds them and never traces into a kernel. Registered by ``Library.define/impl``,
whose calls cost a third of ``torch.library.custom_op``'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from epinorm.chain import Chain, GroupNorm, RMSNorm
from epinorm.checks import check_call
from epinorm.plan import (
    BackwardFunction,
    Forward,
    ForwardFunction,
    Inputs,
    Plan,
    Problem,
    Wanted,
    backend_of,
    plan_for,
)
from epinorm.precision import product_precision
from epinorm.reference import epilogue

__all__ = ["linear_norm", "linear_norm_backward", "linear_norm_forward"]

_TENSORS = "Tensor x, Tensor weight, Tensor? bias, Tensor? norm_weight, Tensor? norm_bias, "
_TENSORS += "Tensor[] operands"
# out_dtype: what the norm computes in and y has, where autocast makes it differ from x's dtype.
_FACTS = "str chain, str strategy, bool strict, ScalarType? out_dtype"

_library = torch.library.Library("epinorm", "DEF")
_tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_contiguous_strides)[:1]
_library.define(f"linear_norm({_TENSORS}, {_FACTS}) -> Tensor", tags=_tags)
_library.define(
    f"linear_norm_forward({_TENSORS}, {_FACTS}) -> (Tensor, Tensor, Tensor, Tensor)", tags=_tags
)
_library.define(
    f"linear_norm_backward(Tensor dy, {_TENSORS}, Tensor z, Tensor mean, Tensor rstd, {_FACTS}, "
    "bool[] wanted) -> Tensor[]",
    tags=_tags,
)
linear_norm = torch.ops.epinorm.linear_norm.default
linear_norm_forward = torch.ops.epinorm.linear_norm_forward.default
linear_norm_backward = torch.ops.epinorm.linear_norm_backward.default

_AFTER_AUTOGRAD = torch._C._after_autograd_keyset
_Operands = Sequence[Tensor]
_Facts = tuple[str, str, bool, torch.dtype | None]
"""The facts of a call as its schema orders them: chain, strategy, strict, out_dtype."""


# --- kernels: find or make the plan, run its backend ---------------------------------------------


class _Prepared(NamedTuple):
    """Everything about a call that does not change while shapes, dtypes and settings stay."""

    problem: Problem
    plan: Plan
    forward: ForwardFunction
    backward: BackwardFunction


_prepared: dict[tuple[Any, ...], _Prepared] = {}
_MAX_PREPARED = 4096


def _facts_of(t: Tensor | None) -> Any:
    return None if t is None else (t.shape, t.dtype, t.device)


def _prepare(tensors: Inputs, facts: _Facts, training: bool) -> _Prepared:
    """Check the call and plan it: a dictionary look-up when one like it was seen before."""
    x, weight, bias, norm_weight, norm_bias, operands = tensors
    device = x.device
    precision = product_precision(x.dtype, device.type)
    key = (
        *(x.shape, x.dtype, device, weight.shape, weight.dtype, weight.device),
        *(_facts_of(bias), _facts_of(norm_weight), _facts_of(norm_bias)),
        *(facts, training, precision),
        *map(_facts_of, operands),
    )
    if (found := _prepared.get(key)) is not None:
        return found
    text, strategy, strict, out_dtype = facts
    chain = Chain.parse(text)
    check_call(x, weight, bias, norm_weight, norm_bias, operands, chain, out_dtype or x.dtype)
    problem = Problem(
        chain=chain,
        m=x.shape[0],
        k=x.shape[1],
        n=weight.shape[0],
        dtype=x.dtype,
        norm_dtype=out_dtype or x.dtype,
        out_dtype=out_dtype or x.dtype,
        has_bias=bias is not None,
        has_norm_weight=norm_weight is not None,
        has_norm_bias=norm_bias is not None,
        training=training,
        device=device,
        precision=precision,
    )
    plan = plan_for(problem, strategy, strict)  # type: ignore[arg-type]
    if len(_prepared) >= _MAX_PREPARED:
        _prepared.clear()
    prepared = _prepared[key] = _Prepared(problem, plan, *backend_of(plan.strategy))
    return prepared


def _dense(t: Tensor) -> Tensor:
    """Make the last dimension contiguous and rows disjoint; most tensors pass as they are."""
    if t.is_contiguous() or (t.dim() == 2 and t.stride(1) == 1 and t.stride(0) >= t.shape[1]):
        return t
    return t.contiguous()


def _inputs(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    operands: _Operands,
) -> Inputs:
    return Inputs(
        _dense(x),
        _dense(weight),
        None if bias is None else _dense(bias),
        None if norm_weight is None else _dense(norm_weight),
        None if norm_bias is None else _dense(norm_bias),
        tuple(_dense(t) for t in operands),
    )


def _kernel(x, weight, bias, norm_weight, norm_bias, operands, *facts) -> Tensor:  # type: ignore[no-untyped-def]
    inputs = _inputs(x, weight, bias, norm_weight, norm_bias, operands)
    prepared = _prepare(inputs, facts, False)
    return prepared.forward(prepared.problem, prepared.plan, inputs).y


def _forward_kernel(x, weight, bias, norm_weight, norm_bias, operands, *facts) -> Forward:  # type: ignore[no-untyped-def]
    inputs = _inputs(x, weight, bias, norm_weight, norm_bias, operands)
    prepared = _prepare(inputs, facts, True)
    return prepared.forward(prepared.problem, prepared.plan, inputs)


def _backward_kernel(  # type: ignore[no-untyped-def]
    dy, x, weight, bias, norm_weight, norm_bias, operands, z, mean, rstd, *facts_and_wanted
) -> list[Tensor]:
    *facts, wanted = facts_and_wanted
    inputs = _inputs(x, weight, bias, norm_weight, norm_bias, operands)
    prepared = _prepare(inputs, tuple(facts), True)
    want = Wanted(*wanted[:5], tuple(wanted[5:]))
    # Backward never reads y.
    kept = Forward(z.new_empty(0), z, mean, rstd)
    found = prepared.backward(prepared.problem, prepared.plan, inputs, kept, _dense(dy), want)
    return [g for g in (*found[:5], *found.operands) if g is not None]


for _name, _function in (
    ("linear_norm", _kernel),
    ("linear_norm_forward", _forward_kernel),
    ("linear_norm_backward", _backward_kernel),
):
    _library.impl(_name, _function, "CompositeExplicitAutograd")


# --- shapes without values -----------------------------------------------------------------------


@torch.library.register_fake("epinorm::linear_norm", lib=_library)
def _fake(x, weight, bias, norm_weight, norm_bias, operands, *facts) -> Tensor:  # type: ignore[no-untyped-def]
    text, _, _, out_dtype = facts
    dtype = out_dtype or x.dtype
    check_call(x, weight, bias, norm_weight, norm_bias, operands, Chain.parse(text), dtype)
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype)


@torch.library.register_fake("epinorm::linear_norm_forward", lib=_library)
def _fake_forward(x, weight, bias, norm_weight, norm_bias, operands, *facts) -> Forward:  # type: ignore[no-untyped-def]
    y = _fake(x, weight, bias, norm_weight, norm_bias, operands, *facts)
    norm = Chain.parse(facts[0]).norm
    groups = norm.num_groups if isinstance(norm, GroupNorm) else 1
    stats_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    rstd = x.new_empty((x.shape[0], groups), dtype=stats_dtype)
    mean = rstd.new_empty(0) if isinstance(norm, RMSNorm) else torch.empty_like(rstd)
    return Forward(y, x.new_empty(y.shape), mean, rstd)


@torch.library.register_fake("epinorm::linear_norm_backward", lib=_library)
def _fake_backward(  # type: ignore[no-untyped-def]
    dy, x, weight, bias, norm_weight, norm_bias, operands, z, mean, rstd, *facts_and_wanted
) -> list[Tensor]:
    tensors = (x, weight, bias, norm_weight, norm_bias, *operands)
    wanted = facts_and_wanted[-1]
    return [t.new_empty(t.shape) for t, want in zip(tensors, wanted, strict=True) if want]


# --- autograd ------------------------------------------------------------------------------------


def _in_reference(x, weight, bias, norm_weight, norm_bias, operands, chain, out_dtype) -> Tensor:  # type: ignore[no-untyped-def]
    """The chain in PyTorch's own differentiable operations, as the kernels compute it."""
    z = torch.nn.functional.linear(x, weight, bias).to(out_dtype or x.dtype)
    return epilogue(z, Chain.parse(chain), norm_weight, norm_bias, operands)


class _LinearNorm(_SingleLevelFunction):
    """``linear_norm`` with its gradient; facts first, then every tensor as its own argument."""

    @staticmethod
    def forward(ctx: Any, facts: _Facts, *tensors: Any) -> Tensor:
        x, weight, bias, norm_weight, norm_bias, *operands = tensors
        with torch._C._AutoDispatchBelowAutograd():
            y, z, mean, rstd = linear_norm_forward(
                x, weight, bias, norm_weight, norm_bias, operands, *facts
            )
        ctx.save_for_backward(z, mean, rstd, *tensors)
        ctx.facts = facts
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        z, mean, rstd, x, weight, bias, norm_weight, norm_bias, *operands = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[1:])
        found = linear_norm_backward(
            *(dy, x, weight, bias, norm_weight, norm_bias, operands, z, mean, rstd),
            *(*ctx.facts, wanted),
        )
        return None, *_scatter(found, wanted)


def _scatter(found: Sequence[Tensor], wanted: Sequence[bool]) -> tuple[Tensor | None, ...]:
    remaining = iter(found)
    return tuple(next(remaining) if want else None for want in wanted)


def _has_tangent(tensors: Sequence[Tensor | None]) -> bool:
    """Whether forward-mode differentiation is under way through one of the tensors."""
    if forward_ad._current_level < 0:
        return False
    return any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def _autograd(keyset, x, weight, bias, norm_weight, norm_bias, operands, *facts) -> Tensor:  # type: ignore[no-untyped-def]
    arguments = (x, weight, bias, norm_weight, norm_bias)
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments, operands):
        if _has_tangent((*arguments, *operands)):
            return _in_reference(*arguments, operands, facts[0], facts[3])
        return _LinearNorm.apply(facts, *arguments, *operands)
    if _has_tangent((*arguments, *operands)):
        return _in_reference(*arguments, operands, facts[0], facts[3])
    with torch._C._AutoDispatchBelowAutograd():
        return linear_norm.redispatch(keyset & _AFTER_AUTOGRAD, *arguments, operands, *facts)


def _forward_autograd(keyset, *arguments) -> Any:  # type: ignore[no-untyped-def]
    """Reached by direct calls alone: ``linear_norm`` is what carries the gradient."""
    with torch._C._AutoDispatchBelowAutograd():
        return linear_norm_forward.redispatch(keyset & _AFTER_AUTOGRAD, *arguments)


def _backward_autograd(  # type: ignore[no-untyped-def]
    keyset, dy, x, weight, bias, norm_weight, norm_bias, operands, *rest
) -> list[Tensor]:
    """Differentiate the gradient itself (create_graph) through the reference, to any order."""
    tensors = (x, weight, bias, norm_weight, norm_bias, *operands)
    if torch.is_grad_enabled() and torch._C._any_requires_grad(dy, tensors):
        # Fresh nodes: of two inputs one may have been computed from the other.
        fresh = [
            None if t is None else t.view_as(t) if t.requires_grad else t.detach().requires_grad_()
            for t in tensors
        ]
        y = _in_reference(*fresh[:5], fresh[5:], rest[3], rest[6])
        leaves = [t for t, want in zip(fresh, rest[-1], strict=True) if want]
        return list(torch.autograd.grad(y, leaves, dy, create_graph=True))
    with torch._C._AutoDispatchBelowAutograd():
        return linear_norm_backward.redispatch(
            *(keyset & _AFTER_AUTOGRAD, dy, x, weight, bias, norm_weight, norm_bias, operands),
            *rest,
        )


_library.impl("linear_norm", _autograd, "Autograd", with_keyset=True)
_library.impl("linear_norm_forward", _forward_autograd, "Autograd", with_keyset=True)
_library.impl("linear_norm_backward", _backward_autograd, "Autograd", with_keyset=True)


# --- autocast ------------------------------------------------------------------------------------

_CUDA_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)


def _norm_is_fp32_under_autocast(chain: Chain) -> bool:
    """Whether this PyTorch runs the chain's norm in fp32 (RMSNorm joined later than the others)."""
    name = {"GroupNorm": "group_norm", "LayerNorm": "layer_norm", "RMSNorm": "rms_norm"}
    operator = f"aten::{name[type(chain.norm).__name__]}"
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, "AutocastCUDA")


def _autocast_cuda(x, weight, bias, norm_weight, norm_bias, operands, *facts) -> Tensor:  # type: ignore[no-untyped-def]
    """The linear in autocast's dtype, the norm and all after it in fp32; fp64 is left alone."""
    text, strategy, strict, out_dtype = facts
    if not _norm_is_fp32_under_autocast(Chain.parse(text)):
        return _autocast_reference(x, weight, bias, norm_weight, norm_bias, operands, *facts)
    if x.dtype != torch.float64:
        low = torch.get_autocast_dtype("cuda")
        out_dtype = torch.float32
        x, weight = x.to(low), weight.to(low)
        bias = None if bias is None else bias.to(low)
        norm_weight = None if norm_weight is None else norm_weight.to(out_dtype)
        norm_bias = None if norm_bias is None else norm_bias.to(out_dtype)
        operands = [t.to(out_dtype) for t in operands]
    with torch._C._ExcludeDispatchKeyGuard(_CUDA_AUTOCAST):
        return linear_norm(
            x, weight, bias, norm_weight, norm_bias, operands, text, strategy, strict, out_dtype
        )


def _autocast_reference(x, weight, bias, norm_weight, norm_bias, operands, *facts) -> Tensor:  # type: ignore[no-untyped-def]
    """Each of PyTorch's layers under its own autocast rule: dtypes mix as no kernel of ours does."""
    text, strategy, strict, _ = facts
    if strict or strategy not in ("auto", "reference"):
        asked = "strict=True" if strict else f"strategy {strategy!r}"
        raise RuntimeError(f"{asked} cannot be met: autocast runs this chain on {x.device.type} "
                           "in PyTorch's own layers, which mix dtypes there")
    z = torch.nn.functional.linear(x, weight, bias)
    return epilogue(z, Chain.parse(text), norm_weight, norm_bias, operands)


_library.impl("linear_norm", _autocast_cuda, "AutocastCUDA")
_library.impl("linear_norm", _autocast_reference, "AutocastCPU")
