// The second step of batch_statistics: parts (count, 2, N) of means and sums of squares, joined in a
// fixed order -> mean, rstd, and statistics: the mean, and the variance with M - 1 in its denominator.
#include "common/dependent.cuh"
#include "norm/batch_layout.cuh"

constexpr int kJoinColumns = 32;  // a block's
constexpr int kJoinShares = 16;   // of the parts, joined side by side

// How many rows a block of batch_statistics has: of `passes` over kStatisticsRows each, the last one
// less what is beyond the first row.
EPINORM_FUNCTION i64 rows_of(int part, int parts, i64 rows) {
  const i64 passes = (rows + kStatisticsRows - 1) / kStatisticsRows;
  const i64 own = (passes - part + parts - 1) / parts;
  const bool has_last = (passes - 1) % parts == part;
  return own * kStatisticsRows - (has_last ? passes * kStatisticsRows - rows : 0);
}

EPINORM_FUNCTION void join(Moments& moments, i64& count, const Moments& other, i64 more) {
  if (more == 0) return;
  const T share = T(more) / T(count + more);
  moments.join(other, share, T(count) * share);
  count += more;
}

extern "C" __global__ void __launch_bounds__(kJoinColumns * kJoinShares)
batch_join(const T* __restrict__ partial, int parts, i64 rows, i64 width, T* __restrict__ mean,
           T* __restrict__ rstd, T* __restrict__ statistics) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  __shared__ Moments shared[kJoinShares][kJoinColumns];
  __shared__ i64 counts[kJoinShares];
  const int x = threadIdx.x % kJoinColumns, own = threadIdx.x / kJoinColumns;
  const i64 column = i64(blockIdx.x) * kJoinColumns + x;
  const bool inside = column < width;
  Moments moments = {};
  i64 count = 0;
#pragma unroll 4
  for (int part = own; part < parts; part += kJoinShares) {
    const T* const from = partial + 2 * part * width + column;
    const Moments other = {inside ? from[0] : T(0), inside ? from[width] : T(0)};
    join(moments, count, other, rows_of(part, parts, rows));
  }
  shared[own][x] = moments;
  if (x == 0) counts[own] = count;
  __syncthreads();
  if (own != 0 || !inside) return;
#pragma unroll
  for (int share = 1; share < kJoinShares; ++share) join(moments, count, shared[share][x], counts[share]);
  mean[column] = moments.mean;
  rstd[column] = reciprocal_sqrt(moments.squares / T(rows) + chain::epsilon<T>());
  statistics[column] = moments.mean;
  statistics[width + column] = moments.squares / T(rows - 1);
}
