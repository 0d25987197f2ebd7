// The second step of the sums over rows: partial (parts, kSums, N), one row a block of norm_backward,
// added up in a fixed order into each gradient's own dtype. With kColumnLargest also the largest
// magnitudes of columns, (parts, N) bits, joined into the first of these rows.
#include "common/dependent.cuh"
#include "norm/norm_types.cuh"

constexpr int kColumns = 32;  // a block's
constexpr int kShares = 32;   // of the parts, added up side by side

// Of a column, for the threads of the first share. from: its parts, `stride` apart, null beyond the last column.
template <typename Value, typename Join>
EPINORM_FUNCTION Value joined(const Value* from, i64 stride, int parts, Join join) {
  __shared__ Value shared[kShares][kColumns];
  const int x = threadIdx.x % kColumns, share = threadIdx.x / kColumns;
  Value total = Value(0);
#pragma unroll 8
  for (int part = share; part < parts; part += kShares)
    if (from != nullptr) total = join(total, from[part * stride]);
  shared[share][x] = total;
  __syncthreads();
#pragma unroll
  for (int half = kShares / 2; half > 0; half /= 2) {
    if (share < half) shared[share][x] = join(shared[share][x], shared[share + half][x]);
    __syncthreads();
  }
  return shared[0][x];
}

extern "C" __global__ void __launch_bounds__(kColumns * kShares)
norm_column_sums(const T* __restrict__ partial, unsigned* largest, int parts,
                 i64 width EPINORM_SUM_PARAMETERS) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const i64 column = i64(blockIdx.x) * kColumns + threadIdx.x % kColumns;
  const bool inside = column < width, writes = inside && threadIdx.x < kColumns;
  if (kColumnLargest && blockIdx.y == kSums) {
    unsigned* const from = inside ? largest + column : nullptr;
    const unsigned most =
        joined(from, width, parts, [](unsigned a, unsigned b) { return max(a, b); });
    if (writes) *from = most;
    return;
  }
  const T* const from = inside ? partial + blockIdx.y * width + column : nullptr;
  const T sum = joined(from, kSums * width, parts, [](T a, T b) { return a + b; });
  if (!writes) return;
  switch (blockIdx.y) {
    EPINORM_SUM_STORES
  }
}
