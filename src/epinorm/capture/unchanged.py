"""What a capture depends on, as native code looks at it before a call: in a twentieth of the time
that Dynamo's guards take behind other code, which walk from object to object.

A guard of Dynamo's looks at what it finds under a name, such as ``L['model']._modules['0'].eps``.
Where each step of the name leads to what it led to when the guards held, and what is found there
cannot change within, they hold again: so this does not know what a guard means, only what it reads.
Compared are the arguments, the ``__dict__`` of each module on the way, its keys in full, the
versions of the modules' classes, and what stands in globals. A tensor may be another one: native
code looks whether it is of the kind that the call was recorded for. PyTorch's settings are compared
by Dynamo's own ``GlobalStateGuard``. A guard of anything else leaves the capture to Dynamo.
"""

from __future__ import annotations

import dis
import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import CodeType
from typing import Any, NamedTuple, cast

import torch
from torch import fx
from torch._dynamo import eval_frame
from torch.utils import _device

from epinorm.backends import prepack
from epinorm.backends.cuda.runtime.native import native
from epinorm.capture.looking import MOST_TENSORS, Looking, Step, Tree, steps_of, unseen
from epinorm.operator import native_calls
from epinorm.operator.dispatch import Caller

_log = logging.getLogger("epinorm")
_GlobalStateGuard: Any = getattr(torch._C._dynamo.guards, "GlobalStateGuard", None)
_OF_SETTINGS = frozenset(
    (
        *("GRAD_MODE", "DETERMINISTIC_ALGORITHMS", "GLOBAL_STATE", "TORCH_FUNCTION_STATE"),
        *("DEFAULT_DEVICE", "SHAPE_ENV", "AUTOGRAD_SAVED_TENSORS_HOOKS"),
    )
)
"""Guards of no name: ``GlobalStateGuard`` looks at the first three, native code at modes of torch
functions, `_PLACES` at the device; sizes are compared themselves, and hooks for saved tensors are
none of a capture's (guards.py)."""
_OF_ALL_ARGUMENTS = frozenset(("SEQUENCE_LENGTH", "TYPE_MATCH", "DICT_KEYS_MATCH"))
_PLACES = ((eval_frame, "_stance"), (_device, "CURRENT_DEVICE"))
_COMPILED_AUTOGRAD = "torch._dynamo.compiled_autograd"

Guarded = list[tuple[str, str]]
"""Of each guard its kind and the name of what it looks at."""


class Unchanged(NamedTuple):
    """As ``result_of`` of runtime/unchanged.h takes it apart: what the arguments are, what stands
    in dicts (dict, key, value ...), whether settings are as they were, the numbers of the tensors
    that the call is given, and the one call that is kept, of tensors like these."""

    arguments: tuple[Any, ...]
    places: tuple[Any, ...]
    settings: Callable[[], bool]
    inputs: tuple[int | None, ...]
    calls: Any


def only_call(graph: fx.Graph) -> fx.Node | None:
    """The one call of ours that a graph consists of, if it is given what the graph is."""
    calls = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    if len(calls) != 1 or not isinstance(calls[0].target, Caller) or calls[0].kwargs:
        return None
    given = [node for node in _given(calls[0]) if node is not None]
    return calls[0] if all(node.op == "placeholder" for node in given) else None


def _given(call: fx.Node) -> list[Any]:
    """What a call of ours is given, in the order of ``Inputs``, operands one by one."""
    *tensors, operands = call.args
    return [*tensors, *cast("tuple[Any, ...]", operands)]


def name_of(source: Any) -> str:
    """Dynamo's name of a source or guard, which is a method in some versions of PyTorch."""
    return source.name if isinstance(source.name, str) else source.name()


_PLAIN = frozenset(
    (
        *("RESUME", "NOP", "CACHE", "EXTENDED_ARG", "PUSH_NULL", "PRECALL", "CALL", "NOT_TAKEN"),
        *("LOAD_GLOBAL", "LOAD_FAST", "LOAD_CONST", "LOAD_ATTR", "LOAD_SMALL_INT", "LOAD_METHOD"),
        *("LOAD_FAST_BORROW", "LOAD_FAST_CHECK", "LOAD_FAST_LOAD_FAST", "COPY_FREE_VARS"),
        *("LOAD_FAST_BORROW_LOAD_FAST_BORROW", "STORE_FAST", "STORE_FAST_LOAD_FAST"),
        *("STORE_FAST_STORE_FAST", "DELETE_FAST", "COPY", "SWAP", "POP_TOP", "BINARY_SUBSCR"),
        *("BINARY_OP", "BUILD_LIST", "BUILD_TUPLE", "LIST_EXTEND", "UNPACK_SEQUENCE", "KW_NAMES"),
        *("CALL_FUNCTION", "DUP_TOP", "ROT_TWO", "ROT_THREE", "RETURN_VALUE"),
    )
)


def only_calls(code: CodeType) -> bool:
    """Whether what Dynamo made of a frame calls its graph and does nothing else."""
    names = [each.opname for each in dis.get_instructions(code)]
    calls = sum(name in ("CALL", "CALL_FUNCTION") for name in names)
    return calls == 1 and _PLAIN.issuperset(names)


