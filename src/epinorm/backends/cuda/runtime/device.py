"""Facts about a GPU that choose and size a kernel: architecture, multiprocessors, shared memory."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch

OLDEST_CAPABILITY = (8, 0)
"""Ampere: the first with cp.async and with bf16 in its tensor cores."""

HOPPER = (9, 0)

Device = torch.device | int | str | None


@dataclass(frozen=True)
class Gpu:
    """What sizes a kernel. shared_of_block, shared_of_multiprocessor: bytes of shared memory."""

    capability: tuple[int, int]
    multiprocessors: int
    shared_of_block: int
    shared_of_multiprocessor: int


class StandIn(Protocol):
    """Answers for the GPU and its kernels; see recorder.py."""

    gpu: Gpu

    def kernel(self, source: Any) -> Any:
        """Of a ``jit.KernelSource``, in a loaded ``launch.Kernel``'s place."""
        ...


_stand_in: StandIn | None = None


def stand_in() -> StandIn | None:
    """What answers in the GPU's place now; None: nothing does."""
    return _stand_in


@contextmanager
def standing_in(given: StandIn) -> Iterator[None]:
    """Let ``given`` answer for every GPU, in all threads: meant for a tool's own process."""
    global _stand_in
    if _stand_in is not None:
        raise RuntimeError("something stands in for the GPU already")
    _stand_in = given
    try:
        yield
    finally:
        _stand_in = None


def device_index(device: Device = None) -> int:
    """Number of a CUDA device as PyTorch counts; None, or 'cuda' without a number, is the current.

    Raises `ValueError` for a device of another kind.
    """
    if isinstance(device, int):
        return device
    if device is not None:
        device = torch.device(device)
        if device.type != "cuda":
            raise ValueError(f"expected a CUDA device, but got {device}")
        if device.index is not None:
            return int(device.index)
    return torch.cuda.current_device()


def arch_of(device: Device = None) -> str:
    """Architecture that kernels for this GPU are compiled for, such as 'sm_90a'."""
    return arch_of_capability(*capability(device))


def arch_of_capability(major: int, minor: int) -> str:
    """'sm_90a' for 9.0, since wgmma and setmaxnreg belong to that very chip; else 'sm_<xy>'."""
    return "sm_90a" if (major, minor) == (9, 0) else f"sm_{major}{minor}"


def capability(device: Device = None) -> tuple[int, int]:
    """Compute capability, such as (9, 0)."""
    return gpu_of(device).capability


def sm_count(device: Device = None) -> int:
    """Number of streaming multiprocessors."""
    return gpu_of(device).multiprocessors


def max_shared_bytes(device: Device = None) -> int:
    """Shared memory in bytes that one block can have, static and dynamic together."""
    return gpu_of(device).shared_of_block


def gpu_of(device: Device = None) -> Gpu:
    """The facts of this GPU, as the driver reports them."""
    if _stand_in is not None:
        return _stand_in.gpu
    return gpu_at(device_index(device))


def supported(device: Device = None) -> str | None:
    """None where our kernels can run on this device, else one sentence that says why not."""
    if _stand_in is not None:
        return None
    if device is not None and not isinstance(device, int):
        kind = torch.device(device).type
        if kind != "cuda":
            return f"the CUDA kernels need an NVIDIA GPU, but the device is {kind}"
    if not torch.cuda.is_available():
        return "the CUDA kernels need an NVIDIA GPU, but PyTorch sees none"
    return _supported(device_index(device))


@cache
def _supported(index: int) -> str | None:
    if torch.version.hip is not None:
        return "the CUDA kernels need an NVIDIA GPU, but this PyTorch is built for ROCm"
    name, found = torch.cuda.get_device_name(index), gpu_at(index).capability
    if found < OLDEST_CAPABILITY:
        oldest = ".".join(map(str, OLDEST_CAPABILITY))
        return (
            f"the CUDA kernels need compute capability {oldest} or newer, "
            f"but {name} has {found[0]}.{found[1]}"
        )
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
        extra = f"cu{(torch.version.cuda or '13').partition('.')[0]}"
        return (
            "the CUDA kernels are compiled with cuda-core, which is not installed: "
            f"pip install 'epinorm[{extra}]'"
        )
    from epinorm.backends.cuda.runtime.driver import driver

    try:
        driver()
    except RuntimeError as error:
        return f"the CUDA kernels cannot be launched: {error}"
    return None


@cache
def gpu_at(index: int) -> Gpu:
    """The facts of the GPU of this number, asked for once."""
    properties: Any = torch.cuda.get_device_properties(index)
    return Gpu(
        (properties.major, properties.minor),
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,
        properties.shared_memory_per_multiprocessor,
    )
