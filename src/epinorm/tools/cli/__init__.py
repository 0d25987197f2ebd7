"""The command line; the modules beside main add their commands to its ``app``."""

from __future__ import annotations

from epinorm.tools.cli import kernelbench, tune
from epinorm.tools.cli.main import app, main

__all__ = ["app", "kernelbench", "main", "tune"]
