"""A pass as one native call: the launches of an earlier run, repeated with other addresses.

What Python decides for a problem is the same at each call but for addresses. ``recording`` notes
the allocations and launches of a run; each address among its arguments lies in a tensor that was
given or allocated, and a ``Replay`` launches the same with the addresses of later tensors. What is
allocated and not a result lies in one buffer. Sound without being told what a kernel does: an
argument that is a pointer says so in its signature, and one that lies in no tensor is refused.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from epinorm.backends.cpu.build import load_library
from epinorm.backends.cuda.runtime import launch as launching
from epinorm.backends.cuda.runtime import prepared
from epinorm.backends.cuda.runtime.arguments import SHAPE, Layout
from epinorm.backends.cuda.runtime.driver import (
    INVALID_CONTEXT,
    driver,
    make_primary_context_current,
    message,
)
from epinorm.backends.cuda.runtime.prepared import new_tensor
from epinorm.backends.cuda.runtime.tensor_map import MapFacts, facts_of

__all__ = ["CannotReplay", "Recording", "Replay", "is_recording", "recording"]

ALIGNMENT = 256
"""Bytes between the tensors of the scratch buffer."""
VECTOR_BYTES = 16
"""Tensors begin at multiples of it, when recorded and when repeated: kernels are chosen by it."""

LARGEST_SCRATCH = 96 * 2**20
"""Bytes: with more the GPU decides, and memory is better given back within the pass."""

_ALLOCATES = frozenset(("empty", "empty_strided", "new_empty", "empty_like", "new_empty_strided"))
_VIEWS = frozenset(("view", "t", "transpose", "slice", "select", "alias", "detach", "as_strided"))


class CannotReplay(Exception):
    """A run is not only launches of ours between tensors; the text says what it is."""


class Launched(NamedTuple):
    """A launch: its kernel, the first fields of its CUlaunchConfig, arguments and attributes."""

    kernel: int
    numbers: tuple[int, ...]
    attributes: tuple[int, int]
    layout: Layout
    values: tuple[Any, ...]


class Recording(TorchDispatchMode):
    """What this thread allocates and launches, in order; everything stays allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[Tensor] = []
        self.launches: list[Launched] = []
        self.refused = ""
        self._thread = threading.get_ident()

    def note_launch(self, *facts: Any) -> None:
        if threading.get_ident() == self._thread:
            self.launches.append(Launched(*facts))

    def note_allocation(self, tensor: Tensor) -> None:
        if threading.get_ident() == self._thread:
            self.allocated.append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        made = func(*args, **(kwargs or {}))
        if name in _ALLOCATES:
            self.allocated.append(made)
        elif name not in _VIEWS:
            self.refused = self.refused or f"it calls aten::{name}"
        return made


_one_at_a_time = threading.Lock()


def is_recording() -> bool:
    """Whether a run is being recorded: by another thread, or around what this one does now."""
    return _one_at_a_time.locked()


@contextmanager
def recording() -> Iterator[Recording]:
    """Note what this thread does within; one thread at a time."""
    noted = Recording()
    hooks: tuple[Any, ...] = (launching, prepared)
    with _one_at_a_time:
        try:
            for module in hooks:
                module.recording = noted
            with noted:
                yield noted
        finally:
            for module in hooks:
                module.recording = None


class _Map(ctypes.Structure):
    _fields_ = (
        *(("id", ctypes.c_uint64), ("sizes", ctypes.c_uint64 * 2), ("stride", ctypes.c_uint64)),
        *(("box", ctypes.c_uint32 * 2), ("type", ctypes.c_int32), ("swizzle", ctypes.c_int32)),
        *(("promotion", ctypes.c_int32), ("padding", ctypes.c_int32)),
    )


