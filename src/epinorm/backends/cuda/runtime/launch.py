"""A loaded kernel and its launch on PyTorch's current stream.

One launch fills a buffer, launch configuration and arguments alike, and calls the driver, which
copies from it before it returns. Nothing is allocated on the GPU and nothing waits, so a launch can
be captured in a graph.
"""

from __future__ import annotations

import ctypes
import math
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch

from epinorm.backends import unpromised
from epinorm.backends.cuda.runtime.arguments import FIELDS, Frame, Layout, layout_of
from epinorm.backends.cuda.runtime.driver import (
    INVALID_CONTEXT,
    check,
    driver,
    make_primary_context_current,
    message,
)

Dimensions = int | tuple[int, ...]
Stream = torch.Stream | int | None


# CUfunction_attribute and CUlaunchAttributeID of cuda.h.
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14
_CLUSTER_DIMENSION = 4
_PROGRAMMATIC_STREAM_SERIALIZATION = 6

SHARED_BYTES_FOR_ALL = 48 * 1024
"""Dynamic shared memory that a kernel has without asking."""
LARGEST_PORTABLE_CLUSTER = 8

recording: Any = None
"""A ``replay.Recording`` that is told of each launch."""


@dataclass(frozen=True)
class Compiled:
    """A kernel's machine code and what ptxas says about it; a figure that it did not report is -1.

    spill_bytes: spill stores and loads together. shared_bytes: static shared memory of a block.
    stack_bytes: local memory of a thread.
    """

    cubin: bytes
    log: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    stack_bytes: int


@dataclass(frozen=True, eq=False)
class _Shape:
    """Everything of a launch but its kernel, stream and arguments; `_shape` makes one of a kind."""

    numbers: tuple[int, ...]
    """Grid, block and dynamic shared memory: the first seven fields of CUlaunchConfig."""
    shared_bytes: int
    cluster_size: int
    attributes: int
    attribute_count: int

    def __str__(self) -> str:
        return (
            f"grid {self.numbers[:3]}, block {self.numbers[3:6]}, cluster of {self.cluster_size}, "
            f"{self.shared_bytes} bytes of dynamic shared memory"
        )


