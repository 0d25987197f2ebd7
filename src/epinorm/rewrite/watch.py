"""Watch what a user's code does while it is traced, beyond what the trace records.

A graph freezes or drops whatever is not an operation on tensors: a printed line, a random number,
a global that changes. Calls are seen through the interpreter's profile hook.
"""

from __future__ import annotations

import builtins
import dis
import gc
import math
import operator
import sys
from types import (
    BuiltinFunctionType,
    BuiltinMethodType,
    CodeType,
    FrameType,
    FunctionType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import get_testing_overrides

__all__ = ["Untraceable", "Watch", "forbidden_call", "globals_read", "is_simple"]

_SET_ATTRIBUTE = nn.Module.__setattr__.__code__
_TORCH_CODE_TO_TRACE = (
    "torch.nn.functional",
    "torch.nn.modules",
    "torch.functional",
    "torch._tensor",
    "torch._jit_internal",
    "torch.fx",
    "torch.overrides",
    "torch.utils._contextlib",
)
_HARMLESS_BUILTINS = frozenset(
    getattr(builtins, name)
    for name in "abs all any callable divmod getattr hasattr id iter len max min next ord chr "
    "pow repr round sorted sum format".split()
)


class Untraceable(Exception):
    """Why a module's ``forward`` cannot be represented by a graph."""


def is_simple(value: Any) -> bool:
    """Whether a value cannot change in place, so that comparing it says whether it is the same."""
    if isinstance(value, (tuple, frozenset)):
        return all(is_simple(v) for v in value)
    simple = (bool, int, float, str, bytes, torch.dtype, torch.device)
    return value is None or isinstance(value, simple) or _is_code(value)


def _is_code(value: Any) -> bool:
    code = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
    return isinstance(value, code) and not isinstance(getattr(value, "__self__", None), nn.Module)


class Watch:
    """Watch, through the interpreter's profile hook, what the user's code calls while it runs."""

    def __init__(self, starts_in: str) -> None:
        self._starts_in = starts_in  # the file whose calls into other code are the user's forward
        self.codes: dict[CodeType, dict[str, Any]] = {}
        self.builtins: set[Any] = set()
        self.torch_calls: set[str] = set()
        self.sets_attributes = False
        self._users: set[FrameType] = set()
        self._previous: Any = None
        self._collects = False

    def __enter__(self) -> Watch:
        self._previous = sys.getprofile()
        # A garbage collection in the user's code would run other libraries' gc callbacks there, and
        # look as if the user had called them.
        self._collects = gc.isenabled()
        gc.disable()
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *exception: Any) -> None:
        sys.setprofile(self._previous)
        if self._collects:
            gc.enable()

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self._on_call(frame)
        elif event == "return":
            self._users.discard(frame)
        elif event == "c_call" and frame in self._users:
            self.builtins.add(argument)

    def _on_call(self, frame: FrameType) -> None:
        """A frame is the user's if the file that runs ``forward`` or such a frame called it."""
        caller = frame.f_back
        if caller is None or not (
            caller in self._users or caller.f_code.co_filename == self._starts_in
        ):
            return
        home = str(frame.f_globals.get("__name__", ""))
        if home.partition(".")[0] not in ("torch", "epinorm"):
            self._users.add(frame)
            self.codes[frame.f_code] = frame.f_globals
        elif frame.f_code is _SET_ATTRIBUTE:
            self.sets_attributes = True
        elif caller in self._users and not home.startswith((*_TORCH_CODE_TO_TRACE, "epinorm")):
            self.torch_calls.add(f"{home}.{frame.f_code.co_name}")


def forbidden_call(watch: Watch, recorded: set[Any]) -> str | None:
    """The first call in the user's code whose effect a graph would freeze or drop."""
    if watch.sets_attributes:
        return "sets attributes of a module inside its forward"
    for name in sorted(watch.torch_calls):
        return f"calls {name}"
    for function in watch.builtins:
        if isinstance(function, type) or function in _HARMLESS_BUILTINS:
            continue
        owner = getattr(function, "__self__", None)
        if isinstance(function, BuiltinMethodType) and isinstance(
            owner, (str, tuple, list, dict, set, frozenset, range)
        ):
            continue
        if isinstance(owner, ModuleType) and owner in (math, operator):
            continue
        home = getattr(function, "__objclass__", None)
        if home in (str, tuple, list, dict, set, Tensor, Tensor.__base__, object, type):
            continue
        if function in recorded or function in get_testing_overrides():
            continue
        if function is sys.setprofile:
            continue
        return f"calls {getattr(function, '__qualname__', function)}, which a trace cannot hold"
    return None


def globals_read(watch: Watch) -> tuple[tuple[dict[str, Any], str, Any], ...]:
    """The globals that the user's code reads: namespace, name, value; raises Untraceable."""
    found: list[tuple[dict[str, Any], str, Any]] = []
    for code, namespace in watch.codes.items():
        if code.co_freevars and code.co_freevars != ("__class__",):
            raise Untraceable(f"{code.co_name} reads variables of an enclosing function")
        for instruction in dis.get_instructions(code):
            name = instruction.argval
            if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                raise Untraceable(f"changes the global {name}")
            if instruction.opname != "LOAD_GLOBAL" or name not in namespace:
                continue
            if not is_simple(namespace[name]):
                kind = type(namespace[name]).__name__
                raise Untraceable(f"reads the global {name}, a {kind} that can change")
            found.append((namespace, name, namespace[name]))
    return tuple(found)
