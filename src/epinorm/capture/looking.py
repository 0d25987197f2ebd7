"""What guards look at, from the names that Dynamo gives to it, as native code compares it.

``unchanged.py`` says what for, and runtime/unchanged.h how it is written down.
"""

from __future__ import annotations

import ast
import inspect
import sys
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from epinorm.backends.unpromised import NO_VERSION, version_of_class

MOST_TENSORS = 64
"""That native code has room for (``kMostTensors``)."""
_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, tuple, torch.Size),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""What stays as it is while it is itself; a tuple if what is in it does."""
_BY_IDENTITY = frozenset(("ID_MATCH", "TYPE_MATCH", "CONSTANT_MATCH"))
_KINDS: dict[Any, frozenset[str]] = {
    Tensor: frozenset(("TENSOR_MATCH", "DUPLICATE_INPUT")),
    nn.Module: frozenset(("TYPE_MATCH", "NOT_PRESENT_IN_GENERIC_DICT")),
    dict: frozenset(
        (
            *("TYPE_MATCH", "SEQUENCE_LENGTH", "DICT_KEYS_MATCH", "DICT_CONTAINS"),
            *("DICT_NOT_CONTAINS", "EMPTY_NN_MODULE_HOOKS_DICT"),
        )
    ),
    FunctionType: _BY_IDENTITY | {"CLOSURE_MATCH", "FUNCTION_MATCH"},
    ModuleType: _BY_IDENTITY | {"MODULE_MATCH", "FUNCTION_MATCH", "DUPLICATE_INPUT"},
    BuiltinFunctionType: _BY_IDENTITY | {"BUILTIN_MATCH", "FUNCTION_MATCH", "DUPLICATE_INPUT"},
    type: _BY_IDENTITY | {"CLASS_MATCH", "BUILTIN_MATCH"},
    object: _BY_IDENTITY,
}
"""The guards that are known to look at no more of such a value than what is compared."""
_OF_MODULE = ("_parameters", "_buffers", "_modules")
_TYPE = "type()"


class Unseen(Exception):
    """What a guard looks at could change unseen."""


class Step(NamedTuple):
    """One step of a name: an attribute, `_TYPE` for the class, or an item."""

    is_item: bool
    key: Any


def steps_of(name: str) -> tuple[str, list[Step]]:
    """A name of Dynamo's as its root (L or G) and the steps from there."""
    try:
        node: Any = ast.parse(name, mode="eval").body
    except SyntaxError:
        raise Unseen(name) from None
    steps: list[Step] = []
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute):
            steps.append(Step(False, node.attr))
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            steps.append(Step(True, node.slice.value))
        elif isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
            called = getattr(node.func, "id", "")
            if called not in ("type", "dict"):
                raise Unseen(name)
            steps += [Step(False, _TYPE)] if called == "type" else []  # a copy of a dict is like it
            node = node.args[0]
            continue
        else:
            raise Unseen(name)
        node = node.value
    if node.id not in ("L", "G") or not steps:
        raise Unseen(name)
    return node.id, steps[::-1]


class Tree:
    """What guards look at below one object; kinds: of the guards that look at the object itself."""

    def __init__(self) -> None:
        self.below: dict[Step, Tree] = {}
        self.kinds: set[str] = set()

    def add(self, steps: Iterable[Step], kind: str) -> None:
        """A guard of this kind looks at what these steps lead to."""
        tree = self
        for step in steps:
            tree = tree.below.setdefault(step, Tree())
        tree.kinds.add(kind)

    def join(self, other: Tree) -> None:
        """And all that the other one has."""
        self.kinds |= other.kinds
        for step, below in other.below.items():
            self.below.setdefault(step, Tree()).join(below)


