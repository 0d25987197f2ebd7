"""A loaded kernel and its launch on PyTorch's current stream.

One launch fills one buffer, launch configuration and arguments alike, and calls the driver. The
buffer belongs to a thread, so that threads need no lock; the driver copies from it before it
returns. Nothing is allocated on the GPU and nothing waits, so a launch can be captured in a graph.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from epinorm.cuda.driver import (
    INVALID_CONTEXT,
    check,
    driver,
    make_primary_context_current,
    message,
)
from epinorm.cuda.tensor_map import (
    TENSOR_MAP_ALIGNMENT,
    TENSOR_MAP_BYTES,
    TensorMap,
    tensor_map,
)

if TYPE_CHECKING:
    from epinorm.cuda.jit import Compiled

__all__ = ["Kernel", "TensorMap", "f32", "f64", "i32", "i64", "tensor_map", "u32", "u64"]

Dimensions = int | tuple[int, ...]
Stream = torch.Stream | int | None


class i32(int):
    """An `int` argument."""


class i64(int):
    """A `long long` argument."""


class u32(int):
    """An `unsigned` argument."""


class u64(int):
    """An `unsigned long long` argument."""


class f32(float):
    """A `float` argument, rounded from Python's float."""


class f64(float):
    """A `double` argument."""


# CUfunction_attribute and CUlaunchAttributeID of cuda.h.
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14
_CLUSTER_DIMENSION = 4
_PROGRAMMATIC_STREAM_SERIALIZATION = 6

SHARED_BYTES_FOR_ALL = 48 * 1024
"""Dynamic shared memory that a kernel has without asking."""
LARGEST_PORTABLE_CLUSTER = 8

# CUlaunchConfig: grid, block, shared bytes, stream, attributes, number of attributes.
_CONFIG = "<7I4xQQI4x"
_CONFIG_BYTES = struct.calcsize(_CONFIG)
_ALIGNMENT = TENSOR_MAP_ALIGNMENT

