"""What can be seen of one call from inside its process: aliases, changed inputs, late results.

The same observations are made of the original model in the judge's process, so that what PyTorch
itself does is held against nobody. Clocks and synchronisation are taken when this module is
imported, before a solution's code runs. What is seen here a solution that knows this code could
hide: it is honest people's mistakes that it finds (docs/judging.md).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from epinorm.tools import verify
from epinorm.tools.judge import loop

_sleep = time.sleep
_synchronize = torch.cuda.synchronize

LATE_SECONDS = 0.05
"""On a CPU a result is looked at again after this time: a thread may still be writing it."""
BUSY_CYCLES = 20_000_000
"""About 10 ms of a GPU's clock, for which the inputs are not there yet on the current stream."""


Observed = dict[str, list[str]]
"""What one call did besides its result, by kind; each entry is the end of a sentence."""


def observe(
    model: nn.Module, inputs: Sequence[Any], other_stream: bool = False
) -> tuple[list[Tensor], Observed]:
    """Run forward under no_grad; the outputs as they were when it returned, and what was seen.

    On CUDA the inputs hold NaN until 10 ms after the call was made: a solution that does not work
    on the current stream reads NaN, and one that does not wait for its own work returns too early.
    ``other_stream``: the current stream is one of its own.
    """
    given = [value for value in inputs if isinstance(value, Tensor)]
    known = _named_tensors(model, inputs)
    before = {name: tensor.detach().clone() for name, tensor in known.items()}
    threads = set(threading.enumerate())
    device = given[0].device if given else torch.device("cpu")
    with _delayed(given, device, other_stream), torch.no_grad():
        result = model(*inputs)
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        returned = [leaf.detach().clone() for leaf in leaves]
    _settle(device)
    seen: Observed = {
        "odd types": [
            f"output {index} is a {type(leaf).__name__}, no plain Tensor"
            for index, leaf in enumerate(leaves)
            if type(leaf) not in (Tensor, nn.Parameter)
        ],
        "late": [
            f"output {index} still changed after the call had returned"
            for index, (leaf, first) in enumerate(zip(leaves, returned, strict=True))
            if not _same_bits(leaf.detach(), first)
        ],
        "changed": [n for n, t in known.items() if not _same_bits(t.detach(), before[n])],
        "aliases": _aliases(leaves, known),
    }
    started = [t for t in threading.enumerate() if t not in threads and t.is_alive()]
    return returned, {**seen, "threads": [thread.name for thread in started]}


def _named_tensors(model: nn.Module, inputs: Sequence[Any]) -> dict[str, Tensor]:
    named = {f"input {i}": v for i, v in enumerate(inputs) if isinstance(v, Tensor)}
    named |= {f"parameter {name}": p for name, p in model.named_parameters()}
    named |= {f"buffer {name}": b for name, b in model.named_buffers()}
    return named


@contextlib.contextmanager
def _delayed(given: Sequence[Tensor], device: torch.device, other_stream: bool) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    _synchronize(device)
    stream = torch.cuda.Stream(device) if other_stream else torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        values = [tensor.detach().clone() for tensor in given]
        for tensor in given:
            if tensor.is_floating_point():
                tensor.detach().fill_(float("nan"))
        torch.cuda._sleep(BUSY_CYCLES)
        for tensor, value in zip(given, values, strict=True):
            tensor.detach().copy_(value)
        yield


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        _synchronize(device)
    else:
        _sleep(LATE_SECONDS)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())


def _span(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _aliases(leaves: Sequence[Tensor], known: dict[str, Tensor]) -> list[str]:
    found = []
    named = [(name, _span(tensor)) for name, tensor in known.items()]
    for index, leaf in enumerate(leaves):
        if leaf.numel() == 0:
            continue
        start, end = _span(leaf)
        for name, (low, high) in named:
            if start < high and low < end:
                found.append(f"output {index} shares memory with {name}")
        named.append((f"output {index}", (start, end)))
    return found


class Untouched:
    """Functions and settings as they were when this was made; ``changes`` says what is not so.

    What is new is no change: extensions add names. Names that begin with _ are torch's own affair.
    """

    def __init__(self) -> None:
        self._functions = {place: dict(_callables(owner)) for place, owner in _watched()}
        self._settings = _settings()

    def functions(self) -> list[str]:
        """The functions that were replaced since, as dotted names."""
        return [
            f"{place}.{name}"
            for place, owner in _watched()
            for name, value in _callables(owner)
            if _replaced(self._functions[place].get(name, value), value)
        ]

    def settings(self) -> list[str]:
        """The settings that were changed since, each as "name from old to new"."""
        now = _settings()
        return [
            f"{name} from {old} to {now[name]}"
            for name, old in self._settings.items()
            if now[name] != old
        ]


def _watched() -> list[tuple[str, ModuleType | type]]:
    return [
        ("time", time),
        ("threading", threading),
        ("torch", torch),
        ("torch.nn.functional", torch.nn.functional),
        ("torch.Tensor", Tensor),
        ("torch.cuda", torch.cuda),
        ("torch.cuda.Event", torch.cuda.Event),
        ("torch.cuda.Stream", torch.cuda.Stream),
        ("torch.autograd", torch.autograd),
        ("epinorm.tools.verify", verify),
        ("epinorm.tools.judge.loop.Loop", loop.Loop),
    ]


_TORCH_FOLDER = str(Path(torch.__file__).parent)


def _replaced(old: Any, new: Any) -> bool:
    """Whether a function is another one; torch itself wraps some of its own when first used."""
    if new is old:
        return False
    code = getattr(new, "__code__", None)
    at_home = code is not None and code.co_filename.startswith(_TORCH_FOLDER)
    return not (at_home and getattr(new, "__name__", "") == getattr(old, "__name__", None))


def _callables(owner: ModuleType | type) -> Iterator[tuple[str, Any]]:
    for name, value in list(vars(owner).items()):
        if not name.startswith("_") and callable(value):
            yield name, value


_SETTINGS: Mapping[str, Callable[[], Any]] = {
    "the fp32 matmul precision": torch.get_float32_matmul_precision,
    "torch.backends.cuda.matmul.allow_tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
    "torch.backends.cudnn.allow_tf32": lambda: torch.backends.cudnn.allow_tf32,
    "reduced-precision sums in fp16": (
        lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    ),
    "reduced-precision sums in bf16": (
        lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    ),
    "the default dtype": torch.get_default_dtype,
    "grad mode": torch.is_grad_enabled,
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "the number of threads": torch.get_num_threads,
}


def _settings() -> dict[str, str]:
    return {name: _read(read) for name, read in _SETTINGS.items()}


def _read(read: Callable[[], Any]) -> str:
    try:
        return str(read())
    except RuntimeError as error:  # PyTorch's two interfaces for fp32 products were mixed
        return f"unreadable ({str(error).splitlines()[0]})"
