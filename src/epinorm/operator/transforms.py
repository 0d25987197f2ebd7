"""The operators under autocast and under torch.vmap."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from epinorm.chain import Chain, returns_more
from epinorm.chain.chain import AUTOCAST_TO_FP32
from epinorm.chain.reference import Results, epilogue
from epinorm.operator.schema import OPERATORS, library, linear_norm, linear_norm_sum

CUDA_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
_AUTOCAST = CUDA_AUTOCAST | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_PACKAGE = "AOTICompiledModel.__call__"


def norm_is_fp32_under_autocast(chain: Chain) -> bool:
    """Whether this PyTorch runs the chain's norm in fp32 (RMSNorm joined later than the others)."""
    if chain.norm is None:
        return False
    name = f"aten::{chain.norm.operator}"
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")


def stays_low_under_autocast(chain: Chain) -> bool:
    """Whether CUDA autocast leaves the norm of what the linear gives, and all around it, in the
    linear's dtype: a BatchNorm, next to parameters as they are."""
    if not chain.returns_statistics or norm_is_fp32_under_autocast(chain):
        return False
    return not any(
        op.operand not in (None, "seed") or op.name in AUTOCAST_TO_FP32
        for op in (*chain.pre, *chain.post)
    )


def out_dtype_under_autocast(chain: Chain) -> torch.dtype | None:
    """The dtype of y under CUDA autocast; None where PyTorch's layers mix dtypes as no kernel of
    ours does."""
    if stays_low_under_autocast(chain):
        return torch.get_autocast_dtype("cuda")
    return torch.float32 if norm_is_fp32_under_autocast(chain) else None


def casts(tensors: Sequence[Any], out_dtype: torch.dtype | None) -> list[torch.dtype | None]:
    """What belongs to the linear in CUDA autocast's dtype; the rest in fp32 where y is, else as
    it is."""
    low = torch.get_autocast_dtype("cuda")
    rest = torch.float32 if out_dtype == torch.float32 else None
    dtypes = (low, low, low, *(rest,) * (len(tensors) - 3))
    # Seeds are no floating-point numbers.
    is_cast = [t is not None and t.is_floating_point() for t in tensors]
    return [dtype if floats else None for floats, dtype in zip(is_cast, dtypes, strict=True)]


def cast(tensors: Sequence[Any], out_dtype: torch.dtype | None) -> tuple[Any, ...]:
    """The tensors in autocast's dtypes."""
    pairs = zip(tensors, casts(tensors, out_dtype), strict=True)
    return tuple([t if dtype is None else t.to(dtype) for t, dtype in pairs])


def _is_packages(arguments: tuple[Any, ...]) -> bool:
    """Whether a package of AOTInductor's called the operator whose autocast rule asks. It takes
    what we return for what it was compiled for: of autocast's dtypes it would read other memory.
    It is known by who called, or by None for an empty list (which 2.9 does not give)."""
    return arguments[5] is None or sys._getframe(2).f_code.co_qualname == _PACKAGE


def _without_autocast(arguments: tuple[Any, ...]) -> Results:
    operator = linear_norm_sum if returns_more(arguments[6]) else linear_norm
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        return operator(*arguments[:5], arguments[5] or (), *arguments[6:])


def _autocast_cuda(*arguments: Any) -> Results:
    """The linear in autocast's dtype, the norm and all after it in fp32, or in the same where it is
    a BatchNorm; fp64 is left alone."""
    if _is_packages(arguments):
        return _without_autocast(arguments)
    x, weight, bias, norm_weight, norm_bias, operands, text, strategy, strict, out = arguments
    chain, tensors = Chain.parse(text), (x, weight, bias, norm_weight, norm_bias, *operands)
    out_dtype = out_dtype_under_autocast(chain)
    if out_dtype is None:
        return _autocast_reference(*arguments)
    sum_dtype = sum_dtype_under_autocast(tensors, chain) if chain.returns_sum else None
    if x.dtype != torch.float64:
        out = out_dtype
        x, weight, bias, norm_weight, norm_bias, *operands = cast(tensors, out)
    arguments = (x, weight, bias, norm_weight, norm_bias, operands, text, strategy, strict, out)
    with torch._C._ExcludeDispatchKeyGuard(CUDA_AUTOCAST):
        if not chain.returns_more:
            return linear_norm(*arguments)
        y, second = linear_norm_sum(*arguments)
        return y, second if sum_dtype is None else second.to(sum_dtype)


def sum_dtype_under_autocast(tensors: Sequence[Any], chain: Chain) -> torch.dtype:
    """What PyTorch's own operations make of the linear's dtype and those of the operands."""
    x, kinds = tensors[0], chain.operand_kinds
    dtype = x.dtype if x.dtype == torch.float64 else torch.get_autocast_dtype("cuda")
    pairs = zip(kinds, tensors[5:], strict=True)
    return chain.sum_dtype_in_eager(dtype, [t.dtype for kind, t in pairs if kind != "seed"])


def _autocast_reference(*arguments: Any) -> Results:
    """Each of PyTorch's layers under its own autocast rule: dtypes mix as in no kernel of ours."""
    if _is_packages(arguments):
        return _without_autocast(arguments)
    x, weight, bias, norm_weight, norm_bias, operands, text, strategy, strict, _ = arguments
    if strict or strategy not in ("auto", "reference"):
        asked = "strict=True" if strict else f"strategy {strategy!r}"
        raise RuntimeError(
            f"{asked} cannot be met: under autocast this chain runs on {x.device.type} in "
            "PyTorch's own layers, which mix dtypes there"
        )
    z = F.linear(x, weight, bias)
    return epilogue(z, Chain.parse(text), norm_weight, norm_bias, operands)


for _name in ("linear_norm", "linear_norm_sum"):
    library.impl(_name, _autocast_cuda, "AutocastCUDA")
    library.impl(_name, _autocast_reference, "AutocastCPU")


def _register_vmap(operator: Any) -> None:
    """One call for each sample: gradients of a weight that samples share need as many anyway."""

    def by_sample(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        samples = [
            operator(*(_take(a, d, i) for a, d in zip(arguments, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        if isinstance(samples[0], Tensor):
            return torch.stack(samples), 0
        outputs = type(samples[0])(torch.stack(s) for s in zip(*samples, strict=True))
        return outputs, type(samples[0])(0 for _ in outputs)

    torch.library.register_vmap(operator, by_sample, lib=library)


def _take(argument: Any, dim: Any, index: int) -> Any:
    if isinstance(argument, Tensor):
        return argument if dim is None else argument.select(dim, index)
    if isinstance(argument, (list, tuple)) and isinstance(dim, (list, tuple)):
        return [_take(a, d, index) for a, d in zip(argument, dim, strict=True)]
    return argument


for _operator in OPERATORS:
    _register_vmap(_operator)
