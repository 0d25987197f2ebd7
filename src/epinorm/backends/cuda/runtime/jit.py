"""From CUDA text to a loaded kernel: NVRTC through cuda-core, with a cache on disk.

A kernel is looked for in this process, then on disk, then compiled. Compiling needs no GPU, no CUDA
toolkit and no host compiler.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import io
import logging
import re
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch

from epinorm.backends import cache
from epinorm.backends.cuda.runtime.device import device_index, stand_in
from epinorm.backends.cuda.runtime.driver import check, driver, make_primary_context_current
from epinorm.backends.cuda.runtime.launch import Compiled, Kernel
from epinorm.backends.memo import memo

SAY_SECONDS = 3.0
"""Of compiling, after which it is said again what a first call waits for."""
STANDARD = "c++17"
NOT_REPORTED = -1

_log = logging.getLogger("epinorm")


@dataclass(frozen=True)
class KernelSource:
    """One kernel to compile: ``entry`` is an `extern "C"` symbol of ``text``, ``arch`` such as
    'sm_90a'."""

    entry: str
    text: str
    arch: str


def compile_cubin(source: KernelSource) -> Compiled:
    """Compile for `source.arch`, on a machine with or without a GPU.

    Raises `RuntimeError` with the compiler's log where the text does not compile or has no such
    entry.
    """
    program_class, options_class = _compiler()
    options = options_class(arch=source.arch, std=STANDARD, ptxas_options=["-v"])
    log = io.StringIO()
    started = time.perf_counter()
    try:
        program = program_class(source.text, "c++", options)
        cubin = bytes(program.compile("cubin", logs=log).code)
    except Exception as error:  # cuda-core's own class, which differs between its versions
        raise RuntimeError(
            f"compiling {source.entry} for {source.arch} failed: {error}\n{log.getvalue()}"
        ) from error
    _progress.add(source, time.perf_counter() - started)
    return _read_log(source, cubin, log.getvalue())


class Progress:
    """What this process has compiled so far."""

    def __init__(self) -> None:
        self.kernels, self.seconds, self.said_at = 0, 0.0, 0.0

    def add(self, source: KernelSource, seconds: float) -> None:
        """Count a kernel, and say so where it has been a while."""
        self.kernels, self.seconds = self.kernels + 1, self.seconds + seconds
        if self.seconds - self.said_at > SAY_SECONDS:
            self.said_at = self.seconds
            _log.warning(
                "epinorm: compiling kernels for %s (first use, kept on disk): %d in %.0f s",
                *(source.arch, self.kernels, self.seconds),
            )


_progress = Progress()


def compiled(source: KernelSource) -> Compiled:
    """The kernel from the cache on disk, or compiled and kept there; needs no GPU."""
    key = cache_key(source)
    record = cache.read(key)
    if record is not None:
        known = {name: record.facts[name] for name in _FIGURES}
        return Compiled(cubin=record.payload, **known)  # type: ignore[arg-type]
    result = compile_cubin(source)
    facts: dict[str, str | int] = {name: getattr(result, name) for name in _FIGURES}
    cache.write(key, {**facts, "entry": source.entry, "arch": source.arch}, result.cubin)
    return result


def cache_key(source: KernelSource) -> str:
    """Key that holds everything that the machine code depends on."""
    return cache.key_of(source.text, source.entry, source.arch, *_versions())


def load(source: KernelSource, device: torch.device | int | None = None) -> Kernel:
    """The kernel on this GPU, from memory, else from the cache on disk, else compiled.

    Raises `RuntimeError` where the kernel is not loaded yet and the current stream is being
    captured: nothing is compiled or loaded inside a capture.
    """
    if (instead := stand_in()) is not None:
        kernel: Kernel = instead.kernel(source)
        return kernel
    index = device_index(device)
    return _loaded.kernels.get((source, index)) or _load(source, index)


_FIGURES = ("log", "registers", "spill_bytes", "shared_bytes", "stack_bytes")


class Loaded:
    """Kernels by source and GPU, and what they are of: handles, which are never unloaded."""

    def __init__(self) -> None:
        self.kernels: dict[tuple[KernelSource, int], Kernel] = {}
        self.libraries: dict[KernelSource, tuple[int, Compiled]] = {}
        self.cubins: dict[tuple[bytes, str, int], Kernel] = {}
        self.locks: dict[KernelSource, threading.Lock] = {}


_loaded = Loaded()


def _load(source: KernelSource, index: int) -> Kernel:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"kernel {source.entry} is not loaded yet and nothing can be compiled or loaded while "
            "a CUDA graph is captured: make one call with these shapes before the capture"
        )
    with _loaded.locks.setdefault(source, threading.Lock()):
        kernel = _loaded.kernels.get((source, index))
        if kernel is None:
            handle, facts = _loaded.libraries.get(source) or _load_library(source)
            _load_eagerly(handle, index, source.entry)
            kernel = _loaded.kernels[source, index] = Kernel(handle, source.entry, index, facts)
    return kernel


def _load_library(source: KernelSource) -> tuple[int, Compiled]:
    """Handle of the kernel, which holds for every GPU of this architecture; never unloaded."""
    result = compiled(source)
    found = _loaded.libraries[source] = _handle_of(result.cubin, source.entry), result
    return found


def _handle_of(cubin: bytes, entry: str) -> int:
    torch.cuda.init()
    library, handle = ctypes.c_void_p(), ctypes.c_void_p()
    api = driver()
    check(
        api.cuLibraryLoadData(ctypes.byref(library), cubin, None, None, 0, None, None, 0),
        f"loading {entry}",
    )
    check(
        api.cuLibraryGetKernel(ctypes.byref(handle), library, entry.encode()),
        f"finding {entry} in its cubin",
    )
    assert handle.value is not None
    return handle.value


def load_cubin(cubin: bytes, entry: str, index: int) -> Kernel:
    """A kernel that another compiler made, on this GPU."""
    kind = cubin, entry, index
    kernel = _loaded.cubins.get(kind)
    if kernel is None:
        handle = _handle_of(cubin, entry)
        _load_eagerly(handle, index, entry)
        facts = Compiled(cubin, "", *[NOT_REPORTED] * 4)
        kernel = _loaded.cubins[kind] = Kernel(handle, entry, index, facts)
    return kernel


def _load_eagerly(handle: int, index: int, entry: str) -> None:
    """Put the code on the GPU now: the driver else does it at the first launch, maybe a capture."""
    with torch.cuda.device(index):
        make_primary_context_current(index)
        function = ctypes.c_void_p()
        check(
            driver().cuKernelGetFunction(ctypes.byref(function), handle),
            f"loading {entry} onto cuda:{index}",
        )


def _read_log(source: KernelSource, cubin: bytes, log: str) -> Compiled:
    """The figures of `source.entry` in what `ptxas -v` prints."""
    sections = log.split("Compiling entry function '")
    mine = [part for part in sections[1:] if part.startswith(source.entry + "'")]
    if len(sections) > 1 and not mine:
        raise RuntimeError(
            f"the text compiles for {source.arch} but has no kernel {source.entry}: "
            f'is it declared extern "C"?\n{log}'
        )
    text = mine[0] if mine else ""
    registers = _sum(r"Used (\d+) registers", text)
    spills = [_sum(rf"(\d+) bytes spill {kind}", text) for kind in ("stores", "loads")]
    return Compiled(
        cubin=cubin,
        log=log,
        registers=registers,
        spill_bytes=NOT_REPORTED if NOT_REPORTED in spills else sum(spills),
        # ptxas leaves shared memory out where there is none.
        shared_bytes=max(_sum(r"(\d+) bytes smem", text), 0) if registers >= 0 else NOT_REPORTED,
        stack_bytes=_sum(r"(\d+) bytes stack frame", text),
    )


def _sum(pattern: str, text: str) -> int:
    found = re.findall(pattern, text)
    return sum(map(int, found)) if found else NOT_REPORTED


def _compiler() -> tuple[Any, Any]:
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError:  # before 0.5 the same classes were here
        try:
            from cuda.core.experimental import Program, ProgramOptions
        except ImportError as error:
            raise RuntimeError(
                f"cuda-core, which compiles the kernels, cannot be imported: {error}"
            ) from error
    return Program, ProgramOptions


@memo(1)
def _versions() -> tuple[str, ...]:
    """Versions of the compiler and of what sets its default options.

    NVRTC's package says which build it is, where NVRTC itself, which takes most of a start from the
    cache to load, says only major.minor. Of two packages cuda-bindings takes the one that somebody
    in this process has loaded already.
    """
    packages = [f"{name} {v}" for name in _NVRTC if (v := _version(name)) is not None]
    if len(packages) != 1:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
        taken = [package for package in packages if f" {major}.{minor}." in package]
        packages = taken or [f"nvrtc {major}.{minor}"]
    return (*packages, *(f"{name} {_version(name)}" for name in _WRAPPERS))


_NVRTC = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")
_WRAPPERS = ("cuda-core", "cuda-bindings")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
