"""What native code is told of an executable's passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from epinorm.backends.prepack import Converter


class NativePasses(NamedTuple):
    """Passes that native code repeats (cuda/runtime/replay.cpp).

    program: of the forward pass, its first result y. fields: of a ``Forward``, each as the number
    of a result or as a tensor of its own. planes: the number from which on results are what is left
    for the backward pass; has_room, leave: whether it may stay, and what holds it, from these
    results and whether x and the weight want gradients; None where nothing is left. backward: where
    it finds the passes without and with a gradient of the sum, None in the latter's place where
    that gradient is converted first; None without gradients. converter: what has converted the
    weight that the program is given besides, behind all else; None where it is given none.
    may_keep: whether the executable may keep a weight converted that is marked, so that it is no
    call's of one that this program computes, unless by what is kept; None where it keeps none.
    """

    program: Any
    fields: Any
    planes: int
    has_room: Callable[[], bool] | None
    leave: Callable[[bool, bool, list[Tensor]], Any] | None
    backward: tuple[Any, Any] | None
    converter: Converter | None
    may_keep: Callable[[Tensor], bool] | None
