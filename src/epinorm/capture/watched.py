"""What Dynamo does not guard of classes: whether one gets another function than was captured."""

from __future__ import annotations

from collections.abc import Iterable
from types import CodeType
from typing import Any

import torch
from torch._guards import TracingContext
from torch.torch_version import TorchVersion

_GLOBAL_CLASSES_UNGUARDED = TorchVersion(torch.__version__) < "2.13"
_REPLACED = ("forward",)
"""What is replaced in PyTorch's own classes, as ``nn.Linear``'s where LoRA is added to all."""


class Watched:
    """``attributes`` of classes with their values, looked at before each call: the functions that
    were captured, of PyTorch's classes ``forward``; and before PyTorch 2.13 what these read of
    classes in their globals."""

    def __init__(self) -> None:
        self.attributes: list[tuple[type, str, Any]] = []

    def look_at(self, classes: Iterable[type]) -> None:
        """Watch what was captured just now of these classes and what they inherit from."""
        captured = set(TracingContext.get_traced_code() or ())
        owners = dict.fromkeys(base for cls in classes for base in cls.__mro__)
        for owner in owners:
            names = _REPLACED if _is_pytorchs(owner) else None
            for name, function in vars(owner).items():
                if names is not None and name not in names:
                    continue
                inner = getattr(function, "fget", getattr(function, "__func__", function))
                if getattr(inner, "__code__", None) in captured:
                    self._add(owner, name, function)
                    self._watch_heirs(classes, name, function)
                    self.look_at_globals(inner.__code__, getattr(inner, "__globals__", {}))

    def _watch_heirs(self, classes: Iterable[type], name: str, function: Any) -> None:
        """Where a class may begin to shadow what it inherits; of class methods, which are new ones
        at each look, it is not seen."""
        value = function.__func__ if isinstance(function, staticmethod) else function
        for cls in classes:
            if name not in vars(cls) and getattr(cls, name, None) is value:
                self._add(cls, name, value)

    def _add(self, owner: type, name: str, value: Any) -> None:
        if not any(o is owner and n == name and v is value for o, n, v in self.attributes):
            self.attributes.append((owner, name, value))

    def look_at_globals(self, code: CodeType, known: dict[str, Any]) -> None:
        """Before PyTorch 2.13: watch what code reads of classes in its globals."""
        if not _GLOBAL_CLASSES_UNGUARDED:
            return
        names = code.co_names
        for found in map(known.get, names):
            if isinstance(found, type) and not _is_pytorchs(found):
                for name in names:
                    if name in vars(found):
                        self._add(found, name, vars(found)[name])


def _is_pytorchs(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("torch", "builtins")
