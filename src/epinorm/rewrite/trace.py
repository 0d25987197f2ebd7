"""A module's own ``forward`` as a graph, together with everything that the graph took for granted.

torch.fx runs ``forward`` once with stand-ins for tensors. What it cannot see, it freezes: plain
attributes, globals, random numbers, gradient mode. So the tracer notes each value that was read
(the graph is used only while they are unchanged) and refuses whatever cannot be noted.
"""

from __future__ import annotations

import builtins
import dis
import math
import operator
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode, get_testing_overrides

from epinorm.rewrite.spelling import plain_type

__all__ = ["TENSOR", "Trace", "Untraceable", "has_hooks", "is_simple", "same", "trace"]

TENSOR = object()
"""Stands for "a tensor" among the arguments that a trace was made for."""

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_BOOKKEEPING = frozenset(nn.Module().__dict__) - {"training"}
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


@dataclass(frozen=True)
class Trace:
    """One graph of one module's ``forward`` and what it holds for.

    ``arguments``: by parameter name, TENSOR or the constant that the graph was made for.
    ``attributes``: plain values read from the module; ``globals``: those read from Python modules.
    ``inlined``: paths of the containers whose children the graph calls directly.
    """

    graph: fx.Graph
    arguments: Mapping[str, Any]
    attributes: Mapping[str, Any]
    globals: tuple[tuple[dict[str, Any], str, Any], ...]
    inlined: tuple[str, ...]


def is_simple(value: Any) -> bool:
    """Whether a value cannot change in place, so that comparing it says whether it is the same."""
    if isinstance(value, (tuple, frozenset)):
        return all(is_simple(v) for v in value)
    simple = (bool, int, float, str, bytes, torch.dtype, torch.device)
    return value is None or isinstance(value, simple) or _is_code(value)


def _is_code(value: Any) -> bool:
    code = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
    return isinstance(value, code) and not isinstance(getattr(value, "__self__", None), nn.Module)


def same(a: Any, b: Any) -> bool:
    """Whether two plain values are of one type and equal, a NaN being equal to itself."""
    return a is b or (type(a) is type(b) and bool(a == b))


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module runs code that a user hooked onto it."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


class _Proxy(fx.Proxy):
    """A stand-in that records ``x += y`` as what it is, a change of x."""

    def _record(self, function: Callable[..., Any], other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    def __iadd__(self, other: Any) -> fx.Proxy:
        return self._record(operator.iadd, other)

    def __isub__(self, other: Any) -> fx.Proxy:
        return self._record(operator.isub, other)

    def __imul__(self, other: Any) -> fx.Proxy:
        return self._record(operator.imul, other)

    def __itruediv__(self, other: Any) -> fx.Proxy:
        return self._record(operator.itruediv, other)


def _context() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
    )


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(self, inline: bool) -> None:
        super().__init__(autowrap_modules=(math,))
        self.inline = inline
        self.inlined: list[str] = []
        self.failure: str | None = None
        self.recorded: set[Any] = set()
        self.start = _context()

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _context() != self.start:
            self._fail("changes the gradient mode or autocast inside its forward")
        return super().create_node(*args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor) and not isinstance(a, nn.Parameter) and a not in self.tensor_attrs:
            known = any(a is buffer for buffer in self.root.buffers())
            if not known:
                self._fail("uses a tensor that is no parameter, buffer or attribute of it")
        return super().create_arg(a)

    def to_bool(self, obj: fx.Proxy) -> bool:
        return self._fail("decides by a tensor's value or shape which way to go")

    def keys(self, obj: fx.Proxy) -> Any:
        return self._fail("passes computed keyword arguments")

    def _fail(self, reason: str) -> Any:
        self.failure = self.failure or reason
        raise Untraceable(reason)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        path = self.path_of_module(m)
        if self.inline and plain_type(m) is nn.Sequential and not _is_replaced_or_hooked(m):
            self.inlined.append(path)
            return nn.Sequential.forward(m, *args, **kwargs)  # type: ignore[arg-type]
        return self.create_proxy("call_module", path, args, kwargs)


def _is_replaced_or_hooked(module: nn.Module) -> bool:
    return has_hooks(module) or "forward" in module.__dict__


