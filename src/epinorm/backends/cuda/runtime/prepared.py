"""What is made once for a problem and used by every call with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from epinorm.backends import unpromised
from epinorm.backends.cuda.runtime.device import capability


def starts_early(device: torch.device) -> bool:
    """Can the norm kernels be launched while the kernel before them ends (sm_90 and later)?

    Each of them executes griddepcontrol.wait before it touches memory, so it reads and writes
    nothing until that kernel is complete; only the launch itself is hidden. (The range guards read
    flags before it, which are older; `rescale_planes.cu` says why it need not wait.)
    """
    return capability(device) >= (9, 0)


recording: Any = None
"""A ``replay.Recording`` that is told of what dispatch does not see."""


def may_be_over(made: Tensor, old: Tensor) -> None:
    """Say that ``made`` may be written over ``old`` where nothing else holds that.

    The kernel that fills it is the last to read ``old``, each value before it writes the one there.
    """
    noted = recording
    if noted is not None:
        noted.note_over(made, old)


def new_tensor(
    size: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[], Tensor]:
    """A function that makes a contiguous tensor, not filled in, each time that it is called."""
    ordinary = partial(torch.empty, size, dtype=dtype, device=device)
    empty, current_device = unpromised.empty_strided, unpromised.current_device
    index = device.index
    if empty is None or current_device is None or device.type != "cuda" or index is None:
        return ordinary
    strides = tuple(math.prod(max(n, 1) for n in size[i + 1 :]) for i in range(len(size)))

    def new() -> Tensor:
        # It knows no device but the current one.
        if current_device() != index:
            return ordinary()
        made = empty(size, strides, dtype)
        noted = recording  # another thread may end it
        if noted is not None:
            noted.note_allocation(made)
        return made

    return new
