"""An executable whose passes are repeated by one native call each, once they were recorded.

For problems so small that the host decides: what a pass hands from kernel to kernel then lies in
one buffer, which takes more memory than one tensor after the other. Where a call is not like the
recorded one, or there is no compiler, the ordinary pass runs; so does the first, which loads its
kernels, and whatever runs while a CUDA graph is captured before anything was recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epinorm.backends.cpu.build import BuildError
from epinorm.backends.cuda.fp32.kept_planes import KeptPlanes, make_room
from epinorm.backends.cuda.runtime.replay import CannotReplay, Replay, is_recording, recording
from epinorm.backends.prepack import marked
from epinorm.problem import Forward, Gradients, Inputs, Run, StepForward, Wanted
from epinorm.said import log_once

__all__ = ["ReplayedBackward", "replayed_forward"]


ATTEMPTS = 3
"""Runs that are recorded before it is given up."""
FEWEST_LAUNCHES = 2
"""One launch costs no more by itself."""


class _Recorder:
    """Records one of the first runs and makes it a ``Replay``."""

    def __init__(self) -> None:
        self.runs = 0

    def wants(self, device: torch.device) -> bool:
        """Whether this run is to be recorded: not the first, which loads kernels."""
        if self.runs > ATTEMPTS or is_recording():
            return False
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        self.runs += 1
        return self.runs > 1

    def record(
        self,
        run: Callable[[], Any],
        given: Sequence[Tensor],
        results: Callable[[Any], list[Tensor]],
    ) -> tuple[Any, Replay | None]:
        """What ``run`` makes, and how to repeat it."""
        with recording() as noted:
            made = run()
        try:
            if len(noted.launches) < FEWEST_LAUNCHES:
                raise CannotReplay("it is one launch")
            replay = Replay(noted, given, results(made))
        except CannotReplay:
            return made, None
        except BuildError as error:
            log_once(f"kernels are launched one by one, which takes longer: {error}")
            return made, None
        self.runs = ATTEMPTS + 1
        return made, replay


def _there(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [t for t in tensors if t is not None and t.numel()]


class _Known(NamedTuple):
    """How to repeat a forward pass with these constants. shared: the fields of its result that are
    no tensors of its own; left: whether x's and W's planes follow the others, of nbytes bytes."""

    replay: Replay
    constants: tuple[float, ...]
    shared: tuple[Tensor | None, ...]
    own: tuple[bool, ...]
    left: tuple[bool, ...]
    nbytes: int

    def result(self, made: list[Tensor]) -> Forward:
        results = iter(made)
        fields = [next(results) if own else t for t, own in zip(self.shared, self.own, strict=True)]
        if not self.left:
            return Forward._make(fields)
        step = StepForward._make(fields)
        step.left = KeptPlanes(*[next(results) if is_there else None for is_there in self.left])
        return step


def _planes(out: Forward) -> tuple[Tensor | None, ...]:
    left = getattr(out, "left", None)
    return () if left is None else (left.x, left.weight)


def _known(replay: Replay, constants: tuple[float, ...], out: Forward) -> _Known:
    own = tuple([t is not None and t.numel() > 0 for t in out])
    shared = tuple([None if is_own else t for t, is_own in zip(out, own, strict=True)])
    planes = _planes(out)
    nbytes = sum(t.nbytes for t in planes if t is not None)
    return _Known(replay, constants, shared, own, tuple(t is not None for t in planes), nbytes)


def replayed_forward(run: Run) -> Run:
    """A forward pass that is repeated once it was recorded."""
    recorder, known = _Recorder(), list[_Known]()

    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        operands: tuple[Tensor, ...],
        constants: tuple[float, ...] = (),
    ) -> Forward:
        whole = (x, weight, bias, norm_weight, norm_bias, operands, constants)
        if id(weight) in marked or not all([t.is_contiguous() for t in operands]):
            return run(*whole)
        given = [t for t in (x, weight, bias, norm_weight, norm_bias) if t is not None]
        given += operands
        if known:
            found = known[0]
            room = not found.nbytes or make_room(found.nbytes, x.device)
            if room and constants == found.constants:
                made = found.replay(given)
                if made is not None:
                    return found.result(made)
        if known or not recorder.wants(x.device):
            return run(*whole)
        out, replay = recorder.record(
            lambda: run(*whole), given, lambda made: _there((*made, *_planes(made)))
        )
        if replay is not None:
            known.append(_known(replay, constants, out))
        return out

    return forward


def _given(
    inputs: Inputs, kept: Forward, dy: Tensor, planes: tuple[Tensor | None, ...]
) -> list[Tensor]:
    """What a backward pass reads. Where z is dy it is asked for its size alone, or is read as dy:
    then one tensor fewer is given than where it is not."""
    z = None if kept.z is dy else kept.z
    return _there((dy, *inputs[:5], *inputs.operands, z, kept.mean, kept.rstd, *planes))


_SINGLE = Gradients._fields[:-1]

Launches = tuple[Gradients, Tensor | None]
"""Gradients, and dz where PyTorch multiplies the others from it."""


class ReplayedBackward:
    """What a backward pass launches, repeated once it was recorded, for each set of gradients."""

    def __init__(self, run: Callable[..., Launches]) -> None:
        self._run = run
        self._known: dict[Any, tuple[_Recorder, list[Any]]] = {}

    def __call__(
        self,
        inputs: Inputs,
        kept: list[Forward],
        dy: Tensor,
        want: Wanted,
        left: KeptPlanes | None,
    ) -> Launches:
        """As ``executable.CudaExecutable.backward``."""
        # x and W as well, which are saved by name: their data may have been exchanged meanwhile.
        if not all([t.is_contiguous() for t in (dy, inputs.x, inputs.weight, *inputs.operands)]):
            return self._run(inputs, kept, dy, want, left)
        # Looked at once: another thread may free them to make room.
        planes = (None, None) if left is None else (left.x, left.weight)
        has_planes = planes[0] is not None, planes[1] is not None
        known = self._known.get((want, has_planes))
        if known is None:
            known = self._known[want, has_planes] = (_Recorder(), [])
        recorder, found = known
        if found and found[0][1] == inputs.constants:
            replay, _, fields = found[0]
            made = replay(_given(inputs, kept[0], dy, planes))
            if made is not None:
                kept.clear()
                if left is not None:
                    left.restrict(False, False)
                results = iter(made)
                *gradients, dz = [next(results) if is_there else None for is_there in fields]
                operands = tuple(gradients[len(_SINGLE) :])
                return Gradients._make((*gradients[: len(_SINGLE)], operands)), dz
        if found or not recorder.wants(dy.device):
            del planes  # which are freed within the run
            return self._run(inputs, kept, dy, want, left)
        given = _given(inputs, kept[0], dy, planes)
        (gradients, dz), replay = recorder.record(
            lambda: self._run(inputs, kept, dy, want, left),
            given,
            lambda made: _there((*made[0][:5], *made[0].operands, made[1])),
        )
        if replay is not None:
            fields = [t is not None for t in (*gradients[:5], *gradients.operands, dz)]
            found.append((replay, inputs.constants, fields))
        return gradients, dz
