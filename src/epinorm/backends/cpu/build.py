"""Compile the CPU kernels on first use and keep them in epinorm's cache.

The runner (PyTorch's headers; about three seconds) is compiled once, a chain's kernel (no headers;
under a second) once for each chain and dtypes. PyTorch's ``cpp_extension.load`` is not used: a
build of its that was killed leaves a lock for which the next one waits forever. Here every build
has a folder of its own and a time limit, and the result is renamed into the cache, so no lock can
be left behind. Nothing is kept, or used, before it was loaded and has computed something right
(proof.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from epinorm.backends import cache
from epinorm.backends.cpu.abi import declare_runner
from epinorm.backends.cpu.proof import Disproved, prove_runner
from epinorm.backends.memo import memo
from epinorm.problem import CannotCompile, Problem

HERE = Path(__file__).parent
KERNEL_HEADERS = ("call.h", "lanes.h", "elementary.h", "strip.h", "stages.h", "passes.h")
RUNNER_FILES = ("call.h", "packed.h", "parts.h", "runner.cpp")
TIME_LIMIT_SECONDS = 300.0
OLDEST_GCC = 12
"""The first with __builtin_shufflevector."""

# No -ffast-math: NaN and infinity mean what they say. errno and traps are never looked at, and
# without them square roots and selections become vector instructions.
# Hidden: every kernel's names are the same, and the loader merges some of them (GNU unique ones)
# across libraries, so that one chain would read another's constants.
COMMON_FLAGS = ("-std=c++20", "-fPIC", "-shared", "-w", "-fvisibility=hidden", "-fno-gnu-unique")
KERNEL_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd")
RUNNER_FLAGS = ("-O2", "-fopenmp")

_lock = threading.RLock()  # a kernel is proved by way of the runner
_loaded: dict[str, ctypes.CDLL] = {}
_failures: dict[str, str] = {}
_RUNNER = "runner"
_BUILD = "epinorm-build-"


class BuildError(CannotCompile):
    """The CPU kernels cannot be built here; the text says why."""


def compiler_problem() -> str | None:
    """None where a compiler is found, or one sentence that says what is missing. Starts nothing."""
    if sys.platform != "linux":
        return f"the CPU kernels are built on Linux only, and this is {sys.platform}"
    if compiler_path() is None:
        wanted = os.environ.get("CXX")
        return (
            f"there is no C++ compiler: CXX={wanted} is not a program"
            if wanted
            else "there is no C++ compiler: install g++ (12 or newer), or name one in CXX"
        )
    return None


def failure(source: str) -> str | None:
    """Why this kernel's or the runner's build failed earlier in this process, or None."""
    return _failures.get(_RUNNER) or _failures.get(source)


def load_runner(problem: Problem) -> ctypes.CDLL:
    """The library that cuts the work into parts; raises BuildError where it cannot be built.

    problem: one that it is needed for.
    """

    def prove(library: ctypes.CDLL) -> None:
        declare_runner(library)
        prove_runner(library, problem)

    return _load(_RUNNER, "its runner", _runner_parts, prove)


def load_kernel(source: str, name: str, prove: Callable[[ctypes.CDLL], None]) -> ctypes.CDLL:
    """The library of a kernel's text, once ``prove`` raises nothing; raises BuildError where it
    cannot be built."""
    return _load(source, name, lambda: _kernel_parts(source), prove)


def load_extension(name: str, folder: Path, files: tuple[str, ...]) -> Any:
    """The Python module ``epinorm_<stem>`` that the last of the C++ files makes, with PyTorch's and
    Python's headers; once in a process. Raises BuildError where it cannot be built."""
    module = f"epinorm_{Path(files[-1]).stem}"

    def parts() -> tuple[dict[str, str], str, list[str]]:
        flags = ["-O1", f"-isystem{sysconfig.get_path('include')}", *_torch_flags()]
        texts = {file: (folder / file).read_text() for file in files}
        return texts, files[-1], [*flags, "-ltorch_python"]

    def declare(library: ctypes.CDLL) -> None:
        getattr(library, f"PyInit_{module}")

    library = _load(name, name, parts, declare)
    make = getattr(ctypes.PyDLL(None, handle=library._handle), f"PyInit_{module}")
    make.restype = ctypes.py_object
    return make()


