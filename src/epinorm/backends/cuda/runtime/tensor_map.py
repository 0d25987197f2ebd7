"""Tensor maps: what the tensor memory accelerator (TMA) must know to copy a tile of a matrix.

Encoding one is a computation on the host, 1.5 us; the last ones are kept, by everything that goes
into them. The address is enough to tell two tensors apart: it is unique over all GPUs of a process.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import NamedTuple

import torch

from epinorm.backends.cuda.runtime.device import stand_in
from epinorm.backends.cuda.runtime.driver import check, driver
from epinorm.backends.memo import memo

TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGNMENT = 64

# CUtensorMapDataType, CUtensorMapSwizzle and, of 256 bytes, CUtensorMapL2promotion of cuda.h.
_DATA_TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_L2_PROMOTION = 3

LARGEST_BOX = 256
_KEPT = 512


class MapFacts(NamedTuple):
    """What a map was encoded from, as the driver takes it; kinds: of data, swizzle, promotion."""

    address: int
    sizes: tuple[int, int]
    stride: int
    box: tuple[int, int]
    kinds: tuple[int, int, int]


_facts: dict[bytes, MapFacts] = {}
_MOST_FACTS = 8192
_numbers = itertools.count()  # in the place of maps that no driver encodes


def facts_of(data: bytes) -> MapFacts | None:
    """What a map was encoded from; None if that was too long ago."""
    return _facts.get(data)


def tensor_map(tensor: torch.Tensor, box_rows: int, box_cols: int, swizzle: int = 128) -> bytes:
    """A CUtensorMap that copies boxes of `box_rows` x `box_cols` out of or into a matrix: the
    argument for a `const __grid_constant__ CUtensorMap`. Whoever launches keeps the tensor alive.

    tensor: (rows, columns), fp16, bf16 or fp32, on a GPU, columns contiguous, rows a multiple of
    16 bytes apart, starting on 16 bytes. Elements outside it read as zero and are not written.
    `swizzle` is in bytes. In a kernel the first coordinate is the column; it must be a multiple of
    16 bytes, else the GPU stops with "illegal instruction".
    Raises `ValueError` or `TypeError` for what the hardware cannot address. Source: PTX ISA,
    section "Tensors"; CUDA driver API, cuTensorMapEncodeTiled.
    """
    matrix = tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
    return _encode(matrix, (box_rows, box_cols), swizzle)


_Matrix = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]


@memo(_KEPT)
def _encode(matrix: _Matrix, box: tuple[int, int], swizzle: int) -> bytes:
    _validate(matrix, box, swizzle)
    address, (rows, cols), strides, dtype = matrix
    row_bytes = max(strides[0], cols) * dtype.itemsize if rows == 1 else strides[0] * dtype.itemsize
    row_bytes = -(-row_bytes // 16) * 16  # differs from the stride only where there is one row
    facts = MapFacts(
        *(address, (cols, rows), row_bytes, (box[1], box[0])),
        (_DATA_TYPES[dtype], _SWIZZLES[swizzle], _L2_PROMOTION),
    )
    data = _encoded(facts) if stand_in() is None else next(_numbers).to_bytes(TENSOR_MAP_BYTES)
    if len(_facts) >= _MOST_FACTS:
        _facts.clear()
    _facts[data] = facts
    return data


def _encoded(facts: MapFacts) -> bytes:
    # Storage for a map that can be moved to the next 64-byte boundary.
    buffer = ctypes.create_string_buffer(TENSOR_MAP_BYTES + TENSOR_MAP_ALIGNMENT)
    shift = -ctypes.addressof(buffer) % TENSOR_MAP_ALIGNMENT
    data_type, *rest = facts.kinds
    check(
        driver().cuTensorMapEncodeTiled(
            ctypes.addressof(buffer) + shift,
            data_type,
            2,
            facts.address,
            (ctypes.c_uint64 * 2)(*facts.sizes),
            (ctypes.c_uint64 * 1)(facts.stride),
            (ctypes.c_uint32 * 2)(*facts.box),
            (ctypes.c_uint32 * 2)(1, 1),
            0,  # no interleave
            *rest,
            0,  # out of bounds: zeros
        ),
        f"encoding a tensor map of {facts}",
    )
    return buffer.raw[shift : shift + TENSOR_MAP_BYTES]


def _validate(matrix: _Matrix, box: tuple[int, int], swizzle: int) -> None:
    (address, shape, strides, dtype), (box_rows, box_cols) = matrix, box
    if dtype not in _DATA_TYPES:
        raise TypeError(f"a tensor map needs float16, bfloat16 or float32, but got {dtype}")
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"a tensor map needs a matrix with elements, but got shape {shape}")
    if strides[1] != 1 and shape[1] != 1:
        raise ValueError(f"a tensor map needs contiguous columns, but got strides {strides}")
    if shape[0] > 1 and strides[0] * dtype.itemsize % 16:
        raise ValueError(
            f"a tensor map needs rows a multiple of 16 bytes apart, "
            f"but they are {strides[0] * dtype.itemsize} bytes apart"
        )
    if address % 16:
        raise ValueError(f"a tensor map needs data on a 16-byte boundary, but got {address:#x}")
    if not (1 <= box_rows <= LARGEST_BOX and 1 <= box_cols <= LARGEST_BOX):
        raise ValueError(
            f"a tensor map's box has 1 to {LARGEST_BOX} rows and columns, "
            f"but got {box_rows} x {box_cols}"
        )
    if swizzle not in _SWIZZLES:
        raise ValueError(f"swizzle must be one of {[*_SWIZZLES]} bytes, but got {swizzle}")
    if box_cols * dtype.itemsize % 16:
        raise ValueError(f"a box row must be a multiple of 16 bytes, but has {box_cols} {dtype}")
    if swizzle and box_cols * dtype.itemsize > swizzle:
        raise ValueError(
            f"a box row of {box_cols * dtype.itemsize} bytes does not fit swizzle {swizzle}"
        )
