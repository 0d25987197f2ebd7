"""The few functions of the CUDA driver that epinorm calls, through ctypes.

ctypes and not cuda-core or cuda-bindings, whose launch with ten arguments costs 4.5 and 6 us on an
H200's host, most of it in Python; and so nothing has to be imported to load a cached kernel. These
functions have had a stable binary interface since CUDA 12.0, the optional ones since later.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from functools import cache, lru_cache

import torch

INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_CAPTURE_MODE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED

_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"

_KINDS = {
    **{"p": c_void_p, "s": c_char_p, "i": c_int, "u": c_uint, "z": c_size_t},
    **{"P": POINTER(c_void_p), "S": POINTER(c_char_p), "I": POINTER(c_int), "Z": POINTER(c_size_t)},
}
_SIGNATURES = {
    "cuGetErrorName": "iS",
    "cuGetErrorString": "iS",
    "cuCtxSetCurrent": "p",
    "cuDeviceGet": "Ii",
    "cuDevicePrimaryCtxRetain": "Pi",
    "cuLibraryLoadData": "Psppuppu",
    "cuLibraryGetKernel": "Pps",
    "cuKernelGetFunction": "Pp",
    "cuKernelSetAttribute": "iipi",
    "cuLaunchKernelEx": "pppp",
    "cuThreadExchangeStreamCaptureMode": "I",
    "cuTensorMapEncodeTiled": "piupppppiiii",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": "Ipiz",
    "cuOccupancyMaxActiveClusters": "Ipp",
}
"""A letter of ``_KINDS`` an argument."""
GRAPHS = (
    *("cuStreamCreate", "cuStreamDestroy_v2", "cuThreadExchangeStreamCaptureMode"),
    *("cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuStreamIsCapturing"),
    *("cuGraphInstantiateWithFlags", "cuGraphLaunch", "cuGraphDestroy", "cuGraphExecDestroy"),
)
"""What native code calls, as ``GraphFunctions`` of graphs.h has them."""
_SIGNATURES = {**dict.fromkeys(GRAPHS, ""), **_SIGNATURES}
_OPTIONAL = {"cuKernelGetParamInfo": "pzZZ"}  # since 12.4


class Driver:
    """The driver's functions as attributes; each returns a CUresult as an int."""

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise RuntimeError(f"the CUDA driver cannot be loaded: {error}") from error
        for name, letters in {**_SIGNATURES, **_OPTIONAL}.items():
            if hasattr(library, name):
                function = getattr(library, name)
                function.argtypes = [_KINDS[letter] for letter in letters]
                function.restype = c_int
                setattr(self, name, function)
            elif name in _SIGNATURES:
                raise RuntimeError(
                    f"NVIDIA's driver is older than CUDA 12.0 and must be updated: it has no {name}"
                )
        self.has_parameter_info = hasattr(self, "cuKernelGetParamInfo")

    def __getattr__(self, name: str) -> ctypes._FuncPointer:
        raise AttributeError(f"the CUDA driver has no {name}")


@lru_cache(maxsize=1)
def driver() -> Driver:
    """The CUDA driver of this process; raises `RuntimeError` where it is missing or too old."""
    return Driver()


def message(status: int) -> str:
    """Name and explanation of a CUresult, as the driver words them."""
    words = []
    for function in (driver().cuGetErrorName, driver().cuGetErrorString):
        text = c_char_p()
        if function(status, byref(text)) == 0 and text.value:
            words.append(text.value.decode())
    return ": ".join(words) or f"CUDA error {status}"


def check(status: int, doing: str) -> None:
    """Raise `RuntimeError` that says what failed, unless `status` is success."""
    if status != 0:
        raise RuntimeError(f"{doing} failed with {message(status)}")


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Let this thread wait for events while a CUDA graph is captured, as no capture is part of it.

    Else the driver forbids it, since it could wait for the capture itself.
    """
    mode = c_int(_CAPTURE_MODE_RELAXED)
    exchange = driver().cuThreadExchangeStreamCaptureMode
    check(exchange(byref(mode)), "relaxing the capture mode")
    try:
        yield
    finally:
        check(exchange(byref(mode)), "setting the capture mode back")


def make_primary_context_current(device: int) -> None:
    """Make PyTorch's context of `device` current in this thread.

    A new thread has none until its first call into the CUDA runtime, and a launch through the
    driver is not one.
    """
    check(
        driver().cuCtxSetCurrent(_primary_context(device)),
        f"making the CUDA context of GPU {device} current",
    )


@cache
def _primary_context(device: int) -> c_void_p:
    torch.cuda.init()
    api, number, context = driver(), c_int(), c_void_p()
    check(api.cuDeviceGet(byref(number), device), f"finding GPU {device}")
    check(
        api.cuDevicePrimaryCtxRetain(byref(context), number),
        f"getting the CUDA context of GPU {device}",
    )
    return context
