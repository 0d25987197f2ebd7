"""A CUDA text as it stands, run on the host: each thread of a block is one of the CPU's.

For kernels of plain C++: barriers and a warp's largest are there, other functions of warps and
inline PTX are not (what has them compiles, and must not be called). Slow: small sizes alone.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

CTYPES = {
    "p": ("void*", ctypes.c_void_p),
    "l": ("long long", ctypes.c_longlong),
    "i": ("int", ctypes.c_int),
    "f": ("float", ctypes.c_float),
    "d": ("double", ctypes.c_double),
}
_PTX = re.compile(
    r'asm(\s+volatile)?\s*\((?:[^()"]|"[^"]*"|\((?:[^()"]|"[^"]*"|\([^()]*\))*\))*\)\s*;'
)
_HEAD = r"""
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>
using std::fabs;
using std::max;
using std::min;
struct Dim { int x = 0, y = 0, z = 0; };
static thread_local Dim threadIdx, blockIdx;
static Dim gridDim;
static std::barrier<>* of_block;
static std::vector<std::unique_ptr<std::barrier<>>> of_warps;
static unsigned lanes[64][32];
#define __syncthreads() of_block->arrive_and_wait()
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define alignas(x)
struct uint4 { unsigned x, y, z, w; };
struct uint2 { unsigned x, y; };
template <class T> T __ldg(const T* p) { return *p; }
template <class To, class From> To same_bits(From from) {
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}
inline float __uint_as_float(unsigned u) { return same_bits<float>(u); }
inline unsigned __float_as_uint(float f) { return same_bits<unsigned>(f); }
inline float __fmul_rn(float a, float b) { volatile float c = a * b; return c; }
inline double __dmul_rn(double a, double b) { volatile double c = a * b; return c; }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return uint64_t(a) * b >> 32; }
inline unsigned __reduce_or_sync(unsigned, unsigned v) { return v; }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
template <class T> T __shfl_xor_sync(unsigned, T v, int, int = 32) { return v; }
inline unsigned __reduce_max_sync(unsigned, unsigned v) {
  const int warp = threadIdx.x / 32;
  lanes[warp][threadIdx.x % 32] = v;
  of_warps[warp]->arrive_and_wait();
  const unsigned most = *std::max_element(lanes[warp], lanes[warp] + 32);
  of_warps[warp]->arrive_and_wait();
  return most;
}
"""
_RUN = """
extern "C" __attribute__((visibility("default"))) void run(int x, int y, int threads, void** a) {{
  gridDim = {{x, y, 1}};
  for (int block = 0; block < x * y; ++block) {{
    std::barrier<> all(threads);
    of_block = &all;
    of_warps.clear();
    for (int w = 0; w < threads / 32; ++w) of_warps.emplace_back(new std::barrier<>(32));
    std::vector<std::thread> every;
    for (int t = 0; t < threads; ++t)
      every.emplace_back([=] {{
        threadIdx = {{t, 0, 0}};
        blockIdx = {{block % x, block / x, 0}};
        {call};
      }});
    for (std::thread& each : every) each.join();
  }}
}}
"""
_FLAGS = "-std=c++20 -O0 -w -fpermissive -shared -fPIC -pthread -fno-strict-aliasing".split()
# Statics of inline functions, which stand for shared memory, are each kernel's own.
_FLAGS += ["-fno-gnu-unique", "-fvisibility=hidden"]


class HostKernel:
    """What ``load`` gives for a source; made in ``folder``."""

    def __init__(self, source: Any, folder: Path) -> None:
        self.source, self.folder = source, folder

    def blocks_per_sm(self, *_: Any) -> int:
        return 1

    def prepare(self, signature: str, grid: Any, block: int, **_: Any) -> Callable[..., None]:
        """A function of the kernel's arguments that runs it."""
        run = self._built(signature).run
        x, y = (grid, 1) if isinstance(grid, int) else grid

        def launch(*values: Any) -> None:
            pairs = zip(signature, values, strict=True)
            held = [CTYPES[letter][1](value) for letter, value in pairs]
            run(x, y, block, (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held)))

        return launch

    def _built(self, signature: str) -> ctypes.CDLL:
        kinds = [CTYPES[letter][0] for letter in signature]
        given = ", ".join(f"*({kind}*)a[{i}]" for i, kind in enumerate(kinds))
        call = f"((void (*)({', '.join(kinds)})){self.source.entry})({given})"
        text = _HEAD + _PTX.sub(";", self.source.text) + _RUN.format(call=call)
        name = self.folder / hashlib.sha256(text.encode()).hexdigest()[:16]
        made, source = name.with_suffix(".so"), name.with_suffix(".cpp")
        if not made.exists():
            source.write_text(text)
            subprocess.run(["g++", *_FLAGS, str(source), "-o", str(made)], check=True)
        return ctypes.CDLL(str(made))
