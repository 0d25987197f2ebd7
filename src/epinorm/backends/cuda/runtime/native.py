"""The native part of calls, as a module: compiled when it is first wanted, beside first calls."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from epinorm.backends import unpromised
from epinorm.backends.cpu.build import BuildError, load_extension
from epinorm.precision import matmul_setting

_FILES = (
    *("graphs.h", "program.h", "call.h", "waiting.h", "chain_node.h", "from_python.h", "calls.h"),
    *("unchanged.h", "replay.cpp"),
)


def native(wait: bool = False) -> Any:
    """The native part as a module; None while it is compiled, at first use (half a minute).

    Raises BuildError where it cannot be built.
    """
    future = _built()
    return future.result() if wait or future.done() else None


def settle() -> None:
    """Wait until calls are as fast as they get: the native part is there, or cannot be built."""
    with suppress(BuildError):
        native(wait=True)


@cache
def _built() -> Future[Any]:
    future: Future[Any] = Future()

    def build() -> None:
        try:
            made = load_extension("native code for calls", Path(__file__).parent, _FILES)
            made.ask(unpromised.current_device, unpromised.current_stream, matmul_setting)
            future.set_result(made)
        except Exception as error:
            future.set_exception(BuildError(str(error)))

    threading.Thread(target=build, name="epinorm-build").start()
    return future
