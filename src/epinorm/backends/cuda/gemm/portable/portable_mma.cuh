// Tensor cores since sm_80: cp.async, ldmatrix and mma.sync, one PTX instruction a function.
// PTX ISA, "Asynchronous copy" and "Warp Level Matrix Instructions".
#pragma once
#include "gemm/portable/prelude.cuh"
#include "common/async_copy.cuh"
#include "common/integers.cuh"

// cp.async of 16 bytes past L1, or of zeros. By a predicate: a number of bytes that is not known to the
// compiler costs six instructions.
__device__ __forceinline__ void copy_unit(u32 to, const void* from, bool inside) {
  asm volatile(
      "{ .reg .pred outside; setp.eq.b32 outside, %2, 0;"
      " cp.async.cg.shared.global.L2::128B [%0], [%1], 16, outside; }" ::"r"(to),
      "l"(from), "r"(static_cast<int>(inside))
      : "memory");
}

// cp.async of 4 bytes, or of zeros.
__device__ __forceinline__ void copy_word(u32 to, const void* from, bool inside) {
  asm volatile(
      "{ .reg .pred outside; setp.eq.b32 outside, %2, 0;"
      " cp.async.ca.shared.global.L2::128B [%0], [%1], 4, outside; }" ::"r"(to),
      "l"(from), "r"(static_cast<int>(inside))
      : "memory");
}

// ldmatrix: two or four 8 x 8 matrices of 16-bit numbers, each lane a pair of neighbours in a row, or with
// kTransposed in a column. Lane l gives the address of row l % 8 of matrix l / 8.
template <bool kTransposed>
__device__ __forceinline__ void load_matrices(u32 (&to)[4], u32 address) {
  if (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}
template <bool kTransposed>
__device__ __forceinline__ void load_two_matrices(u32 (&to)[4], u32 address) {
  if (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1])
                 : "r"(address)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1])
                 : "r"(address)
                 : "memory");
}

// mma.sync: d = a b + c for 16 rows, 8 columns and 16 along the summed index; four numbers of d and c.
__device__ __forceinline__ void multiply(float* d, const u32 (&a)[4], u32 b0, u32 b1,
                                         const float* c) {
  if (kBfloat16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7},"
        " {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),
          "f"(c[2]), "f"(c[3]));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7},"
        " {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),
          "f"(c[2]), "f"(c[3]));
}
