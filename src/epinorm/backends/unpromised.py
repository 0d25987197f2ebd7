"""What PyTorch and CPython do not promise; None where these have none."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# A PyTorch without CUDA has neither.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", None)  # type: ignore[assignment]
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # type: ignore[assignment]

# The guard that torch.compile puts before its code, and what that code allocates with: past the
# dispatcher, on the current device, in a third of the time of torch.empty.
TensorGuards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)
empty_strided: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor] | None = getattr(
    torch._C._dynamo.guards, "_empty_strided_cuda", None
)

# (False) -> the hooks for saved tensors that hold now, as checkpointing's, or None.
saving_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks

_VERSION_AT = object.__basicsize__ + 46 * struct.calcsize("P")
"""Of PyTypeObject's tp_version_tag (CPython's Include/cpython/object.h)."""


def _version_of_class(cls: type) -> memoryview:
    return memoryview((ctypes.c_char * 4).from_address(id(cls) + _VERSION_AT)).cast("B")


def _has_versions() -> bool:
    """Whether they are where they should be: another one after a change to the class or its
    base, and only then."""

    class Base: ...

    class Heir(Base): ...

    seen: list[bytes] = []
    for changed in (Heir, None, Base, None):
        if changed is not None:
            changed.other = len(seen)  # type: ignore[attr-defined]
        getattr(Heir, "other", None)
        seen.append(bytes(_version_of_class(Heir)))
    return NO_VERSION not in seen and seen[0] == seen[1] != seen[2] == seen[3]


NO_VERSION = bytes(4)
version_of_class: Callable[[type], memoryview] = (
    _version_of_class if _has_versions() else lambda cls: memoryview(NO_VERSION)
)
"""Where CPython has the class' version, while that lives: four bytes that change whenever the class
or what it inherits from does; `NO_VERSION` where it has none (any more) until the next look-up."""
