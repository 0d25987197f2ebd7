"""Where Dynamo would do other than the model's own code does, while it captures for us."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._dynamo import exc, symbolic_convert
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.output_graph import SubgraphTracer
from torch._dynamo.variables import ConstantVariable, dicts, misc
from torch._dynamo.variables import functions as python_functions
from torch._dynamo.variables import torch as torch_functions
from torch.nn.modules import module as torch_modules

from epinorm.capture.guards import here
from epinorm.capture.handlers import is_handled

_FAST_PATHS = "torch.nn.modules.transformer"
"""nn.TransformerEncoder leaves padding out in eval, by nested tensors, but not compiled."""


class _Answers(dict[Any, Any]):
    """What Dynamo answers to code that asks whether it is compiled: PyTorch's own hears the truth,
    the model's hears what it hears in eager, as it is to do what it does there (transformers makes
    masks for a compiler that it leaves out in eager, and attention with masks is slower)."""

    def __getitem__(self, function: Any) -> Any:
        answer = super().__getitem__(function)
        asking = getattr(sys._getframe(1).f_locals.get("tx"), "f_globals", {})
        name = str(asking.get("__name__"))
        return answer and name.partition(".")[0] in ("torch", "epinorm") and name != _FAST_PATHS


_RAISING_WITHOUT_GPU = (torch.cuda.is_current_stream_capturing,)
"""Which transformers asks and takes for False where it raises, as Dynamo does not."""


@contextmanager
def _answers_as_in_eager() -> Iterator[None]:
    functions: Any = torch_functions
    known = functions.tracing_state_functions
    more = {} if torch.cuda.is_available() else dict.fromkeys(_RAISING_WITHOUT_GPU, False)
    handlers = functions.TorchInGraphFunctionVariable._get_handlers()
    handling = dict.fromkeys(more, handlers.get(torch._C._get_tracing_state))
    with compile_lock, mock.patch.dict(handlers, handling):  # no other thread compiles meanwhile
        functions.tracing_state_functions = here(lambda: _Answers(known() | more), known)
        try:
            yield
        finally:
            functions.tracing_state_functions = known


_CHECKS_ITS_INPUT = "torch.nn.modules.instancenorm"
"""Which warns, at each call, of an input of another number of channels than it was made for."""


@contextmanager
def _warning_at_once() -> Iterator[None]:
    """Let that be said while it is captured, in the name of what calls modules as in eager, since
    filters go by it, and end no graph. Where warnings are errors the capture ends, and the model's
    own code raises it."""
    skipped: Any = python_functions.SkipFunctionVariable
    refuse = skipped.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(tx, "f_globals", {}).get("__name__")
        if self.value is not warnings.warn or name != _CHECKS_ITS_INPUT:
            return refuse(self, tx, args, kwargs)
        message, line = args[0].as_python_constant(), nn.Module._call_impl.__code__.co_firstlineno
        known = vars(torch_modules).setdefault("__warningregistry__", {})
        at = (torch_modules.__file__, line, torch_modules.__name__, known)
        warnings.warn_explicit(message, UserWarning, *at)
        return ConstantVariable.create(None)

    with mock.patch.object(skipped, "call_function", here(call_function, refuse)):
        yield


_DICTS: Any = getattr(dicts, "SideEffectsProxyDict", None)
"""What stands for an object's ``__dict__`` while Dynamo of PyTorch 2.13 and later traces."""


@contextmanager
def _without_cycles() -> Iterator[None]:
    """Such a dict and its object hold each other, and they what the frame had: activations, and
    with them their graph, would stay until the garbage is collected."""
    if _DICTS is None:
        yield
        return
    made, begin = [], _DICTS.__init__

    def noted(self: Any, *arguments: Any, **named: Any) -> None:
        made.append(self)
        begin(self, *arguments, **named)

    with mock.patch.object(_DICTS, "__init__", here(noted, begin)):
        try:
            yield
        finally:
            for each in made:
                vars(each).clear()


_WAITS = inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE | inspect.CO_ASYNC_GENERATOR


@contextmanager
def _generators_wait() -> Iterator[None]:
    """Leave to Python a frame that hands a generator out, which Dynamo would run to its end, and
    the call of an ``async`` function, which it would run at once."""
    frame: Any = symbolic_convert.InstructionTranslator
    called: Any = symbolic_convert.InliningInstructionTranslator
    generator: Any = python_functions.LocalGeneratorObjectVariable
    returning, inlining = frame.replace_tos_if_return_is_generator, called.check_inlineable

    def refuse(*_: Any) -> None:
        raise exc.SkipFrame("a generator leaves the captured function")

    def returned(self: Any) -> None:
        if self.stack and isinstance(self.stack[-1], generator):
            refuse()

    def inlined(function: Any) -> Any:
        if function.get_code().co_flags & _WAITS:
            raise exc.Unsupported("an async function is called")
        return inlining(function)

    with (
        mock.patch.object(frame, returning.__name__, here(returned, returning)),
        mock.patch.object(generator, "reconstruct", here(refuse, generator.reconstruct)),
        mock.patch.object(called, inlining.__name__, staticmethod(here(inlined, inlining))),
    ):
        yield


@contextmanager
def _errors_are_handled() -> Iterator[None]:
    """Leave to Python an operation that the model runs within a ``try`` or the like: in a graph it
    would raise outside of that."""
    create = SubgraphTracer.create_proxy

    def created(self: Any, kind: str, *arguments: Any, **named: Any) -> Any:
        if kind.startswith("call_") and is_handled(self.output_graph.current_tx):
            raise exc.Unsupported("the model handles what an operation raises")
        return create(self, kind, *arguments, **named)

    with mock.patch.object(SubgraphTracer, create.__name__, here(created, create)):
        yield


@contextmanager
def _arrays_change() -> Iterator[None]:
    """Leave to Python what is done with an array of numpy's. Dynamo, which is to trace none, takes
    it for a constant: it would change it in place itself, each time that it traces the frame."""
    made: Any = misc.NumpyVariable
    known = made.as_python_constant

    def constant(self: Any) -> Any:
        if hasattr(self.value, "__setitem__"):  # of what it stands for, arrays alone have it
            raise exc.Unsupported("an array of numpy's is read or changed")
        return known(self)

    with mock.patch.object(made, known.__name__, here(constant, known)):
        yield


_ALL: tuple[Callable[[], Any], ...] = (
    _answers_as_in_eager,  # and no other thread, for what follows
    _without_cycles,
    _warning_at_once,
    _generators_wait,
    _errors_are_handled,
    _arrays_change,
)


@contextmanager
def as_in_eager() -> Iterator[None]:
    """Let what this thread captures do as the model does in eager; no other captures meanwhile."""
    with ExitStack() as stack:
        for each in _ALL:
            stack.enter_context(each())
        yield
