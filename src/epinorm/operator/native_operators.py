"""Calls that native code computes from end to end: of the operators, below autograd."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from epinorm.backends.native_passes import NativePasses
from epinorm.backends.prepack import Marked, marked
from epinorm.operator.calls import Facts, constants_of, remembering
from epinorm.operator.undisturbed import function_modes
from epinorm.precision import takes_tf32
from epinorm.problem import Executable, Wanted

_modules: dict[str, Any] = sys.modules
_COMPILED_AUTOGRAD = "torch._dynamo.compiled_autograd"
_MOST_CONVERTERS = 64
UNMARKED: Any = object()
"""The place of calls whose weight is not marked."""


class Native:
    """Calls of one chain, by what they depend on: PyTorch's modes, and of each tensor type, dtype,
    device, sizes, requires_grad and alignment, all compared in C++ (cuda/runtime/call.h).

    Those of marked weights are kept apart, by what has converted the weight that they read: they
    are given what is kept of it behind all else. Those by None read the weight itself, so that it
    is no matter to them what becomes of what is kept.
    """

    def __init__(self) -> None:
        self._calls: dict[Any, Any] = {}
        remembering.add(self)

    def forget(self) -> None:
        """Find nothing until something is kept again."""
        self._calls = {}

    def find(self, tensors: Sequence[Any]) -> Any:
        """What a call like one that was kept gives, else None; tensors: in the order of ``Inputs``,
        operands one by one."""
        compiled = _modules.get(_COMPILED_AUTOGRAD)
        if compiled is not None and compiled.compiled_autograd_enabled:
            return None  # which traces no node of C++ but PyTorch's
        known = self._calls
        if not known:
            return None
        entry = marked.get(id(tensors[1])) if marked else None
        if entry is not None:
            return self._find_of_marked(entry, tensors)
        calls = known.get(UNMARKED)
        return None if calls is None else calls(*tensors)

    def _find_of_marked(self, entry: Marked, tensors: Sequence[Any]) -> Any:
        calls = self._calls.get(None)
        if calls is not None and (made := calls(*tensors)) is not None:
            return made
        converter = entry.converter
        calls = None if converter is None else self._calls.get(converter)
        if calls is None or function_modes():  # these would see the weight looked at
            return None
        kept = entry.current(tensors[1], converter)
        return None if kept is None else calls(*tensors, kept)

    def like(self, tensors: Sequence[Any]) -> Any:
        """What computes calls of tensors like these, of which no weight is marked, and no others;
        None where ``find`` finds none."""
        calls = self._calls.get(UNMARKED)
        return None if calls is None else calls.like(*tensors)

    def made(self, of: Any = UNMARKED) -> Any:
        """What C++ keeps calls in: of weights that are not marked, or of marked ones that are given
        as ``of`` has converted them, or as they are."""
        calls = self._calls.get(of)
        if calls is None:
            from epinorm.backends.cuda.runtime.native import native

            if len(self._calls) >= _MOST_CONVERTERS:
                self._calls.clear()
            calls = self._calls[of] = native().Calls()
        return calls

    def calls_like(self, weight: Tensor, passes: NativePasses) -> tuple[Any, tuple[Tensor, ...]]:
        """What C++ is to keep calls of such a weight in that are computed so, and what these are
        given behind all else; None where ``find`` is to find no such call."""
        entry = marked.get(id(weight)) if marked else None
        if passes.converter is not None:
            kept = None if entry is None else entry.current(weight, passes.converter)
            return (None, ()) if kept is None else (self.made(passes.converter), (kept,))
        if entry is None:
            return self.made(), ()
        keeps = passes.may_keep is not None and passes.may_keep(weight)
        return (None if keeps else self.made(None)), ()


class NativeOperator(Native):
    """Those of one operator, with equal facts and, backward, the same gradients wanted: ``find``,
    or ``find_backward``, gives a tuple of all that the operator returns."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def find_backward(self, tensors: Sequence[Any]) -> Any:
        """As ``find``, of a pass that reads nothing that is kept; tensors: in the order
        of ``keep_backward``."""
        compiled = _modules.get(_COMPILED_AUTOGRAD)
        if compiled is not None and compiled.compiled_autograd_enabled:
            return None
        calls = self._calls.get(UNMARKED)
        return None if calls is None else calls(*tensors)

    def keep_forward(self, executable: Executable, tensors: Sequence[Any], facts: Facts) -> None:
        """Let ``find`` compute calls like this one, if ``executable``, which computes it, recorded
        its pass; tensors: operands last."""
        passes = passes_of(executable, facts)
        if passes is not None and passes.waits is None:
            made = passes.fields
            outputs = made.outputs if executable.problem.training else (made.y, made.second)
            outputs = [t for t in outputs if t is not None]
            like = self.calls_like(tensors[1], passes)
            self._keep(executable, tensors, passes.program, outputs, *like)

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
            self._keep(executable, tensors, program, range(count), self.made())

    def _keep(
        self,
        executable: Executable,
        tensors: Sequence[Any],
        program: Any,
        outputs: Sequence[Any],
        calls: Any,
        kept: tuple[Tensor, ...] = (),
    ) -> None:
        if calls is None or not outputs:
            return
        if all([t is None or t.is_contiguous() for t in tensors]):
            given, setting = (*tensors, *kept), setting_of(executable)
            calls.add_operator(self._name, given, len(tensors), setting, program, outputs)


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