class _Place(ctypes.Structure):
    _fields_ = (
        *(("at", ctypes.c_uint32), ("buffer", ctypes.c_int32), ("map", ctypes.c_int32)),
        *(("padding", ctypes.c_int32), ("offset", ctypes.c_int64)),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        *(("kernel", ctypes.c_uint64), ("frame", ctypes.c_uint32), ("first", ctypes.c_uint32)),
        *(("count", ctypes.c_uint32), ("padding", ctypes.c_uint32)),
    )


class _Program(ctypes.Structure):
    _fields_ = (
        *(("launch", ctypes.c_void_p), ("encode", ctypes.c_void_p), ("frames", ctypes.c_void_p)),
        *(("launches", ctypes.c_void_p), ("offsets", ctypes.c_void_p)),
        *(("places", ctypes.c_void_p), ("maps", ctypes.c_void_p), ("bytes", ctypes.c_uint32)),
        *(("launch_count", ctypes.c_uint32), ("place_count", ctypes.c_uint32)),
        ("padding", ctypes.c_uint32),
    )


_map_ids = itertools.count(1)


class _Memory:
    """Which buffer an address is in: of those given, then of the results, last of the scratch."""

    def __init__(
        self, given: Sequence[Tensor], noted: Recording, results: Sequence[Tensor]
    ) -> None:
        self.spans: list[tuple[int, int, int, int]] = []  # begin, end, buffer, offset there
        for buffer, tensor in enumerate((*given, *results)):
            self._add(tensor, buffer, 0)
        known = {tensor.data_ptr() for tensor in results}
        scratch, end = len(self.spans), 0
        for tensor in noted.allocated:
            if tensor.numel() and tensor.data_ptr() not in known:
                self._add(tensor, scratch, end)
                end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if end > LARGEST_SCRATCH:
            raise CannotReplay(f"it hands on {end} bytes")
        self.scratch_bytes = end
        self.spans.sort()
        for before, after in itertools.pairwise(self.spans):
            if before[1] > after[0]:
                raise CannotReplay("two of its tensors share memory")

    def _add(self, tensor: Tensor, buffer: int, offset: int) -> None:
        begin = tensor.data_ptr()
        aligned = tensor.numel() == 1 or begin % VECTOR_BYTES == 0
        if not (aligned and tensor.is_contiguous() and tensor.numel()):
            raise CannotReplay("a tensor is empty, not contiguous or not aligned")
        self.spans.append((begin, begin + tensor.nbytes, buffer, offset))

    def place(self, at: int, address: int, map_: int = -1) -> _Place:
        for begin, end, buffer, offset in self.spans:
            if begin <= address < end:
                return _Place(at, buffer, map_, 0, address - begin + offset)
        raise CannotReplay(f"an argument at {address:#x} is in none of its tensors")


class Replay:
    """A recorded run as a function of the tensors given to it, to new tensors like its results.

    given: contiguous, as those of later calls, that share no memory. results: among what the run
    allocated. Raises CannotReplay for a run of another kind, BuildError without a compiler.
    """

    def __init__(
        self, noted: Recording, given: Sequence[Tensor], results: Sequence[Tensor]
    ) -> None:
        if noted.refused:
            raise CannotReplay(noted.refused)
        made = {tensor.data_ptr() for tensor in noted.allocated}
        if not all(tensor.data_ptr() in made for tensor in results):
            raise CannotReplay("a result is not its own")
        device = results[0].device
        self.device = device.index or 0
        self.count = len(noted.launches)
        memory = _Memory(given, noted, results)
        self._given = len(given)
        self._aligned = [i for i, t in enumerate(given) if t.numel() > 1]
        self._new = [new_tensor(tuple(t.shape), t.dtype, t.device) for t in results]
        if memory.scratch_bytes:
            self._new.append(new_tensor((memory.scratch_bytes,), torch.uint8, device))
        self.results = len(results)
        self._buffers = ctypes.c_uint64 * (len(given) + len(self._new))
        self._run = _library().epinorm_replay
        self._program, self._kept = _program(noted.launches, memory)
        self._address = ctypes.addressof(self._program)

    def __call__(self, given: Sequence[Tensor]) -> list[Tensor] | None:
        """The results; None where the tensors are not as many as those of the recorded run, or do
        not begin as they did."""
        if len(given) != self._given:
            return None
        addresses = [t.data_ptr() for t in given]
        together = 0
        for i in self._aligned:
            together |= addresses[i]
        if together % VECTOR_BYTES or launching._current_device() != self.device:
            return None
        made = [new() for new in self._new]
        addresses += [t.data_ptr() for t in made]
        done = ctypes.c_int()
        buffers, stream = self._buffers(*addresses), launching._current_stream(self.device)
        status = self._run(self._address, buffers, stream, done)
        if status == INVALID_CONTEXT and not done.value:  # a thread's first use of CUDA
            make_primary_context_current(self.device)
            status = self._run(self._address, buffers, stream, done)
        if status:
            raise RuntimeError(
                f"launch {done.value + 1} of {self.count} failed with {message(status)}"
            )
        return made[: self.results]


