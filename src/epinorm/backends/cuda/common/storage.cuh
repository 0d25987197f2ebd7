// The element types of tensors, and their conversion to and from the fp32 that is computed in.
// One PTX cvt each, so that no header is needed.
#pragma once
#include "common/integers.cuh"

struct Float32 {
  using Storage = float;
  static constexpr bool kRangeOfFloat = true;
  static __device__ __forceinline__ float load(float value) { return value; }
  static __device__ __forceinline__ float store(float value) { return value; }
};

struct Float16 {
  using Storage = u16;
  static constexpr bool kRangeOfFloat = false;
  static __device__ __forceinline__ float load(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }
  static __device__ __forceinline__ u16 store(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
  }
  static __device__ __forceinline__ u32 store_pair(float first, float second) {
    u32 bits;
    asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(bits) : "f"(first), "f"(second));
    return bits;
  }
  static __device__ __forceinline__ float2 load_pair(u32 bits) {
    return {load(static_cast<u16>(bits)), load(static_cast<u16>(bits >> 16))};
  }
};

struct Bfloat16 {
  using Storage = u16;
  static constexpr bool kRangeOfFloat = true;
  static __device__ __forceinline__ float load(u16 bits) {
    return __uint_as_float(static_cast<u32>(bits) << 16);
  }
  static __device__ __forceinline__ u16 store(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
  }
  static __device__ __forceinline__ u32 store_pair(float first, float second) {
    u32 bits;
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(bits) : "f"(first), "f"(second));
    return bits;
  }
  static __device__ __forceinline__ float2 load_pair(u32 bits) {
    return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
  }
};

// A value as it lies in memory, and its conversion later: between the two nothing waits for a load.
__device__ __forceinline__ u32 raw_bits(float value) { return __float_as_uint(value); }
__device__ __forceinline__ u32 raw_bits(u16 value) { return value; }

template <class Type>
__device__ __forceinline__ float from_raw_bits(u32 bits) {
  if constexpr (sizeof(typename Type::Storage) == 4)
    return Type::load(__uint_as_float(bits));
  else
    return Type::load(static_cast<u16>(bits));
}
