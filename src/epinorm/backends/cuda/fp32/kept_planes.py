"""x's and W's planes from an fp32 chain's forward pass, for the backward pass of the same step.

The backward products read the same planes, and making them again costs about a tenth of a step.
They are kept as long as a share of the GPU's memory suffices for all layers together, and given
back by the backward pass as soon as each was used, W's before dW is allocated. Where they are gone,
after a first backward pass through a retained graph say, they are made again: the bits are the
same, but for a W that was converted on its way into the product (docs/training.md).
"""

from __future__ import annotations

import os
import threading
from functools import cache

import torch
from torch import Tensor

from epinorm.backends.cuda.runtime.device import gpu_of

__all__ = ["KeptPlanes", "nbytes_kept", "room_for"]

SHARE = 1 / 16
"""Of the GPU's memory, for all planes that wait for their backward pass."""
VARIABLE = "EPINORM_KEPT_PLANES_MB"


class KeptPlanes:
    """The planes of x and of W as `planes.Splitter` lays them out, one matrix a buffer; or None."""

    def __init__(self, x: Tensor | None, weight: Tensor | None) -> None:
        self.x = x
        self.weight = weight
        self._counted = _nbytes(x) + _nbytes(weight)
        self._device = next((t.device for t in (x, weight) if t is not None), None)
        if self._device is not None:
            _count(self._device, self._counted)

    def restrict(self, x: bool, weight: bool) -> None:
        """Free what serves other gradients than those of x or of the weight: dX needs W."""
        if not x:
            self.take_weight()
        if not weight:
            self.take_x()

    def take_x(self) -> Tensor | None:
        """x's planes, which are the caller's from now on."""
        taken, self.x = self.x, None
        self._uncount(_nbytes(taken))
        return taken

    def take_weight(self) -> Tensor | None:
        """W's planes, which are the caller's from now on."""
        taken, self.weight = self.weight, None
        self._uncount(_nbytes(taken))
        return taken

    def _uncount(self, nbytes: int) -> None:
        if self._device is not None and nbytes:
            self._counted -= nbytes
            _count(self._device, -nbytes)

    def __del__(self) -> None:
        self._uncount(self._counted)


def room_for(nbytes: int, device: torch.device) -> bool:
    """Whether planes of ``nbytes`` bytes may wait for their backward pass on this GPU."""
    return nbytes_kept(device) + nbytes <= _limit(device)


def nbytes_kept(device: torch.device) -> int:
    """Bytes of planes that wait for their backward pass on this GPU."""
    return _kept.get(device, 0)


@cache
def _limit(device: torch.device) -> int:
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return int(SHARE * gpu_of(device).memory)
    try:
        megabytes = float(text)
    except ValueError:
        megabytes = -1.0
    if not 0 <= megabytes < float("inf"):
        raise ValueError(f"{VARIABLE} is a number of megabytes from 0 on, but got {text!r}")
    return int(megabytes * 1e6)


_kept: dict[torch.device, int] = {}
_lock = threading.Lock()


def _nbytes(buffer: Tensor | None) -> int:
    return 0 if buffer is None else buffer.numel()


def _count(device: torch.device, nbytes: int) -> None:
    with _lock:
        _kept[device] = _kept.get(device, 0) + nbytes
