"""An executable whose passes are repeated by one native call each, once they were recorded.

Where a call is not like the recorded one, or there is no compiler, the ordinary pass runs; so does
the first, which loads its kernels, and whatever runs while a CUDA graph is captured before anything
was recorded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epinorm.backends.cuda.fp32.kept_planes import KeptPlanes, limit, make_room, waiting
from epinorm.backends.cuda.gemm.forward import SingleForward
from epinorm.backends.cuda.recorded import Recorder, apart, present
from epinorm.backends.cuda.runtime.native import native
from epinorm.backends.native_passes import NativePasses, Waits
from epinorm.backends.prepack import marked
from epinorm.problem import (
    Forward,
    Gradients,
    Inputs,
    Later,
    Rest,
    StepForward,
    Wanted,
)


class _Known(NamedTuple):
    """How to repeat a forward pass with these constants. shared: the fields of its result that are
    no tensors of its own; left: whether x's and W's planes follow the others, of nbytes bytes,
    and scales_alone of W's; is_packed: whether what is kept of the weight is given besides, behind
    all else."""

    program: Any
    constants: tuple[float, ...]
    shared: tuple[Tensor | None, ...]
    own: tuple[bool, ...]
    left: tuple[bool, ...]
    nbytes: int
    scales_alone: bool
    is_packed: bool

    def result(self, made: list[Tensor]) -> Forward:
        results = iter(made)
        fields = [next(results) if own else t for t, own in zip(self.shared, self.own, strict=True)]
        if not self.left:
            return Forward._make(fields)
        step = StepForward._make(fields)
        planes = [next(results) if is_there else None for is_there in self.left]
        step.left = KeptPlanes(*planes, scales_alone=self.scales_alone)
        return step

    def waits(self, first: int, device: torch.device) -> Waits:
        """What holds the planes in native code; first: the number of their first result."""
        has_x, has_weight = self.left
        room = None if limit() is None else partial(make_room, self.nbytes, device)
        places = first if has_x else -1, first + has_x if has_weight else -1
        return Waits(KeptPlanes, waiting, device, room, *places, self.scales_alone)


def _planes(out: Forward) -> tuple[Tensor | None, ...]:
    left = getattr(out, "left", None)
    return () if left is None else (left.x, left.weight)


def _known(program: Any, constants: tuple[float, ...], out: Forward, is_packed: bool) -> _Known:
    own = tuple([t is not None and t.numel() > 0 for t in out])
    shared = tuple([None if is_own else t for t, is_own in zip(out, own, strict=True)])
    planes = _planes(out)
    nbytes = sum(t.nbytes for t in planes if t is not None)
    left = tuple(t is not None for t in planes)
    scales_alone = bool(planes) and out.left.scales_alone  # type: ignore[attr-defined]
    return _Known(program, constants, shared, own, left, nbytes, scales_alone, is_packed)


class ReplayedForward:
    """A forward pass that is repeated once it was recorded; holds: as ``replay`` takes it; product:
    what may read a prepacked weight's converted form.

    That is one tensor more that the pass is given, where it is up to date.
    """

    def __init__(
        self, run: Callable[[Inputs], Forward], *, holds: bool, product: SingleForward | None = None
    ) -> None:
        self._run, self._recorder, self._holds = run, Recorder(), holds
        self._product = product
        self._known: _Known | None = None

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        operands: tuple[Tensor, ...],
        constants: tuple[float, ...] = (),
    ) -> Forward:
        whole = Inputs(x, weight, bias, norm_weight, norm_bias, operands, constants)
        if not all([t.is_contiguous() for t in operands]):
            return self._run(whole)
        given = [t for t in (x, weight, bias, norm_weight, norm_bias) if t is not None]
        given += operands
        packed: list[Tensor] = []
        entry, product = marked.get(id(weight)) if marked else None, self._product
        if entry is not None and product is not None and product.may_keep(weight):
            kept = entry.current(weight, product.converter)
            if kept is None:
                return self._run(whole)
            packed = [kept]
            given += packed
        found = self._known
        if found is not None:
            room = not found.nbytes or make_room(found.nbytes, x.device)
            if room and constants == found.constants and found.program.fits(given):
                return found.result(found.program(given))
        if found is not None or not self._recorder.wants(x.device):
            return self._run(whole)
        whole = apart(whole)
        given = [t for t in (*whole[:5], *whole.operands, *packed) if t is not None]
        out, program = self._recorder.record(
            lambda: self._run(whole),
            given,
            lambda made: present((*made, *_planes(made))),
            holds=self._holds,
            reads_last=bool(packed),
        )
        if program is not None:
            self._device = x.device
            self._known = _known(program, constants, out, bool(packed))
        return out

    def native(self, constants: tuple[float, ...]) -> NativePasses | None:
        """The pass with these constants, as native code repeats it; None before it was recorded."""
        known, product = self._known, self._product
        if known is None or known.constants != constants:
            return None
        results = itertools.count()
        fields = [
            next(results) if own else t for t, own in zip(known.shared, known.own, strict=True)
        ]
        made = Forward._make(fields)
        waits = known.waits(next(results), self._device) if known.nbytes else None
        converter = product.converter if product is not None and known.is_packed else None
        may_keep = None if product is None else product.may_keep
        return NativePasses(known.program, made, waits, None, converter, may_keep)


def _given(
    inputs: Inputs, kept: Forward, dy: Tensor, planes: tuple[Tensor | None, ...]
) -> list[Tensor]:
    """What a backward pass reads. Where z is dy it is asked for its size alone, or is read as dy:
    then one tensor fewer is given than where it is not."""
    z = None if kept.z is dy else kept.z
    return present((dy, *inputs[:5], *inputs.operands, z, kept.mean, kept.rstd, *planes))


def _flags(want: Wanted, has_planes: tuple[bool, bool]) -> int:
    """A bit for each tensor in the order of ``Inputs`` whose gradient is wanted, and those of
    planes (chain_node.h)."""
    wanted = sum(flag << i for i, flag in enumerate((*want[:-1], *want.operands)))
    return wanted | has_planes[0] << 62 | has_planes[1] << 63


_SINGLE = Gradients._fields[:-1]


class _ReplayedRest:
    """A ``Rest.compute`` that is repeated once it was recorded."""

    def __init__(self, run: Callable[[list[Tensor], Tensor], Tensor | None]) -> None:
        self._run, self._recorder = run, Recorder()
        self._program: Any = None
        self._like: Any = None  # the weight that was recorded

    def __call__(self, carried: list[Tensor], weight: Tensor) -> Tensor | None:
        if not weight.is_contiguous() or self._like not in (None, (weight.shape, weight.dtype)):
            return self._run(carried, weight)
        given = [*carried, weight]
        if self._program is not None and self._program.fits(given):
            carried.clear()
            found: Tensor = self._program(given)[0]
            return found
        if self._program is not None or not self._recorder.wants(weight.device):
            del given
            return self._run(carried, weight)
        dx, self._program = self._recorder.record(
            lambda: self._run(carried, weight), given, lambda made: [made]
        )
        if self._program is not None:
            self._like = weight.shape, weight.dtype
        return dx


def _carried(later: Later | None, dy: Tensor) -> list[Tensor]:
    """What is carried over besides dy."""
    return [t for t in later[0].carried if t is not dy] if later else []


class _KnownBackward(NamedTuple):
    """How to repeat a backward pass with these constants; there: which gradients it gives, rest:
    what takes the results behind them, if x's is left for later, and carries_dy: that too."""

    program: Any
    constants: tuple[float, ...]
    there: list[bool]
    rest: _ReplayedRest | None
    carries_dy: bool

    def gradients(self, made: list[Tensor], later: Later | None, dy: Tensor) -> Gradients:
        results = iter(made)
        fields = [next(results) if is_there else None for is_there in self.there]
        if self.rest is not None and later is not None:
            # dz, over it, is the last (plane_products.py).
            later.append(Rest([*results, *[dy] * self.carries_dy], self.rest))
        return Gradients._make((*fields[: len(_SINGLE)], tuple(fields[len(_SINGLE) :])))


