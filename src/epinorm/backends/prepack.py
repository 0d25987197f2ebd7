"""Weights converted once: ``prepack`` keeps their planes from call to call, never a stale one.

fp32 weights are converted to 16-bit planes before they are multiplied (internals/precision.md).
Which weights to keep converted is written down here, by the weight itself and weakly, so that a
model is not changed by it. What is kept is looked at before each use: it is converted again as soon
as the weight's version counter, its storage or its layout is another one (internals/prepack.md).
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from epinorm.backends import unpromised

M = TypeVar("M", nn.Module, Tensor)


class Converter(Protocol):
    """Writes a weight's converted form into ``nbytes`` bytes at an address."""

    nbytes: int

    def __call__(self, buffer: int, first: Tensor, /) -> None: ...

    def wait_outside_of_capture(self, event: torch.cuda.Event, /) -> None:
        """Wait for an event that is no part of the CUDA graph being captured."""
        ...


_State = tuple[int, int, tuple[int, ...], int]
NEVER = -1
"""A version that no tensor has."""
OLDEST = (8, 0)  # compute capability of Ampere


def _state(weight: Tensor) -> _State | None:
    """What changes whenever PyTorch changes the weight; None: it keeps no account of that.

    A version counter counts changes in place. A storage is told apart by its address in the
    process, which stays taken as long as someone holds a weak reference to it.
    """
    if weight.is_inference():
        return None
    storage = weight.untyped_storage()._cdata
    return weight._version, weight.data_ptr(), weight.stride(), storage


recording: Any = None
"""A ``replay.Recording`` that is told of conversions: what repeats a run is to make none."""


class Marked:
    """A weight that is to be kept converted, and its converted form where there is one."""

    __slots__ = (
        *("_captured", "_converter", "_ready", "_state", "_storage", "_streams"),
        *("buffer", "weight"),
    )

    def __init__(self, weight: Tensor, forget: Callable[[Any], None]) -> None:
        self.weight = weakref.ref(weight, forget)
        self.buffer: Tensor | None = None
        self._converter: Converter | None = None
        self._state: _State | None = None
        self._storage: StorageWeakRef | None = None
        self._ready: torch.cuda.Event | None = None
        self._streams: set[int] = set()
        self._captured = False

    def converted(self, weight: Tensor, converter: Converter) -> Tensor | None:
        """The weight as ``converter`` converts it, (nbytes,) uint8, ready on the current stream.

        Kept, or converted now. None where that cannot be kept: an inference tensor, or a stale one
        while a CUDA graph is captured (what is captured would run at each replay only).
        """
        if self.weight() is not weight:
            return None
        state = _state(weight)
        if state is None:
            return None
        stream = unpromised.current_stream(weight.device.index)
        capturing = torch.cuda.is_current_stream_capturing()
        if state != self._state or converter is not self._converter:
            if capturing:
                return None
            with _lock:
                if state != self._state or converter is not self._converter:
                    self._convert(weight, converter, state, stream)
        if capturing:
            self._capture()
        elif stream not in self._streams:
            self._join(stream)
        return self.buffer

    @property
    def converter(self) -> Converter | None:
        """What has converted it last."""
        return self._converter

    def current(self, weight: Tensor, converter: Converter | None) -> Tensor | None:
        """What ``converted`` gives where that has nothing to do, else None."""
        # Before it is looked at: another thread may convert meanwhile, as another converter does.
        buffer, state = self.buffer, self._state
        if state is None or self.weight() is not weight or _state(weight) != state:
            return None
        if unpromised.current_stream(weight.device.index) not in self._streams:
            return None
        if torch.cuda.is_current_stream_capturing():
            return None
        return buffer if converter is self._converter and self._state is state else None

    def _convert(self, weight: Tensor, converter: Converter, state: _State, stream: int) -> None:
        noted = recording  # another thread may end it
        if noted is not None:
            noted.refuse("it converts a weight that is kept")
        # In place only where the weight itself was changed in place: whoever did that has waited
        # for the readers of the old values. It makes graphs see the new ones, too.
        known = self._state is not None and converter is self._converter
        in_place = known and self._state[1:] == state[1:]  # type: ignore[index]
        self._state = None
        if not in_place:
            self.release()
            self.buffer = torch.empty(converter.nbytes, dtype=torch.uint8, device=weight.device)
            self._storage = StorageWeakRef(weight.untyped_storage())
            self._streams = {stream}
        elif stream not in self._streams:
            self._join(stream)
        assert self.buffer is not None
        converter(self.buffer.data_ptr(), weight)
        self._ready = torch.cuda.Event()
        self._ready.record(torch.cuda.current_stream(weight.device))
        # Other streams have joined the last conversion, not this one; what they use is recorded.
        self._streams = {stream}
        self._converter, self._state = converter, state

    def _join(self, stream: int) -> None:
        """Let the current stream wait for the conversion, and the memory for the stream."""
        assert self.buffer is not None
        assert self._ready is not None
        current = torch.cuda.current_stream(self.buffer.device)
        self._ready.wait(current)
        self.buffer.record_stream(current)
        self._streams.add(stream)

    def _capture(self) -> None:
        """Make sure that the conversion is over, and that what a graph reads outlives its use."""
        assert self._ready is not None
        self._captured = True
        _warn_of_capture()
        assert self._converter is not None
        self._converter.wait_outside_of_capture(self._ready)

    def invalidate(self) -> None:
        """Convert again at the next call, whatever the version counter says."""
        if self._state is not None:
            self._state = (NEVER, *self._state[1:])

    def keep_for_graphs(self) -> None:
        """Let the memory live as long as the weight, if a graph reads it."""
        weight = self.weight()
        if self._captured and weight is not None:
            weakref.finalize(weight, _hold, self.buffer).atexit = False

    def release(self) -> None:
        """Let go of the memory; a graph that reads it keeps it until the weight is gone."""
        self.keep_for_graphs()
        self.buffer = self._state = self._storage = self._ready = None
        self._captured = False


