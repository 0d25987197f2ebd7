"""How a measurement says how far it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Notify = Callable[[str, float], None]
"""Told what is being done now, and the share of the whole that is done, from 0 to 1."""
Progress = Callable[[float], None]
"""Told the share of the work that is done, from 0 to 1."""


def silent(*_: Any) -> None:
    """Say nothing."""


def in_a_line(error: BaseException) -> str:
    """An error's kind and the first line of what it says: why a row lacks a column."""
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text.strip()}"[:300]
