"""Conditions as straight code: what a rewritten forward checks at each call, as one function.

The checks are many and small, and run before every kernel: a loop over objects that hold them takes
three times as long as the same comparisons written one after the other. So they are written so, as
torch.fx writes graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["GuardCode", "hook_conditions"]


class GuardCode:
    """The body of one function, line by line, with the values that it compares with.

    ``refused`` is the statement that ends it where a condition does not hold.
    """

    def __init__(self, refused: str) -> None:
        self._refused = refused
        self._lines: list[str] = []
        self._values: dict[str, Any] = {}

    def value(self, value: Any) -> str:
        """The name by which the code knows a value."""
        name = f"c{len(self._values)}"
        self._values[name] = value
        return name

    def line(self, text: str) -> None:
        self._lines.append(text)

    def refuse_if(self, *conditions: str) -> None:
        """Conditions are read from left to right, as far as the first that holds."""
        if conditions:
            self._lines.append(f"if {' or '.join(conditions)}: {self._refused}")

    def function(self, parameters: Sequence[str]) -> Callable[..., Any]:
        """Compile it. A part of the model that is no longer there is a condition that fails."""
        body = "".join(f"  {line}\n" for line in self._lines)
        text = (
            f"def guard({', '.join(parameters)}):\n"
            f" try:\n{body}"
            f" except (AttributeError, KeyError): {self._refused}\n"
        )
        exec(compile(text, "<epinorm guard>", "exec"), self._values)
        return self._values["guard"]


def hook_conditions(module: str) -> list[str]:
    """Each of which holds where calling the module of that name runs code put onto the object."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [*(f"{module}.{hook}" for hook in hooks), f"'forward' in {module}.__dict__"]
