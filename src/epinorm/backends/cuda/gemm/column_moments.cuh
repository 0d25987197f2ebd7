// Of each column of 64 rows of y, as they are stored: the mean, and the sum of squares around it, for a
// BatchNorm behind the product, which then need not read y for its statistics (norm/batch_moments.cu).
#pragma once
#include "gemm/row_store.cuh"

// Sums whose terms wait for each other no longer than they must: all of a block's warps are here at once.
template <int kCount, class Term>
__device__ __forceinline__ float short_sum(Term term) {
  float sums[4] = {};
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i % 4] += term(i);
  return sums[0] + sums[1] + (sums[2] + sums[3]);
}

// What a warp finds of its 16 rows while it stores them: each lane has a column of each part. An
// argument of RowStore::store.
template <class Store>
struct StoredMoments {
  static_assert(Store::kSize == 4 && Store::kParts * Store::kPartColumns * 8 <= kStoreBufferBytes,
                "both fit the warp's buffer");
  float mean[Store::kParts], squares[Store::kParts];
  int rows;  // that there are, of 16

  __device__ __forceinline__ StoredMoments(int row, int m) : rows(min(max(m - row, 0), kStoreRows)) {}

  __device__ __forceinline__ void operator()(int part, u32 buffer) {
    const int lane = lane_here() % Store::kPartColumns;
    const u32 unit = lane / Store::kUnitColumns, within = lane % Store::kUnitColumns * 4;
    const auto at = [&](int row) {
      return load_shared(buffer + swizzled<Store::kWidth, 4>(row, unit) + within);
    };
    // Around the first of them: of equal values the mean is that value, and nothing is left.
    if (rows == kStoreRows) {
      float v[kStoreRows];
#pragma unroll
      for (int row = 0; row < kStoreRows; ++row) v[row] = at(row);
      const float sum = short_sum<kStoreRows>([&](int row) { return v[row] - v[0]; });
      const float of_all = mean[part] = v[0] + sum * (1.0f / kStoreRows);
      squares[part] = short_sum<kStoreRows>([&](int row) {
        const float distance = v[row] - of_all;
        return distance * distance;
      });
      return;
    }
    const float first = at(0);
    float sum = 0.0f, around = 0.0f;
#pragma unroll 1
    for (int row = 1; row < rows; ++row) sum += at(row) - first;
    const float of_all = first + sum / max(rows, 1);
#pragma unroll 1
    for (int row = 0; row < rows; ++row) around += (at(row) - of_all) * (at(row) - of_all);
    mean[part] = of_all, squares[part] = around;
  }

  // Those of the warpgroup's 64 rows to moments (rows of 64, 2, n), by way of its warps' buffers.
  // barrier: named, of the warpgroup's threads.
  __device__ __forceinline__ void store(float* moments, u32 buffer, int row, int column, int m, int n,
                                        int barrier) const {
    const int lane = lane_here(), warp = row % kProductM / kStoreRows;
    const int first_row = row - warp * kStoreRows;
    if (lane < Store::kPartColumns)
#pragma unroll
      for (int part = 0; part < Store::kParts; ++part)
        store_pair(buffer + (part * Store::kPartColumns + lane) * 8, mean[part], squares[part]);
    named_barrier_sync(barrier, kWarpgroupThreads);
    const u32 buffers = buffer - warp * kStoreBufferBytes;
    float* const to = moments + static_cast<i64>(first_row / kProductM) * 2 * n + column;
    for (int at = warp * 32 + lane; at < Store::kParts * Store::kPartColumns; at += kWarpgroupThreads) {
      float2 pairs[4];  // of its warps, the last ones of which may have fewer rows
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = load_pair(buffers + i * kStoreBufferBytes + at * 8);
      const auto weight = [&](int i) {
        return static_cast<float>(min(max(m - first_row - i * kStoreRows, 0), kStoreRows));
      };
      const float sum = short_sum<4>([&](int i) { return (pairs[i].x - pairs[0].x) * weight(i); });
      const float of_all = pairs[0].x + sum / min(m - first_row, kProductM);
      const float squares_of_all = short_sum<4>([&](int i) {
        const float distance = pairs[i].x - of_all;
        return pairs[i].y + distance * distance * weight(i);
      });
      if (column + at >= n || first_row >= m) continue;
      to[at] = of_all;
      to[n + at] = squares_of_all;
    }
    named_barrier_sync(barrier, kWarpgroupThreads);  // the buffers have been read
  }
};