# Letter in a signature -> struct code, size and alignment in bytes.
_FIELDS: dict[str, tuple[str, int, int]] = {
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
class _Layout:
    """Where each argument of one signature lies in the buffer."""

    signature: str
    format: str
    offsets: tuple[int, ...]
    size: int


class _Frame:
    """One thread's buffer for one signature: CUlaunchConfig, arguments, pointers to them."""

    def __init__(self, layout: _Layout) -> None:
        count = len(layout.offsets)
        self._storage = ctypes.create_string_buffer(layout.size + _ALIGNMENT)
        base = ctypes.addressof(self._storage)
        shift = -base % _ALIGNMENT
        pointers = (base + shift + offset for offset in layout.offsets)
        self._pointers = (ctypes.c_void_p * max(count, 1))(*pointers)
        self.pack = partial(struct.Struct(layout.format).pack_into, self._storage, shift)
        self.config = ctypes.c_void_p(base + shift)
        self.parameters = ctypes.c_void_p(ctypes.addressof(self._pointers))


class _Frames(threading.local):
    """The buffers of this thread."""

    def __init__(self) -> None:
        self.of: dict[_Layout, _Frame] = {}


_frames = _Frames()


class Kernel:
    """One kernel on one GPU, ready to launch; made by `epinorm.cuda.jit.load`."""

    def __init__(self, handle: int, entry: str, device: int, compiled: Compiled) -> None:
        self.entry = entry
        self.device = device
        self.compiled = compiled
        self._handle = ctypes.c_void_p(handle)
        self._launch = driver().cuLaunchKernelEx
        self._shared_limit = SHARED_BYTES_FOR_ALL
        self._cluster_limit = LARGEST_PORTABLE_CLUSTER
        self._layouts: dict[str, _Layout] = {}
        self._lock = threading.Lock()
        self._current_device: Callable[[], int] = torch._C._cuda_getDevice
        self._current_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream

    def __repr__(self) -> str:
        return f"Kernel({self.entry!r}, cuda:{self.device})"

    def launch(
        self,
        grid: Dimensions,
        block: Dimensions,
        args: Sequence[object],
        *,
        shared_bytes: int = 0,
        cluster: Dimensions | None = None,
        dependent: bool = False,
        stream: Stream = None,
    ) -> None:
        """Launch on this kernel's GPU, on PyTorch's current stream of it unless told otherwise.

        `grid` counts blocks, with a cluster too; `shared_bytes` is the dynamic shared memory of a
        block. An argument is a tensor of this GPU or None (a pointer), a `TensorMap`, or a number
        wrapped as i32, i64, u32, u64, f32 or f64. `dependent` lets this kernel start before the
        one ahead of it in the stream has ended: it must execute `griddepcontrol.wait` before it
        reads what that one wrote. Raises `TypeError` or `ValueError` for arguments that are not
        what the kernel takes, `RuntimeError` for what the driver refuses.
        """
        letters, values = [], []
        for argument in args:
            kind = _KINDS.get(type(argument)) or _kind_of(argument)
            letters.append(kind[0])
            values.append(kind[1](argument))
        signature = "".join(letters)
        layout = self._layouts.get(signature) or self._add_layout(signature)
        frame = _frames.of.get(layout) or _add_frame(layout)
        if shared_bytes > self._shared_limit or cluster is not None:
            self.reserve(shared_bytes, _volume(cluster))
        attributes, count = _attributes(cluster, dependent)
        if stream is None:
            stream = self._current_stream(self.device)
        elif type(stream) is not int:
            stream = stream.cuda_stream
        x, y, z = _three(grid)
        i, j, k = _three(block)
        try:
            frame.pack(x, y, z, i, j, k, shared_bytes, stream, attributes, count, *values)
        except (struct.error, OverflowError) as error:
            raise ValueError(
                f"{self.entry}: a number does not fit its type: {error} "
                f"(grid {grid}, block {block}, arguments {signature} = {values})"
            ) from None
        if self._current_device() == self.device:
            status = self._launch(frame.config, self._handle, frame.parameters, None)
        else:
            with torch.cuda.device(self.device):
                status = self._launch(frame.config, self._handle, frame.parameters, None)
        if status == INVALID_CONTEXT:  # the first use of CUDA in this thread
            status = self._launch_in_new_thread(frame)
        if status:
            raise RuntimeError(
                f"launching {self.entry} on cuda:{self.device} failed with {message(status)} "
                f"(grid {grid}, block {block}, cluster {cluster}, "
                f"dynamic shared memory {shared_bytes} bytes, arguments {signature})"
            )

    def reserve(self, shared_bytes: int, cluster_size: int = 1) -> None:
        """Allow launches with this much dynamic shared memory and clusters of this many blocks."""
        with self._lock:
            if shared_bytes > self._shared_limit:
                self._set(_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes, "bytes of shared memory")
                self._shared_limit = shared_bytes
            if cluster_size > self._cluster_limit:
                self._set(_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1, "(clusters of more than 8 blocks)")
                self._cluster_limit = cluster_size

    def blocks_per_sm(self, block_threads: int, shared_bytes: int = 0) -> int:
        """Blocks of this many threads that one multiprocessor holds at a time (occupancy)."""
        self.reserve(shared_bytes)
        blocks = ctypes.c_int()
        with torch.cuda.device(self.device):
            make_primary_context_current(self.device)
            check(
                driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(
                    ctypes.byref(blocks), self._handle, block_threads, shared_bytes
                ),
                f"asking for the occupancy of {self.entry}",
            )
        return blocks.value

    def _launch_in_new_thread(self, frame: _Frame) -> int:
        with torch.cuda.device(self.device):
            make_primary_context_current(self.device)
            return int(self._launch(frame.config, self._handle, frame.parameters, None))

    def _set(self, attribute: int, value: int, what: str) -> None:
        number = ctypes.c_int()
        check(driver().cuDeviceGet(ctypes.byref(number), self.device), "finding the GPU")
        check(
            driver().cuKernelSetAttribute(attribute, value, self._handle, number),
            f"allowing {self.entry} {value} {what} on cuda:{self.device}",
        )

    def _add_layout(self, signature: str) -> _Layout:
        layout = _layout(signature)
        if driver().has_parameter_info:
            self._check_parameters(layout)
        self._layouts[signature] = layout
        return layout

    def _check_parameters(self, layout: _Layout) -> None:
        """Compare number and sizes of the arguments with what the compiled kernel takes."""
        takes = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        info = driver().cuKernelGetParamInfo
        while not info(self._handle, len(takes), ctypes.byref(offset), ctypes.byref(size)):
            takes.append(size.value)
        gets = [_FIELDS[letter][1] for letter in layout.signature]
        if gets != takes:
            raise TypeError(
                f"{self.entry} takes arguments of {takes} bytes, but got {gets} bytes "
                f"({layout.signature})"
            )


_Kind = tuple[str, Callable[[Any], Any]]


def _address(tensor: torch.Tensor) -> int:
    if not tensor.is_cuda:
        raise ValueError(f"a kernel's tensor must be on its GPU, but got one on {tensor.device}")
    return tensor.data_ptr()


def _itself(value: object) -> object:
    return value


_KINDS: dict[type, _Kind] = {
    torch.Tensor: ("p", _address),
    torch.nn.Parameter: ("p", _address),
    type(None): ("p", lambda _: 0),
    i32: ("i", _itself),
    i64: ("l", _itself),
    u32: ("u", _itself),
    u64: ("v", _itself),
    f32: ("f", _itself),
    f64: ("d", _itself),
    TensorMap: ("m", lambda map_: map_.data),
}


def _kind_of(argument: object) -> _Kind:
    if isinstance(argument, torch.Tensor):
        return _KINDS[torch.Tensor]
    raise TypeError(
        "a kernel's argument must be a tensor, None, a TensorMap or a number wrapped as i32, i64, "
        f"u32, u64, f32 or f64, but got {argument!r} of type {type(argument).__name__}"
    )


def _three(dimensions: Dimensions) -> tuple[int, int, int]:
    if isinstance(dimensions, int):
        return dimensions, 1, 1
    if len(dimensions) > 3:
        raise ValueError(f"a grid, block or cluster has 1 to 3 dimensions, but got {dimensions}")
    x, y, z = (*dimensions, 1, 1)[:3]
    return x, y, z


def _volume(cluster: Dimensions | None) -> int:
    if cluster is None:
        return 1
    x, y, z = _three(cluster)
    return x * y * z


@cache
def _layout(signature: str) -> _Layout:
    codes, offsets, end = [_CONFIG], [], _CONFIG_BYTES
    for letter in signature:
        code, size, alignment = _FIELDS[letter]
        padding = -end % alignment
        codes.append(f"{padding}x{code}" if padding else code)
        offsets.append(end + padding)
        end += padding + size
    return _Layout(signature, "".join(codes), tuple(offsets), end)


def _add_frame(layout: _Layout) -> _Frame:
    return _frames.of.setdefault(layout, _Frame(layout))


@cache
def _attributes(cluster: Dimensions | None, dependent: bool) -> tuple[int, int]:
    """Address and number of the CUlaunchAttributes; kept for good, the driver only reads them."""
    # CUlaunchAttribute: 4 bytes of identifier, 4 of padding, 64 of value.
    entries = []
    if cluster is not None:
        entries.append(struct.pack("<I4x3I52x", _CLUSTER_DIMENSION, *_three(cluster)))
    if dependent:
        entries.append(struct.pack("<I4xi60x", _PROGRAMMATIC_STREAM_SERIALIZATION, 1))
    if not entries:
        return 0, 0
    array = (ctypes.c_uint64 * (9 * len(entries))).from_buffer_copy(b"".join(entries))
    _kept_attributes.append(array)
    return ctypes.addressof(array), len(entries)


_kept_attributes: list[ctypes.Array[ctypes.c_uint64]] = []