def _hold(_: object) -> None:
    pass


marked: dict[int, Marked] = {}
"""By ``id(weight)``. Empty: nothing is prepacked."""

_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_lock = threading.RLock()
_hooks: list[Any] = []
_warned_of_capture = False


def prepack(model: M) -> M:
    """Keep the converted form of the model's fp32 weights between calls; return the model.

    model: an nn.Module (fused or not, or holding ``LinearNorm``), or one weight (N, K). All its
    parameters and buffers of two dimensions are marked, those that it is given later too. A marked
    weight is converted by the first call that needs it, and again when it was changed. On other
    hardware and for other dtypes nothing is kept; a warning says so. ``unprepack`` undoes it, and
    what is kept dies with the weight. Calling it again converts anew.

    Changes that PyTorch does not count are not seen: through ``weight.data``, by another library's
    kernel, by the replay of a CUDA graph. ``torch.autograd.graph.increment_version(weight)`` or
    another ``prepack`` makes them seen. Raises TypeError for anything but a module or a tensor.
    """
    global _warned_of_capture
    weights = _weights(model)
    unprepack(model)
    _warned_of_capture = False
    with _lock:
        if isinstance(model, nn.Module):
            _modules.update(model.modules())
        for weight in weights:
            _mark(weight)
        if not _hooks:
            _hooks.append(register_module_parameter_registration_hook(_on_parameter))
            _hooks.append(register_optimizer_step_post_hook(_on_step))
    reason = _why_nothing(weights)
    if reason is not None:
        name = "this weight" if isinstance(model, Tensor) else type(model).__name__
        warnings.warn(f"prepack keeps nothing of {name} for now: {reason}", stacklevel=2)
    return model


