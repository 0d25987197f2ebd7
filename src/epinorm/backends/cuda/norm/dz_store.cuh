// How the backward kernel writes dz, the gradient of the linear's output.
#pragma once
#include "common/vector.cuh"

// dx: kCount neighbouring values from `column` on, of the row that starts at `row_offset`.
template <int kCount, typename S, typename T>
EPINORM_FUNCTION void store_dz(S* dz, long long row_offset, int column, const T (&dx)[kCount]) {
  Vector<S, kCount> packed;
  packed.set(dx);
  packed.store(dz + row_offset + column);
}
