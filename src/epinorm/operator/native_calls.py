"""Calls that native code computes from end to end, their node in autograd's graph included."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from epinorm.backends.prepack import marked
from epinorm.chain.reference import Results
from epinorm.operator import transforms
from epinorm.operator.accumulation import entered
from epinorm.operator.autograd import OPERANDS, gradients, residual_place
from epinorm.operator.calls import Facts, constants_of, remembering
from epinorm.precision import fp32_precision
from epinorm.problem import Executable, NativePasses


class NativeCalls:
    """Those of one chain, by what they depend on: PyTorch's modes, and of each tensor type, dtype,
    device, sizes, requires_grad and alignment, all compared in C++ (cuda/runtime/chain_node.h).

    A training step's backward pass then needs no Python either, once it was recorded.
    """

    def __init__(self) -> None:
        self._calls: Any = None
        remembering.add(self)

    def forget(self) -> None:
        """Find nothing until something is kept again."""
        self._calls = None

    def find(self, tensors: Sequence[Any]) -> Results | None:
        """What a call like one that was kept gives, else None; tensors: operands last."""
        calls = self._calls
        if calls is None or (marked and id(tensors[1]) in marked):
            return None  # what is kept converted is looked at first
        return calls(*tensors)

    def keep(
        self,
        executable: Executable,
        tensors: Sequence[Any],
        facts: Facts,
        training: bool,
        returns_sum: bool = False,
    ) -> None:
        """Let ``find`` compute calls like this one, if ``executable``, which computed it, recorded
        its pass. facts[3]: the norm's dtype under autocast; returns_sum: the caller wants the sum,
        in PyTorch's dtype."""
        passes: NativePasses | None = getattr(executable, "native", lambda _: None)(
            constants_of(facts)
        )
        if passes is None or not all([t is None or t.is_contiguous() for t in tensors]):
            return
        chain = executable.problem.chain
        place = residual_place(chain)
        if returns_sum and facts[3] is not None:
            as_pytorch = transforms.sum_dtype_under_autocast(tensors, chain)
            if as_pytorch != executable.problem.sum_dtype:
                return
        from epinorm.backends.cuda.runtime.replay import native

        x, weight = tensors[:2]
        casts = None if facts[3] is None else transforms.casts(tensors)
        setting = fp32_precision() if executable.problem.dtype == torch.float32 else None
        leave, backward = passes.leave, passes.backward
        if leave is not None:
            leave = partial(leave, x.requires_grad, weight.requires_grad)
        if self._calls is None:
            self._calls = native().Calls()
        self._calls.add(
            *(tensors, casts, setting, (*x.shape[:-1], weight.shape[0])),
            *(passes.program, passes.kept, passes.sum, passes.planes, passes.has_room, leave),
            *(backward if training and backward is not None else (None, None)),
            partial(gradients, executable, facts) if training else None,
            ctypes.addressof(entered),
            OPERANDS + place if place >= 0 else -1,
        )
