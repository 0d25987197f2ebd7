"""A mode that sees which operators are called, and lets them run."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class SeesOperators(TorchDispatchMode):
    """Their overloads, in order, in ``seen``."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))
