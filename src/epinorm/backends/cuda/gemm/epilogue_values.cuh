// What the epilogue of a product reads, and takes into accumulators that lie as wgmma's and mma.sync's do
// (group_stats.cuh), 16 rows of a warp at a time: bias, scales, gamma and beta, operands.
//
// The prelude defines the chain (codegen.py); kGroupColumns; kHasBias, kHasGamma, kHasBeta; kScaled
// (operands are scaled planes); kSaveForBackward (a matrix beside y is written: z, or, with kKeepsSum, what enters
// the norm); kKeepStatistics (mean and rstd are written); kAffineScaled (a constant taken out of post
// scales gamma and beta); kBiasInZ (z is kept with the bias); the types OutType, KeptType (of the
// matrix), LinearType (of the bias) and NormType; kChannelOperands.
// The kernel defines, before it includes this:
//   kWarpColumns, kAccumulators    columns of a warp's accumulators, and a thread's of 16 rows
//   kVectorColumns, kVectorThreads columns whose vectors lie together in shared memory, and the
//                                  threads that put them there
//   kParts                         that share a group wider than kWarpColumns, each with so many of it
//   kAlignedRows                   rows of y and z start on 16 bytes
//   kPacksAffine                   gamma and beta of 16 bits stay so in shared memory
//   kSpareRegisters                a thread's, besides its accumulators
//   COMBINES_PARTS                 a macro, where group_sum.parts can combine the parts of a group
//   HOLDS_OPERAND                  a macro, where the chain's one element operand is a HeldOperand
#pragma once
#include "gemm/epilogue_prelude.cuh"
#include "common/group_stats.cuh"
#include "gemm/row_store.cuh"
#include "common/storage.cuh"

// Vectors of the tile's columns that the epilogue reads, kept as fp32 in shared memory.
constexpr int kBiasVector = 0;
constexpr int kGammaVector = kBiasVector + kHasBias;
constexpr int kBetaVector = kGammaVector + kHasGamma;
constexpr int kScaleVector = kBetaVector + kHasBeta;
constexpr int kOperandVector = kScaleVector + kScaled;
constexpr int kVectors = kOperandVector + kChannelOperands;
constexpr int kVectorSlots = kVectors > 0 ? kVectors : 1;
constexpr int kVectorLoads = (kVectorColumns + kVectorThreads - 1) / kVectorThreads;

constexpr int kVectorBytes = kVectors * kVectorColumns * 4;

// Those of two columns lie together then: one load of 8 bytes instead of two. That pays where shared
// memory limits the store pass; elsewhere unpacking costs more.
constexpr bool kPackedAffine = kPacksAffine && kHasGamma && kHasBeta &&
                               sizeof(typename OutType::Storage) == 2 &&
                               sizeof(typename NormType::Storage) == 2;
constexpr u32 kPackedPairBytes = 8;
constexpr bool kScaledWhenPacked = NormType::kRangeOfFloat;  // else the scale could overflow

// A group wider than a warp's columns: all that share it add up their parts through shared memory.
constexpr bool kSharedGroup = kGroupColumns > kWarpColumns;
static_assert(!kSharedGroup || kGroupColumns == kParts * kWarpColumns, "a group is all parts");
static_assert(kSharedGroup || kWarpColumns % kGroupColumns == 0, "a warp has whole groups");
using Segment = Segments<kSharedGroup ? kWarpColumns : kGroupColumns>;

struct Epilogue {
  const typename LinearType::Storage* bias;  // the linear's dtype: under autocast not the norm's
  const typename NormType::Storage *gamma, *beta;
  const typename NormType::Storage* operands[chain::kSlots];
  chain::Constants<float> constants;
  float affine_scale;  // 1 but for kAffineScaled
  const float *row_scale, *column_scale;
  typename OutType::Storage* y;
  typename KeptType::Storage* z;
  float *mean, *rstd;
  int m, n;
  chain::Drops<float> drops;
};
#include "gemm/element_operands.cuh"

