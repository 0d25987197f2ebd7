// 16-byte units of shared memory.
#pragma once
#include "integers.cuh"

constexpr int kUnitBytes = 16;

// ld.shared.v4
__device__ __forceinline__ uint4 load_unit(u32 address) {
  uint4 unit;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(unit.x), "=r"(unit.y), "=r"(unit.z), "=r"(unit.w)
               : "r"(address)
               : "memory");
  return unit;
}

// st.shared.v4
__device__ __forceinline__ void store_unit(u32 address, const uint4& unit) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(unit.x), "r"(unit.y),
               "r"(unit.z), "r"(unit.w)
               : "memory");
}