def _runner_parts() -> tuple[dict[str, str], str, list[str]]:
    files = {name: (HERE / name).read_text() for name in RUNNER_FILES}
    return files, "runner.cpp", [*RUNNER_FLAGS, *_torch_flags()]


def _torch_flags() -> list[str]:
    """What a file with PyTorch's headers is compiled and linked with."""
    # As its cpp_extension names them, which warns where there is a toolkit and no GPU.
    root = Path(torch.__file__).parent
    folders = [root / "include", root / "include/torch/csrc/api/include"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    few = "-DAT_PER_OPERATOR_HEADERS"  # else some of its headers include all of its operators
    return [
        abi,
        few,
        *(f"-isystem{f}" for f in folders),
        f"-L{root / 'lib'}",
        "-ltorch_cpu",
        "-lc10",
    ]


def _kernel_parts(source: str) -> tuple[dict[str, str], str, list[str]]:
    files = {name: (HERE / name).read_text() for name in KERNEL_HEADERS}
    return {**files, "kernel.cpp": source}, "kernel.cpp", list(KERNEL_FLAGS)


def _load(
    identity: str,
    name: str,
    parts: Callable[[], tuple[dict[str, str], str, list[str]]],
    prove: Callable[[ctypes.CDLL], None],
) -> ctypes.CDLL:
    if (library := _loaded.get(identity)) is not None:
        return library
    with _lock:
        if (library := _loaded.get(identity)) is not None:
            return library
        if (reason := _failures.get(identity)) is not None:
            raise BuildError(reason)
        try:
            library = _proved(*parts(), name, prove)
        except (BuildError, OSError) as error:
            _failures[identity] = reason = str(error).strip()
            raise BuildError(reason) from error
        _loaded[identity] = library
        return library


def _proved(
    files: dict[str, str],
    main: str,
    flags: list[str],
    name: str,
    prove: Callable[[ctypes.CDLL], None],
) -> ctypes.CDLL:
    """The library from the cache or, where there is none that computes, from the compiler."""
    compiler, identity = _compiler()
    key = _key(identity, files, flags)
    kept = cache.read(key)
    if kept is not None:
        with contextlib.suppress(OSError, AttributeError, Disproved):
            library = _open(kept.payload)
            prove(library)
            return library
    code = _compile(compiler, files, main, flags, name)
    try:
        library = _open(code)
        prove(library)
    except (OSError, AttributeError, Disproved) as error:
        raise BuildError(f"what {compiler} made of {name} is of no use: {error}") from error
    cache.write(key, {"entry": f"cpu: {name}", "arch": platform.machine()}, code)
    return library


def _key(compiler: str, files: dict[str, str], flags: list[str]) -> str:
    facts = (compiler, *platform.libc_ver(), torch.__version__, _cpu(), *COMMON_FLAGS, *flags)
    return cache.key_of("cpu", *facts, *(part for item in files.items() for part in item))


def _remove_abandoned() -> None:
    """Remove what builds that were killed have left."""
    before = time.time() - 2 * TIME_LIMIT_SECONDS
    for item in list(os.scandir(tempfile.gettempdir())):
        with contextlib.suppress(OSError):
            status = item.stat(follow_symlinks=False)
            ours = status.st_uid == os.geteuid() and item.is_dir(follow_symlinks=False)
            if item.name.startswith(_BUILD) and ours and status.st_mtime < before:
                shutil.rmtree(item.path, ignore_errors=True)


def _compile(compiler: str, files: dict[str, str], main: str, flags: list[str], name: str) -> bytes:
    _remove_abandoned()
    with tempfile.TemporaryDirectory(prefix=_BUILD) as folder:
        for file, text in files.items():
            Path(folder, file).write_text(text)
        command = [compiler, *COMMON_FLAGS, main, *flags, "-o", "kernel.so"]
        _run(command, folder, name)
        made = Path(folder, "kernel.so")
        if not made.exists():
            raise BuildError(f"{compiler} says that it compiled {name}, and made nothing")
        return made.read_bytes()


def _run(command: list[str], folder: str, name: str) -> None:
    notice = f"epinorm: compiling {name} for this CPU (first use, a few seconds)"
    terminal = sys.stderr.isatty()
    print(notice, end="" if terminal else "\n", file=sys.stderr, flush=True)
    began = time.monotonic()
    log = Path(folder, "log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "TMPDIR": folder},  # what a killed compiler leaves is found with it
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            while process.poll() is None:
                seconds = time.monotonic() - began
                if seconds > TIME_LIMIT_SECONDS:
                    raise BuildError(
                        f"{command[0]} did not finish {name} within {TIME_LIMIT_SECONDS:g} s"
                    )
                if terminal:
                    print(f"\r{notice} {seconds:.0f} s", end="", file=sys.stderr, flush=True)
                time.sleep(0.02)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            if terminal:
                print(file=sys.stderr, flush=True)
    if process.returncode:
        lines = log.read_text(errors="replace").strip().splitlines()
        shown = next((line for line in lines if "error" in line), lines[-1] if lines else "")
        raise BuildError(f"{command[0]} failed on {name} (exit {process.returncode}): {shown}")


def _open(code: bytes) -> ctypes.CDLL:
    """Load exactly these bytes: no path that someone could exchange in between."""
    if hasattr(os, "memfd_create"):
        # Stays open: the loader takes a second library of the same name for the first one.
        descriptor = os.memfd_create("epinorm-kernel", os.MFD_CLOEXEC)
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(code)
        return ctypes.CDLL(f"/proc/self/fd/{descriptor}")
    with tempfile.TemporaryDirectory(prefix=_BUILD) as folder:
        path = Path(folder, "kernel.so")
        path.write_bytes(code)
        return ctypes.CDLL(str(path))


def compiler_path() -> str | None:
    """What compiles the CPU kernels: CXX, or g++, or c++; None where it is not there."""
    named = os.environ.get("CXX")
    for candidate in (named,) if named else ("g++", "c++"):
        if found := shutil.which(candidate):
            return found
    return None


@lru_cache(maxsize=8)
def _version_of(path: str) -> str:
    try:
        answer = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"the C++ compiler {path} does not run: {error}") from error
    first, *rest = answer.stdout.splitlines() or [""]
    number = re.search(r"(\d+)\.\d+\.\d+", first)
    if "Free Software Foundation" not in " ".join(rest):
        # Its OpenMP would be another one than PyTorch's: two pools of threads in one process.
        raise BuildError(f"the CPU kernels need g++, and {path} is {first or 'unknown'}")
    if number is None or int(number[1]) < OLDEST_GCC:
        raise BuildError(f"the CPU kernels need g++ {OLDEST_GCC} or newer, and {path} is {first}")
    # One that is replaced by another of the same version is another one, too.
    status = os.stat(os.path.realpath(path))
    return f"{first} {os.path.realpath(path)} {status.st_size} {status.st_mtime_ns}"


def _compiler() -> tuple[str, str]:
    problem = compiler_problem()
    path = compiler_path()
    if problem is not None or path is None:
        raise BuildError(problem or "there is no C++ compiler")
    return path, _version_of(path)


@memo(1)
def _cpu() -> str:
    """What -march=native looks at: a cache in a shared home folder serves several machines."""
    wanted = ("model name", "flags", "Features", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
