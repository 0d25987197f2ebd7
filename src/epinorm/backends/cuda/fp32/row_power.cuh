// The powers of two with which rows of dz's planes count in dW: the scale of the row times that of
// x's. Exponents, since they leave fp32's range.
//
// The prelude defines kPlanes.
#pragma once
#include "fp32/planes_prelude.cuh"

constexpr int kNoPower = -(1 << 20);  // of a row that counts nothing

// The exponent of a power of two in fp32's normal range.
__device__ __forceinline__ int power_of(float power_of_two) {
  return static_cast<int>(__float_as_uint(power_of_two) >> 23) - 127;
}

// common: what rows take over where their values then fit, row 0's power; the same in all blocks.
struct PowerRange {
  int least = -kNoPower, most = kNoPower, common = kNoPower;

  // That rows are brought to, most of which have it already: the largest, but with two planes, which hold
  // values twice as large, rows that have one more go up by it.
  __device__ __forceinline__ int target() const {
    return kPlanes == 2 && most <= common + 1 ? common : most;
  }

  __device__ __forceinline__ void add(int power) {
    if (power == kNoPower) return;
    least = min(least, power);
    most = max(most, power);
  }
};