def _program(launches: Sequence[Launched], memory: _Memory) -> tuple[_Program, tuple[Any, ...]]:
    """The tables of a run, and what they point into."""
    frames, places, maps = bytearray(), list[_Place](), list[_Map]()
    table, offsets = list[_Launch](), list[int]()
    for launch in launches:
        frames += bytes(-len(frames) % ctypes.sizeof(ctypes.c_uint64 * 8))
        frame, layout = len(frames), launch.layout
        frames += SHAPE.pack(*launch.numbers)
        frames += struct.pack(layout.format, 0, *launch.attributes, *launch.values)
        first = len(offsets)
        table.append(_Launch(launch.kernel, frame, first, len(layout.offsets), 0))
        offsets += layout.offsets
        arguments = zip(layout.signature, layout.offsets, launch.values, strict=True)
        for letter, offset, value in arguments:
            if letter == "p" and value:
                places.append(memory.place(frame + offset, value))
            elif letter == "m":
                facts = facts_of(value)
                if facts is None:
                    raise CannotReplay("a tensor map is not known any more")
                places.append(memory.place(frame + offset, facts.address, len(maps)))
                maps.append(_map(facts))
    most_arguments = ctypes.c_int()
    if len(frames) > _library().epinorm_replay_limits(ctypes.byref(most_arguments)):
        raise CannotReplay("its arguments take too many bytes")
    if any(launch.count > most_arguments.value for launch in table):
        raise CannotReplay("a kernel takes too many arguments")
    arrays = (
        (ctypes.c_char * len(frames)).from_buffer(frames),
        (_Launch * len(table))(*table),
        (ctypes.c_uint32 * max(len(offsets), 1))(*offsets),
        (_Place * max(len(places), 1))(*places),
        (_Map * max(len(maps), 1))(*maps),
    )
    functions = [pointer_to(getattr(driver(), name)) for name in _FUNCTIONS]
    addresses = [ctypes.addressof(array) for array in arrays]
    program = _Program(*functions, *addresses, len(frames), len(table), len(places), 0)
    return program, (*arrays, frames)


_FUNCTIONS = ("cuLaunchKernelEx", "cuTensorMapEncodeTiled")


def pointer_to(function: Any) -> int | None:
    """The address of a function of the driver."""
    try:
        return ctypes.cast(function, ctypes.c_void_p).value
    except (TypeError, ctypes.ArgumentError):
        raise CannotReplay("the driver is none that native code can call") from None


def _map(facts: MapFacts) -> _Map:
    return _Map(next(_map_ids), facts.sizes, facts.stride, facts.box, *facts.kinds, 0)


def _library() -> ctypes.CDLL:
    """The native part; raises BuildError where it cannot be built."""

    def declare(library: ctypes.CDLL) -> None:
        library.epinorm_replay.argtypes = (
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)),
        )
        library.epinorm_replay.restype = ctypes.c_int

    return load_library("launches in one call", Path(__file__).with_name("replay.cpp"), declare)