def unprepack(model: nn.Module | Tensor) -> None:
    """Stop keeping the model's weights converted, and free the memory.

    CUDA graphs that were captured with them stay valid: what they read is freed with the weights.
    """
    weights = _weights(model)
    with _lock:
        if isinstance(model, nn.Module):
            for module in model.modules():
                _modules.discard(module)
        for weight in weights:
            entry = marked.pop(id(weight), None)
            if entry is not None:
                entry.release()
        if not _modules and not marked:
            while _hooks:
                _hooks.pop().remove()


@contextmanager
def prepacked(model: M) -> Iterator[M]:
    """``prepack`` for the length of a with statement."""
    prepack(model)
    try:
        yield model
    finally:
        unprepack(model)


@contextmanager
def converted_once(weight: Tensor) -> Iterator[None]:
    """Let all calls within share the weight's converted form, where it is one that is converted.
    What another thread's calls find of it meanwhile is theirs as long as they run."""
    is_converted = not weight.is_inference() and why_not(weight) is None
    mine = None
    with _lock:
        if is_converted and id(weight) not in marked:
            _mark(weight)
            mine = marked[id(weight)]
    try:
        yield
    finally:
        if mine is not None:
            with _lock:
                if marked.get(id(weight)) is mine:
                    del marked[id(weight)]
                mine.keep_for_graphs()


def _weights(model: nn.Module | Tensor) -> list[Tensor]:
    if isinstance(model, Tensor):
        return [model]
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module or a Tensor, got {type(model).__name__}")
    return [t for t in (*model.parameters(), *model.buffers()) if _is_matrix(t)]


def _is_matrix(t: Tensor) -> bool:
    return t.dim() == 2 and t.is_floating_point()


def keeps(weight: Tensor) -> bool:
    """Whether the weight is marked, and is one that is converted at all."""
    return id(weight) in marked and not weight.is_inference() and why_not(weight) is None


def _mark(weight: Tensor) -> None:
    key = id(weight)

    def forget(reference: Any) -> None:
        entry = marked.get(key)
        if entry is not None and entry.weight is reference:
            del marked[key]

    marked[key] = Marked(weight, forget)


def _on_parameter(module: nn.Module, name: str, parameter: Tensor | None) -> None:
    """A module gets a parameter: by assignment, or load_state_dict(..., assign=True)."""
    if module in _modules and parameter is not None and _is_matrix(parameter):
        with _lock:
            if id(parameter) not in marked:
                _mark(parameter)


def _on_step(optimizer: Any, *_: Any) -> None:
    """An optimizer has stepped; the fused ones leave the version counters as they were."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            entry = marked.get(id(parameter))
            if entry is not None:
                entry.invalidate()


def _why_nothing(weights: list[Tensor]) -> str | None:
    """Why no weight can be kept, or why some of them cannot; None where all is well."""
    if not weights:
        return "it has no matrix of weights"
    if any(weight.is_inference() for weight in weights):
        return (
            "weights made under torch.inference_mode have no version counter, so that a change "
            "could not be seen (make or load the model outside of it)"
        )
    reasons = [why_not(weight) for weight in weights]
    return None if None in reasons else reasons[0]


def why_not(weight: Tensor) -> str | None:
    """Why weights of this dtype on this device are not converted; None where they are."""
    if weight.dtype != torch.float32:
        return f"{weight.dtype} is multiplied as it is; only float32 is converted"
    if weight.device.type != "cuda":
        return f"weights are converted for NVIDIA GPUs only, but are on {weight.device.type}"
    if torch.version.hip is not None or torch.cuda.get_device_capability(weight.device) < OLDEST:
        name = torch.cuda.get_device_name(weight.device)
        return f"weights are converted for NVIDIA GPUs since Ampere only, but this is {name}"
    return None


def _warn_of_capture() -> None:
    global _warned_of_capture
    if not _warned_of_capture:
        _warned_of_capture = True
        warnings.warn(
            "a CUDA graph is being captured with prepacked weights: a replay cannot see that a "
            "weight has changed until an ordinary call has converted it again",
            stacklevel=2,
        )
