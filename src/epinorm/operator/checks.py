"""What can be wrong with the tensors of one call, said before anything runs.

Where PyTorch's own layers refuse the same mistake, the exception type and the words are theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from epinorm.chain import BatchNorm, Chain, GroupNorm
from epinorm.problem import Inputs

_OPTIONAL = ("bias", "norm_weight", "norm_bias")


def named(inputs: Inputs) -> list[tuple[str, Any]]:
    """The tensors with the names that messages have for them."""
    operands = [(f"operand {i}", t) for i, t in enumerate(inputs.operands)]
    return [*zip(("x", "weight", *_OPTIONAL), inputs[:5], strict=True), *operands]


def check_types(inputs: Inputs) -> None:
    """Raise TypeError for whatever is no Tensor, but for what may be None."""
    for name, t in named(inputs):
        if not isinstance(t, Tensor) and not (t is None and name in _OPTIONAL):
            raise TypeError(f"{name} must be a Tensor, not {type(t).__name__}")


def check_leading_dimensions(x: Tensor, operands: Sequence[Tensor], chain: Chain) -> None:
    """Raise unless x (..., K) and its residuals (..., N) can be folded into matrices."""
    if x.dim() == 0:
        raise RuntimeError("both arguments to linear need to be at least 1D, but x is 0D")
    if isinstance(chain.norm, (GroupNorm, BatchNorm)) and x.dim() != 2:
        kind, operator = type(chain.norm).__name__, chain.norm.operator
        raise ValueError(
            f"with {kind} x must be 2D (M, K): {operator} normalises dimension 1, which is the "
            f"linear's output only there; got x of shape {list(x.shape)}"
        )
    check_operand_count(operands, chain)
    for i, (kind, operand) in enumerate(zip(chain.operand_kinds, operands, strict=True)):
        if kind in ("element", "row") and operand.shape[:-1] != x.shape[:-1]:
            shape = [*x.shape[:-1], "N" if kind == "element" else 1]
            raise RuntimeError(
                f"operand {i} must have one value per {kind} of the output, {shape}, "
                f"got {list(operand.shape)}"
            )


def norm_dtype_of(inputs: Inputs, chain: Chain, out_dtype: torch.dtype) -> torch.dtype:
    """The dtype of the norm's parameters: y's; a BatchNorm's of 16 bits may be fp32 all the same,
    as autocast leaves them."""
    given = inputs.norm_weight if inputs.norm_weight is not None else inputs.norm_bias
    if given is None or given.dtype != torch.float32 or out_dtype.itemsize != 2:
        return out_dtype
    return torch.float32 if chain.returns_statistics else out_dtype


def check_call(inputs: Inputs, chain: Chain, out_dtype: torch.dtype) -> None:
    """Raise if x (M, K), weight (N, K) and the rest do not fit each other or the chain.

    Works on symbolic shapes too, where each comparison becomes a guard.
    """
    _check_same_device([t for _, t in named(inputs)])
    _check_dtypes(inputs, chain, out_dtype)
    x, weight, bias, norm_weight, norm_bias, operands, _ = inputs
    if x.dim() != 2:
        raise RuntimeError(f"x must be 2D (M, K) here, got shape {list(x.shape)}")
    if weight.dim() != 2:
        raise RuntimeError(f"weight must be 2D (N, K), got shape {list(weight.shape)}")
    (m, k), (n, weight_k) = x.shape, weight.shape
    if k != weight_k:
        raise RuntimeError(
            f"mat1 and mat2 shapes cannot be multiplied ({m}x{k} and {weight_k}x{n}): "
            f"x has {k} input features, weight has {weight_k}"
        )
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != n):
        raise RuntimeError(
            f"bias must be a vector of one value per output feature, ({n},), "
            f"got shape {list(bias.shape)}"
        )
    _check_norm(m, n, norm_weight, norm_bias, chain)
    _check_operands(m, n, operands, chain)


def check_backward(
    dy: Tensor,
    inputs: Inputs,
    kept: Sequence[Tensor],
    chain: Chain,
    out_dtype: torch.dtype,
    wanted: Sequence[bool],
    dsum: Tensor | None = None,
) -> None:
    """Raise if dy, dsum or what forward kept (z or a result, mean, rstd) does not fit these inputs:
    kernels read memory as they expect it, and hooks on saved tensors can hand back anything."""
    x, tensors = inputs.x, [t for _, t in named(inputs)]
    y_shape = [x.shape[0], inputs.weight.shape[0]]
    sum_dtype = chain.sum_dtype(x.dtype, out_dtype)
    z_dtype = out_dtype if chain.saves_y else sum_dtype if chain.saves_sum else x.dtype
    stats_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    stats = list(chain.statistics_shape(*y_shape)), stats_dtype
    expected = (
        ("z", chain.keeps_z or chain.saves_sum or chain.saves_y, (y_shape, z_dtype)),
        ("mean", chain.centred, stats),
        ("rstd", chain.norm is not None, stats),
    )
    given = [("dy", y_shape, out_dtype, dy)]
    for (name, is_there, kind), t in zip(expected, kept, strict=True):
        given.append((name, *(kind if is_there else ([0], t.dtype)), t))
    if dsum is not None:
        given.append(("dsum", y_shape, sum_dtype, dsum))
    for name, shape, dtype, t in given:
        if list(t.shape) != shape or t.dtype != dtype or t.device != x.device:
            raise RuntimeError(
                f"{name} must be of shape {shape}, {dtype} and on {x.device} for these inputs, but "
                f"is of shape {list(t.shape)}, {t.dtype} and on {t.device} (hooks on saved tensors "
                "must give back what was saved)"
            )
    if len(wanted) != len(tensors) or any(
        want and t is None for want, t in zip(wanted, tensors, strict=True)
    ):
        raise ValueError(
            f"wanted must say for each of the {len(tensors)} inputs whether its gradient is asked "
            f"for, False for those that are None; got {list(wanted)}"
        )
    check_rows(wanted[5:], chain)


def check_rows(asked: Sequence[bool], chain: Chain) -> None:
    """Raise where a gradient is asked of numbers of rows; asked: of each operand."""
    if any(asks and kind == "row" for asks, kind in zip(asked, chain.operand_kinds, strict=False)):
        raise ValueError("the operand of mul_row, one value a row, must not ask for a gradient")


def _check_same_device(tensors: Sequence[Tensor | None]) -> None:
    devices = dict.fromkeys(t.device for t in tensors if t is not None)
    if len(devices) > 1:
        names = " and ".join(str(device) for device in devices)
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{names}!"
        )


def _check_dtypes(inputs: Inputs, chain: Chain, out_dtype: torch.dtype) -> None:
    x = inputs.x
    if not x.dtype.is_floating_point or x.dtype.itemsize == 1:
        what = "a linear layer" if chain.norm is None else "a norm"
        raise NotImplementedError(
            f"{what} is not implemented for {x.dtype}: x must be float32, float64, bfloat16 or "
            "float16"
        )
    seeds = [f"operand {i}" for i, kind in enumerate(chain.operand_kinds) if kind == "seed"]
    of_linear, rest = named(inputs)[1:3], named(inputs)[3:]
    norm_dtype = norm_dtype_of(inputs, chain, out_dtype)
    if norm_dtype != out_dtype and len(seeds) < len(inputs.operands):
        raise RuntimeError(
            f"next to a norm's parameters of {norm_dtype} and an output of {out_dtype} a chain has "
            f"no tensor operands, but {chain} has"
        )
    for name, tensor in of_linear:
        if tensor is not None and tensor.dtype != x.dtype:
            raise RuntimeError(
                f"x and {name} must have the same dtype, but got {x.dtype} and {tensor.dtype}"
            )
    for name, tensor in rest:
        if tensor is not None and tensor.dtype != norm_dtype and name not in seeds:
            raise RuntimeError(f"{name} must have dtype {norm_dtype}, but got {tensor.dtype}")


def _check_norm(
    m: int, n: int, norm_weight: Tensor | None, norm_bias: Tensor | None, chain: Chain
) -> None:
    if chain.returns_statistics and m == 1:
        raise ValueError(
            "Expected more than 1 value per channel when training, got input size "
            f"{torch.Size([m, n])}"
        )
    if chain.norm is not None:
        groups = chain.norm.num_groups
        if n % groups:
            raise RuntimeError(
                "Expected number of channels in input to be divisible by num_groups, but got "
                f"input of shape {[m, n]} and num_groups={groups}"
            )
        if isinstance(chain.norm, GroupNorm) and m == 1 and n == groups:
            raise ValueError(
                "Expected more than 1 value per channel when training, got input size "
                f"{[m, n]} and num_groups={groups}"
            )
    for name, tensor in (("weight", norm_weight), ("bias", norm_bias)):
        if tensor is not None and chain.norm is None:
            raise ValueError(f"norm_{name} belongs to a norm, and the chain has none: {chain}")
        if tensor is not None and (tensor.dim() != 1 or tensor.shape[0] != n):
            raise RuntimeError(
                f"Expected {name} to be a vector of size equal to the number of channels in "
                f"input, but got norm_{name} of shape {list(tensor.shape)} and input of shape "
                f"{[m, n]}"
            )


def check_operand_count(operands: Sequence[Tensor], chain: Chain) -> None:
    """Raise ValueError unless these are as many as the chain takes."""
    kinds = chain.operand_kinds
    if len(operands) != len(kinds):
        takers = [op.name for op in (*chain.pre, *chain.post) if op.operand is not None]
        wants = f"{len(kinds)} ({', '.join(takers)})" if kinds else "no"
        raise ValueError(f"the chain takes {wants} tensor operands, got {len(operands)}")


def _check_operands(m: int, n: int, operands: Sequence[Tensor], chain: Chain) -> None:
    check_operand_count(operands, chain)
    for i, (kind, operand) in enumerate(zip(chain.operand_kinds, operands, strict=True)):
        if kind == "seed":
            if list(operand.shape) != [1] or operand.dtype != torch.int64:
                raise RuntimeError(
                    f"operand {i}, a seed, must be of shape [1] and torch.int64, got "
                    f"{list(operand.shape)} and {operand.dtype}"
                )
            continue
        expected = {"channel": [n], "row": [m, 1]}.get(kind, [m, n])
        if list(operand.shape) != expected:
            raise RuntimeError(
                f"operand {i} must have shape {expected} (one value per {kind} of the output), "
                f"got {list(operand.shape)}"
            )