class _RecordCreation(TorchFunctionMode):
    """Record calls such as ``torch.rand(3)``, which fx would run once and freeze."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.tracer.recorded.add(func)
        found: list[fx.Proxy] = []
        fx.node.map_aggregate((args, kwargs), lambda a: _note_proxy(a, found))
        if found or getattr(func, "__name__", "") == "__get__":
            return func(*args, **kwargs)
        return self.tracer.create_proxy("call_function", func, tuple(args), kwargs)


def _note_proxy(value: Any, found: list[fx.Proxy]) -> Any:
    if isinstance(value, fx.Proxy):
        found.append(value)
    return value


class _Watch:
    """Watch, through the interpreter's profile hook, what the user's code calls while it runs."""

    def __init__(self) -> None:
        self.codes: dict[CodeType, dict[str, Any]] = {}
        self.builtins: set[Any] = set()
        self.torch_calls: set[str] = set()
        self._users: set[FrameType] = set()
        self._previous: Any = None

    def __enter__(self) -> _Watch:
        self._previous = sys.getprofile()
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *exception: Any) -> None:
        sys.setprofile(self._previous)

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self._on_call(frame)
        elif event == "return":
            self._users.discard(frame)
        elif event == "c_call" and frame in self._users:
            self.builtins.add(argument)

    def _on_call(self, frame: FrameType) -> None:
        """A frame is the user's if this file (running ``forward``) or such a frame called it."""
        caller = frame.f_back
        if caller is None or not (caller in self._users or caller.f_code.co_filename == __file__):
            return
        home = str(frame.f_globals.get("__name__", ""))
        if home.partition(".")[0] not in ("torch", "epinorm"):
            self._users.add(frame)
            self.codes[frame.f_code] = frame.f_globals
        elif caller in self._users and not home.startswith((*_TORCH_CODE_TO_TRACE, "epinorm")):
            self.torch_calls.add(f"{home}.{frame.f_code.co_name}")


def _forbidden_call(watch: _Watch, recorded: set[Any]) -> str | None:
    """The first call in the user's code whose effect a graph would freeze or drop."""
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


def _globals_read(watch: _Watch) -> tuple[tuple[dict[str, Any], str, Any], ...]:
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


def _recorder(
    cls: type[nn.Module], reads: dict[str, Any], training: bool | None
) -> type[nn.Module]:
    """A class like ``cls`` whose instances note the plain values that are read from them."""

    def note(name: str, value: Any) -> Any:
        if name == "training" and training is not None:
            value = training
        bound = isinstance(value, MethodType) and isinstance(value.__self__, nn.Module)
        if name in _BOOKKEEPING or name.startswith("__") or bound:
            return value
        if not isinstance(value, (Tensor, nn.Module, fx.Proxy)):
            reads[name] = value
        return value

    class Recorder(cls):  # type: ignore[misc, valid-type]
        def __getattribute__(self, name: str) -> Any:
            return note(name, super().__getattribute__(name))

        def __getattr__(self, name: str) -> Any:
            return note(name, super().__getattr__(name))

    return Recorder


def _snapshot(module: nn.Module) -> dict[str, Any]:
    state = dict(module.__dict__)
    for name in ("_parameters", "_buffers", "_modules"):
        state[name] = dict(state[name])
    return state


def _check_unchanged(module: nn.Module, before: dict[str, Any]) -> None:
    """Raise, and put everything back, if running ``forward`` changed the module's attributes."""
    after = _snapshot(module)
    if after.keys() == before.keys() and all(
        after[k] is before[k] or (isinstance(before[k], dict) and _same_items(after[k], before[k]))
        for k in before
    ):
        return
    module.__dict__.clear()
    for name, value in before.items():
        module.__dict__[name] = dict(value) if isinstance(value, dict) else value
    raise Untraceable("sets attributes of its own inside its forward")


def _same_items(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a is b or (a.keys() == b.keys() and all(a[k] is b[k] for k in a))


def trace(
    module: nn.Module, arguments: Mapping[str, Any], training: bool | None, inline: bool = True
) -> Trace:
    """Trace ``module.forward`` for ``arguments`` (by name, TENSOR or a constant).

    ``training`` is what ``self.training`` reads as; None: what it is. Raises Untraceable.
    """
    cls = plain_type(module)
    before = _snapshot(module)
    reads: dict[str, Any] = {}
    shadow = object.__new__(_recorder(cls, reads, training))
    object.__setattr__(shadow, "__dict__", module.__dict__)
    tracer = _Tracer(inline)

    def bind(root_fn: Any, is_module: bool, concrete_args: Any) -> tuple[Any, list[Any]]:
        values = {
            name: tracer.create_proxy("placeholder", name, (), {}) if value is TENSOR else value
            for name, value in arguments.items()
        }
        return (lambda: cls.forward(shadow, **values)), []

    tracer.create_args_for_root = bind  # type: ignore[method-assign, assignment]
    watch = _Watch()
    try:
        with _RecordCreation(tracer), watch:
            graph = tracer.trace(shadow)
    except Exception as error:
        reason = tracer.failure or str(error).strip().partition("\n")[0]
        raise Untraceable(reason or type(error).__name__) from error
    finally:
        if module.__dict__ is not shadow.__dict__:
            raise AssertionError("the traced stand-in lost its module")
        _check_unchanged(module, before)
    if tracer.failure:  # the user's own try/except swallowed it
        raise Untraceable(tracer.failure)
    if forbidden := _forbidden_call(watch, tracer.recorded):
        raise Untraceable(forbidden)
    for name, value in reads.items():
        if not is_simple(value):
            kind = type(value).__name__
            raise Untraceable(f"reads self.{name}, a {kind} whose contents can change")
    return Trace(graph, dict(arguments), reads, _globals_read(watch), tuple(tracer.inlined))
