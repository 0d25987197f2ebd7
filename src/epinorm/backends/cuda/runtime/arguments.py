"""A kernel's arguments in a buffer that the driver copies from.

A signature has one letter an argument (see `FIELDS`); its layout is the same everywhere.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

from epinorm.backends.cuda.runtime.tensor_map import TENSOR_MAP_ALIGNMENT, TENSOR_MAP_BYTES

# CUlaunchConfig: grid, block and shared bytes, which stay; then, packed with the arguments, stream,
# attributes and number of attributes.
SHAPE = struct.Struct("<7I4x")
_CONFIG = "<QQI4x"
CONFIG_BYTES = SHAPE.size + struct.calcsize(_CONFIG)
_ALIGNMENT = TENSOR_MAP_ALIGNMENT

# Letter in a signature -> struct code, size and alignment in bytes.
FIELDS: dict[str, tuple[str, int, int]] = {
    "p": ("Q", 8, 8),
    "i": ("i", 4, 4),
    "l": ("q", 8, 8),
    "u": ("I", 4, 4),
    "v": ("Q", 8, 8),
    "f": ("f", 4, 4),
    "d": ("d", 8, 8),
    "m": (f"{TENSOR_MAP_BYTES}s", TENSOR_MAP_BYTES, TENSOR_MAP_ALIGNMENT),
}


@dataclass(frozen=True, eq=False)
class Layout:
    """Where each argument of one signature lies in the buffer."""

    signature: str
    format: str
    offsets: tuple[int, ...]
    size: int


class Frame:
    """A buffer for launches of one shape, one at a time: CUlaunchConfig, arguments, pointers to
    them. shape: the first seven fields of CUlaunchConfig.

    ``pack`` fills in the stream, the attributes and their number, and the arguments.
    """

    def __init__(self, layout: Layout, shape: Sequence[int]) -> None:
        count = len(layout.offsets)
        self._storage = ctypes.create_string_buffer(layout.size + _ALIGNMENT)
        base = ctypes.addressof(self._storage)
        shift = -base % _ALIGNMENT
        pointers = (base + shift + offset for offset in layout.offsets)
        self._pointers = (ctypes.c_void_p * max(count, 1))(*pointers)
        SHAPE.pack_into(self._storage, shift, *shape)
        fields = struct.Struct(layout.format)
        self.pack = partial(fields.pack_into, self._storage, shift + SHAPE.size)
        self.config = ctypes.c_void_p(base + shift)
        self.parameters = ctypes.c_void_p(ctypes.addressof(self._pointers))


@cache
def layout_of(signature: str) -> Layout:
    """Layout of a signature; raises `ValueError` for a letter that stands for nothing."""
    codes, offsets, end = [_CONFIG], [], CONFIG_BYTES
    for letter in signature:
        if letter not in FIELDS:
            raise ValueError(
                f"a signature has letters out of {''.join(FIELDS)}, but got {signature!r}"
            )
        code, size, alignment = FIELDS[letter]
        padding = -end % alignment
        codes.append(f"{padding}x{code}" if padding else code)
        offsets.append(end + padding)
        end += padding + size
    return Layout(signature, "".join(codes), tuple(offsets), end)
