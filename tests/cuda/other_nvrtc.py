"""Compile standard input by the NVRTC at argv[1] for argv[2]; print its verdict and its log.

A process of its own: cuda-bindings takes whichever NVRTC its process has loaded already.
"""

import ctypes
import sys


def main(path: str, arch: str) -> None:
    """The verdict's first line is NVRTC's number, 0 for none."""
    nvrtc, text = ctypes.CDLL(path), sys.stdin.read().encode()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    assert not nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, b"k.cu", 0, None, None)
    options = f"--gpu-architecture={arch} -std=c++17 --ptxas-options=-v".encode().split()
    verdict = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * 3)(*options))
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    print(verdict, log.value.decode(errors="replace"), sep="\n")


main(*sys.argv[1:])
