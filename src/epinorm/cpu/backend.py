"""The fused chain on the CPU: a backend (epinorm.plan) over the compiled kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from epinorm import reference_backend
from epinorm.chain import RMSNorm
from epinorm.cpu import abi
from epinorm.cpu.blocks import Blocks, choose_blocks
from epinorm.cpu.build import BuildError, load_kernel, load_runner, warn_once
from epinorm.cpu.codegen import kernel_source
from epinorm.plan import Forward, Gradients, Inputs, Plan, Problem, Wanted, plan_for

__all__ = ["backward", "forward"]

_ERROR_BYTES = 1024


@dataclass(frozen=True)
class _Prepared:
    """What all calls of one problem share."""

    runner: ctypes.CDLL
    kernel: abi.Kernel
    blocks: Blocks
    eps: float


@lru_cache(maxsize=1024)
def _prepare(problem: Problem) -> _Prepared:
    library = load_kernel(kernel_source(problem), str(problem.chain))
    kernel = abi.Kernel()
    library.epinorm_describe(problem.n, problem.groups, ctypes.byref(kernel))
    norm = problem.chain.norm
    eps = norm.eps
    if isinstance(norm, RMSNorm) and eps is None:
        eps = torch.finfo(problem.stats_dtype).eps
    assert eps is not None
    return _Prepared(load_runner(), kernel, choose_blocks(problem), eps)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _call(
    problem: Problem,
    prepared: _Prepared,
    inputs: Inputs,
    mean: Tensor | None,
    rstd: Tensor | None,
    operand_gradients: tuple[Tensor | None, ...] = (),
) -> abi.Problem:
    """The runner's arguments, without results. The tensors must outlive it."""
    blocks, chain = prepared.blocks, problem.chain
    call = abi.Call(problem.n, problem.groups, prepared.eps)
    call.norm_weight = _pointer(inputs.norm_weight)
    call.norm_bias = _pointer(inputs.norm_bias)
    call.mean = _pointer(mean)
    call.rstd = _pointer(rstd)
    arrays: list[ctypes.Array] = []
    if count := len(inputs.operands):
        pointers = ctypes.c_void_p * count
        strides = [
            operand.stride(0) if kind == "element" else 0
            for operand, kind in zip(inputs.operands, chain.operand_kinds, strict=True)
        ]
        gradients = operand_gradients or (None,) * count
        arrays = [
            pointers(*(t.data_ptr() for t in inputs.operands)),
            (ctypes.c_int64 * count)(*strides),
            pointers(*(_pointer(t) for t in gradients)),
        ]
        call.operands, call.operand_strides, call.operand_gradients = map(ctypes.addressof, arrays)
    result = abi.Problem(
        call,
        prepared.kernel,
        abi.Blocks(blocks.rows, blocks.columns, blocks.inner, blocks.outer, blocks.chunks),
        problem.m,
        problem.k,
        abi.DTYPE_CODES[problem.dtype],
        abi.DTYPE_CODES[problem.out_dtype],
        inputs.x.data_ptr(),
        inputs.x.stride(0),
        inputs.weight.data_ptr(),
        inputs.weight.stride(0),
        _pointer(inputs.bias),
    )
    result.arrays = arrays  # the struct holds addresses only
    return result


def _run(function: Callable[..., int], call: abi.Problem) -> None:
    message = ctypes.create_string_buffer(_ERROR_BYTES)
    if function(call, message, _ERROR_BYTES):
        raise RuntimeError(message.value.decode(errors="replace"))


def _fall_back(error: BuildError) -> None:
    warn_once(str(error))
    plan_for.cache_clear()  # so that the next plan, and explain, name the reason


def forward(problem: Problem, plan: Plan, inputs: Inputs) -> Forward:
    """Compute y (M, N) in one pass over the rows; see epinorm.plan for the shapes and dtypes.

    Where the kernels cannot be built, warns once and computes with PyTorch's own layers. Raises
    RuntimeError with PyTorch's message where its product fails.
    """
    try:
        prepared = _prepare(problem)
    except BuildError as error:
        _fall_back(error)
        return reference_backend.forward(problem, plan, inputs)
    m, n, x = problem.m, problem.n, inputs.x
    y = x.new_empty((m, n), dtype=problem.out_dtype)
    z = mean = rstd = None
    if problem.training:
        z = x.new_empty((m, n))
        rstd = x.new_empty((m, problem.groups), dtype=problem.stats_dtype)
        if not isinstance(problem.chain.norm, RMSNorm):
            mean = torch.empty_like(rstd)
    call = _call(problem, prepared, inputs, mean, rstd)
    call.y, call.y_stride, call.z = y.data_ptr(), n, _pointer(z)
    _run(prepared.runner.epinorm_forward, call)

    def kept(tensor: Tensor | None) -> Tensor:
        return x.new_empty(0) if tensor is None else tensor

    return Forward(y, kept(z), kept(mean), kept(rstd))


def backward(
    problem: Problem, plan: Plan, inputs: Inputs, kept: Forward, dy: Tensor, want: Wanted
) -> Gradients:
    """Compute the wanted gradients from dy (M, N) and what forward kept; raises as forward does."""
    try:
        prepared = _prepare(problem)
    except BuildError as error:
        _fall_back(error)
        return reference_backend.backward(problem, plan, inputs, kept, dy, want)
    m, k, n, x, blocks = problem.m, problem.k, problem.n, inputs.x, prepared.blocks
    kinds = problem.chain.operand_kinds
    if dy.stride(1) != 1 and n > 1:
        dy = dy.contiguous()

    by_tiles = blocks.columns < n
    by_parts = want.weight and blocks.weight_parts
    dx = x.new_empty((m, k)) if want.x else None
    dweight = x.new_empty((n, k)) if want.weight else None
    weight_parts = x.new_empty((blocks.chunks, n, k)) if by_parts else None
    whole_dz = (by_tiles and want.x) or (want.weight and not by_parts)
    dz = x.new_empty((m, n)) if whole_dz else None
    totals = x.new_empty((prepared.kernel.totals, n), dtype=torch.float64)
    total_parts = totals.new_empty((blocks.chunks, *totals.shape))
    elements = tuple(
        x.new_empty((m, n), dtype=problem.norm_dtype) if kind == "element" and wanted else None
        for kind, wanted in zip(kinds, want.operands, strict=True)
    )
    mean = kept.mean if kept.mean.numel() else None
    call = _call(problem, prepared, inputs, mean, kept.rstd, elements)
    call.z, call.y, call.y_stride = kept.z.data_ptr(), dy.data_ptr(), dy.stride(0)
    call.dz, call.dx, call.dweight = _pointer(dz), _pointer(dx), _pointer(dweight)
    call.dweight_parts = _pointer(weight_parts)
    call.totals, call.total_parts = totals.data_ptr(), total_parts.data_ptr()
    _run(prepared.runner.epinorm_backward, call)

    def total(index: int, dtype: torch.dtype) -> Tensor:
        return totals[index].to(dtype, copy=True)

    channel = iter(range(3, prepared.kernel.totals))
    operands: list[Tensor | None] = []
    for kind, wanted, element in zip(kinds, want.operands, elements, strict=True):
        index = next(channel) if kind == "channel" else None
        operands.append(
            total(index, problem.norm_dtype) if index is not None and wanted else element
        )
    return Gradients(
        dx,
        dweight,
        total(0, problem.dtype) if want.bias else None,
        total(1, problem.norm_dtype) if want.norm_weight else None,
        total(2, problem.norm_dtype) if want.norm_bias else None,
        tuple(operands),
    )
