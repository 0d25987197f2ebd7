// The epilogue of a product whose tile lies in shared memory, a row of x after the other: each lane has four
// neighbouring channels, a warp all kBlockN of a row, so that y and z leave in whole lines as they are.
//
// The prelude defines kBlockN, kBlockM and what norm_epilogue.cuh takes from it too; all is fp32.
#pragma once
#include "gemm/hopper/fp32_prelude.cuh"
#include "common/group_stats.cuh"
#include "gemm/row_store.cuh"
#include "common/shared_units.cuh"

constexpr int kLaneColumns = 4;
static_assert(kBlockN == 32 * kLaneColumns, "a warp has a row");
static_assert(kBlockN % kGroupColumns == 0 && sizeof(typename OutType::Storage) == 4, "");

constexpr int kGroupLanes = kGroupColumns > kLaneColumns ? kGroupColumns / kLaneColumns : 1;
constexpr int kLaneGroups = kGroupColumns < kLaneColumns ? kLaneColumns / kGroupColumns : 1;
constexpr int kOwnColumns = kLaneColumns / kLaneGroups;  // of a group, in a lane

constexpr int kWarpRowsX = kBlockM / 8;  // of x, of each of eight warps
constexpr int kRowsAtOnce = 8;
constexpr int kTurnedRowBytes = kBlockN * 4;

struct Epilogue {
  const float *bias, *gamma, *beta;
  const float* operands[chain::kSlots];
  chain::Constants<float> constants;
  float affine_scale;
  const float* row_scale;
  float *y, *z, *mean, *rstd;
  int m, n;
  chain::Drops<float> drops;
};

// In the turned tile groups of eight floats trade places, so that the writes of turn() (rows 0, 2, 4, 6 or
// 1, 3, 5, 7 of eight) spread over all banks.
__device__ __forceinline__ u32 turned_places(int row) { return (row & 3) ^ (row >> 2 & 1); }

__device__ __forceinline__ u32 turned_unit(u32 tile, int row, int lane) {
  return tile + row * kTurnedRowBytes + ((lane / 2) ^ turned_places(row)) * 32 + lane % 2 * kUnitBytes;
}

using LaneVector = float[kLaneColumns];

// What belongs to a lane's channels.
struct LaneChannels {
  LaneVector bias, gamma, beta, operands[chain::kSlots];

  static __device__ __forceinline__ void load(LaneVector& v, const float* from, int left, float scale) {
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) v[i] = i < left ? __ldg(from + i) * scale : 0.0f;
  }

  __device__ __forceinline__ LaneChannels(const Epilogue& e, int column) {
    const int left = e.n - column;
    if (kHasBias) load(bias, e.bias + column, left, 1.0f);
    if (kHasGamma) load(gamma, e.gamma + column, left, e.affine_scale);
    if (kHasBeta) load(beta, e.beta + column, left, e.affine_scale);
#pragma unroll
    for (int k = 0; k < chain::kOperands; ++k)
      if (chain::is_channel(k)) load(operands[k], e.operands[k] + column, left, 1.0f);
  }

  // The chain's tensor operands at one element.
  __device__ __forceinline__ void at(float (&t)[chain::kSlots], const Epilogue& e, int row, int column,
                                     int i) const {
#pragma unroll
    for (int k = 0; k < chain::kOperands; ++k) {
      if (chain::is_channel(k))
        t[k] = operands[k][i];
      else if (chain::is_seed(k))
        t[k] = chain::factor_of(e.drops, k, row, column + (i & ~1), i & 1);
      else if (chain::is_row(k))
        t[k] = row < e.m ? __ldg(e.operands[k] + row) : 0.0f;
      else
        t[k] = row < e.m && column < e.n
                   ? __ldg(e.operands[k] + static_cast<i64>(row) * e.n + column + i)
                   : 0.0f;
    }
  }
};

// The sum over a group's lanes.
__device__ __forceinline__ float group_sum(float value) {
#pragma unroll
  for (int lanes = 1; lanes < kGroupLanes; lanes *= 2)
    value += __shfl_xor_sync(0xffffffffu, value, lanes);
  return value;
}

