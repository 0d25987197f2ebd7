"""Python processes without three seconds of imports: forked from one that has done nothing else.

It has imported PyTorch and its compiler, and nothing of epinorm.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch", "torch._dynamo.repro.after_dynamo"])


class Process:
    """A new process of its own session that runs ``code`` under ``environment`` in a folder, as
    ``python -c`` would; of Python's own variables PYTHONPATH counts, OpenMP's come too late."""

    def __init__(
        self, code: str, environment: Mapping[str, str] | None = None, folder: Path | None = None
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="epinorm-test-")
        self._said = [Path(self._folder.name, name) for name in ("out", "err")]
        environment = dict(os.environ if environment is None else environment)
        given = (textwrap.dedent(code), environment, folder or Path.cwd(), self._said)
        self._process = context.Process(target=_run, args=given)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end; what it wrote to standard output and error."""
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"it runs for more than {timeout} s"
        out, err = self._read()
        return out, err

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def until_it_says(self, text: str, timeout: float = 240) -> None:
        """Wait until it wrote so to standard error, or has ended."""
        end = time.monotonic() + timeout
        while self._process.is_alive() and text not in self._read()[1]:
            assert time.monotonic() < end, f"it does not say {text!r} within {timeout} s"
            time.sleep(0.01)

    def _read(self) -> list[str]:
        return [path.read_text() if path.exists() else "" for path in self._said]


def run_python(
    code: str, environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """What ``python -c code`` does."""
    process = Process(code, environment, folder)
    out, err = process.communicate(240)
    return subprocess.CompletedProcess(["python", "-c", code], process.returncode or 0, out, err)


def as_module(name: str, *arguments: str) -> str:
    """What ``python -m name arguments`` runs."""
    return (
        f"import runpy, sys; sys.argv = {['-m', *arguments]!r}\n"
        f"runpy.run_module({name!r}, run_name='__main__', alter_sys=True)\n"
    )


def imported_by(statement: str, names: Iterable[str]) -> list[str]:
    """Which of these modules and packages a statement imports after ``import torch``."""
    code = f"""
        import json, sys, torch
        names = {tuple(names)!r}
        def found():
            return [m for m in sys.modules if any(m == n or m.startswith(n + ".") for n in names)]
        for there in found():  # PyTorch's compiler imports some
            del sys.modules[there]
        {statement}
        print(json.dumps(sorted(found())))
    """
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    modules: list[str] = json.loads(done.stdout)
    return modules


def as_script(script: Path, *arguments: str) -> str:
    """What ``python script arguments`` runs."""
    return (
        f"import runpy, sys; sys.path.insert(0, {str(script.parent)!r})\n"
        f"sys.argv = {[str(script), *arguments]!r}\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )


def run_script(
    script: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """What ``python script arguments`` does."""
    return run_python(as_script(script, *arguments), {**os.environ, **environment})


def _run(code: str, environment: dict[str, str], folder: Path, said: list[Path]) -> None:
    os.setsid()
    os.chdir(folder)
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # of a suite in the background: ignored
    for path, number in zip(said, (1, 2), strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # it is read from the environment once
    sys.path[:0] = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.argv = ["-c"]
    exec(compile(code, "<test>", "exec"), {"__name__": "__main__"})
