"""Everything that is found or made once and kept in this process: one decorator, one ``clear``."""

from __future__ import annotations

from collections.abc import Callable
from functools import _lru_cache_wrapper, lru_cache
from typing import TypeVar

T = TypeVar("T")

_clearing: list[Callable[[], None]] = []


def memo(maxsize: int = 1024) -> Callable[[Callable[..., T]], _lru_cache_wrapper[T]]:
    """``functools.lru_cache``, which ``clear`` empties too."""

    def decorate(function: Callable[..., T]) -> _lru_cache_wrapper[T]:
        kept = lru_cache(maxsize=maxsize)(function)
        cleared_with(kept.cache_clear)
        return kept

    return decorate


def cleared_with(function: Callable[[], None]) -> None:
    """Let ``clear`` call this, for what is kept in another way."""
    _clearing.append(function)


def clear() -> None:
    """Forget plans, executables, tuned choices and all that was made for them.

    What a caller holds stays valid; the next call is planned anew. Loaded kernels stay: they are
    kept under their whole text, and CUDA never unloads them.
    """
    for function in _clearing:
        function()
