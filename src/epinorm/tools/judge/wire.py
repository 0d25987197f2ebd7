"""How tensors travel between the judge and a solution's process: as plain bytes in a memory file.

Nothing is unpickled in the judge's process: a header names shapes and dtypes, and is checked before
a byte is read. The memory file has no name, so nothing of it is left when both have ended.
"""

from __future__ import annotations

import ctypes
import io
import math
import os
from collections.abc import Mapping
from typing import IO, Any, cast

import torch
from torch import Tensor

ALIGNMENT = 64
CHUNK = 1 << 30
"""read(2) and write(2) take at most 2 GiB at once."""

_NAMES = "float64 float32 float16 bfloat16 bool uint8 int8 int16 int32 int64 complex64 complex128"
DTYPES = {name: getattr(torch, name) for name in _NAMES.split()}

Named = Mapping[str, Tensor | None]


class BadData(Exception):
    """What was received, or is to be sent, are no plain tensors; the message says why."""


def save(file: int, values: Any) -> None:
    """Write what torch.save can."""
    os.ftruncate(file, 0)
    torch.save(values, cast("IO[bytes]", _Stream(file)))


def load(file: int) -> Any:
    """Read what ``save`` wrote, which can be code: for what comes from the judge."""
    return torch.load(cast("IO[bytes]", _Stream(file)), weights_only=False)


class _Stream(io.RawIOBase):
    """A file with a position of its own, where both processes share the file's."""

    def __init__(self, file: int) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        starts = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: _size(self._file)}
        self._at = starts[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, memory: Any) -> int:
        view = memoryview(memory).cast("B")[: max(0, _size(self._file) - self._at)]
        _fill(view, self._file, self._at)
        self._at += len(view)
        return len(view)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        _put(view, self._file, self._at)
        self._at += len(view)
        return len(view)


def _size(file: int) -> int:
    return os.fstat(file).st_size


def _put(memory: Any, file: int, offset: int) -> None:
    """Write all of the memory."""
    view = memoryview(memory).cast("B")
    while view:
        written = os.pwrite(file, view[:CHUNK], offset)
        view, offset = view[written:], offset + written


def _fill(memory: Any, file: int, offset: int) -> None:
    """Read as many bytes as there is memory for."""
    view = memoryview(memory).cast("B")
    while view:
        count = os.preadv(file, [view[:CHUNK]], offset)
        if count <= 0:
            raise BadData("it was cut off")
        view, offset = view[count:], offset + count


def _memory(tensor: Tensor) -> Any:
    """The bytes of a contiguous tensor on the CPU, which must outlive them."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())


def send(file: int, tensors: Named, most: int) -> list[Any]:
    """Write tensors; returns their header: [name, dtype, shape] each, None for no tensor.

    Raises BadData for what is no plain dense tensor, and for more than ``most`` bytes in all.
    """
    header: list[Any] = []
    offset = 0
    for name, tensor in tensors.items():
        if tensor is None:
            header.append([name, None, None])
            continue
        kind = str(tensor.dtype).removeprefix("torch.")
        if tensor.layout != torch.strided or tensor.is_quantized or kind not in DTYPES:
            raise BadData(f"{name} is a {tensor.layout} tensor of {tensor.dtype}, no dense one")
        size = tensor.numel() * tensor.element_size()
        if offset + size > most:
            raise BadData(
                f"{name} of shape {tuple(tensor.shape)} is {size:.3g} bytes, which is too large"
            )
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        if size:
            _put(_memory(plain), file, offset)
        header.append([name, kind, list(tensor.shape)])
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    os.ftruncate(file, offset)
    return header


def receive(file: int, header: Any, most: int) -> dict[str, Tensor | None]:
    """The tensors of a header that is not trusted; raises BadData for whatever is wrong with it."""
    if not isinstance(header, list) or not all(isinstance(e, list) and len(e) == 3 for e in header):
        raise BadData("its header is no list of names, dtypes and shapes")
    there = _size(file)
    if there > most:
        raise BadData(f"it is {there} bytes, at most {most} were expected")
    tensors: dict[str, Tensor | None] = {}
    offset = 0
    for name, kind, shape in header:
        if not isinstance(name, str):
            raise BadData("a name is no text")
        if kind is None:
            tensors[name] = None
            continue
        dtype = DTYPES.get(kind) if isinstance(kind, str) else None
        sizes = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
        if dtype is None or not sizes or len(shape) > 64:
            raise BadData("a header names no dtype and shape")
        count = math.prod(shape)
        if offset + count * dtype.itemsize > there:
            raise BadData(f"a tensor of shape {tuple(shape)} is cut off")
        flat = torch.empty(count, dtype=dtype)
        if count:
            _fill(_memory(flat), file, offset)
        tensors[name] = flat.reshape(shape)
        offset += -(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return tensors
