"""A pass as one native call: what an earlier run launched, repeated with other addresses.

What Python decides for a problem is the same at each call but for addresses. ``recording`` notes
the allocations, launches and products of PyTorch's of a run; each address among their arguments
lies in a tensor that was given or allocated, and ``replay`` makes a program (program.h) that does
the same with later tensors; what it allocates lives from its first use to its last. Sound without
being told what a kernel does: an argument that is a pointer says so in its signature, and one that
lies in no tensor is refused.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from epinorm.backends import prepack
from epinorm.backends.cuda.runtime import launch as launching
from epinorm.backends.cuda.runtime import prepared
from epinorm.backends.cuda.runtime.arguments import SHAPE, Layout
from epinorm.backends.cuda.runtime.driver import (
    GRAPHS,
    INVALID_CONTEXT,
    driver,
    make_primary_context_current,
    message,
)
from epinorm.backends.cuda.runtime.native import native
from epinorm.backends.cuda.runtime.tensor_map import MapFacts, facts_of

VECTOR_BYTES = 16
"""Tensors begin at multiples of it, when recorded and when repeated (``kVectorBytes``)."""
MOST_BYTES, MOST_ARGUMENTS = 4096, 128
"""Of a launch's arguments (program.h)."""
FEWEST_LAUNCHES, MOST_MADE = 3, 32 << 20
"""Of a pass that may be a CUDA graph: fewer launches take the host as long, and while more bytes
than these are written the GPU takes longer than the host."""

_ALLOCATES = frozenset(("empty", "empty_strided", "new_empty", "empty_like", "new_empty_strided"))
_VIEWS = frozenset(
    (
        *("view", "_unsafe_view", "t", "transpose", "slice", "select", "alias", "detach"),
        *("as_strided", "flatten"),
    )
)
_PRODUCTS = frozenset(("mm", "addmm"))


class CannotReplay(Exception):
    """A run is not only launches of ours between tensors; the text says what it is."""


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


class _Buffer(NamedTuple):
    """Where a tensor lay when it was given or allocated, and what it is."""

    begin: int
    end: int
    shape: tuple[int, ...]
    dtype: torch.dtype


