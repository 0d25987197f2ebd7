"""From the files in `kernels/` to one self-contained CUDA text.

The text holds everything that NVRTC sees: no include path, no header outside it. So it is the whole
content of the cache's key, and it can be written into an exported file as it stands.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from functools import cache
from pathlib import Path

__all__ = ["KERNEL_FOLDER", "double_literal", "float_literal", "kernel_text", "read_kernel"]

KERNEL_FOLDER = Path(__file__).parents[1]

_OWN_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"(?P<name>[^"\n]+)"[^\n]*\n?', re.MULTILINE)
_ANY_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[^\n]*", re.MULTILINE)
_PRAGMA_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[ \t]*\n?", re.MULTILINE)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


@cache
def read_kernel(name: str) -> str:
    """Text of `kernels/name` with each of our own headers put in the place of its first include.

    Raises `FileNotFoundError` for a name that is not there and `ValueError` for an include that is
    not one of our own files.
    """
    text = _expanded(name, included_from=None, seen=set())
    left = _ANY_INCLUDE.search(text)
    if left:
        raise ValueError(
            f"{name}: only our own headers can be included, as in '#include \"x.cuh\"', "
            f"but found '{left.group().strip()}'"
        )
    return text


def kernel_text(name: str, prelude: Mapping[str, str | int | float] | str = "") -> str:
    """Text of `kernels/name` behind a prelude: a text, or names and values that become `#define`s.

    `#define`, not `constexpr`: a constexpr inside `#if` silently counts as 0. An int becomes an
    integer literal, a bool 1 or 0, a float an exact `float` literal (for a `double` one, pass
    `double_literal(value)`), and a str stands as it is.
    """
    if not isinstance(prelude, str):
        prelude = "".join(f"#define {_name(k)} {_literal(k, v)}\n" for k, v in prelude.items())
    elif prelude and not prelude.endswith("\n"):
        prelude += "\n"
    return prelude + read_kernel(name)


def float_literal(value: float) -> str:
    """Exact CUDA literal of type `float` for `value` rounded to fp32."""
    try:
        (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    except OverflowError:
        raise ValueError(
            f"{value} does not fit a float: pass double_literal(value) instead"
        ) from None
    return _hex_literal(rounded, "f")


def double_literal(value: float) -> str:
    """Exact CUDA literal of type `double` for `value`."""
    return _hex_literal(value)


def _expanded(name: str, included_from: str | None, seen: set[str]) -> str:
    seen.add(name)
    path = KERNEL_FOLDER / name
    if not path.is_file():
        by = f", included from {included_from}," if included_from else ""
        raise FileNotFoundError(f"kernel file {name}{by} is not in {KERNEL_FOLDER}")

    def replace(match: re.Match[str]) -> str:
        header = match["name"]
        return "" if header in seen else _expanded(header, included_from=name, seen=seen)

    text = _OWN_INCLUDE.sub(replace, _PRAGMA_ONCE.sub("", path.read_text(encoding="utf-8")))
    return text if text.endswith("\n") else text + "\n"


def _hex_literal(value: float, suffix: str = "") -> str:
    if not math.isfinite(value):
        raise ValueError(f"a constant in a kernel must be finite, but got {value}")
    literal = float(value).hex() + suffix
    # Parentheses, so that a negative value is one operand wherever the name is used.
    return f"({literal})" if literal.startswith("-") else literal


def _literal(name: str, value: str | int | float) -> str:
    if isinstance(value, str):
        if "\n" in value:
            raise ValueError(f"the definition of {name} must be one line, but got {value!r}")
        return value
    if isinstance(value, int):
        digits = str(int(value))
        digits += "" if -(2**31) < value < 2**31 else "LL"
        return f"({digits})" if value < 0 else digits
    return float_literal(value)


def _name(name: str) -> str:
    if not _IDENTIFIER.fullmatch(name):
        raise ValueError(f"{name!r} cannot be defined in a kernel: it is not a C identifier")
    return name
