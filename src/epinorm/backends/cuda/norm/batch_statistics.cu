// z (the linear's output without its bias) -> of each column of pre(z + bias) a block's mean and sum of
// squares around it, (gridDim.y, 2, N), which batch_join adds up. One read of z, from the last row,
// which the product wrote last. No atomics: the same bits at each run.
#include "common/dependent.cuh"
#include "norm/batch_layout.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocksPerSm)
batch_statistics(const Z* z, i64 z_stride, const Z* __restrict__ bias, T* __restrict__ partial, i64 rows,
                 int groups EPINORM_CHAIN_PARAMETERS) {
  wait_for_previous_kernel();
  const Sources from = {bias, nullptr, nullptr, EPINORM_OPERAND_POINTERS, EPINORM_OPERAND_STRIDES,
                        EPINORM_CONSTANTS,
                        chain::drops_of<T>(EPINORM_CONSTANTS, EPINORM_OPERAND_POINTERS)};
  const Strip at(groups);
  const ChannelStore store(from, at);
  const Channels channels = store.get(from, at, 0);
  Moments moments[kVector] = {};
  i64 count = 0;  // the same in all lanes of a warp
  for (i64 first = at.begin(); first < rows; first += at.step()) {
    const auto row = [&](int u) { return rows - 1 - (first + u * kWarpsY); };
    const Rows read(at, z, z_stride, from, rows, row);
    int there = 1;
#pragma unroll
    for (int u = 1; u < kRows; ++u) there += row(u) >= 0;
    const T inverse = T(1) / T(there), share = T(there) / T(count + there), weight = T(count) * share;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      T v[kRows], sum = T(0);
      // Around the first of them: of equal values the mean is that value, and nothing is left.
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        v[u] = read.value(from, channels, u, j);
        if (u > 0 && row(u) >= 0) sum += v[u] - v[0];
      }
      Moments these = {v[0] + sum * inverse, T(0)};
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        const T distance = v[u] - these.mean;
        if (row(u) >= 0) these.squares += distance * distance;
      }
      moments[j].join(these, share, weight);
    }
    count += there;
  }
  let_next_kernel_start();

  // Warps below each other, the first one first.
  __shared__ Moments shared[kWarpsY][kVector][kStripLanes];
  __shared__ i64 counts[kWarpsY];
  const int lane = threadIdx.x % kStripLanes;
#pragma unroll
  for (int j = 0; j < kVector; ++j) shared[at.warp][j][lane] = moments[j];
  if (lane == 0) counts[at.warp] = count;
  __syncthreads();
  if (at.warp != 0 || !at.inside(0)) return;
  for (int warp = 1; warp < kWarpsY; ++warp) {
    const i64 more = counts[warp];
    if (more == 0) break;
    const T share = T(more) / T(count + more), weight = T(count) * share;
#pragma unroll
    for (int j = 0; j < kVector; ++j) moments[j].join(shared[warp][j][lane], share, weight);
    count += more;
  }
  T* const to = partial + 2 * i64(blockIdx.y) * at.columns + at.first;
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    to[j] = moments[j].mean;
    to[at.columns + j] = moments[j].squares;
  }
}
