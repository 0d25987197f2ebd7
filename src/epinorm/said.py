"""What is said once in a process, as a warning or in PyTorch's log."""

from __future__ import annotations

import logging
import threading
import warnings

MOST_REMEMBERED = 10_000
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
    """Warn the user, if not of the same ``cause`` before: the text, unless another is named."""
    if is_new(cause or text):
        warnings.warn(text, category, stacklevel=4)


def log_once(text: str) -> None:
    """Log a warning, if not the same before."""
    if is_new(text):
        logging.getLogger("epinorm").warning("epinorm: %s", text)


def forget() -> None:
    """Say all of it again."""
    with _lock:
        _said.clear()
