// Rows of x and of W that are zero, or out of the range of planes, have planes of this scale, which no
// other row has (fp32/plane_value.cuh). What dz has beside one is zero in a product over it, or all of
// the product is computed again: it takes no part in the scales that dz is split by.
#pragma once

constexpr int kEmptyRowShift = 24;

__device__ __forceinline__ bool is_of_empty_row(float scale) {
  return scale == 1.0f / (1 << kEmptyRowShift);
}

__device__ __forceinline__ float scale_that_counts(float scale) {
  return is_of_empty_row(scale) ? 0.0f : scale;
}
