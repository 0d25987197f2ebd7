"""Python processes without two seconds of imports: forked from one that has done nothing else."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping
from pathlib import Path

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "epinorm", "epinorm.backends.cpu"])


class Process:
    """A new process of its own session that runs ``code`` under ``environment``, as ``python -c``
    would; its variables of OpenMP and Python itself come too late."""

    def __init__(self, code: str, environment: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="epinorm-test-")
        self._said = [Path(self._folder.name, name) for name in ("out", "err")]
        given = (textwrap.dedent(code), dict(environment), self._said)
        self._process = _context.Process(target=_run, args=given)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end; what it wrote to standard output and error."""
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"it runs for more than {timeout} s"
        out, err = (path.read_text() if path.exists() else "" for path in self._said)
        return out, err

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode


def run_script(
    script: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """What ``python script arguments`` does."""
    command = [str(script), *arguments]
    code = f"""
        import runpy, sys
        sys.path.insert(0, {str(script.parent)!r})
        sys.argv = {command!r}
        runpy.run_path(sys.argv[0], run_name="__main__")
    """
    process = Process(code, {**os.environ, **environment})
    out, err = process.communicate(240)
    return subprocess.CompletedProcess(command, process.returncode or 0, out, err)


def _run(code: str, environment: dict[str, str], said: list[Path]) -> None:
    os.setsid()
    for path, number in zip(said, (1, 2), strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # it is read from the environment once
    sys.argv = ["-c"]
    exec(compile(code, "<test>", "exec"), {"__name__": "__main__"})
