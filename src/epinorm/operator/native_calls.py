"""Calls of a model's chain that native code computes, their node in autograd's graph included."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from epinorm.backends.cpu.build import BuildError
from epinorm.backends.prepack import marked
from epinorm.operator import transforms
from epinorm.operator.accumulation import entered
from epinorm.operator.autograd import OPERANDS, gradients
from epinorm.operator.calls import Facts
from epinorm.operator.native_operators import UNMARKED, Native, passes_of, setting_of
from epinorm.precision import follows_setting, fp32_precision
from epinorm.problem import Executable


class NativeCalls(Native):
    """Those of a model's chain: ``find`` gives y, and the sum if it was asked for, or the batch's
    statistics, of tensors in the order of ``Inputs``. A training step's backward pass then needs no
    Python either, once it was recorded (cuda/runtime/chain_node.h)."""

    def keep(
        self,
        executable: Executable,
        tensors: Sequence[Any],
        facts: Facts,
        training: bool,
        returns_more: bool = False,
    ) -> None:
        """Let ``find`` compute calls like this one, if ``executable``, which computed it, recorded
        its pass. facts[3]: y's dtype under autocast; returns_more: the caller wants the sum,
        in PyTorch's dtype."""
        passes = passes_of(executable, facts)
        if passes is None or not all([t is None or t.is_contiguous() for t in tensors]):
            return
        if training and passes.converter is not None:
            return  # of which the node would save what is kept, and each step makes it stale
        if training and any([t is not None and t.is_inference() for t in tensors]):
            return  # of which Python saves copies
        chain = executable.problem.chain
        place, made = chain.residual_place, passes.fields
        if returns_more and chain.returns_sum and facts[3] is not None:
            as_pytorch = transforms.sum_dtype_under_autocast(tensors, chain)
            if as_pytorch != executable.problem.sum_dtype:
                return
        x, weight = tensors[:2]
        casts = None if facts[3] is None else transforms.casts(tensors, facts[3])
        calls, packed = self.calls_like(weight, passes)
        if calls is None:
            return
        waits, backward = passes.waits, passes.backward
        if waits is not None:
            waits = waits.of_gradients(x.requires_grad, weight.requires_grad)
        kept = made.saved(chain), made.mean, made.rstd
        second: Any = made.second if isinstance(made.second, int) else -1
        both = (-1, second) if chain.returns_statistics else (second, -1)
        calls.add(
            *((*tensors, *packed), casts, setting_of(executable), (*x.shape[:-1], weight.shape[0])),
            *(passes.program, kept, *both, waits),
            *(backward if training and backward is not None else (None, None)),
            partial(gradients, executable, facts) if training else None,
            ctypes.addressof(entered),
            OPERANDS + place if place >= 0 else -1,
        )


WORTH = ("cuda",)
"""Devices where native code is there anyhow."""


class LayersCalls(Native):
    """Those of a model's chain that are left to PyTorch's own layers: ``find`` calls these. What
    Python would take to see that a call is such a one, a small step's kernels do not hide."""

    def keep(self, layers: Callable[..., Any], tensors: Sequence[Any]) -> None:
        """Let ``find`` compute calls like this one by a function of the tensors, once the native
        code is there."""
        x = tensors[0]
        if x.device.type not in WORTH or not all([t is None or t.is_contiguous() for t in tensors]):
            return
        from epinorm.backends.cuda.runtime.native import native

        with suppress(BuildError):
            if native() is not None:
                setting = fp32_precision() if follows_setting(x.dtype, "cuda") else None
                calls = self.made(None if id(tensors[1]) in marked else UNMARKED)
                calls.add_layers(tensors, setting, layers)
