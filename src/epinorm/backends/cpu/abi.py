"""The structs of call.h and runner.cpp for ctypes, read from the C++ that declares them."""

from __future__ import annotations

import ctypes
import re
from ctypes import POINTER, Structure, c_char_p, c_double, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch

DTYPE_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}

_TEXT = "".join(Path(__file__).with_name(name).read_text() for name in ("call.h", "runner.cpp"))
_TYPES: dict[str, Any] = {"double": c_double, "int32_t": c_int32, "int64_t": c_int64}
_FIELDS = re.compile(r"^  (?:const |mutable )?(\w+)([* const]*) (\w+(?:, \w+)*);", re.MULTILINE)


def _fields(struct: str) -> tuple[tuple[str, Any], ...]:
    """Its fields in order; all pointers are c_void_p, those to functions too."""
    text = _TEXT.partition(f"struct {struct} {{")[2].partition("\n};")[0]
    return tuple(
        (name, c_void_p if "*" in stars or f"(*{kind})" in _TEXT else _TYPES[kind])
        for kind, stars, names in _FIELDS.findall(text)
        for name in names.split(", ")
    )


class Call(Structure):
    """What every row of one call shares."""

    _fields_ = _fields("EpinormCall")


class Kernel(Structure):
    """A chain's functions and what they need."""

    _fields_ = _fields("EpinormKernel")


class Blocks(Structure):
    """How the rows are cut."""

    _fields_ = _fields("EpinormBlocks")


_TYPES |= {"EpinormCall": Call, "EpinormKernel": Kernel, "EpinormBlocks": Blocks}


class Problem(Structure):
    """One call of the runner."""

    _fields_ = _fields("Problem")


def declare_runner(library: ctypes.CDLL) -> None:
    """Give the runner's functions their types."""
    for function in (library.epinorm_forward, library.epinorm_backward):
        function.argtypes = [POINTER(Problem)]
    library.epinorm_message.restype = c_char_p


def declare_kernel(library: ctypes.CDLL) -> None:
    """Give a kernel's description its types."""
    library.epinorm_describe.argtypes = [c_int64, c_int64, POINTER(Kernel)]
    library.epinorm_describe.restype = None
