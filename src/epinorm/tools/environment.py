"""What is on this machine, and what epinorm can do with it: the content of ``epinorm info``."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import torch


def facts() -> dict[str, str | None]:
    """Name → value, in the order in which to show them; None where a thing is not there."""
    import epinorm
    from epinorm.backends import cache
    from epinorm.backends.cpu.build import compiler_path

    known: dict[str, str | None] = {
        "epinorm": epinorm.__version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "cpu": f"{os.cpu_count()} cores, PyTorch uses {torch.get_num_threads()} threads",
        "gpu": _gpus(),
        "cuda-core": _version("cuda-core"),
        "kernel compiler": _nvrtc(),
        "host compiler": compiler_path(),
    }
    state = cache.info()
    known["kernel cache"] = (
        state.problem
        or f"{state.folder}: {state.entries} kernels, {state.size / 1e6:.1f} of at most "
        f"{state.limit / 1e6:.0f} MB"
        + (f" ({state.mistake})" if state.mistake else "")
    )
    known["supported here"] = _supported()
    return known


def _gpus() -> str | None:
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        return f"none (this PyTorch is {built})"
    names = []
    for index in range(torch.cuda.device_count()):
        of = torch.cuda.get_device_properties(index)
        memory = f"{of.total_memory / 2**30:.0f} GiB"
        names.append(f"{of.name} (compute capability {of.major}.{of.minor}, {memory})")
    return f"{'; '.join(names)}; CUDA {torch.version.cuda}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _nvrtc() -> str | None:
    try:
        from cuda.bindings import nvrtc
    except ImportError:
        return None
    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:  # the bindings are there, the library is not
        return f"NVRTC cannot be loaded: {error}"
    return f"NVRTC {major}.{minor}"


def _supported() -> str:
    if not torch.cuda.is_available():
        return "CPU"
    from epinorm.backends.cuda.runtime import device

    answers = []
    for index in range(torch.cuda.device_count()):
        reason = device.supported(index)
        answers.append(f"cuda:{index}" if reason is None else f"not cuda:{index} ({reason})")
    return ", ".join(["CPU", *answers])
