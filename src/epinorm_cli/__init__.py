"""The command ``epinorm``, beside the library: importing that takes PyTorch's second or two, and
``epinorm --help`` needs none of it. A command imports what it needs when it runs."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit; it needs the extra ``cli``, the library does not."""
    try:
        from epinorm_cli import commands
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        sys.exit(f"the command needs {error.name}: pip install 'epinorm[cli]'")
    commands.main()
