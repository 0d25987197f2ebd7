"""A CUDA text as it stands, run on the host: each thread of a block is one of the CPU's.

For kernels of plain C++: barriers, a warp's largest and roundings to bf16 are there, other
functions of warps and inline PTX are not (what has them compiles, and must not be called). Slow:
small sizes alone.
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
_TO_BF16 = 'asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));', "y.bits = nearest_bf16(x);"
# Few of the standard's headers: those with threads, barriers and vectors take four times as long as
# the rest of a kernel.
_HEAD = r"""
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <pthread.h>
using std::fabs;
using std::max;
using std::min;
struct Dim { int x = 0, y = 0, z = 0; };
static thread_local Dim threadIdx, blockIdx;
static Dim gridDim;
static pthread_barrier_t of_block, of_warps[32], between_blocks;
static unsigned lanes[32][32];
#define __syncthreads() pthread_barrier_wait(&of_block)
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
inline unsigned nearest_bf16(float f) {
  const unsigned u = same_bits<unsigned>(f);
  return f != f ? 0x7fffu : u + 0x7fffu + (u >> 16 & 1u) >> 16;
}
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
  pthread_barrier_wait(&of_warps[warp]);
  unsigned most = 0;
  for (unsigned each : lanes[warp]) most = max(most, each);
  pthread_barrier_wait(&of_warps[warp]);
  return most;
}
"""
_RUN = """
static void** a;
static void* all_blocks(void* thread) {{
  for (int block = 0; block < gridDim.x * gridDim.y; ++block) {{
    threadIdx = {{int(intptr_t(thread)), 0, 0}};
    blockIdx = {{block % gridDim.x, block / gridDim.x, 0}};
    {call};
    pthread_barrier_wait(&between_blocks);
  }}
  return nullptr;
}}
extern "C" __attribute__((visibility("default"))) void run(int x, int y, int threads, void** of) {{
  gridDim = {{x, y, 1}};
  a = of;
  pthread_barrier_init(&of_block, nullptr, threads);
  pthread_barrier_init(&between_blocks, nullptr, threads);
  for (int w = 0; w < threads / 32; ++w) pthread_barrier_init(&of_warps[w], nullptr, 32);
  pthread_t every[1024];
  for (intptr_t t = 0; t < threads; ++t)
    if (pthread_create(&every[t], nullptr, all_blocks, (void*)t)) abort();
  for (int t = 0; t < threads; ++t) pthread_join(every[t], nullptr);
  pthread_barrier_destroy(&of_block);
  pthread_barrier_destroy(&between_blocks);
  for (int w = 0; w < threads / 32; ++w) pthread_barrier_destroy(&of_warps[w]);
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
        kernel = _PTX.sub(";", self.source.text.replace(*_TO_BF16))
        text = _HEAD + kernel + _RUN.format(call=call)
        name = self.folder / hashlib.sha256(text.encode()).hexdigest()[:16]
        made, source = name.with_suffix(".so"), name.with_suffix(".cpp")
        if not made.exists():
            source.write_text(text)
            subprocess.run(["g++", *_FLAGS, str(source), "-o", str(made)], check=True)
        return ctypes.CDLL(str(made))
