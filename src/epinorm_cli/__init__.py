"""The command ``epinorm``, beside the library: importing that takes PyTorch's second or two, and
``epinorm --help`` needs none of it. A command imports what it needs when it runs."""

from __future__ import annotations

import codecs
import sys
from io import TextIOWrapper

__all__ = ["main"]

_PLAIN = {
    "→": "->",
    "←": "<-",
    "×": "x",
    "·": "*",
    "µ": "u",
    "−": "-",
    "–": "-",
    "‖": "|",
    "─": "-",
}


def _in_plain_letters(error: UnicodeError) -> tuple[str, int]:
    """What a terminal or a pipe cannot show, by signs that all can."""
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    return "".join(_PLAIN.get(letter, "?") for letter in text), error.end


def main() -> None:
    """Run the command line and exit; it needs the extra ``cli``, the library does not."""
    codecs.register_error("epinorm", _in_plain_letters)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="epinorm")
    try:
        from epinorm_cli import commands
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        sys.exit(f"the command needs {error.name}: pip install 'epinorm[cli]'")
    commands.main()
