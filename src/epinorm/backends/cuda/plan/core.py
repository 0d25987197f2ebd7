"""Which core multiplies in strategy `single`, as far as the environment says."""

from __future__ import annotations

import os
from typing import Literal, get_args

from epinorm.problem import Core

VARIABLE = "EPINORM_CORE"

Wanted = Core | Literal["auto"]
_KNOWN = ("auto", *get_args(Core))


def wanted_core() -> Wanted:
    """What ``$EPINORM_CORE`` asks for: "auto", "hopper" or "portable".

    Read when a call is planned, so one that was planned before keeps its core. Raises
    ``ValueError`` for any other value.
    """
    text = os.environ.get(VARIABLE, "").strip() or "auto"
    if text not in _KNOWN:
        raise ValueError(f"{VARIABLE} is one of {', '.join(_KNOWN)}, but got {text!r}")
    return text  # type: ignore[return-value]
