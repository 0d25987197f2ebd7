"""What Dynamo does not guard of classes: whether one has other code now than was captured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter
from types import CodeType
from typing import Any

import torch
from torch._guards import TracingContext
from torch.torch_version import TorchVersion

from epinorm.backends.unpromised import NO_VERSION, version_of_class

_GLOBAL_CLASSES_UNGUARDED = TorchVersion(torch.__version__) < "2.13"
_code = attrgetter("__code__")
_UNKNOWN = b""
_OF_MAKING = frozenset(
    f"__{name}__"
    for name in (
        *("new", "init", "init_subclass", "del", "repr", "str", "dir", "copy", "deepcopy"),
        *("reduce", "reduce_ex", "getstate", "setstate"),
    )
)
"""What some libraries replace for a while in nn.Module, as to make parameters on no device."""


class Watched:
    """The classes of modules as they were captured: what there is, in each class and in what it
    inherits from, under names that captured code reads, and functions and properties there and
    under Python's own names (``__call__``) as they are; and before PyTorch 2.13 what the code reads
    of classes in its globals. Compared are, ordinarily, only the versions that CPython gives to a
    class, another one at each change to it or to what it inherits from, and the code of functions
    that are not PyTorch's, which reloading a module changes within them."""

    def __init__(self) -> None:
        self._classes: dict[type, None] = {}
        self._versions: list[memoryview] = []
        self._known: list[bytes] = []
        self._functions: list[Any] = []
        self._codes: list[CodeType] = []
        self._names: set[str] = set()
        self._of_globals: dict[tuple[type, str], None] = {}
        self._seen: dict[tuple[type, str], Any] = {}
        self._is_past = False

    def look_at(self, classes: Iterable[type]) -> None:
        """Watch what was captured just now of these classes and what they inherit from."""
        captured = set(TracingContext.get_traced_code() or ())
        for code in captured:
            self._names.update(code.co_names)
            self._names.update(c for c in code.co_consts if isinstance(c, str))
        for owner in _owners(classes):
            for name, function in list(vars(owner).items()):
                inner = getattr(function, "fget", getattr(function, "__func__", function))
                if getattr(inner, "__code__", None) in captured:
                    self._names.add(name)
                    if not (_is_pytorchs(owner) or inner in self._functions):
                        self._functions.append(inner)
                    self.look_at_globals(inner.__code__, getattr(inner, "__globals__", {}))
        self._begin(classes)

    def look_at_globals(self, code: CodeType, known: dict[str, Any]) -> None:
        """Before PyTorch 2.13: watch what code reads of classes in its globals."""
        if not _GLOBAL_CLASSES_UNGUARDED:
            return
        names = code.co_names
        classes: list[Any] = [
            each for each in map(known.get, names) if issubclass(type(each), type)
        ]
        for found in classes:  # and no proxies of some, which isinstance believes
            if not _is_pytorchs(found):
                read = [(found, name) for name in names if name in vars(found)]
                if read:
                    self._of_globals |= dict.fromkeys(read)
                    self._begin([found])

    def has_changed(self) -> bool:
        """Whether anything of this is another one than it was."""
        if self._is_past:
            return True
        if self._codes and list(map(_code, self._functions)) != self._codes:
            return True
        if self._versions == self._known:
            return False
        now = dict(self._attributes())
        if now.keys() != self._seen.keys() or any(v is not now[k] for k, v in self._seen.items()):
            return True
        self._know_versions()
        return False

    def _begin(self, classes: Iterable[type]) -> None:
        """Watch these too. What was captured before, in this call as well, stays as it was."""
        self._classes |= dict.fromkeys(classes)
        codes, now = list(map(_code, self._functions)), dict(self._attributes())
        self._is_past |= codes[: len(self._codes)] != self._codes
        self._is_past |= any(now.get(k, self) is not v for k, v in self._seen.items())
        self._versions = list(map(version_of_class, self._classes))
        self._codes, self._seen = codes, now
        self._know_versions()

    def _know_versions(self) -> None:
        for cls in self._classes:
            type.__getattribute__(cls, "__init__")  # gives it one
        known = map(bytes, self._versions)
        self._known = [_UNKNOWN if version == NO_VERSION else version for version in known]

    def _attributes(self) -> Iterator[tuple[tuple[type, str], Any]]:
        for owner in _owners(self._classes):
            for name, value in list(vars(owner).items()):  # threads
                acts = hasattr(type(value), "__get__") or callable(value)
                if name in self._names:
                    yield (owner, name), value if acts else None  # Dynamo guards constants
                elif acts and name.startswith("__") and name not in _OF_MAKING:
                    yield (owner, name), value
        for owner, name in self._of_globals:
            yield (owner, name), vars(owner).get(name)


def _owners(classes: Iterable[type]) -> dict[type, None]:
    return dict.fromkeys(base for cls in classes for base in cls.__mro__ if base is not object)


def _is_pytorchs(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("torch", "builtins")