class Looking:
    """Makes what is compared of the values that trees of names lead to now."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.places: list[tuple[dict[Any, Any], Any, Any]] = []

    def number(self, tensor: Tensor) -> int:
        """One for each tensor."""
        for i, known in enumerate(self.tensors):
            if known is tensor:
                return i
        if len(self.tensors) == MOST_TENSORS:
            unseen("too many tensors")
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def expected(self, value: Any, tree: Tree) -> Any:
        """What the value is compared with."""
        kind = type(value)
        if kind in (Tensor, nn.Parameter):
            _only(tree, Tensor)
            if not is_dense(value):
                unseen("a tensor of other strides")
            return [self.number(value), kind]
        if isinstance(value, nn.Module):
            return self._module(value, tree)
        if kind in (dict, OrderedDict):
            _only(tree, dict, below=True)
            if not all(step.is_item for step in tree.below):
                unseen("an attribute of a dict")
            return [kind, *self._items(value, tree, Step(True, None))]
        if kind is FunctionType:
            return self._function(value, tree)
        if isinstance(value, type):
            _only(tree, type)
            return [weakref.ref(value)]
        if kind in (ModuleType, BuiltinFunctionType, object):
            _only(tree, kind)
            return value
        self._plain(value, tree)
        return value

    def number_of(self, name: str, given: dict[str, Any]) -> int:
        """Of a tensor that a guard looks at."""
        value: Any = given
        for is_item, key in steps_of(name)[1]:
            value = value[key] if is_item else getattr(value, key)
        if not any(known is value for known in self.tensors):
            unseen(name)
        return self.number(value)

    def look_in(self, known: dict[str, Any], tree: Tree) -> None:
        """At what stands in globals, and in what they name."""
        for (is_item, key), below in tree.below.items():
            if not is_item or key not in known:
                unseen(key)
            self._look_at(known, key, below)

    def _look_at(self, known: dict[str, Any], key: str, tree: Tree) -> None:
        value = known[key]
        if isinstance(value, ModuleType):
            alone = Tree()
            alone.kinds = tree.kinds
            self.places.append((known, key, self.expected(value, alone)))
            for step, below in tree.below.items():
                if step.is_item or step.key not in vars(value):
                    unseen(step)
                self._look_at(vars(value), step.key, below)
        elif type(value) is dict and not tree.kinds:
            self.places.append((known, key, value))
            self.look_in(value, tree)
        else:
            self.places.append((known, key, self.expected(value, tree)))

    def _plain(self, value: Any, tree: Tree) -> None:
        """It cannot change, nor what guards look at in it."""
        if type(value) not in _PLAIN:
            unseen(type(value))
        if type(value) is tuple:
            for each in value:
                self._plain(each, Tree())
        for (is_item, key), below in tree.below.items():
            if not is_item or type(value) not in (tuple, torch.Size):
                unseen(key)
            self._plain(value[key], below)

    def _function(self, function: FunctionType, tree: Tree) -> list[Any]:
        if any(step != Step(False, "__code__") for step in tree.below):
            unseen(function)
        _only(tree, FunctionType, below=True)
        return [weakref.ref(function), function.__code__]

    def _items(self, known: dict[Any, Any], tree: Tree, like: Step) -> list[Any]:
        """Keys and values: those that a guard looks at, or all of a dict that one looks at."""
        found: list[Any] = []
        for key, value in known.items():
            below = tree.below.get(like._replace(key=key))
            if below is None and tree.kinds and like.is_item:
                below = Tree()
            found += [key, ... if below is None else self.expected(value, below)]
        return found

    def _module(self, module: nn.Module, tree: Tree) -> list[Any]:
        cls, known = type(module), module.__dict__
        _only(tree, nn.Module, below=True)
        if cls.__getattr__ is not nn.Module.__getattr__ or (
            cls.__getattribute__ is not object.__getattribute__ or type(cls) is not type
        ):
            unseen(cls)
        within = Tree()  # by names in its own __dict__
        for (is_item, key), below in tree.below.items():
            if is_item:
                unseen(key)
            if key == _TYPE:
                self._class(cls, below)
                continue
            of_class = inspect.getattr_static(cls, key, None)
            if hasattr(type(of_class), "__set__") or hasattr(type(of_class), "__delete__"):
                unseen(f"{cls.__name__}.{key}")  # as a slot: its value is in no dict
            below.kinds.discard("HASATTR")  # whether it is there is what keys and version say
            if key in known:
                within.below.setdefault(Step(False, key), Tree()).join(below)
                continue
            for kept in _OF_MODULE:  # also where it is not there: it could be
                inner = within.below.setdefault(Step(False, kept), Tree())
                if key in known[kept]:
                    inner.below.setdefault(Step(True, key), Tree()).join(below)
            if of_class is not None:
                self._in_class(of_class, below)
            elif below.below and not any(key in known[kept] for kept in _OF_MODULE):
                unseen(key)
        items = self._items(known, within, Step(False, None))
        return [weakref.ref(module), version_of(cls), items]

    def _class(self, cls: type, tree: Tree) -> None:
        """The class of a module, whose version tells of every change to it and its bases; a guard
        looks at it, at those that it inherits from, or at what stands there."""
        _only(tree, type, below=True)
        for step, below in tree.below.items():
            if step != Step(False, "__mro__"):
                if step.is_item or step.key.startswith("__"):
                    if step != Step(False, "__dict__"):
                        unseen(step.key)
                    self._namespace(cls, below)
                    continue
                self._in_class(inspect.getattr_static(cls, step.key), below)
                continue
            for (_, place), base in below.below.items():
                for inner, names in base.below.items():
                    if inner != Step(False, "__dict__"):
                        self._in_class(vars(cls.__mro__[place])[inner.key], names)
                    else:
                        self._namespace(cls.__mro__[place], names)

    def _namespace(self, cls: type, tree: Tree) -> None:
        _only(tree, dict, below=True)
        for (_, name), below in tree.below.items():
            self._in_class(vars(cls)[name], below)

    def _in_class(self, value: Any, tree: Tree) -> None:
        """What stands in a class, whose version does not tell of changes within it."""
        if type(value) in (property, staticmethod, classmethod):
            if not tree.kinds <= _BY_IDENTITY:
                unseen(tree.kinds)
            for step, inner in tree.below.items():
                if step.key not in ("fget", "__func__"):
                    unseen(step.key)
                self._in_class(getattr(value, step.key), inner)
            return
        tree.kinds.discard("NOT_PRESENT_IN_GENERIC_DICT")  # which is of the module's own
        alone = {"value": value}  # a place of its own
        self.places.append((alone, "value", self.expected(value, tree)))


def _only(tree: Tree, like: Any, below: bool = False) -> None:
    """Raise Unseen for guards of another kind than these; below: something may be looked at."""
    if not tree.kinds <= _KINDS[like] or (tree.below and not below):
        unseen(f"{like.__name__}: {tree.kinds} {[step.key for step in tree.below]}")


def is_dense(tensor: Tensor) -> bool:
    """Whether its strides are those of a new tensor, in dimensions of one element too."""
    strides, step = [], 1
    for size in reversed(tensor.shape):
        strides.append(step)
        step *= max(size, 1)
    return tensor.layout == torch.strided and list(tensor.stride()) == strides[::-1]


def unseen(what: Any) -> NoReturn:
    """Raise Unseen for it."""
    raise Unseen(str(what))


def version_of(cls: type) -> int:
    """The version that CPython gives to a class, another one at each change to it or its bases."""
    type.__getattribute__(cls, "__init__")  # gives it one
    version = bytes(version_of_class(cls))
    if version == NO_VERSION:
        unseen(f"{cls.__name__} has no version")
    return int.from_bytes(version, sys.byteorder)
