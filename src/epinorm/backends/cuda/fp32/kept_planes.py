"""x's and W's planes from an fp32 chain's forward pass, for the backward pass of the same step.

The backward products read the same planes, and making them again costs about a tenth of a step.
Those of one layer wait, the one whose forward pass was last: its backward pass comes first, takes
them, and allocates as much for dX and dW, W's being given back before dW is allocated. Planes of
more layers would add to a step's peak, where all activations wait too. Where they are gone they are
made again: the bits are the same, but for a matrix that was converted on its way into the product
(internals/training.md).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from epinorm.backends.memo import memo

VARIABLE = "EPINORM_KEPT_PLANES_MB"


class KeptPlanes:
    """The planes of x and of W as `planes.Splitter` lays them out, one matrix a buffer; or None. Of
    W, all but the planes where these are made again (`plan/gradients.py`, ``weight_waits``):
    scales_alone. Native code makes them without ``__init__`` (runtime/waiting.h)."""

    __slots__ = ("__weakref__", "scales_alone", "weight", "x")

    def __init__(
        self, x: Tensor | None, weight: Tensor | None, *, scales_alone: bool = False
    ) -> None:
        self.x = x
        self.weight = weight
        self.scales_alone = scales_alone
        there = weight if x is None else x
        if there is not None:
            _add([weakref.ref(self)], there.device)

    @property
    def nbytes(self) -> int:
        """Bytes of what is still there."""
        return sum(t.numel() for t in (self.x, self.weight) if t is not None)

    def restrict(self, x: bool, weight: bool) -> None:
        """Free what serves other gradients than those of x or of the weight: dX needs W."""
        if not x:
            self.weight = None
        if not weight:
            self.x = None

    def weight_moved(self) -> None:
        """W lies elsewhere than it did: perhaps it is another, whose planes have other scales."""
        if self.scales_alone:
            self.weight = None

    def take_x(self) -> Tensor | None:
        """x's planes, which are the caller's from now on."""
        taken, self.x = self.x, None
        return taken

    def take_weight(self) -> Tensor | None:
        """W's planes, which are the caller's from now on."""
        taken, self.weight = self.weight, None
        return taken


def make_room(nbytes: int, device: torch.device) -> bool:
    """Free planes that have waited longest until ``nbytes`` more are within the limit; False where
    they never are."""
    most = limit()
    most = nbytes if most is None else most
    if nbytes > most:
        return False
    with _lock:
        still = _alive(waiting.pop(device, []))
        there = sum(kept.nbytes for kept in still)
        while there + nbytes > most:
            oldest = still.pop(0)
            there -= oldest.nbytes
            oldest.restrict(False, False)
        _add([weakref.ref(kept) for kept in still], device)
    return True


def nbytes_kept(device: torch.device) -> int:
    """Bytes of planes that wait for their backward pass on this GPU."""
    with _lock:
        return sum(kept.nbytes for kept in _alive(waiting.get(device, ())))


@memo(1)
def limit() -> int | None:
    """Bytes that may wait on a GPU; None for those of one layer."""
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return None
    try:
        megabytes = float(text)
    except ValueError:
        megabytes = -1.0
    if not 0 <= megabytes < float("inf"):
        raise ValueError(f"{VARIABLE} is a number of megabytes from 0 on, but got {text!r}")
    return int(megabytes * 1e6)


waiting: dict[torch.device, list[weakref.ref[KeptPlanes]]] = {}
"""In the order of their forward passes."""
_lock = threading.Lock()


def _add(references: list[weakref.ref[KeptPlanes]], device: torch.device) -> None:
    """Behind those that wait; native code, which asks for no lock, takes whole lists away."""
    there: list[weakref.ref[KeptPlanes]] | None = None
    while there is None or waiting.get(device) is not there:
        there = waiting.setdefault(device, [])
        there.extend(references)


def _alive(references: Sequence[weakref.ref[KeptPlanes]]) -> list[KeptPlanes]:
    found = (known() for known in references)
    return [kept for kept in found if kept is not None and kept.nbytes]
