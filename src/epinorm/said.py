"""What is said once in a process, as a warning or in PyTorch's log."""

from __future__ import annotations

import logging
import sys
import threading
import warnings

MOST_REMEMBERED = 10_000
_NOT_USERS = ("epinorm", "torch", "")
"""Whose modules a user's line is not in; code that TorchDynamo and FX make has no name."""
_said: set[str] = set()
_lock = threading.Lock()


def is_new(what: str) -> bool:
    """Whether this was not asked before."""
    with _lock:
        new = what not in _said
        if len(_said) < MOST_REMEMBERED:
            _said.add(what)
    return new


def warn_once(text: str, category: type[Warning] = UserWarning, cause: str | None = None) -> None:
    """Warn the user, if not of the same ``cause`` before: the text, unless another is named.

    The line named is the user's: how many calls are in between depends on who calls the model.
    """
    if is_new(cause or text):
        level, frame = 1, sys._getframe()
        while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_USERS:
            level, frame = level + 1, frame.f_back
        warnings.warn(text, category, stacklevel=level)


def log_once(text: str) -> None:
    """Log a warning, if not the same before."""
    if is_new(text):
        logging.getLogger("epinorm").warning("epinorm: %s", text)


def forget() -> None:
    """Say all of it again."""
    with _lock:
        _said.clear()
