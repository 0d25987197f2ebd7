"""What ptxas said of the kernels that these tests compile: the same text, architecture and compiler
give the same figures, so a kernel is compiled again only where one of them has changed.

    python tests/cuda/figures.py FOLDER    keeps those of a cache folder (``make figures``)
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from epinorm.backends import cache

KEPT = Path(__file__).with_suffix(".txt")
NAMES = ("entry", "arch", "registers", "spill_bytes", "shared_bytes", "stack_bytes")
COMPILED_ANYWAY = 32
"""Of so many kernels one: were a figure kept under a wrong key, its test would show it."""


def main(folder: str) -> None:
    """Keep what a cache folder holds of kernels that ptxas did not warn about, and nothing else."""
    os.environ["EPINORM_CACHE_DIR"] = folder
    records = ((e.key, cache.read(e.key)) for e in cache.list_entries())
    lines = (
        " ".join((key, *(str(record.facts[name]) for name in NAMES)))
        for key, record in records
        if record is not None and _is_plain(str(record.facts.get("log", "warning")))
    )
    KEPT.write_text("\n".join(sorted(lines)) + "\n")


def fill_cache() -> None:
    """Give the cache a record without machine code of each kernel."""
    for line in KEPT.read_text().splitlines():
        key, *values = line.split()
        if int(key[:8], 16) % COMPILED_ANYWAY:
            facts: dict[str, str | int] = dict(zip(NAMES, values, strict=True))
            facts |= {name: int(facts[name]) for name in NAMES[2:]}
            cache.write(key, {**facts, "log": ""}, b"")


def _is_plain(log: str) -> bool:
    """Whether ptxas reported figures and nothing else."""
    figures = (
        r"ptxas +\. +\d+ bytes stack frame|ptxas info +: "
        r"(\d+ bytes gmem|Compil|Function properties|Used \d+ registers)"
    )
    said = [line for line in log.splitlines() if line.startswith("ptxas")]
    return bool(said) and all(re.match(figures, line) for line in said)


if __name__ == "__main__":
    main(*sys.argv[1:])
