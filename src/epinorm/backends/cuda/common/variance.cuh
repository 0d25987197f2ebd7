// The biased variance of kCount values by the corrected two-pass algorithm (Chan, Golub and LeVeque,
// 1983): from the sums of squared and of plain distances to a mean that rounding has touched.
#pragma once
#include "common/chain.cuh"

// The mean of the values' distance to their computed mean is what rounding left out of it: far below
// an ulp of the values' spread, unless they lie far from zero.
template <int kCount, typename T>
EPINORM_FUNCTION T variance(T squares, T distances, T shift) {
  const T excess = distances * shift;
  if (excess < squares) return (squares - excess) * (T(1) / T(kCount));
  return squares < T(EPINORM_INFINITY) ? T(0) : squares;  // and NaN stays NaN
}
