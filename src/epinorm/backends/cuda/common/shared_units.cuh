// Shared memory: addresses, 16-byte units and single floats.
#pragma once
#include "common/integers.cuh"

constexpr int kUnitBytes = 16;

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

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

// st.shared.f32
__device__ __forceinline__ void store_shared(u32 address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

// ld.shared.f32
__device__ __forceinline__ float load_shared(u32 address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

// ld.shared.v2
__device__ __forceinline__ float2 load_pair(u32 address) {
  float2 pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(pair.x), "=f"(pair.y)
               : "r"(address)
               : "memory");
  return pair;
}