class Capture(NamedTuple):
    """A frame that Dynamo captured as a graph with one result, and nothing else: what runs it, or
    the one call of ours that it consists of; the names of what that is given; what guards look at,
    and the frame's globals. It lives as long as the guards, which hold it."""

    run: Callable[..., Any]
    call: Any
    inputs: tuple[str | None, ...]
    guarded: Guarded
    globals: dict[str, Any]

    @classmethod
    def of(
        cls, code: CodeType, graph: fx.Graph, run: Any, guarded: Guarded, known: dict[str, Any]
    ) -> Capture | None:
        """code: what Dynamo made of the frame; run: what runs the graph."""
        (output,) = graph.find_nodes(op="output")
        if _GlobalStateGuard is None or len(output.args[0]) != 1 or not only_calls(code):
            return None
        only = only_call(graph)
        inputs = graph.find_nodes(op="placeholder") if only is None else _given(only)
        if not all(node is None or hasattr(node, "_dynamo_source") for node in inputs):
            return None
        names = tuple(None if n is None else name_of(n._dynamo_source) for n in inputs)
        return cls(run, getattr(only, "target", None), names, guarded, known)

    def keep_with(self, guards: Any) -> weakref.ref[Any]:
        """Dynamo's GuardManagerWrapper, which holds this from now on."""
        vars(guards)[_HELD] = self
        return weakref.ref(guards)

    def unchanged(self, given: dict[str, Any], guards: weakref.ref[Any]) -> Unchanged | None:
        """What native code compares before it computes a call like this one, for which the guards
        hold; None where native code does not compute it. Raises where something that they look at
        could change unseen. given: "args" and "kwargs" behind the others."""
        arguments, flat, tensors, numbers = self._looked_at(given)
        call = self.call
        calls = self._graph_of(tensors, guards) if call is None else call.native(tensors)
        if calls is None:
            return None
        return Unchanged(arguments, flat, _GlobalStateGuard().check, numbers, calls)

    def _looked_at(
        self, given: dict[str, Any]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...], list[Any], tuple[int | None, ...]]:
        """What is compared of arguments and places, and the tensors that the call is given, with
        their numbers."""
        looking, roots = Looking(), {"L": Tree(), "G": Tree()}
        for kind, name in self.guarded:
            if name:
                root, steps = steps_of(name)
                roots[root].add(steps, kind)
            elif kind not in _OF_SETTINGS:
                unseen(kind)
        arguments = _arguments(looking, roots["L"], given)
        looking.look_in(self.globals, roots["G"])
        places = [*looking.places, *_settings()]
        numbers = tuple(
            None if name is None else looking.number_of(name, given) for name in self.inputs
        )
        if not {*range(len(looking.tensors))} <= {*numbers} or len(numbers) > MOST_TENSORS:
            unseen("tensors that the call is not given, or too many")
        tensors = [None if number is None else looking.tensors[number] for number in numbers]
        return arguments, tuple(part for place in places for part in place), tensors, numbers

    def _graph_of(self, tensors: Sequence[Any], guards: weakref.ref[Any]) -> Any:
        """As native code keeps calls: of the graph, for tensors like these, while Dynamo keeps
        it."""
        x = next((t for t in tensors if t is not None), None)
        if x is None or x.device.type not in native_calls.WORTH or (host := native()) is None:
            return None
        made = host.Calls()
        made.add_layers(tensors, None, lambda *given: _run(guards, given))
        return made


_HELD = "epinorm_capture"


def _run(guards: weakref.ref[Any], given: tuple[Any, ...]) -> Any:
    alive = guards()
    return None if alive is None else vars(alive)[_HELD].run(*given)[0]


def unchanged(captures: list[weakref.ref[Any]], given: dict[str, Any]) -> Unchanged | None:
    """As ``Capture.unchanged`` of the one whose guards hold, of those that Dynamo still keeps."""
    captures[:] = [guards for guards in captures if guards() is not None]
    try:
        for guards in captures:
            if (alive := guards()) is not None and alive.check(given):
                found = cast("Capture", vars(alive)[_HELD]).unchanged(given, guards)
                return found if alive.check(given) else None  # another thread may have changed it
    except Exception as error:  # whatever it is, the call itself is done
        _log.debug("epinorm: guards stay Dynamo's: %r", error)
    return None


def _arguments(looking: Looking, tree: Tree, given: dict[str, Any]) -> tuple[Any, ...]:
    below = {key: inner for (_, key), inner in tree.below.items()}
    *named, args, kwargs = given.items()
    trees = [below.get(name, Tree()) for name in ("args", "kwargs")]
    if kwargs[1] or trees[1].below or not (trees[0].kinds | trees[1].kinds <= _OF_ALL_ARGUMENTS):
        unseen("arguments")
    of_args = trees[0].below
    found: list[Any] = []
    for name, value in named:
        found.append(looking.expected(value, below[name]) if name in below else ...)
    for i, value in enumerate(args[1]):
        inner = of_args.get(Step(True, i))
        found.append(... if inner is None else looking.expected(value, inner))
    return tuple(found)


def _settings() -> list[tuple[dict[str, Any], str, Any]]:
    autograd = sys.modules.get(_COMPILED_AUTOGRAD)
    if autograd is None or prepack.marked or eval_frame._stance.stance != "default":
        unseen("settings")
    if autograd.compiled_autograd_enabled:
        unseen("compiled autograd traces no node of C++ but PyTorch's")
    places: list[tuple[dict[str, Any], str, Any]] = [
        (vars(module), name, getattr(module, name)) for module, name in _PLACES
    ]
    places.append((vars(autograd), "compiled_autograd_enabled", False))
    return [*places, (vars(prepack), "marked", [dict])]


def as_before(known: list[Unchanged], run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` for calls that are like none of those known, which native code computes."""
    return partial(native().as_before, known, run)