// The vectors as a warp sees them: from its first column on, of those that lie together.
struct Vectors {
  const float* all;
  u32 first_column;

  __device__ __forceinline__ u32 address(u32 vector, u32 column) const {
    return shared_address(all + vector * kVectorColumns + first_column + column);
  }
  // Of an even column's gamma, of the next one's and of both betas.
  __device__ __forceinline__ u32 packed_affine(u32 column) const {
    return shared_address(all + kGammaVector * kVectorColumns) +
           (first_column + column) / 2 * kPackedPairBytes;
  }
};

// This thread's share of the tile's vectors as they lie in memory. Issued before the product and
// converted after it: a conversion here would wait for the load.
using Fetched = u32[kVectorSlots][kVectorLoads];

__device__ __forceinline__ void fetch_vectors(Fetched& fetched, const Epilogue& e, int first_column,
                                              int thread) {
#pragma unroll
  for (int load = 0; load < kVectorLoads; ++load) {
    const int at = load * kVectorThreads + thread, column = first_column + at;
    const bool inside = at < kVectorColumns && column < e.n;
    if (kHasBias) fetched[kBiasVector][load] = inside ? raw_bits(e.bias[column]) : 0;
    if (kHasGamma) fetched[kGammaVector][load] = inside ? raw_bits(e.gamma[column]) : 0;
    if (kHasBeta) fetched[kBetaVector][load] = inside ? raw_bits(e.beta[column]) : 0;
    if (kScaled) fetched[kScaleVector][load] = inside ? raw_bits(e.column_scale[column]) : 0;
    int slot = kOperandVector;
#pragma unroll
    for (int i = 0; i < chain::kOperands; ++i)
      if (chain::is_channel(i))
        fetched[slot++][load] = inside ? raw_bits(e.operands[i][column]) : 0;
  }
}

__device__ __forceinline__ float fetched_value(u32 bits, int vector, float affine_scale) {
  if (kHasBias && vector == kBiasVector) return from_raw_bits<LinearType>(bits);
  if (kScaled && vector == kScaleVector) return from_raw_bits<Float32>(bits);
  const float value = from_raw_bits<NormType>(bits);
  const bool scaled = kAffineScaled && vector < kScaleVector;  // gamma, beta; not an operand
  return scaled ? value * affine_scale : value;
}

__device__ __forceinline__ void store_packed(u32 bits, float* vectors, int vector, int column,
                                             float affine_scale) {
  const u32 at = Vectors{vectors, 0}.packed_affine(column - column % 2) +
                 (vector == kBetaVector) * 4 + column % 2 * 2;
  const bool scaled = kAffineScaled && kScaledWhenPacked;
  const u16 number = scaled ? NormType::store(fetched_value(bits, vector, affine_scale)) : bits;
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"(number) : "memory");
}

// Into shared memory, where nobody reads the last tile's any more.
__device__ __forceinline__ void store_vectors(const Fetched& fetched, float* vectors, int thread,
                                              float affine_scale) {
#pragma unroll
  for (int vector = 0; vector < kVectors; ++vector)
#pragma unroll
    for (int load = 0; load < kVectorLoads; ++load) {
      const int at = load * kVectorThreads + thread;
      if (at >= kVectorColumns) continue;
      if (kPackedAffine && (vector == kGammaVector || vector == kBetaVector))
        store_packed(fetched[vector][load], vectors, vector, at, affine_scale);
      else
        vectors[vector * kVectorColumns + at] =
            fetched_value(fetched[vector][load], vector, affine_scale);
    }
}

// A vector's values at the two columns of a chunk that this lane holds. Volatile keeps the loads near
// their use: hoisted, they would push accumulators out of the registers.
__device__ __forceinline__ float2 pair_at(const Vectors& vectors, int vector, int chunk,
                                          int quad_lane) {
  float2 pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(pair.x), "=f"(pair.y)
               : "r"(vectors.address(vector, chunk * kChunkColumns + quad_lane * 2)));
  return pair;
}

struct Affine {
  float2 gamma, beta;
};

