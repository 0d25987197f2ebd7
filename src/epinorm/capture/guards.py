"""Dynamo's guards, where ours are to be others: none that cannot fail, signs of zeros, and who
holds what is guarded."""

from __future__ import annotations

import functools
import math
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from threading import get_ident
from typing import Any, cast
from unittest import mock

import torch
from torch import fx
from torch._C._dynamo.guards import GuardManager
from torch._dynamo.guards import GuardBuilder
from torch._guards import Guard, Source
from torch.torch_version import TorchVersion
from torch.utils import _pytree as pytree

from epinorm.capture.unchanged import Guarded, name_of
from epinorm.precision import convolutions_take_tf32

_GET_TAKES_GUARDS = TorchVersion(torch.__version__) >= "2.10"


def _is_zero(value: Any) -> bool:
    return type(value) is float and value == 0.0


def has_zero(gm: fx.GraphModule) -> bool:
    """Whether the graph computes with a float that is zero, whose sign may be that of a result."""
    return any(_is_zero(v) for n in gm.graph.nodes for v in pytree.tree_leaves((n.args, n.kwargs)))


def _no_guard(*_: Any) -> None: ...


def _add(manager: Any, guard: Any, holds: Callable[[Any], bool], fact: str) -> None:
    try:
        manager.add_lambda_guard(holds, [fact], guard.user_stack)
    except TypeError:  # PyTorch 2.9 and 2.10
        manager.add_lambda_guard(holds, [fact])


