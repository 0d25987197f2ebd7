"""From the kernels' files and their headers to one self-contained CUDA text.

The text holds everything that NVRTC sees: no include path, no header outside it. So it is the whole
content of the cache's key, and it can be written into an exported file as it stands.

Each file also compiles alone, for an editor and its reader: what a kernel is specialised for
stands as one example in a file named `prelude.cuh`, or with that ending, which the files include
that use it. In a text the writers' own constants stand instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

KERNEL_FOLDER = Path(__file__).parents[1]

_OWN_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"(?P<name>[^"\n]+)"[^\n]*\n?', re.MULTILINE)
_ANY_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[^\n]*", re.MULTILINE)
_ALONE = re.compile(
    r'^[ \t]*#[ \t]*(pragma[ \t]+once|include[ \t]+"[\w/]*prelude\.cuh")[ \t]*\n?', re.MULTILINE
)
"""What a file needs that is compiled alone."""


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


def read_file(path: Path) -> str:
    """Text of a kernel's file or header as it stands in a kernel's text."""
    return _ALONE.sub("", path.read_text(encoding="utf-8"))


def kernel_text(name: str, prelude: str = "") -> str:
    """Text of `kernels/name` behind a prelude."""
    if prelude and not prelude.endswith("\n"):
        prelude += "\n"
    return prelude + read_kernel(name)


def constants(values: Mapping[str, int | bool | str]) -> str:
    """Each as a constexpr definition; a text is the literal of a float."""
    lines = []
    for name, value in values.items():
        kind, text = "int", str(value)
        if isinstance(value, bool):
            kind, text = "bool", text.lower()
        elif isinstance(value, str):
            kind = "float"
        lines.append(f"constexpr {kind} {name} = {text};\n")
    return "".join(lines)


def _expanded(name: str, included_from: str | None, seen: set[str]) -> str:
    seen.add(name)
    path = KERNEL_FOLDER / name
    if not path.is_file():
        by = f", included from {included_from}," if included_from else ""
        raise FileNotFoundError(f"kernel file {name}{by} is not in {KERNEL_FOLDER}")

    def replace(match: re.Match[str]) -> str:
        header = match["name"]
        return "" if header in seen else _expanded(header, included_from=name, seen=seen)

    text = _OWN_INCLUDE.sub(replace, read_file(path))
    return text if text.endswith("\n") else text + "\n"
