"""A module's own ``forward`` as a graph, together with everything that the graph took for granted.

torch.fx runs ``forward`` once with stand-ins for tensors. What it cannot see, it freezes: plain
attributes, globals, random numbers, gradient mode. So the tracer notes each value that was read
(the graph is used only while they are unchanged) and refuses whatever cannot be noted.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from epinorm.rewrite.spelling import plain_type
from epinorm.rewrite.watch import Untraceable, Watch, forbidden_call, globals_read, is_simple

__all__ = ["TENSOR", "Silent", "Trace", "Untraceable", "has_hooks", "is_simple", "same", "trace"]

TENSOR = object()
"""Stands for "a tensor" among the arguments that a trace was made for."""

_ONE_AT_A_TIME = threading.RLock()
_BOOKKEEPING = frozenset(nn.Module().__dict__) - {"training"}


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


class Silent:
    """First among the bases of a class made here: a user's ``__init_subclass__`` is not run."""

    def __init_subclass__(cls) -> None:
        pass


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(self, inline: bool) -> None:
        super().__init__(autowrap_modules=(math,))
        self.inline = inline
        self.inlined: list[str] = []
        self.failure: str | None = None
        self.recorded: set[Any] = set()
        self.start = _context()
        self.thread = threading.get_ident()

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

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self.thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self.thread:  # torch.fx patches nn.Module for every thread
            return forward(*args, **kwargs)
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

    class Recorder(Silent, cls):  # type: ignore[misc, valid-type]
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
    watch = Watch(__file__)
    try:
        with _ONE_AT_A_TIME, _RecordCreation(tracer), watch:
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
    if forbidden := forbidden_call(watch, tracer.recorded):
        raise Untraceable(forbidden)
    for name, value in reads.items():
        if not is_simple(value):
            kind = type(value).__name__
            raise Untraceable(f"reads self.{name}, a {kind} whose contents can change")
    return Trace(graph, dict(arguments), reads, globals_read(watch), tuple(tracer.inlined))
