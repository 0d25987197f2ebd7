"""Launches of attention's kernels, and the tiles that they take."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epinorm.backends.cuda.attention import kernels, rows_first
from epinorm.backends.cuda.runtime.driver import driver, relaxed_capture
from epinorm.backends.cuda.runtime.jit import load_cubin
from epinorm.backends.memo import cleared_with

_log = logging.getLogger("epinorm")
_LOG2_E = 1 / math.log(2)
_ALIGNMENT = 16
_MOST_PREPARED = 1024


class _Tile(NamedTuple):
    """Queries and keys of a block, warps, and stages of the loop's loads."""

    block_m: int
    block_n: int
    warps: int
    stages: int


# By the width of a head: measured on an H200 (docs/decisions/0028-attention_in_tf32.md).
_FORWARD = {64: _Tile(128, 32, 4, 3), 128: _Tile(128, 64, 8, 2)}
_KEYS = {64: _Tile(64, 128, 8, 1), 128: _Tile(32, 128, 8, 1)}
_QUERIES = {64: _Tile(128, 64, 8, 1), 128: _Tile(128, 64, 8, 1)}


def run_forward(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """``epinorm::attention`` on a GPU."""
    read = tuple(map(_in_rows, (query, key, value)))
    mixed, lse = rows_first(query), query.new_empty(query.shape[:3])
    strided = (*read, mixed)
    _launch(kernels.attention_forward, _FORWARD, strided, (lse,), (scale * _LOG2_E,))
    return mixed, lse


def run_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixed: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``epinorm::attention_backward`` on a GPU."""
    read = tuple(map(_in_rows, (query, key, value, grad)))
    lse, delta = lse.contiguous(), torch.empty_like(lse, memory_format=torch.contiguous_format)
    dq, dk, dv = map(rows_first, (query, key, value))
    rows, scales = (lse, delta), (scale * _LOG2_E, scale)
    strided = (*read, _in_rows(mixed), dq)
    _launch(kernels.attention_backward_queries, _QUERIES, strided, rows, scales)
    _launch(kernels.attention_backward_keys, _KEYS, (*read, dk, dv), rows, scales, of_keys=True)
    return dq, dk, dv


def _in_rows(tensor: Tensor) -> Tensor:
    """Rows in lines, at offsets of 32 bits within a head."""
    fits = tensor.stride(3) == 1 and tensor.stride(2) * tensor.shape[2] < 1 << 31
    return tensor if fits else tensor.contiguous()


def _launch(
    kernel: Any,
    tiles: Mapping[int, _Tile],
    strided: tuple[Tensor, ...],
    rows: tuple[Tensor, ...],
    scales: tuple[float, ...],
    of_keys: bool = False,
) -> None:
    """A program for each block of queries, or of keys, of each head.

    strided: the kernel's first arguments, of which it asks strides, query and key first; rows:
    those of one number a query.
    """
    (batch, heads, queries, width), keys = strided[0].shape, strided[1].shape[2]
    tile = tiles[width]
    count, block = (keys, tile.block_n) if of_keys else (queries, tile.block_m)
    strides = [stride for tensor in strided for stride in tensor.stride()[:3]]
    numbers = (*strides, heads, queries, keys)
    device = strided[0].device
    pointers = [tensor.data_ptr() for tensor in (*strided, *rows)]
    aligned = not any(pointer % _ALIGNMENT for pointer in pointers)  # as Triton compiles for
    kind = kernel.__name__, device.index, batch, width, numbers
    known = prepared.get(kind) if aligned else None
    if known is not None:
        known(*pointers, *scales)
        return
    whole = (queries % tile.block_m == 0, keys % tile.block_n == 0)
    nothing, here = nullcontext(), device.index == torch.cuda.current_device()
    with nothing if here else torch.cuda.device(device), _loading():
        grid = -(-count // block) * batch * heads
        made = kernel[(grid,)](
            *(*strided, *rows, *numbers, *scales),
            *(width, tile.block_m, tile.block_n, *whole),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        if aligned and kind not in prepared:
            if len(prepared) >= _MOST_PREPARED:
                prepared.clear()
            facts = len(pointers), numbers, len(scales)
            prepared[kind] = _prepare(made, grid, device.index, *facts)


def _loading() -> AbstractContextManager[None]:
    """While a CUDA graph is captured the driver forbids what a kernel's first launch does."""
    return relaxed_capture() if torch.cuda.is_current_stream_capturing() else nullcontext()


def _prepare(
    made: Any, grid: int, device: int, pointers: int, numbers: Sequence[int], scales: int
) -> Callable[..., None] | None:
    """What Triton has compiled, launched as our own kernels are, which takes the host less; None
    where that is not what a kernel of these arguments would be."""
    try:
        metadata = made.metadata
        if metadata.global_scratch_size or metadata.profile_scratch_size:
            return None
        if metadata.num_ctas != 1 or metadata.launch_cooperative_grid or metadata.launch_pdl:
            return None
        if not driver().has_parameter_info:
            return None
        kernel = load_cubin(made.asm["cubin"], metadata.name, device)
        # Numbers that are 1 are compiled in; memory for scratch, of which there is none, is last.
        given = [n for n in numbers if n != 1]
        letters = ["l" if n >= 1 << 31 else "i" for n in given]
        signature = "p" * pointers + "".join(letters) + "f" * scales + "pp"
        threads = metadata.num_warps * metadata.warp_size
        launch = kernel.prepare(signature, grid, threads, shared_bytes=metadata.shared)
    except Exception as error:  # of a Triton that is another one
        _log.debug("attention is launched by Triton: %s", error)
        return None

    def run(*values: Any) -> None:
        launch(*values[:pointers], *given, *values[pointers:], 0, 0)

    return run


prepared: dict[Any, Callable[..., None] | None] = {}
cleared_with(prepared.clear)
