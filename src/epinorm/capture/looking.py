"""What guards look at, from the names that Dynamo gives to it, as native code compares it.

``unchanged.py`` says what for, and runtime/unchanged.h how it is written down.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections import OrderedDict
from collections.abc import Iterable
from types import (
    BuiltinFunctionType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from epinorm.backends.unpromised import NO_VERSION, version_of_class

MOST_TENSORS = 128
"""That native code has room for (``kMostTensors``)."""
_CONSTANT = (
    *(type(None), bool, int, float, complex, str, bytes, object, BuiltinFunctionType, ModuleType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
_DICTS = (dict, OrderedDict)
_TYPE = "type()"
_OF_CLASSES = (
    *(property, staticmethod, classmethod, MappingProxyType, GetSetDescriptorType),
    *(MemberDescriptorType, MethodDescriptorType, WrapperDescriptorType),
)
"""What stands in classes, and stays as it is while it is itself."""


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
    """What guards look at below one object; is_read: one looks at the object itself."""

    def __init__(self) -> None:
        self.below: dict[Step, Tree] = {}
        self.is_read = False

    def add(self, steps: Iterable[Step]) -> None:
        tree = self
        for step in steps:
            tree = tree.below.setdefault(step, Tree())
        tree.is_read = True


class Looking:
    """Makes what is compared of the values that trees of names lead to now."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.places: dict[tuple[int, str], tuple[Any, str, Any]] = {}

    def number(self, tensor: Tensor) -> int:
        for i, known in enumerate(self.tensors):
            if known is tensor:
                return i
        if len(self.tensors) == MOST_TENSORS:
            raise Unseen("too many tensors")
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def expected(self, value: Any, tree: Tree) -> Any:
        """What the value is compared with."""
        kind = type(value)
        if isinstance(value, Tensor):
            if tree.below:
                unseen("what a tensor has")
            return [self.number(value)]
        if isinstance(value, nn.Module):
            return self._module(value, tree)
        if kind in _DICTS:
            return [kind, *self._items(value, tree, Step(True, None))]
        if kind is FunctionType:
            if any(step != Step(False, "__code__") for step in tree.below):
                unseen(tree)
            return [kind, value, value.__code__]
        if not is_constant(value) or (tree.below and kind is not tuple):
            unseen(value)
        return value

    def number_of(self, name: str, given: dict[str, Any]) -> int:
        """Of a tensor that a guard looks at."""
        value: Any = given
        for is_item, key in steps_of(name)[1]:
            value = value[key] if is_item else getattr(value, key)
        if not any(known is value for known in self.tensors):
            unseen(name)
        return self.number(value)

    def _items(self, known: dict[Any, Any], tree: Tree, like: Step) -> list[Any]:
        """Keys and values: those that a guard looks at, or all of a dict that one looks at."""
        found: list[Any] = []
        for key, value in known.items():
            below = tree.below.get(like._replace(key=key))
            if below is None and tree.is_read and like.is_item:
                below = Tree()
            found += [key, ... if below is None else self.expected(value, below)]
        return found

    def _module(self, module: nn.Module, tree: Tree) -> list[Any]:
        cls, known = type(module), module.__dict__
        if cls.__getattr__ is not nn.Module.__getattr__ or (
            cls.__getattribute__ is not object.__getattribute__
        ):
            unseen(cls)
        within = Tree()  # by names in its own __dict__
        for (is_item, key), below in tree.below.items():
            if is_item:
                unseen(tree)
            if key == _TYPE:
                self._of_class(cls, below)
                continue
            if key in known:
                _join(within.below.setdefault(Step(False, key), Tree()), below)
                continue
            for kept in ("_parameters", "_buffers", "_modules"):
                if key in known[kept]:
                    inner = within.below.setdefault(Step(False, kept), Tree())
                    _join(inner.below.setdefault(Step(True, key), Tree()), below)
                    break
            else:  # of the class, or not there
                if below.below:
                    unseen(tree)
        version = version_of(cls)
        return [cls, version, self._items(known, within, Step(False, None))]

    def _of_class(self, value: Any, tree: Tree) -> None:
        """A class, or what is found in it: its version tells of every change, but for that of a
        function's code."""
        if isinstance(value, FunctionType):
            alone = {"function": value}  # a place of its own, where its code is compared
            self.places[id(value), "code"] = alone, "function", self.expected(value, tree)
            return
        if not (is_constant(value) or type(value) in (*_OF_CLASSES, tuple)):
            unseen(value)
        for (is_item, key), below in tree.below.items():
            if is_item:
                inner = value[key]
            elif isinstance(value, type) and key not in ("__mro__", "__dict__"):
                inner = inspect.getattr_static(value, key)
            else:
                inner = getattr(value, key)
            self._of_class(inner, below)

    def look_in(self, known: dict[str, Any], tree: Tree) -> None:
        """At what stands in globals, and in what they name."""
        for (is_item, key), below in tree.below.items():
            if not is_item or key not in known:
                unseen(key)
            self._look_at(known, key, below)

    def _look_at(self, known: dict[str, Any], key: str, tree: Tree) -> None:
        value = known[key]
        if isinstance(value, ModuleType):
            for step, below in tree.below.items():
                if step.is_item or step.key not in vars(value):
                    unseen(step)
                self._look_at(vars(value), step.key, below)
            self.places[id(known), key] = known, key, value
        elif type(value) is dict and not tree.is_read:
            self.look_in(value, tree)
            self.places[id(known), key] = known, key, ...
        else:
            self.places[id(known), key] = known, key, self.expected(value, tree)


def _join(tree: Tree, other: Tree) -> None:
    tree.is_read |= other.is_read
    for step, below in other.below.items():
        _join(tree.below.setdefault(step, Tree()), below)


def unseen(what: Any) -> NoReturn:
    """Raise Unseen for it."""
    raise Unseen(str(what))


def is_constant(value: Any) -> bool:
    """Whether it stays as it is while it is itself."""
    kind = type(value)
    if kind is tuple:
        return all(map(is_constant, value))
    return kind in _CONSTANT or isinstance(value, type)


def version_of(cls: type) -> int:
    """The version that CPython gives to a class, another one at each change to it or its bases."""
    type.__getattribute__(cls, "__init__")  # gives it one
    version = bytes(version_of_class(cls))
    if version == NO_VERSION:
        raise Unseen(f"{cls.__name__} has no version")
    return int.from_bytes(version, sys.byteorder)
