// The powers of two with which rows of dz's planes count in dW: the scale of the row times that of
// x's. Exponents, since they leave fp32's range.
#pragma once

constexpr int kNoPower = -(1 << 20);  // of a row that counts nothing

// The exponent of a power of two in fp32's normal range.
__device__ __forceinline__ int power_of(float power_of_two) {
  return static_cast<int>(__float_as_uint(power_of_two) >> 23) - 127;
}

struct PowerRange {
  int least = -kNoPower, most = kNoPower;

  __device__ __forceinline__ void add(int power) {
    if (power == kNoPower) return;
    least = min(least, power);
    most = max(most, power);
  }
};
