"""Calls that native code computes from end to end: of the operators, below autograd."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from epinorm.backends.prepack import marked
from epinorm.operator.calls import Facts, constants_of, remembering
from epinorm.precision import takes_tf32
from epinorm.problem import Executable, NativePasses, Wanted

_modules: dict[str, Any] = sys.modules
_COMPILED_AUTOGRAD = "torch._dynamo.compiled_autograd"


class Native:
    """Calls of one chain, by what they depend on: PyTorch's modes, and of each tensor type, dtype,
    device, sizes, requires_grad and alignment, all compared in C++ (cuda/runtime/call.h).
    """

    def __init__(self) -> None:
        self._calls: Any = None
        remembering.add(self)

    def forget(self) -> None:
        """Find nothing until something is kept again."""
        self._calls = None

    def find(self, tensors: Sequence[Any]) -> Any:
        """What a call like one that was kept gives, else None; tensors: in the same order."""
        calls = self._calls
        if calls is None or (marked and id(tensors[1]) in marked):
            return None  # what is kept converted is looked at first
        compiled = _modules.get(_COMPILED_AUTOGRAD)
        if compiled is not None and compiled.compiled_autograd_enabled:
            return None  # which traces no node of C++ but PyTorch's
        return calls(*tensors)

    def made(self) -> Any:
        """What C++ keeps them in."""
        if self._calls is None:
            from epinorm.backends.cuda.runtime.replay import native

            self._calls = native().Calls()
        return self._calls


class NativeOperator(Native):
    """Those of one operator, with equal facts and, backward, the same gradients wanted: ``find``
    gives a tuple of all that the operator returns."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def keep_forward(self, executable: Executable, tensors: Sequence[Any], facts: Facts) -> None:
        """Let ``find`` compute calls like this one, if ``executable``, which computes it, recorded
        its pass; tensors: operands last."""
        passes = passes_of(executable, facts)
        if passes is not None and passes.leave is None:
            made = passes.fields
            outputs = made.outputs if executable.problem.training else (made.y, made.second)
            outputs = [t for t in outputs if t is not None]
            self._keep(executable, tensors, passes.program, outputs)

    def keep_backward(
        self,
        executable: Executable,
        tensors: Sequence[Any],
        facts: Facts,
        want: Wanted,
        has_dsum: bool,
    ) -> None:
        """As ``keep_forward``; tensors: dy, the inputs, dsum, z, mean and rstd, the order in which
        the pass is given them."""
        find = getattr(executable, "native_backward", None)
        found = None if find is None else find(constants_of(facts), want, has_dsum)
        if found is not None:
            program, count = found
            self._keep(executable, tensors, program, range(count))

    def _keep(
        self, executable: Executable, tensors: Sequence[Any], program: Any, outputs: Sequence[Any]
    ) -> None:
        if outputs and all([t is None or t.is_contiguous() for t in tensors]):
            setting = setting_of(executable)
            self.made().add_operator(self._name, tensors, setting, program, outputs)


def passes_of(executable: Executable, facts: Facts) -> NativePasses | None:
    """The passes as native code repeats them; None before they were recorded."""
    find = getattr(executable, "native", None)
    return None if find is None else find(constants_of(facts))


def setting_of(executable: Executable) -> Any:
    """PyTorch's setting for fp32 products that the executable was made for, if it depends on it:
    another thread may have changed it meanwhile."""
    problem = executable.problem
    depends = problem.dtype == torch.float32 and takes_tf32(problem.m, problem.k, problem.n)
    return problem.precision if depends else None
