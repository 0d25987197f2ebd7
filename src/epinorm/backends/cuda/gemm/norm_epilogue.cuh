// From accumulators to y: statistics of groups, the chain, and what goes to memory, for the rows and
// columns that a warp holds. What the prelude defines is said in epilogue_values.cuh.
#pragma once
#include "gemm/epilogue_prelude.cuh"
#include "gemm/epilogue_values.cuh"
#ifdef LEAVES_MOMENTS
#include "gemm/column_moments.cuh"
#endif

// Means and rstds go to memory through the warp's buffer too, kBatchGroups groups of 16 rows at a time:
// the lanes that have them would store 4 bytes to each of 8 rows.
constexpr int kWarpGroups = kSharedGroup ? 1 : kWarpColumns / kGroupColumns;
constexpr int kSegmentGroups = 4 / Segment::kLanes;

__device__ constexpr int batch_groups() {
  int groups = kPlanes == 2 ? 16 : 8;  // else registers spill in some chains
  while (kWarpGroups % groups != 0 || groups % kSegmentGroups != 0) --groups;
  return groups;
}
constexpr int kBatchGroups = batch_groups();
constexpr int kBatchValues = kStoreRows * kBatchGroups;

__device__ __forceinline__ void stage_statistics(const Statistics (&stats)[2], u32 buffer,
                                                 int segment) {
  const int lane = lane_here(), quad_lane = lane % 4;
  if (!Segment::leads(quad_lane)) return;
  const int group = Segment::group(segment, quad_lane) % kBatchGroups;
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) {
    const u32 at = buffer + ((lane / 4 + lower * 8) * kBatchGroups + group) * 4;
    if (chain::kCentred) store_shared(at, stats[lower].mean);
    store_shared(at + kBatchValues * 4, stats[lower].rstd);
  }
}

__device__ __forceinline__ void store_statistics(const Epilogue& e, u32 buffer, int warp_row,
                                                 int first_group) {
  const int lane = lane_here(), groups = e.n / kGroupColumns;
  __syncwarp();
#pragma unroll
  for (int first = 0; first < kBatchValues; first += 32) {
    const int value = first + lane;
    const int row = warp_row + value / kBatchGroups, group = first_group + value % kBatchGroups;
    if (value < kBatchValues && row < e.m && group < groups) {
      const i64 at = static_cast<i64>(row) * groups + group;
      if (chain::kCentred) e.mean[at] = load_shared(buffer + value * 4);
      e.rstd[at] = load_shared(buffer + (kBatchValues + value) * 4);
    }
  }
  __syncwarp();
}

// From the linear's output, without bias but for kBiasWithScales, to what enters the norm, in place, for one chunk.
template <class Parts>
__device__ __forceinline__ void begin_chunk(float (&v)[kAccumulators], const Epilogue& e,
                                            const Vectors& vectors, Parts& parts,
                                            int chunk_of_part, int row, int first_column, int chunk) {
  const int quad_lane = threadIdx.x % 4;
  parts.reach(chunk_of_part);
  const float2 bias = kAddsBias ? pair_at(vectors, kBiasVector, chunk, quad_lane) : float2{};
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) {
    float x[2], t[2][chain::kSlots];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float& value = v[accumulator(chunk, lower, i)];
      load_operands(t[i], e, vectors, parts, chunk_of_part, chunk, lower, i, row + lower * 8, first_column);
      x[i] = kAddsBias ? value + of(bias, i) : value;
      if (!chain::kRounds) value = chain::pre_apply<float>(e.constants, x[i], t[i]);
    }
    if (!chain::kRounds) continue;
    chain::pre_apply<float>(e.constants, x, t);
#pragma unroll
    for (int i = 0; i < 2; ++i) v[accumulator(chunk, lower, i)] = x[i];
  }
}

struct AppliedStatistics {
  static constexpr bool kRounds = chain::kRoundsStatistics;
  static __device__ __forceinline__ float rounded(float value) { return chain::statistic(value); }
  static __device__ __forceinline__ void round(Statistics& stats) { chain::round_statistics(stats.mean, stats.rstd); }
  static __device__ __forceinline__ float rstd(float found, float mean) {
    return chain::eagers_rstd<kGroupColumns>(found, mean);
  }
};