def here(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """ours in this thread, theirs in others: PyTorch's exports capture without a lock."""
    thread = get_ident()

    @functools.wraps(theirs)
    def function(*arguments: Any, **named: Any) -> Any:
        return (ours if get_ident() == thread else theirs)(*arguments, **named)

    return function


_HOOKS_OF_ALL = re.compile(
    r"G\['__import_torch_dot_nn_dot_modules_dot_module'\]\._global_(forward|backward)(_pre)?_hooks"
)
_MARK = re.compile("_dynamo_.*_indices")
_MARKS = [
    f"add_{kind}_guard"
    for kind in ("dimension_marking", "dynamic_indices", "no_hasattr")  # these two before 2.13
    if hasattr(GuardManager, f"add_{kind}_guard")
]
"""The guards of a tensor's marks, by ``mark_dynamic`` and its like: these say how to compile. A
graph that was made without any, and fits the tensor's sizes, computes the same whatever its
marks."""


def _value(builder: Any, guard: Any) -> Any:
    return builder.get(guard if _GET_TAKES_GUARDS else guard.name)


def _is_needless(guard: Any, builder: Any, empty: set[tuple[Any, str]]) -> bool:
    """Whether a guard's answer is known, or follows from that of another. empty: the dicts of hooks
    that are guarded to be so, by their builder and name; this guard's joins them."""
    kind, name = guard.create_fn_name(), guard.name
    if kind == "EMPTY_NN_MODULE_HOOKS_DICT":
        # Which hooks take kwargs: none does where there is no hook.
        if name.endswith("_with_kwargs") and (builder, name[: -len("_with_kwargs")]) in empty:
            return True
        empty.add((builder, name))
    elif kind == "TYPE_MATCH":  # whether there are any, ``fuse`` looks at itself
        return _HOOKS_OF_ALL.fullmatch(name) is not None
    elif kind in ("MODULE_MATCH", "FUNCTION_MATCH"):  # the latter before 2.11
        # Names that Dynamo itself gave to modules, to guard and to call what is in them.
        mine = getattr(builder.check_fn_manager.output_graph, "import_sources", {})
        return any(name == f"G['{alias}']" for alias in mine)
    return False


Owners = weakref.WeakSet[Any]
"""Dynamo's CheckFunctionManagers."""


class _Watching:
    """Invalidates guards when an object dies that they know by its id, for as long as they live.

    Dynamo's own finalizers hold the guards, and these the graph, for as long as the object lives:
    for good, where it is a class of PyTorch's.
    """

    def __init__(self, guards: Any, manager: Any) -> None:
        self._manager = weakref.ref(manager)
        self._refs: dict[int, weakref.ref[Any]] = {}
        vars(guards).update(watching=self._refs, manager=manager)

    def __call__(self, watched: Any, name: str) -> int:
        known = self._manager

        def invalidate(_: Any) -> None:
            if (manager := known()) is not None:
                manager.invalidate(name)

        if (manager := known()) is not None and id(watched) not in self._refs:
            with suppress(TypeError):  # as for a bool
                self._refs[id(watched)] = weakref.ref(watched, invalidate)
                manager._weakrefs[id(watched)] = weakref.ref(watched)
        return id(watched)


def _looked_at(guard: Any) -> list[tuple[str, str]]:
    """Of a guard its kind and the names of what it looks at."""
    make = guard.create_fn
    given = getattr(make, "keywords", {})
    others = (*getattr(make, "args", ()), *given.values())
    named = [guard, *(each for each in others if isinstance(each, Source))]
    attribute = f".{given['attr']}" if "attr" in given else ""
    return [(guard.create_fn_name(), name_of(each) + attribute) for each in named]


@contextmanager
def guards_as_needed(
    zero_is_there: Callable[[], bool],
    convolves: Callable[[], bool],
    owners: Owners | None,
    guarded: Guarded,
) -> Iterator[None]:
    """Dynamo's guard of a float takes -0.0 for 0.0: where zero_is_there, let one look at the sign.
    None looks whether convolutions take TF32: where what was captured convolves, let one.
    None looks which hooks wait for saved tensors: the graph, which nothing compiles, does not
    depend on them. Those who can invalidate the guards, and with them free the graph, join owners;
    None: nobody frees what was captured. What guards look at joins guarded."""
    matches: Any = GuardBuilder.EQUALS_MATCH
    compare: Any = GuardBuilder.TENSOR_MATCH
    grad_mode: Any = GuardBuilder.GRAD_MODE
    begin: Any = GuardBuilder.__init__
    install: Any = Guard.create
    empty: set[tuple[Any, str]] = set()

    def equals_match(self: Any, guard: Any, *rest: Any, **named: Any) -> None:
        matches(self, guard, *rest, **named)
        value = _value(self, guard)
        if not (zero_is_there() and _is_zero(value)):
            return
        sign = math.copysign(1.0, value)
        fact = f"copysign(1, {guard.name}) == {sign}"
        manager = self.get_guard_manager(guard)
        _add(manager, guard, lambda v: math.copysign(1.0, v) == sign, fact)

    def settings_match(self: Any, guard: Any, *rest: Any, **named: Any) -> None:
        grad_mode(self, guard, *rest, **named)  # one for each capture
        if convolves():
            taken, fact = convolutions_take_tf32(), "whether convolutions take TF32"
            root = self.guard_manager.root
            _add(root, guard, lambda _: convolutions_take_tf32() == taken, fact)

    def tensor_match(self: Any, guard: Any, *rest: Any, **named: Any) -> None:
        is_marked = any(_MARK.fullmatch(name) for name in vars(_value(self, guard)))
        without: dict[str, Any] = {}
        if not is_marked:
            without = {name: here(_no_guard, getattr(GuardManager, name)) for name in _MARKS}
        with mock.patch.multiple(GuardManager, **without) if without else nullcontext():
            compare(self, guard, *rest, **named)

    def create(guard: Any, builder: Any) -> Any:
        if _is_needless(guard, builder, empty):
            return None
        guarded.extend(_looked_at(guard))
        return install(guard, builder)

    def begin_watching(self: Any, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        cast("Owners", owners).add(self.check_fn_manager)
        self.id_ref = _Watching(self.guard_manager, self.check_fn_manager)

    patched: dict[str, Any] = {
        "EQUALS_MATCH": equals_match,
        "TENSOR_MATCH": tensor_match,
        "GRAD_MODE": settings_match,
        "AUTOGRAD_SAVED_TENSORS_HOOKS": _no_guard,
    }
    if owners is not None:
        patched["__init__"] = begin_watching
    for name, ours in patched.items():
        patched[name] = here(ours, getattr(GuardBuilder, name))
    with (
        mock.patch.multiple(GuardBuilder, **patched),
        mock.patch.object(Guard, "create", here(create, install)),
    ):
        yield
