// Of each column of 64 rows of y, as they are stored: the mean, and the sum of squares around it, for a
// BatchNorm behind the product, which then need not read y for its statistics (norm/batch_moments.cu).
#pragma once
#include "gemm/row_store.cuh"

// Parts of (rows, columns) values joined by Chan, Golub and LeVeque's formula (norm/batch_layout.cuh).
struct RowMoments {
  float mean, squares;
  int count;

  __device__ __forceinline__ void join(float more_mean, float more_squares, int more) {
    if (more == 0) return;
    const float distance = more_mean - mean, share = __fdividef(more, count + more);
    mean += distance * share;
    squares += more_squares + distance * distance * (count * share);
    count += more;
  }
};

// What a warp finds of its 16 rows while it stores them: each lane has a column of each part. An
// argument of RowStore::store.
template <class Store>
struct StoredMoments {
  static_assert(Store::kSize == 4 && Store::kParts * Store::kPartColumns * 8 <= kStoreBufferBytes,
                "both fit the warp's buffer");
  float mean[Store::kParts], squares[Store::kParts];
  int rows;  // that there are, of 16
  float inverse_rows;

  __device__ __forceinline__ StoredMoments(int row, int m)
      : rows(min(max(m - row, 0), kStoreRows)), inverse_rows(1.0f / max(rows, 1)) {}

  __device__ __forceinline__ void operator()(int part, u32 buffer) {
    const int lane = lane_here() % Store::kPartColumns;
    const u32 unit = lane / Store::kUnitColumns, within = lane % Store::kUnitColumns * 4;
    const auto at = [&](int row) {
      return load_shared(buffer + swizzled<Store::kWidth, 4>(row, unit) + within);
    };
    float v[kStoreRows], sum = 0.0f, around = 0.0f;
#pragma unroll
    for (int row = 0; row < kStoreRows; ++row) v[row] = at(row);
    // Around the first of them: of equal values the mean is that value, and nothing is left.
#pragma unroll
    for (int row = 1; row < kStoreRows; ++row) sum += row < rows ? v[row] - v[0] : 0.0f;
    mean[part] = v[0] + sum * inverse_rows;
#pragma unroll
    for (int row = 0; row < kStoreRows; ++row) {
      const float distance = row < rows ? v[row] - mean[part] : 0.0f;
      around += distance * distance;
    }
    squares[part] = around;
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
      RowMoments all = {};
#pragma unroll
      for (int other = 0; other < 4; ++other) {
        const float2 pair = load_pair(buffers + other * kStoreBufferBytes + at * 8);
        all.join(pair.x, pair.y, min(max(m - first_row - other * kStoreRows, 0), kStoreRows));
      }
      if (column + at >= n || first_row >= m) continue;
      to[at] = all.mean;
      to[n + at] = all.squares;
    }
    named_barrier_sync(barrier, kWarpgroupThreads);  // the buffers have been read
  }
};
