"""The structs of call.h and runner.cpp, field for field, for ctypes."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_double, c_int, c_int32, c_int64, c_void_p

import torch

DTYPE_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}


class Call(Structure):
    """EpinormCall: what every row of one call shares."""

    _fields_ = (
        ("n", c_int64),
        ("groups", c_int64),
        ("eps", c_double),
        ("constants", c_void_p),
        ("norm_weight", c_void_p),
        ("norm_bias", c_void_p),
        ("operands", c_void_p),
        ("operand_strides", c_void_p),
        ("operand_gradients", c_void_p),
        ("mean", c_void_p),
        ("rstd", c_void_p),
        ("sum", c_void_p),
        ("dsum", c_void_p),
        ("dsum_stride", c_int64),
        ("overflow", c_int32),
    )


class Kernel(Structure):
    """EpinormKernel: a chain's functions and what they need."""

    _fields_ = (
        ("forward", c_void_p),
        ("backward", c_void_p),
        ("fold", c_void_p),
        ("scratch_bytes", c_int64),
        ("sums_bytes", c_int64),
        ("totals", c_int64),
    )


class Blocks(Structure):
    """EpinormBlocks: how the rows are cut."""

    _fields_ = (
        ("rows", c_int64),
        ("columns", c_int64),
        ("inner", c_int64),
        ("outer", c_int64),
        ("chunks", c_int64),
        ("dx_rows", c_int64),
        ("packed", c_int64),
    )


class Problem(Structure):
    """epinorm::Problem: one call of the runner."""

    _fields_ = (
        ("call", Call),
        ("kernel", Kernel),
        ("blocks", Blocks),
        ("m", c_int64),
        ("k", c_int64),
        ("dtype", c_int32),
        ("out_dtype", c_int32),
        ("saved_dtype", c_int32),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("weight", c_void_p),
        ("weight_stride", c_int64),
        ("bias", c_void_p),
        ("z", c_void_p),
        ("y", c_void_p),
        ("y_stride", c_int64),
        ("dz", c_void_p),
        ("dx", c_void_p),
        ("dweight", c_void_p),
        ("dweight_parts", c_void_p),
        ("norm_dtype", c_int32),
        ("column_sums", c_void_p),
    )


def declare_runner(library: ctypes.CDLL) -> None:
    """Give the runner's functions their types."""
    for function in (library.epinorm_forward, library.epinorm_backward):
        function.argtypes = [POINTER(Problem)]
        function.restype = c_int
    library.epinorm_message.argtypes = []
    library.epinorm_message.restype = c_char_p
    library.epinorm_can_pack.argtypes = []
    library.epinorm_can_pack.restype = c_int


def declare_kernel(library: ctypes.CDLL) -> None:
    """Give a kernel's description its types."""
    library.epinorm_describe.argtypes = [c_int64, c_int64, POINTER(Kernel)]
    library.epinorm_describe.restype = None