// Normalises a lane's part of a row in place.
__device__ __forceinline__ void normalise_row(LaneVector& v, Statistics (&stats)[kLaneGroups]) {
  constexpr float kWeight = 1.0f / kGroupColumns;
#pragma unroll
  for (int group = 0; group < kLaneGroups; ++group) {
    float sum = 0.0f, squares = 0.0f;
    if (chain::kCentred) {
      sum = sum_terms<kOwnColumns, 2>([&](int i) { return v[group * kOwnColumns + i]; });
      sum = group_sum(sum) * kWeight;
    }
    squares = sum_terms<kOwnColumns, 2>([&](int i) {
      float& value = v[group * kOwnColumns + i];
      if (chain::kCentred) value -= sum;
      return value * value;
    });
    constexpr float kEps = chain::epsilon<float>();
    const float rstd = reciprocal_root(group_sum(squares) * kWeight + kEps, kEps);
    stats[group] = {sum, chain::eagers_rstd<kGroupColumns>(rstd, sum)};
#pragma unroll
    for (int i = 0; i < kOwnColumns; ++i) v[group * kOwnColumns + i] *= stats[group].rstd;
  }
}

__device__ __forceinline__ void store_lane(float* to, const LaneVector& v) {
  store_line_unit(to, {__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                       __float_as_uint(v[3])});
}

__device__ __forceinline__ void store_row_statistics(const Epilogue& e,
                                                     const Statistics (&stats)[kLaneGroups], int row,
                                                     int column, int lane) {
  if (lane % kGroupLanes != 0) return;
  const i64 at = static_cast<i64>(row) * (e.n / kGroupColumns) + column / kGroupColumns;
#pragma unroll
  for (int group = 0; group < kLaneGroups; ++group) {
    if (chain::kCentred) e.mean[at + group] = stats[group].mean;
    e.rstd[at + group] = stats[group].rstd;
  }
}

// A warp's kWarpRowsX rows from `in_tile` on, from the linear's output but for the rows' scales to y, and to
// z or the sum, mean and rstd where they are kept. tile_row, column: the tile's first row of x, and the lane's channel.
__device__ __forceinline__ void finish_rows(const Epilogue& e, const LaneChannels& channels, u32 tile,
                                            int tile_row, int in_tile, int column, int lane) {
  const int first = tile_row + in_tile;
  const float scales = lane < kWarpRowsX && first + lane < e.m ? e.row_scale[first + lane] : 0.0f;
  float t[chain::kSlots];
#pragma unroll 1
  for (int next = 0; next < kWarpRowsX; next += kRowsAtOnce) {
    LaneVector v[kRowsAtOnce];
    Statistics stats[kRowsAtOnce][kLaneGroups];
#pragma unroll
    for (int u = 0; u < kRowsAtOnce; ++u) {
      const uint4 unit = load_unit(turned_unit(tile, in_tile + next + u, lane));
      const float scale = __shfl_sync(0xffffffffu, scales, next + u);
      v[u][0] = __uint_as_float(unit.x) * scale, v[u][1] = __uint_as_float(unit.y) * scale;
      v[u][2] = __uint_as_float(unit.z) * scale, v[u][3] = __uint_as_float(unit.w) * scale;
    }
#pragma unroll
    for (int u = 0; u < kRowsAtOnce; ++u) {
      const int row = first + next + u;
      const bool keeps = kSaveForBackward && row < e.m && column < e.n;
      float* const kept = e.z + static_cast<i64>(row) * e.n + column;
      if (keeps && !kKeepsSum) store_lane(kept, v[u]);
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) {
        channels.at(t, e, row, column, i);
        const float biased = kHasBias ? v[u][i] + channels.bias[i] : v[u][i];
        v[u][i] = chain::pre_apply<float>(e.constants, biased, t);
      }
      if (keeps && kKeepsSum) store_lane(kept, v[u]);
    }
    if constexpr (chain::kNormalises) {
#pragma unroll
      for (int u = 0; u < kRowsAtOnce; ++u) normalise_row(v[u], stats[u]);
    }
#pragma unroll
    for (int u = 0; u < kRowsAtOnce; ++u) {
      const int row = first + next + u;
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) {
        float y = v[u][i];
        if (kHasGamma) y *= channels.gamma[i];
        if (kHasBeta) y += channels.beta[i];
        channels.at(t, e, row, column, i);
        v[u][i] = chain::post_apply<float>(e.constants, y, t);
      }
      if (row >= e.m || column >= e.n) continue;
      store_lane(e.y + static_cast<i64>(row) * e.n + column, v[u]);
      if (kKeepStatistics && chain::kNormalises) store_row_statistics(e, stats[u], row, column, lane);
    }
  }
}
