// Parts (count, 2, N) of means and sums of squares, of batch_statistics or of the product's own epilogue,
// joined in a fixed order -> mean, rstd, and statistics: the mean, and the variance with M - 1 in its
// denominator.
//
// A block has kJoinColumns columns.
//
// kMomentRows: 0, or the rows of a part of the product's (gemm/column_moments.cuh), which are of z. Where
// its mean is NaN they are found again: the range guard marks the parts so that it changed.
#include "common/dependent.cuh"
#include "norm/batch_layout.cuh"

constexpr int kJoinThreads = 512;
constexpr int kJoinShares = kJoinThreads / kJoinColumns;  // of the parts, joined side by side
constexpr int kJoinAhead = sizeof(T) == 8 ? 4 : 8;  // read before they are joined

// How many rows a part has: of `passes` over kStatisticsRows each a block of batch_statistics has every
// parts-th, the last one less what is beyond the first row.
struct PartRows {
  int parts, passes_each, more_passes, last;  // the last pass' part
  i64 beyond, rows;

  EPINORM_FUNCTION PartRows(int parts, i64 rows) : parts(parts), rows(rows) {
    const i64 passes = (rows + kStatisticsRows - 1) / kStatisticsRows;
    passes_each = int(passes / parts);
    more_passes = int(passes - i64(passes_each) * parts);
    last = (more_passes > 0 ? more_passes : parts) - 1;
    beyond = passes * kStatisticsRows - rows;
  }
  EPINORM_FUNCTION i64 at(int part) const {
    if (part >= parts) return 0;
    if (kMomentRows > 0) return min(i64(kMomentRows), rows - i64(part) * kMomentRows);
    return i64(passes_each + (part < more_passes)) * kStatisticsRows - (part == last ? beyond : 0);
  }
};

// Of a column's rows from z on, `count` of them.
EPINORM_FUNCTION Moments moments_of(const Z* __restrict__ z, i64 stride, i64 count) {
  const T first = to<T>(*z);
  T sum = T(0);
#pragma unroll 16
  for (i64 row = 1; row < count; ++row) sum += to<T>(z[row * stride]) - first;
  Moments found = {first + sum / T(count), T(0)};
#pragma unroll 16
  for (i64 row = 0; row < count; ++row) {
    const T distance = to<T>(z[row * stride]) - found.mean;
    found.squares += distance * distance;
  }
  return found;
}

EPINORM_FUNCTION void join(Moments& moments, i64& count, const Moments& other, i64 more) {
  if (more == 0) return;
  const T share = T(more) / T(count + more);
  moments.join(other, share, T(count) * share);
  count += more;
}

extern "C" __global__ void __launch_bounds__(kJoinThreads)
batch_join(const T* __restrict__ partial, int parts, const Z* __restrict__ z, i64 z_stride,
           const Z* __restrict__ bias, i64 rows, i64 width, T* __restrict__ mean, T* __restrict__ rstd,
           T* __restrict__ statistics) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  __shared__ Moments shared[kJoinShares][kJoinColumns];
  __shared__ i64 counts[kJoinShares];
  const int x = threadIdx.x % kJoinColumns, own = threadIdx.x / kJoinColumns;
  const i64 column = i64(blockIdx.x) * kJoinColumns + x;
  const bool inside = column < width;
  const PartRows part_rows(parts, rows);
  Moments moments = {};
  i64 count = 0;
  for (int first = own; first < parts; first += kJoinAhead * kJoinShares) {
    Moments others[kJoinAhead];
    bool marked = false;
#pragma unroll
    for (int i = 0; i < kJoinAhead; ++i) {
      const int part = first + i * kJoinShares;
      const T* const from = partial + 2 * part * width + column;
      const bool there = inside && part < parts;
      others[i] = {there ? from[0] : T(0), there ? from[width] : T(0)};
      marked |= others[i].mean != others[i].mean;
    }
    if constexpr (kMomentRows > 0) {
      if (marked) {
        const int end = min(first + kJoinAhead * kJoinShares, parts);
#pragma unroll 1
        for (int part = first; part < end; part += kJoinShares) {
          const T* const from = partial + 2 * part * width + column;
          Moments other = {from[0], from[width]};
          if (other.mean != other.mean)
            other = moments_of(z + i64(part) * kMomentRows * z_stride + column, z_stride, part_rows.at(part));
          join(moments, count, other, part_rows.at(part));
        }
        continue;
      }
    }
#pragma unroll
    for (int i = 0; i < kJoinAhead; ++i) join(moments, count, others[i], part_rows.at(first + i * kJoinShares));
  }
  // Each time the second half into the first one.
  for (int half = kJoinShares / 2; half > 0; half /= 2) {
    if (own >= half && own < 2 * half) {
      shared[own][x] = moments;
      if (x == 0) counts[own] = count;
    }
    __syncthreads();
    if (own < half) join(moments, count, shared[own + half][x], counts[own + half]);
  }
  if (own != 0 || !inside) return;
  if (kAddsBias) moments.mean += to<T>(bias[column]);
  mean[column] = moments.mean;
  rstd[column] = reciprocal_sqrt(moments.squares / T(rows) + chain::epsilon<T>());
  statistics[column] = moments.mean;
  statistics[width + column] = moments.squares / T(rows - 1);
}