// The same for all of a row block, where element operands are read part by part.
__device__ __forceinline__ void begin_parts(float (&v)[kAccumulators], const Epilogue& e,
                                            const Vectors& vectors, u32 buffer, int warp_row,
                                            int first_column, const HeldOperand& held,
                                            const float (&row_scale)[2]) {
  constexpr int kPartChunks = kNormPartColumns / kChunkColumns, kParts = kWarpColumns / kNormPartColumns;
  OperandsBefore<kNormPartColumns> parts(e, buffer, warp_row, first_column, held);
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    if (is_beyond(e, first_column, part * kPartChunks)) break;
    if (kScalesInParts) undo_scales(v, e, row_scale, vectors, first_column, threadIdx.x % 4, part * kPartChunks, kPartChunks);
    parts.take(part, part == kParts - 1);
#pragma unroll
    for (int i = 0; i < kPartChunks; ++i) {
      if (i > 0 && is_beyond(e, first_column, part * kPartChunks + i)) break;
      begin_chunk(v, e, vectors, parts, i, warp_row + lane_here() / 4, first_column,
                  part * kPartChunks + i);
    }
  }
}

// From the linear's output, without bias but for kBiasWithScales, to its normalised value, in place, for one segment.
template <class GroupSum>
__device__ __forceinline__ void normalise_segment(float (&v)[kAccumulators], const Epilogue& e,
                                                  const Vectors& vectors, GroupSum& group_sum,
                                                  u32 buffer, int warp_row, int first_column,
                                                  int segment) {
  using Group = Segment;
  const int row = warp_row + threadIdx.x % 32 / 4;
  const int first = segment * Group::kGroupChunks;
  NoParts none;
  if constexpr (!kStagesBefore && !kKeepsSum) {
#pragma unroll
    for (int chunk = first; chunk < first + Group::kGroupChunks; ++chunk) {
      if (is_beyond(e, first_column, chunk)) break;
      begin_chunk(v, e, vectors, none, 0, row, first_column, chunk);
    }
  }
  Statistics stats[2];
  if constexpr (Group::kStraddle) {
    normalise_straddling<kGroupColumns, chain::kCentred, AppliedStatistics>(stats, v, segment,
                                                                            chain::epsilon<float>());
  } else
#ifdef COMBINES_PARTS
  if constexpr (kSharedGroup && chain::kCentred) {
    normalise_parts<kGroupColumns, kWarpColumns, AppliedStatistics>(
        stats, v, chain::epsilon<float>(), group_sum.parts);
  } else
#endif
  {
    normalise_group<kGroupColumns, kSharedGroup ? kWarpColumns : kGroupColumns, chain::kCentred,
                    AppliedStatistics>(
        stats, v, segment, chain::epsilon<float>(), group_sum);
  }
  if (!kKeepStatistics || (kSharedGroup && group_sum.part != 0)) return;
  constexpr int kBatchSegments = kBatchGroups / kSegmentGroups;
  stage_statistics(stats, buffer, segment);
  if (segment % kBatchSegments == kBatchSegments - 1) {
    const int batch = segment / kBatchSegments;
    store_statistics(e, buffer, warp_row, first_column / kGroupColumns + batch * kBatchGroups);
  }
}

// From the normalised value to y, in place, for one chunk.
template <class Parts>
__device__ __forceinline__ void finish_chunk(float (&v)[kAccumulators], const Epilogue& e,
                                             const Vectors& vectors, Parts& parts,
                                             int chunk_of_part, int row, int first_column, int chunk) {
  const int quad_lane = threadIdx.x % 4;
  parts.reach(chunk_of_part);
  const Affine affine = affine_at<NormType>(vectors, chunk, quad_lane, e.affine_scale);
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) {
    float y[2], t[2][chain::kSlots];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float& value = v[accumulator(chunk, lower, i)];
      y[i] = value;
      if (kHasGamma) y[i] *= of(affine.gamma, i);
      if (kHasBeta) y[i] += of(affine.beta, i);
      load_operands(t[i], e, vectors, parts, chunk_of_part, chunk, lower, i, row + lower * 8, first_column);
      if (!chain::kRounds) value = chain::post_apply<float>(e.constants, y[i], t[i]);
    }
    if (!chain::kRounds) continue;
    chain::post_apply<float>(e.constants, y, t);
#pragma unroll
    for (int i = 0; i < 2; ++i) v[accumulator(chunk, lower, i)] = y[i];
  }
}