_Matrix = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""Buffer, or a constant as -1, -2 ...; elements from where it begins, sizes, strides."""


class _Step(NamedTuple):
    """As ``Step`` of program.h has them; used: the buffers that it touches."""

    kernel: int
    frame: bytes
    offsets: bytes
    places: bytes
    matrices: list[_Matrix]
    used: set[int]


class Recording(TorchDispatchMode):
    """What this thread allocates, launches and multiplies, in order, as a program has it.

    given: what the run is given, contiguous, as in later calls; it is not kept.
    """

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.buffers: list[_Buffer] = []
        self.refused = ""
        self.steps: list[_Step] = []
        self.maps: list[_Map] = []
        self.constants: list[Tensor] = []
        self.over: dict[int, int] = {}
        self.launches = 0
        self._thread = threading.get_ident()
        for tensor in given:
            self._add(tensor)
        spans = sorted((buffer.begin, buffer.end) for buffer in self.buffers)
        if any(before[1] > after[0] for before, after in itertools.pairwise(spans)):
            self.refused = "two of its tensors share memory"
        self.given = len(given)

    def note_launch(
        self,
        kernel: int,
        numbers: tuple[int, ...],
        attributes: tuple[int, int],
        layout: Layout,
        values: tuple[Any, ...],
    ) -> None:
        """A kernel, the first fields of its CUlaunchConfig, attributes and arguments."""
        if threading.get_ident() == self._thread:
            try:
                self.steps.append(self._launch(kernel, numbers, attributes, layout, values))
            except CannotReplay as error:
                self.refused = self.refused or str(error)

    def note_allocation(self, tensor: Tensor) -> None:
        if threading.get_ident() == self._thread and tensor.numel():
            self._add(tensor)

    def refuse(self, reason: str) -> None:
        """Let the run be none that can be repeated."""
        if threading.get_ident() == self._thread:
            self.refused = self.refused or reason

    def reads(self, buffer: int) -> bool:
        """Whether a step so far takes something in this buffer."""
        return any(buffer in step.used for step in self.steps)

    def note_over(self, made: Tensor, old: Tensor) -> None:
        """As ``prepared.may_be_over``."""
        new, before = self.find(made.data_ptr()), self.find(old.data_ptr())
        if threading.get_ident() != self._thread or new is None or before is None:
            return
        if self.buffers[new[0]][2:] == self.buffers[before[0]][2:]:  # shape and dtype
            self.over[new[0]] = before[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        made = func(*args, **(kwargs or {}))
        if name in _ALLOCATES:
            self.note_allocation(made)
        elif name in _PRODUCTS and not kwargs:
            self.note_allocation(made)
            matrices = [self._matrix(t) for t in (made, *args[-2:], *args[:-2])]
            self.steps.append(_Step(0, b"", b"", b"", matrices, {place[0] for place in matrices}))
        elif name not in _VIEWS:
            self.refused = self.refused or f"it calls aten::{name}"
        return made

    def find(self, address: int) -> tuple[int, int] | None:
        """A buffer and the bytes from where it begins: the newest there, as memory that was freed
        is used again."""
        for buffer in reversed(range(len(self.buffers))):
            begin, end, *_ = self.buffers[buffer]
            if begin <= address < end:
                return buffer, address - begin
        return None

    def _add(self, t: Tensor) -> None:
        begin = t.data_ptr()
        aligned = t.numel() == 1 or begin % VECTOR_BYTES == 0
        if not (aligned and t.is_contiguous() and t.numel()):
            self.refused = self.refused or "a tensor is empty, not contiguous or not aligned"
        self.buffers.append(_Buffer(begin, begin + t.nbytes, tuple(t.shape), t.dtype))

    def _place(self, at: int, address: int, map_: int = -1) -> _Place:
        found = self.find(address)
        if found is None:
            raise CannotReplay(f"an argument at {address:#x} is in none of its tensors")
        return _Place(at, found[0], map_, 0, found[1])

    def _matrix(self, t: Tensor) -> _Matrix:
        found = self.find(t.data_ptr())
        if found is None:  # of the executable's own
            self.constants.append(t)
            return -len(self.constants), 0, tuple(t.shape), t.stride()
        if self.buffers[found[0]].dtype != t.dtype:
            self.refused = self.refused or "a product reads a tensor as another dtype"
        return found[0], found[1] // t.element_size(), tuple(t.shape), t.stride()

    def _launch(
        self, kernel: int, numbers: Any, attributes: Any, layout: Layout, values: Any
    ) -> _Step:
        self.launches += 1
        places = list[_Place]()
        frame = SHAPE.pack(*numbers) + struct.pack(layout.format, 0, *attributes, *values)
        if len(frame) > MOST_BYTES or len(layout.offsets) > MOST_ARGUMENTS:
            raise CannotReplay("a kernel takes too many arguments")
        for letter, offset, value in zip(layout.signature, layout.offsets, values, strict=True):
            if letter == "p" and value:
                places.append(self._place(offset, value))
            elif letter == "m":
                facts = facts_of(value)
                if facts is None:
                    raise CannotReplay("a tensor map is not known any more")
                places.append(self._place(offset, facts.address, len(self.maps)))
                self.maps.append(_map(facts))
        offsets = struct.pack(f"{len(layout.offsets)}I", *layout.offsets)
        used = {place.buffer for place in places}
        return _Step(kernel, frame, offsets, b"".join(map(bytes, places)), [], used)


_one_at_a_time = threading.Lock()


def is_recording() -> bool:
    """Whether a run is being recorded: by another thread, or around what this one does now."""
    return _one_at_a_time.locked()


@contextmanager
def recording(given: Sequence[Tensor]) -> Iterator[Recording]:
    """Note what this thread does within with what it is given; one thread at a time."""
    noted = Recording(given)
    hooks: tuple[Any, ...] = (launching, prepared, prepack)
    with _one_at_a_time:
        try:
            for module in hooks:
                module.recording = noted
            with noted:
                yield noted
        finally:
            for module in hooks:
                module.recording = None


_map_ids = itertools.count(1)


class Recorded(NamedTuple):
    """What a program is made of, besides functions (``new_program`` of replay.cpp)."""

    given: int
    large: list[int]
    made: list[tuple[tuple[int, ...], torch.dtype, int]]
    constants: list[Tensor]
    results: list[int]
    maps: list[_Map]
    steps: list[tuple[Any, ...]]


def recorded(noted: Recording, results: Sequence[Tensor]) -> Recorded:
    """A run with its results, which are among what it allocated. Raises CannotReplay where it is of
    another kind."""
    if noted.refused:
        raise CannotReplay(noted.refused)
    buffers, given = noted.buffers, noted.given
    found = [noted.find(t.data_ptr()) for t in results]
    kept = [at[0] for at in found if at is not None and at[0] >= given and not at[1]]
    sizes = [buffers[i].end - buffers[i].begin for i in kept]
    if len(set(kept)) < len(results) or sizes != [t.nbytes for t in results]:
        raise CannotReplay("a result is not its own")
    shapes = {buffer: tuple(t.shape) for buffer, t in zip(kept, results, strict=True)}
    steps, over = _with_lifetimes(noted, kept)
    made = [
        (shapes.get(i, each.shape), each.dtype, over.get(i, -1)) for i, each in enumerate(buffers)
    ][given:]
    large = [i for i, each in enumerate(buffers[:given]) if math.prod(each.shape) > 1]
    return Recorded(given, large, made, noted.constants, kept, noted.maps, steps)


def replay(noted: Recording, results: Sequence[Tensor], *, holds: bool = False) -> Any:
    """A recorded run as a function of a list of tensors like those given to it, which it empties,
    to new tensors like its results; ``fits`` of it says whether they are as many, on the current
    device and begin as those did. holds: it may hold all its memory to its end, as a CUDA graph
    does; otherwise one may be where that is no longer than without.

    Raises as ``recorded``. Only once ``native`` has answered.
    """
    facts, count, device = recorded(noted, results), noted.launches, results[0].device
    graphs = GRAPHS if (_is_short(facts) if holds else _frees_at_its_end(facts)) else ()
    functions = [pointer_to(getattr(driver(), name)) for name in (*_FUNCTIONS, *graphs)]

    def trouble(status: int, launches: int) -> None:
        if status != INVALID_CONTEXT or launches:
            text = f"launch {launches + 1} of {count} failed with {message(status)}"
            raise RuntimeError(text)
        make_primary_context_current(device.index or 0)  # a thread's first use of CUDA

    facts = facts._replace(maps=b"".join(map(bytes, facts.maps)))  # type: ignore[arg-type]
    return native().Program(functions, results[0].new_empty(0), *facts, trouble)


def _is_short(facts: Recorded) -> bool:
    nbytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype, _ in facts.made)
    return _launches_alone(facts) and nbytes <= MOST_MADE


def _launches_alone(facts: Recorded) -> bool:
    launches = [step for step in facts.steps if step[0]]  # the others are PyTorch's products
    return FEWEST_LAUNCHES <= len(launches) == len(facts.steps)


def _frees_at_its_end(facts: Recorded) -> bool:
    """Whether nothing is let go of before something else is allocated."""
    if not _launches_alone(facts):
        return False
    *_, made, done = zip(*facts.steps, strict=True)
    frees = itertools.accumulate(map(bool, done), max)
    return not any(later and freed for later, freed in zip(made[1:], frees, strict=False))


def _with_lifetimes(
    noted: Recording, kept: Sequence[int]
) -> tuple[list[tuple[Any, ...]], dict[int, int]]:
    """The steps with what is allocated before each and let go of behind it; and which of these
    may be written over which, in its last step."""
    allocated = range(noted.given, len(noted.buffers))
    made: set[int] = set()
    last = {buffer: i for i, step in enumerate(noted.steps) for buffer in step.used}
    unused = set(kept) - last.keys()
    whole = []
    over: dict[int, int] = {}
    for i, (*facts, matrices, used) in enumerate(noted.steps):
        new = {buffer for buffer in used | unused if buffer in allocated} - made
        made |= new
        over |= {b: noted.over[b] for b in new & noted.over.keys() if last[noted.over[b]] == i}
        done = [b for b in used if b >= 0 and last[b] == i and b not in kept]
        # Constants stand behind all else.
        places = [(b if b >= 0 else len(noted.buffers) - 1 - b, *rest) for b, *rest in matrices]
        whole.append((*facts, places, sorted(new), done))
    return whole, over


_FUNCTIONS = ("cuLaunchKernelEx", "cuTensorMapEncodeTiled")


def pointer_to(function: Any) -> int | None:
    """The address of a function of the driver."""
    try:
        return ctypes.cast(function, ctypes.c_void_p).value
    except (TypeError, ctypes.ArgumentError):
        raise CannotReplay("the driver is none that native code can call") from None


def _map(facts: MapFacts) -> _Map:
    return _Map(next(_map_ids), facts.sizes, facts.stride, facts.box, *facts.kinds, 0)