template <class Type>
__device__ __forceinline__ Affine packed_affine_at(const Vectors& vectors, int chunk, int quad_lane,
                                                   float affine_scale) {
  u32 gamma, beta;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
               : "=r"(gamma), "=r"(beta)
               : "r"(vectors.packed_affine(chunk * kChunkColumns + quad_lane * 2)));
  const float2 g = Type::load_pair(gamma), b = Type::load_pair(beta);
  if (kScaledWhenPacked || !kAffineScaled) return {g, b};
  return {{g.x * affine_scale, g.y * affine_scale}, {b.x * affine_scale, b.y * affine_scale}};
}

// Gamma and beta of the same two columns; what the norm has not is not used.
template <class Type>
__device__ __forceinline__ Affine affine_at(const Vectors& vectors, int chunk, int quad_lane,
                                            float affine_scale) {
  if constexpr (kPackedAffine)
    return packed_affine_at<Type>(vectors, chunk, quad_lane, affine_scale);
  return {kHasGamma ? pair_at(vectors, kGammaVector, chunk, quad_lane) : float2{},
          kHasBeta ? pair_at(vectors, kBetaVector, chunk, quad_lane) : float2{}};
}

__device__ __forceinline__ float of(float2 pair, int i) { return i == 0 ? pair.x : pair.y; }

// Element operands of a tile, on their way from memory while the product is computed: its rows from
// first_row on, its columns from first_column on.
template <int kRows>
__device__ __forceinline__ void prefetch_operands(const Epilogue& e, int first_row,
                                                  int first_column, int thread) {
  constexpr int kLineValues = 128 / sizeof(typename NormType::Storage);
  constexpr int kLines = (kVectorColumns + kLineValues - 1) / kLineValues;
#pragma unroll
  for (int k = 0; k < chain::kOperands; ++k) {
    if (!chain::is_element(k)) continue;
    for (int i = thread; i < kRows * kLines; i += kVectorThreads) {
      const int row = first_row + i / kLines, column = first_column + i % kLines * kLineValues;
      if (row < e.m && column < e.n)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(e.operands[k] + static_cast<i64>(row) * e.n +
                                                      column));
    }
  }
}

// The chain's tensor operands at a lane's place in a chunk. Element operands that are not among `parts`, of
// which `chunk_of_part` is this one, are read there.
template <class Parts>
__device__ __forceinline__ void load_operands(float (&t)[chain::kSlots], const Epilogue& e,
                                              const Vectors& vectors, const Parts& parts,
                                              int chunk_of_part, int chunk, int lower, int i, int row,
                                              int first_column) {
  const int quad_lane = threadIdx.x % 4;
  int slot = kOperandVector;
#pragma unroll
  for (int k = 0; k < chain::kOperands; ++k) {
    if (chain::is_channel(k)) {
      t[k] = of(pair_at(vectors, slot++, chunk, quad_lane), i);
    } else if (chain::is_seed(k)) {
      const int column = first_column + chunk * kChunkColumns + quad_lane * 2;
      t[k] = chain::factor_of(e.drops, k, row, column, i);
    } else if (chain::is_row(k)) {
      t[k] = row < e.m ? NormType::load(e.operands[k][row]) : 0.f;
    } else if (Parts::holds(k)) {
      t[k] = parts.value(k, chunk_of_part, lower, i);
    } else {
      const int column = first_column + chunk * kChunkColumns + quad_lane * 2 + i;
      const bool inside = row < e.m && column < e.n;
      t[k] = inside ? NormType::load(e.operands[k][static_cast<i64>(row) * e.n + column]) : 0.f;
    }
  }
}

__device__ constexpr bool any_seed(int first) {
  return first < chain::kOperands && (chain::is_seed(first) || any_seed(first + 1));
}