// Two passes over a row block in registers: the first holds all shuffles and no store, so that they
// overlap; the second computes each part of y just before it is written. Without a norm there is but
// the second.
template <class GroupSum>
__device__ __forceinline__ void finish_rows(float (&v)[kAccumulators], const Epilogue& e,
                                            const Vectors& vectors, GroupSum& group_sum, u32 buffer,
                                            int warp_row, int first_column, const HeldOperand& held,
                                            const float (&row_scale)[2]) {
  using Store = RowStore<OutType, kWarpColumns, kAlignedRows>;
  constexpr int kSegments = kWarpColumns / kChunkColumns / Segment::kGroupChunks;
  constexpr int kPartChunks = Store::kPartColumns / kChunkColumns;
  const int row = warp_row + lane_here() / 4;
  if constexpr (chain::kNormalises) {
    if constexpr (kStagesBefore) begin_parts(v, e, vectors, buffer, warp_row, first_column, held, row_scale);
    if constexpr (kReadsBefore) held.release();
#pragma unroll
    for (int segment = 0; segment < kSegments; ++segment)
      normalise_segment(v, e, vectors, group_sum, buffer, warp_row, first_column, segment);
  }
  OperandsAtStore<Store::kPartColumns> parts(e, buffer, warp_row, first_column, held);
#ifdef LEAVES_MOMENTS
  static_assert(!chain::kNormalises && kAlignedRows, "");
  StoredMoments<Store> inspect(warp_row, e.m);
#else
  const NoInspection inspect;
#endif
  const auto prepare = [&](int part) {
    parts.take(part, part == Store::kParts - 1);
#pragma unroll
    for (int i = 0; i < kPartChunks; ++i)
      if constexpr (chain::kNormalises)
        finish_chunk(v, e, vectors, parts, i, row, first_column, part * kPartChunks + i);
      else
        begin_chunk(v, e, vectors, parts, i, row, first_column, part * kPartChunks + i);
  };
  Store::store(e.y, buffer, v, warp_row, first_column, e.m, e.n, prepare, inspect);
#ifdef LEAVES_MOMENTS
  inspect.store(e.mean, buffer, warp_row, first_column, e.m, e.n, 1 + threadIdx.x / kWarpgroupThreads);
#endif
  if constexpr (!kReadsBefore) held.release();
}

// What a row's products are multiplied by where operands are scaled planes.
struct ScalesInMemory {
  __device__ __forceinline__ float operator()(const Epilogue& e, int row, int) const {
    return row < e.m ? e.row_scale[row] : 0.f;
  }
};
struct OwnScales {
  float of[2];  // of a lane's row and the one 8 below

  __device__ __forceinline__ float operator()(const Epilogue&, int, int lower) const { return of[lower]; }
};

// From the product of 16 rows to y, and to z or the sum, mean and rstd where they are kept.
template <class GroupSum, class Scales = ScalesInMemory>
__device__ __forceinline__ void finish_row_block(float (&v)[kAccumulators], const Epilogue& e,
                                                 const Vectors& vectors, GroupSum& group_sum,
                                                 u32 buffer, int warp_row, int first_column,
                                                 const HeldOperand& held, const Scales& scales = {}) {
  const int lane = threadIdx.x % 32;
  float row_scale[2] = {};
  if (kScaled) {
    const int row = warp_row + lane / 4;
    row_scale[0] = scales(e, row, 0), row_scale[1] = scales(e, row + 8, 1);
    if (!kScalesInParts) undo_scales(v, e, row_scale, vectors, first_column, lane % 4, 0, kWarpColumns / kChunkColumns);
  }
  if (kSaveForBackward) {
    using Store = RowStore<KeptType, kWarpColumns, kAlignedRows>;
    constexpr int kPartChunks = Store::kPartColumns / kChunkColumns;
    constexpr bool kStagesSum =
        kKeepsSum && kStagesOperands && sizeof(typename KeptType::Storage) == sizeof(typename NormType::Storage);
#ifdef HOLDS_OPERAND
    static_assert(!kKeepsSum || !kReadsBefore || kStagesSum, "what the ring holds is waited for where it is read");
#endif
    StagedOperands<kStagesSum, 0, chain::kPreOperands, Store::kPartColumns> parts(
        e, buffer, warp_row, first_column, held);
    Store::store(e.z, buffer, v, warp_row, first_column, e.m, e.n, [&](int part) {
      if constexpr (kBiasFirst) add_bias(v, vectors, part * kPartChunks, kPartChunks);
      parts.take(part, part == Store::kParts - 1);
      if constexpr (kKeepsSum) {
#pragma unroll
        for (int i = 0; i < kPartChunks; ++i) {
          if (i > 0 && is_beyond(e, first_column, part * kPartChunks + i)) break;
          begin_chunk(v, e, vectors, parts, i, warp_row + lane / 4, first_column,
                      part * kPartChunks + i);
        }
      }
    });
  }
  finish_rows(v, e, vectors, group_sum, buffer, warp_row, first_column, held, row_scale);
}
