// One fp32 value as fp16 planes: v = (hi + lo 2^-11) / factor. What split_rows.cuh does to x and W,
// split_gradient.cu and norm_backward_planes.cu do to dz.
#pragma once
#include "fp32/planes_prelude.cuh"
#include "common/empty_rows.cuh"
#include "common/storage.cuh"

constexpr float kPlaneLowFactor = 2048.0f;  // 2^11
constexpr float kPlaneLargestRest = 1.0f / 256;  // of a value, in lo: lo lo is left out of products
constexpr int kPlaneTopExponent = 14;       // of the largest magnitude that shares a scale, scaled
constexpr int kPlaneLargestExponent = 60;   // of what is not flagged, unscaled

__device__ __forceinline__ float plane_power_of_two(int exponent) {
  return __int_as_float((exponent + 127) << 23);
}

// The power of two that brings `largest` (the bits of a magnitude) into [2^14, 2^15), as an exponent;
// 0, and in_range false, where that is not possible.
__device__ __forceinline__ int plane_shift(u32 largest, bool& in_range) {
  const int exponent = static_cast<int>(largest >> 23) - 127;
  const bool fits = exponent >= -kPlaneLargestExponent && exponent <= kPlaneLargestExponent;
  in_range = fits || largest == 0;
  return fits ? kPlaneTopExponent - exponent : 0;
}

// The same for a row of x or of W. Rows that are zero or out of range get 2^-24, which no other row gets
// here (one with its largest in [2^-10, 2^-9) is brought into [2^13, 2^14) instead):
// norm_backward_planes.cu knows such rows of x by it. Of W it only has to be small: dz takes the scale
// over, and a zero row of W must not make the largest of dz's rows. room: powers of two that are left above.
__device__ __forceinline__ int row_shift(u32 largest, bool& in_range, int room = 0) {
  const int shift = plane_shift(largest, in_range) - room;
  if (!in_range || largest == 0) return kEmptyRowShift;
  return shift == kEmptyRowShift ? kEmptyRowShift - 1 : shift;
}

struct PlaneValue {
  float value, scaled, rest;  // rest: of scaled, without hi
  u16 hi, lo;

  __device__ __forceinline__ PlaneValue(float value, float factor) : value(value), scaled(value * factor) {
    hi = Float16::store(scaled);
    rest = scaled - Float16::load(hi);
    lo = Float16::store(rest * kPlaneLowFactor);
  }

  // Whether the planes hold the value to `tolerance` of itself.
  __device__ __forceinline__ bool held(float tolerance) const {
    bool by_both = true;
    float lost = rest;
    if (kPlanes == 2) {
      // What lo has most of is held, and multiplied by the other factor's hi alone.
      by_both = fabsf(rest) < fabsf(scaled) * kPlaneLargestRest;
      lost -= Float16::load(lo) * (1.0f / kPlaneLowFactor);
    }
    // Less, not at most: scaled down, a value below the smallest fp32 is lost without a rest.
    return (value == 0.0f) | (by_both & (fabsf(lost) < fabsf(scaled) * tolerance));
  }
};
