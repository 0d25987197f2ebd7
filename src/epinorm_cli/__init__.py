"""The command ``epinorm``, beside the library: importing that takes PyTorch's second or two, and
``epinorm --help`` needs none of it. A command imports what it needs when it runs."""

from __future__ import annotations

from epinorm_cli import commands, kernelbench, tune
from epinorm_cli.commands import main
from epinorm_cli.options import app

__all__ = ["app", "commands", "kernelbench", "main", "tune"]
