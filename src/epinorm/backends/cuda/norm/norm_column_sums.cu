// The second step of the sums over rows: partial (parts, sums, N), one row a block of norm_backward,
// added up in a fixed order into each gradient's own dtype.
#include "common/dependent.cuh"
#include "norm/norm_types.cuh"

constexpr int kColumns = 32;  // a block's
constexpr int kShares = 16;   // of the parts, added up side by side

extern "C" __global__ void __launch_bounds__(kColumns * kShares)
norm_column_sums(const T* __restrict__ partial, int parts, i64 width EPINORM_SUM_PARAMETERS) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  __shared__ T shared[kShares][kColumns];
  const int x = threadIdx.x % kColumns, share = threadIdx.x / kColumns;
  const i64 column = i64(blockIdx.x) * kColumns + x;
  const bool inside = column < width;

  T total = T(0);
#pragma unroll 4
  for (int part = share; part < parts; part += kShares)
    if (inside) total += partial[(i64(part) * gridDim.y + blockIdx.y) * width + column];
  shared[share][x] = total;
  __syncthreads();
#pragma unroll
  for (int half = kShares / 2; half > 0; half /= 2) {
    if (share < half) shared[share][x] += shared[share + half][x];
    __syncthreads();
  }
  if (share > 0 || !inside) return;
  const T sum = shared[0][x];
  switch (blockIdx.y) {
    EPINORM_SUM_STORES
  }
}
