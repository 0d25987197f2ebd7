// fp32 as the tensor cores multiply it: 10 bits behind the point. They cut off what is below, where PyTorch's
// products round, which costs 13 % more error; so operands are rounded first.
#pragma once
#include "common/integers.cuh"

// Ties away from zero; Inf and NaN stay what they are, but a NaN whose payload is in the bits that are
// cut off alone, as no arithmetic makes it, becomes Inf.
__device__ __forceinline__ u32 rounded_tf32(u32 bits) {
  u32 rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(bits)));
  return rounded;
}

__device__ __forceinline__ uint4 rounded_tf32(const uint4& unit) {
  return {rounded_tf32(unit.x), rounded_tf32(unit.y), rounded_tf32(unit.z), rounded_tf32(unit.w)};
}
