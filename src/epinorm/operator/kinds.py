"""What calls with like tensors were found to be: a call like an earlier one costs a look-up.

A call depends on PyTorch's settings and, of each tensor, on type, dtype, device, layout, sizes,
strides and requires_grad. These are compared in one call of C++, by the guard that torch.compile
puts before its own code. PyTorch does not promise that guard; where it is missing nothing is found,
and every call goes the long way, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from epinorm.backends import unpromised
from epinorm.backends.prepack import marked
from epinorm.operator import calls
from epinorm.operator.undisturbed import has_plain_types
from epinorm.precision import follows_setting, fp32_precision
from epinorm.problem import Inputs

MOST_KINDS = 16
MOST_SIZES = 1024

FIRST_OPERAND = Inputs._fields.index("operands")

T = TypeVar("T")


class Kinds(Generic[T]):
    """What was found for tensors in the order of ``Inputs``, operands and others one by one."""

    def __init__(self) -> None:
        self.by_count: dict[int, list[_Kind]] = {}
        calls.remembering.add(self)

    def forget(self) -> None:
        """Find nothing until something is kept again."""
        self.by_count.clear()

    def find(self, tensors: Sequence[Any], fact: Any) -> T | None:
        """What was kept for tensors like these and an equal fact; x may have other rows."""
        kinds = self.by_count.get(len(tensors))
        if not kinds:
            return None
        for t in tensors:
            if getattr(t, "is_nested", False):
                return None  # the guard would end the process: it asks for strides
        for kind in kinds:
            if kind.fits(*tensors):
                return kind.found.get(kind.key(tensors, fact))
        return None

    def keep(self, tensors: Sequence[Any], fact: Any, make: Callable[[], T | None]) -> None:
        """Let ``find`` give what ``make`` makes, unless it makes None or no guard compares tensors
        like these; for calls that nothing but autograd, or autocast, may want. All but x and
        operands of the output's shape have one or two dimensions."""
        if unpromised.TensorGuards is None or not (
            is_strided(tensors) and has_plain_types(tensors)
        ):
            return
        setting = _setting(tensors)
        made = make()
        if made is None:
            return
        kinds = self.by_count.setdefault(len(tensors), [])
        kind = next((kind for kind in kinds if kind.fits(*tensors)), None)
        if kind is None:
            if len(kinds) >= MOST_KINDS:
                return
            kind = _Kind(tensors)
            kinds.append(kind)
        if len(kind.found) >= MOST_SIZES:
            kind.found.clear()
        key = kind.key(tensors, fact)
        if setting == _setting(tensors):  # no other thread changed it meanwhile
            kind.found[key] = made


def is_strided(tensors: Sequence[Tensor | None]) -> bool:
    """Whether the tensors are ordinary ones: not sparse, nested or of a library's own layout."""
    return all(t is None or (t.layout is torch.strided and not t.is_nested) for t in tensors)


class _Kind:
    """Tensors that differ from one another in leading dimensions and addresses at most.

    found: by leading dimensions and all else that it depends on.
    """

    __slots__ = ("fits", "found", "has_setting")

    def __init__(self, tensors: Sequence[Any]) -> None:
        x = tensors[0]
        self.has_setting = follows_setting(x.dtype, x.device.type)
        self.found: dict[tuple[Any, ...], Any] = {}
        self.fits = _guard(tensors)

    def key(self, tensors: Sequence[Any], fact: Any) -> tuple[Any, ...]:
        """What the found depends on beyond the kind."""
        setting = _setting(tensors) if self.has_setting else None
        if len(tensors) == FIRST_OPERAND:
            return tensors[0].shape, fact, setting
        return tensors[0].shape, fact, setting, *[t.shape for t in tensors[FIRST_OPERAND:]]


def _setting(tensors: Sequence[Any]) -> tuple[Any, ...]:
    return fp32_precision(), id(tensors[1]) in marked


def _guard(tensors: Sequence[Any]) -> Callable[..., bool]:
    """A function that says whether as many other tensors are of the same kind as these."""
    absent = [i for i, t in enumerate(tensors) if t is None]
    # A tensor that is given twice, as a residual that is x, is compared once: the guard takes two
    # that are the same for another kind.
    first = {id(t): i for i, t in reversed(list(enumerate(tensors))) if t is not None}
    places = sorted(first.values())
    twice = [(i, j) for i, t in enumerate(tensors) if t is not None and i != (j := first[id(t)])]
    sizes: list[list[int | None]] = [list(tensors[i].shape) for i in places]
    strides: list[list[int | None]] = [list(tensors[i].stride()) for i in places]
    for i, size in zip(places, sizes, strict=True):
        if i == 0 or (i >= FIRST_OPERAND and len(size) > 1):  # the key holds them
            size[:-1] = [None] * (len(size) - 1)
    is_matrix = len(sizes[0]) == 2
    dense = [] if is_matrix else [i for i in places if i == 0 or i >= FIRST_OPERAND]
    for i in dense:  # contiguous, so that its strides follow from its sizes
        strides[places.index(i)] = [None] * len(strides[places.index(i)])
    given = [tensors[i] for i in places]
    guards = unpromised.TensorGuards(*given, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: Callable[..., bool] = guards.check
    if is_matrix and not absent and not twice:
        return check

    def fits(*others: Any) -> bool:
        return (
            all([others[i] is None for i in absent])
            and all([others[i] is others[j] for i, j in twice])
            and check(*[others[i] for i in places])
            and all([others[i].is_contiguous() for i in dense])
        )

    return fits
