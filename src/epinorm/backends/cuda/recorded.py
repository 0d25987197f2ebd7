"""The recording of one of a pass' first runs, which native code then repeats."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from epinorm.backends.cpu.build import BuildError
from epinorm.backends.cuda.runtime.native import native
from epinorm.backends.cuda.runtime.replay import CannotReplay, is_recording, recording, replay
from epinorm.problem import Inputs
from epinorm.said import log_once

log = logging.getLogger("epinorm")

ATTEMPTS = 3
"""Runs that are recorded before it is given up."""


class Recorder:
    """Records one of the first runs and makes it a program."""

    def __init__(self) -> None:
        self.runs = 0

    def wants(self, device: torch.device) -> bool:
        """Whether this run is to be recorded: not the first, which loads kernels."""
        if self.runs > ATTEMPTS or is_recording():
            return False
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        if self.runs == 0:
            self.runs = 1
            return False
        try:
            if native() is None:
                return False
        except BuildError as error:
            log_once(f"calls take the host longer, without native code for them: {error}")
            self.runs = ATTEMPTS + 1
            return False
        self.runs += 1
        return True

    def record(
        self,
        run: Callable[[], Any],
        given: list[Tensor],
        results: Callable[[Any], list[Tensor]],
        *,
        holds: bool = False,
        reads_last: bool = False,
    ) -> tuple[Any, Any]:
        """What ``run`` makes, and how to repeat it; None where that cannot be, or where it is to
        have read the last of ``given`` and did not. ``given`` is emptied, so that it may be freed
        within the run."""
        with recording(given) as noted:
            given.clear()
            made = run()
        try:
            if reads_last and not noted.reads(noted.given - 1):
                raise CannotReplay("it does not read what is kept of its weight")
            program = replay(noted, results(made), holds=holds)
        except CannotReplay as reason:
            log.debug("a pass is not repeated by native code: %s", reason)
            return made, None
        self.runs = ATTEMPTS + 1
        return made, program


def present(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Those that are not empty."""
    return [t for t in tensors if t is not None and t.numel()]


def apart(inputs: Inputs, *others: Tensor) -> Inputs:
    """The inputs, of those that begin where another does copies: a recording knows tensors by their
    addresses. What it makes of them serves both, a residual that is x and one that is not. The
    weight is no copy of x: what is kept of it is found by the tensor itself."""
    known = {t.data_ptr() for t in others}

    def own(t: Tensor | None) -> Tensor | None:
        if t is None or not t.numel():
            return t
        count = len(known)
        known.add(t.data_ptr())
        return t if len(known) > count else t.clone()

    weight = own(inputs.weight)
    x, *vectors = map(own, (inputs.x, *inputs[2:5]))
    operands = tuple(map(own, inputs.operands))
    return Inputs._make((x, weight, *vectors, operands, inputs.constants))