// Element operands go through the warp's buffer where y's rows are whole units of them, and registers allow:
// those of a dropout do not.
#ifdef HOLDS_OPERAND
constexpr bool kStagesOperands = true;
#else
constexpr bool kStagesOperands =
    kAlignedRows && sizeof(typename NormType::Storage) == sizeof(typename OutType::Storage) &&
    (!kSaveForBackward || kSpareRegisters >= 128) && !any_seed(0);
#endif
template <int kColumns>
using OperandsBefore = StagedOperands<kStagesOperands, 0, chain::kPreOperands, kColumns>;
template <int kColumns>  // of a chain without a norm all are read there
using OperandsAtStore = StagedOperands<kStagesOperands, chain::kNormalises ? chain::kPreOperands : 0,
                                       chain::kOperands, kColumns>;
constexpr int kNormPartColumns =
    kWidthFor<kWarpColumns * sizeof(typename NormType::Storage)> / sizeof(typename NormType::Storage);
constexpr bool kStagesBefore =
    OperandsBefore<kNormPartColumns>::kAny && chain::kNormalises && !kKeepsSum;
constexpr bool kReadsBefore = chain::kNormalises && any_element(0, chain::kPreOperands);

// The bias is added to what is kept, or, where its values need not be at hand so early, behind that.
constexpr bool kBiasFirst = kHasBias && kSaveForBackward && kBiasInZ && !kKeepsSum;
// In inference, of rows in two products, whose code is more than multiprocessors keep at hand: the bias with the
// scales, by one instruction and one rounding, and both beside an operand's values, for which a part may have to wait.
// In narrower tiles registers spill then, in some chains.
constexpr bool kCompact = kScaled && !kSaveForBackward && kFillsRegisters<kWarpColumns>;
constexpr bool kBiasWithScales = kCompact && kHasBias;
constexpr bool kScalesInParts = kCompact && kStagesBefore;
constexpr bool kAddsBias = kHasBias && !kBiasFirst && !kBiasWithScales;

__device__ __forceinline__ void add_bias(float (&v)[kAccumulators], const Vectors& vectors,
                                         int first_chunk, int chunks) {
  const int quad_lane = threadIdx.x % 4;
#pragma unroll
  for (int chunk = first_chunk; chunk < first_chunk + chunks; ++chunk) {
    const float2 bias = pair_at(vectors, kBiasVector, chunk, quad_lane);
#pragma unroll
    for (int lower = 0; lower < 2; ++lower)
#pragma unroll
      for (int i = 0; i < 2; ++i) v[accumulator(chunk, lower, i)] += of(bias, i);
  }
}

// Never true. Where accumulators leave few registers, a branch ends a block of the compiler's schedule, which
// else keeps too much at once.
__device__ __forceinline__ bool is_beyond(const Epilogue& e, int first_column, int chunk) {
  constexpr int kChunksOfBlock = any_seed(0) || kKeepsSum ? 1 : kNormPartColumns / kChunkColumns;
  return kFillsRegisters<kWarpColumns> && chunk % kChunksOfBlock == 0 && first_column + chunk * kChunkColumns >= e.n;
}

// The linear's output from the scaled planes' product, without its bias but for kBiasWithScales.
__device__ __forceinline__ void undo_scales(float (&v)[kAccumulators], const Epilogue& e,
                                            const float (&row_scale)[2], const Vectors& vectors,
                                            int first_column, int quad_lane, int first_chunk,
                                            int chunks) {
#pragma unroll
  for (int chunk = first_chunk; chunk < first_chunk + chunks; ++chunk) {
    if ((chunk > first_chunk || !kScalesInParts) && is_beyond(e, first_column, chunk)) break;
    const float2 scale = pair_at(vectors, kScaleVector, chunk, quad_lane);
    const float2 bias = kBiasWithScales ? pair_at(vectors, kBiasVector, chunk, quad_lane) : float2{};
#pragma unroll
    for (int lower = 0; lower < 2; ++lower)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& value = v[accumulator(chunk, lower, i)];
        const float both = row_scale[lower] * of(scale, i);
        value = kBiasWithScales ? __fmaf_rn(value, both, of(bias, i)) : value * both;
      }
  }
}
