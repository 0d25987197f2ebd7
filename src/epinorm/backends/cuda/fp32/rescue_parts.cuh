// A group that the blocks of a cluster share, from the tiles of the linear's output to y. A warp has a row of
// its block's tile at a time; every row of an item is flagged, or its group has a flagged column.
#pragma once
#include "fp32/parts_prelude.cuh"
#include "common/chain.cuh"
#include "common/hopper_barrier.cuh"
#include "common/numeric.cuh"
#include "common/variance.cuh"
#include "fp32/rescue_splits.cuh"

EPINORM_FUNCTION float warp_sum(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

struct Moments {
  float mean, variance;  // of a part, then of the group
};

// What enters the norm, in place, and its moments over this block's columns.
EPINORM_FUNCTION Moments begin_part(float* values, i64 at, int row, int column, const Epilogue& e) {
  constexpr float kInverse = 1.0f / kColumns;
  const int lane = threadIdx.x % 32;
  float t[chain::kSlots], sum = 0.0f, squares = 0.0f, distances = 0.0f;
  for (int i = lane; i < kColumns; i += 32) {
    const float z = values[i];
    load_operands(t, e, row, column + i);
    values[i] = chain::pre_apply<float>(e.constants, kHasBias ? z + e.bias[column + i] : z, t);
    if (kSaveForBackward) e.z[at + i] = kKeepsSum ? values[i] : z;
    sum += values[i];
  }
  const float mean = chain::kCentred ? warp_sum(sum) * kInverse : 0.0f;
  for (int i = lane; i < kColumns; i += 32) {
    const float distance = values[i] - mean;
    squares += distance * distance;
    distances += distance;
  }
  squares = warp_sum(squares);
  distances = chain::kCentred ? warp_sum(distances) : 0.0f;
  const float shift = distances * kInverse;  // what rounding left out of the mean
  return {mean + shift, variance<kColumns>(squares, distances, shift)};
}

// Of the whole group, from what all parts have at `place`, in their order (Chan, Golub and LeVeque, 1983).
EPINORM_FUNCTION Moments of_group(const float* place) {
  constexpr float kInverse = 1.0f / kGroupParts;
  const u32 at = static_cast<u32>(__cvta_generic_to_shared(place));
  float means[kGroupParts], mean = 0.0f, within = 0.0f, between = 0.0f;
#pragma unroll
  for (u32 rank = 0; rank < kGroupParts; ++rank) {
    mean += means[rank] = read_remote(at, rank);
    within += read_remote(at + 4, rank);
  }
  mean *= kInverse;
#pragma unroll
  for (int rank = 0; rank < kGroupParts; ++rank)
    between += (means[rank] - mean) * (means[rank] - mean);
  return {mean, (within + (chain::kCentred ? between : 0.0f)) * kInverse};
}

// For all blocks of the cluster; `column` is this one's first. A part's moments lie behind its row.
EPINORM_FUNCTION void finish_parts(float* tile, const Selection& selection, int rows, int column,
                                   const Epilogue& e) {
  static_assert(kTileStride >= kWidth + 2, "");
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, groups = e.n / kGroup;
  for (int i = warp; i < rows; i += kWarps) {
    const int row = selection.rows[i];
    const Moments part =
        begin_part(tile + i * kTileStride, static_cast<i64>(row) * e.n + column, row, column, e);
    float* place = tile + i * kTileStride + kWidth;
    if (lane == 0) place[0] = part.mean, place[1] = part.variance;
  }
  cluster_sync();  // all parts are there
  for (int i = warp; i < rows; i += kWarps) {
    const int row = selection.rows[i];
    const Moments group = of_group(tile + i * kTileStride + kWidth);
    const float spread = group.variance + chain::epsilon<float>();
    const float rstd = chain::eagers_rstd<kGroup>(reciprocal_sqrt(spread), group.mean);
    float t[chain::kSlots];
    for (int j = lane; j < kColumns; j += 32) {
      const float factor = kHasGamma ? rstd * e.gamma[column + j] : rstd;
      const float distance = tile[i * kTileStride + j] - group.mean;
      load_operands(t, e, row, column + j);
      const float normalised = kHasBeta ? distance * factor + e.beta[column + j] : distance * factor;
      e.y[static_cast<i64>(row) * e.n + column + j] =
          chain::post_apply<float>(e.constants, normalised, t);
    }
    if (kKeepStatistics && lane == 0 && rank_in_cluster() == 0) {
      const i64 at = static_cast<i64>(row) * groups + column / kGroup;
      if (chain::kCentred) e.mean[at] = group.mean;
      e.rstd[at] = rstd;
    }
  }
  cluster_sync();  // no part is read any more
}