class Kernel:
    """One kernel on one GPU, ready to launch; made by `epinorm.backends.cuda.runtime.jit.load`."""

    def __init__(self, handle: int, entry: str, device: int, compiled: Compiled) -> None:
        self.entry = entry
        self.device = device
        self.compiled = compiled
        self._handle = ctypes.c_void_p(handle)
        self._shared_limit = SHARED_BYTES_FOR_ALL
        self._cluster_limit = LARGEST_PORTABLE_CLUSTER
        self._layouts: dict[str, Layout] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Kernel({self.entry!r}, cuda:{self.device})"

    def prepare(
        self,
        signature: str,
        grid: Dimensions,
        block: Dimensions,
        *,
        shared_bytes: int = 0,
        cluster: Dimensions | None = None,
        dependent: bool = False,
    ) -> Callable[..., None]:
        """A function of the bare arguments that launches on this kernel's GPU, on PyTorch's current
        stream of it unless ``stream`` names another.

        signature: a letter an argument: p pointer (given as an int, `tensor.data_ptr()`, 0 for
        null), m tensor map (its bytes), i int, l long long, u unsigned, v unsigned long long,
        f float, d double. `grid` counts blocks, with a cluster too; `shared_bytes` is the dynamic
        shared memory of a block. `dependent` lets this kernel start before the one ahead of it in
        the stream has ended: it must execute `griddepcontrol.wait` before it reads what that one
        wrote. Raises `TypeError` or `ValueError` for arguments that are not what the kernel takes,
        `RuntimeError` for what the driver refuses.
        """
        shape = _shape(grid, block, shared_bytes, cluster, dependent)
        layout = self._layouts.get(signature) or self._add_layout(signature)
        if shape.shared_bytes > self._shared_limit or shape.cluster_size > self._cluster_limit:
            self.reserve(shape.shared_bytes, shape.cluster_size)
        # A launch has its frame to itself, whatever other threads, signal handlers and finalizers
        # launch meanwhile; as many frames are made as were ever in use at a time.
        frames: list[Frame] = []
        call, handle = driver().cuLaunchKernelEx, self._handle
        device = self.device
        current_device, current_stream = unpromised.current_device, unpromised.current_stream
        attributes, attribute_count = shape.attributes, shape.attribute_count

        def launch(*values: int | float | bytes, stream: Stream = None) -> None:
            try:
                frame = frames.pop()
            except IndexError:
                frame = Frame(layout, shape.numbers)
            if stream is None:
                stream = current_stream(device)
            elif type(stream) is not int:
                stream = stream.cuda_stream  # type: ignore[union-attr]
            try:
                frame.pack(stream, attributes, attribute_count, *values)
            except (struct.error, OverflowError) as error:
                raise ValueError(
                    f"{self.entry}: arguments do not fit their types: {error} "
                    f"({signature}: {values}, {shape})"
                ) from None
            noted = recording  # another thread may end it
            if noted is not None:
                noted.note_launch(
                    handle.value, shape.numbers, (attributes, attribute_count), layout, values
                )
            if current_device() == device:
                status = call(frame.config, handle, frame.parameters, None)
                if status:
                    self._recover(status, frame, shape, signature)
            else:
                with torch.cuda.device(device):
                    status = call(frame.config, handle, frame.parameters, None)
                    if status:
                        self._recover(status, frame, shape, signature)
            frames.append(frame)

        return launch

    def _recover(self, status: int, frame: Frame, shape: _Shape, signature: str) -> None:
        """Launch again where this thread has not used CUDA before; raise for any other failure."""
        if status == INVALID_CONTEXT:
            with torch.cuda.device(self.device):
                make_primary_context_current(self.device)
                call = driver().cuLaunchKernelEx
                status = call(frame.config, self._handle, frame.parameters, None)
        if status:
            raise RuntimeError(
                f"launching {self.entry} on cuda:{self.device} failed with {message(status)} "
                f"({shape}, arguments {signature})"
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
        ask = driver().cuOccupancyMaxActiveBlocksPerMultiprocessor
        return self._asked(ask, block_threads, shared_bytes)

    def clusters_at_once(self, cluster: int, block_threads: int, shared_bytes: int = 0) -> int:
        """Clusters of ``cluster`` such blocks that the GPU holds at a time.

        Fewer than its multiprocessors suggest: a cluster stays within a GPC, whose number of
        multiprocessors need not be a multiple of its blocks.
        """
        self.reserve(shared_bytes, cluster)
        shape = _shape(cluster, block_threads, shared_bytes, cluster, False)
        # CUlaunchConfig: the shape, padding, the stream, attributes and their number.
        config = struct.pack("<7I4xQQI4x", *shape.numbers, 0, *_attributes(cluster, False))
        return self._asked(driver().cuOccupancyMaxActiveClusters, config)

    def _asked(self, ask: Callable[..., int], *arguments: Any) -> int:
        found = ctypes.c_int()
        with torch.cuda.device(self.device):
            make_primary_context_current(self.device)
            status = ask(ctypes.byref(found), self._handle, *arguments)
            check(status, f"asking for the occupancy of {self.entry}")
        return found.value

    def _set(self, attribute: int, value: int, what: str) -> None:
        number = ctypes.c_int()
        check(driver().cuDeviceGet(ctypes.byref(number), self.device), "finding the GPU")
        check(
            driver().cuKernelSetAttribute(attribute, value, self._handle, number),
            f"allowing {self.entry} {value} {what} on cuda:{self.device}",
        )

    def _add_layout(self, signature: str) -> Layout:
        layout = layout_of(signature)
        if driver().has_parameter_info:
            self._check_parameters(layout)
        self._layouts[signature] = layout
        return layout

    def _check_parameters(self, layout: Layout) -> None:
        """Compare number and sizes of the arguments with what the compiled kernel takes."""
        takes: list[int] = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        info = driver().cuKernelGetParamInfo
        while not info(self._handle, len(takes), ctypes.byref(offset), ctypes.byref(size)):
            takes.append(size.value)
        gets = [FIELDS[letter][1] for letter in layout.signature]
        if gets != takes:
            raise TypeError(
                f"{self.entry} takes arguments of {takes} bytes, but got {gets} bytes "
                f"({layout.signature})"
            )


def three(dimensions: Dimensions) -> tuple[int, int, int]:
    """The dimensions along x, y and z; raises ValueError for more."""
    if isinstance(dimensions, int):
        return dimensions, 1, 1
    if len(dimensions) > 3:
        raise ValueError(f"a grid, block or cluster has 1 to 3 dimensions, but got {dimensions}")
    x, y, z = (*dimensions, 1, 1)[:3]
    return x, y, z


@lru_cache(maxsize=4096)
def _shape(
    grid: Dimensions,
    block: Dimensions,
    shared_bytes: int,
    cluster: Dimensions | None,
    dependent: bool,
) -> _Shape:
    numbers = (*three(grid), *three(block), shared_bytes)
    cluster_size = math.prod(three(cluster or 1))
    return _Shape(numbers, shared_bytes, cluster_size, *_attributes(cluster, dependent))


@cache
def _attributes(cluster: Dimensions | None, dependent: bool) -> tuple[int, int]:
    """Address and number of the CUlaunchAttributes; kept for good, the driver only reads them."""
    # CUlaunchAttribute: 4 bytes of identifier, 4 of padding, 64 of value.
    entries = []
    if cluster is not None:
        entries.append(struct.pack("<I4x3I52x", _CLUSTER_DIMENSION, *three(cluster)))
    if dependent:
        entries.append(struct.pack("<I4xi60x", _PROGRAMMATIC_STREAM_SERIALIZATION, 1))
    if not entries:
        return 0, 0
    array = (ctypes.c_uint64 * (9 * len(entries))).from_buffer_copy(b"".join(entries))
    _kept_attributes.append(array)
    return ctypes.addressof(array), len(entries)


_kept_attributes: list[ctypes.Array[ctypes.c_uint64]] = []