class ReplayedBackward:
    """A backward pass, repeated once it was recorded, for each set of gradients, whole or with x's
    left for later."""

    def __init__(self, run: Callable[..., Gradients]) -> None:
        self._run = run
        self._known: dict[Any, tuple[Recorder, list[_KnownBackward]]] = {}
        self._native: tuple[tuple[float, ...], Any] | None = None

    def native(self, constants: tuple[float, ...]) -> Any:
        """What native code finds recorded passes in, of these constants; None where those of others
        were recorded first."""
        if self._native is None:
            self._native = constants, native().Backward()
        return self._native[1] if self._native[0] == constants else None

    def program(self, constants: tuple[float, ...], want: Wanted) -> tuple[Any, int] | None:
        """What repeats the pass where no planes were left, and how many gradients it gives; None
        before it was recorded with these constants."""
        _, found = self._known.get((want, (False, False), False), (None, None))
        if not found or found[0].constants != constants:
            return None
        return found[0].program, sum(found[0].there)

    def __call__(
        self,
        inputs: Inputs,
        kept: list[Forward],
        dy: Tensor,
        want: Wanted,
        left: KeptPlanes | None,
        later: Later | None = None,
    ) -> Gradients:
        """As ``executable.CudaExecutable.backward``."""
        run = self._run if later is None else partial(self._run, later=later)
        # x and W as well, which are saved by name: their data may have been exchanged meanwhile.
        # Native code gives back no gradient that is empty.
        read = (dy, inputs.x, inputs.weight, *inputs.operands)
        if not all([t.is_contiguous() and t.numel() for t in read]):
            return run(inputs, kept, dy, want, left)
        # Looked at once: another thread may free them to make room.
        planes = (None, None) if left is None else (left.x, left.weight)
        has_planes = planes[0] is not None, planes[1] is not None
        key = want, has_planes, later is not None
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = (Recorder(), [])
        recorder, found = known
        if found and found[0].constants == inputs.constants:
            given = _given(inputs, kept[0], dy, planes)
            if found[0].program.fits(given):
                del planes  # and what else holds what is freed within the pass
                kept.clear()
                if left is not None:
                    left.restrict(False, False)
                return found[0].gradients(found[0].program(given), later, dy)
            del given
        if found or not recorder.wants(dy.device):
            del planes
            return run(inputs, kept, dy, want, left)
        inputs = apart(inputs, kept[0].z)
        given = _given(inputs, kept[0], dy, planes)
        del planes
        gradients, program = recorder.record(
            lambda: run(inputs, kept, dy, want, left),
            given,
            lambda made: present((*made[:5], *made.operands, *_carried(later, dy))),
        )
        if program is not None:
            there = [t is not None for t in (*gradients[:5], *gradients.operands)]
            rest = _ReplayedRest(later[0].compute) if later else None
            carries_dy = any(t is dy for rest in later or () for t in rest.carried)
            found.append(_KnownBackward(program, inputs.constants, there, rest, carries_dy))
            backward = self.native(inputs.constants)
            if backward is not None and later is None:
                backward.add(_flags(want, has_planes), program)
        return gradients
