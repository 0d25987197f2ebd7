"""What native code is told of an executable's passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epinorm.backends.prepack import Converter


class Waits(NamedTuple):
    """What holds what a forward pass leaves for the backward pass, and where (runtime/waiting.h):
    the class, its objects that wait by their device, this device; what is to be asked for room, or
    None where what waits is freed; the number of the result that is x's and of W's, or -1, and
    whether W's are scales alone."""

    of_class: type
    waiting: dict[torch.device, Any]
    device: torch.device
    make_room: Callable[[], bool] | None
    x: int
    weight: int
    scales_alone: bool

    def of_gradients(self, x: bool, weight: bool) -> Waits:
        """Of those alone that these gradients read: dX reads W's."""
        return self._replace(x=self.x if weight else -1, weight=self.weight if x else -1)


class NativePasses(NamedTuple):
    """Passes that native code repeats (cuda/runtime/replay.cpp).

    program: of the forward pass, its first result y. fields: of a ``Forward``, each as the number
    of a result or as a tensor of its own. waits: what is left for the backward pass; None where
    nothing is. backward: where
    it finds the passes without and with a gradient of the sum, None in the latter's place where
    that gradient is converted first; None without gradients. converter: what has converted the
    weight that the program is given besides, behind all else; None where it is given none.
    may_keep: whether the executable may keep a weight converted that is marked, so that it is no
    call's of one that this program computes, unless by what is kept; None where it keeps none.
    """

    program: Any
    fields: Any
    waits: Waits | None
    backward: tuple[Any, Any] | None
    converter: Converter | None
    may_keep: Callable[[Tensor], bool] | None
