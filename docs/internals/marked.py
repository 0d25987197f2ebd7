"""What the two scripts beside it share: a table between the markers of a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def replace_marked(page: Path, name: str, lines: Sequence[str]) -> None:
    """Put lines between the page's ``<!-- NAME: begin ... -->`` and ``<!-- NAME: end``."""
    begin, end = f"<!-- {name}: begin", f"<!-- {name}: end"
    before, rest = page.read_text().split(begin)
    note, rest = rest.split("-->", 1)
    after = rest.split(end)[1]
    block = "\n".join(lines)
    page.write_text(f"{before}{begin}{note}-->\n{block}\n{end}{after}")
