// y = post(norm(pre(x Wᵀ + bias))) in one kernel: load, multiply, normalise, activate, store.
//
// Persistent blocks of one producer thread and two warpgroups that multiply; see hopper_pipeline.cuh.
// When a tile's product is done its warpgroup normalises it in registers, while the other one
// multiplies and the producer loads ahead.
//
// The prelude defines, besides what hopper_pipeline.cuh needs: the chain (codegen.py); kGroupColumns;
// kHasBias, kHasGamma, kHasBeta; kScaled (operands are scaled planes); kKeep (training: z, mean and
// rstd are written); kAffineScale (of gamma and beta: a constant taken out of post); the types OutType, KeptType and NormType; OPERAND_PARAMETERS and OPERAND_LIST.
#include "group_stats.cuh"
#include "hopper_pipeline.cuh"
#include "hopper_store.cuh"
#include "storage.cuh"

// Vectors of the tile's columns that the epilogue reads, kept as fp32 in shared memory.
constexpr int kBiasVector = 0;
constexpr int kGammaVector = kBiasVector + kHasBias;
constexpr int kBetaVector = kGammaVector + kHasGamma;
constexpr int kScaleVector = kBetaVector + kHasBeta;
constexpr int kOperandVector = kScaleVector + kScaled;
constexpr int kVectors = kOperandVector + kChannelOperands;
constexpr int kVectorSlots = kVectors > 0 ? kVectors : 1;
constexpr int kVectorLoads = (kConsumerN + kWarpgroupThreads - 1) / kWarpgroupThreads;

constexpr int kVectorBytes = kVectors * kConsumerN * 4;
constexpr int kStoreBytes = 4 * kStoreBufferBytes;  // of a warpgroup

// A group wider than a warpgroup's columns: the two add up their halves through shared memory.
constexpr bool kSharedGroup = kGroupColumns > kConsumerN;
static_assert(!kSharedGroup || kGroupColumns == kConsumers * kConsumerN, "a group is two halves");
using Segment = Segments<kSharedGroup ? kConsumerN : kGroupColumns>;
constexpr int kExchangeBytes = kSharedGroup ? 2 * kConsumers * kProductM * 4 : 0;
constexpr int kExchangeBarrier = 1 + kConsumers;  // named; 0 is bar.sync's, then one a consumer

// Shared memory: the ring, the store buffers, the vectors, the exchange, the barriers (hopper.py adds them up too).
constexpr int kStoreOffset = kStages * kStageBytes;
constexpr int kVectorOffset = kStoreOffset + kConsumers * kStoreBytes;
constexpr int kExchangeOffset = kVectorOffset + kConsumers * kVectorBytes;
constexpr int kBarrierOffset = kExchangeOffset + kExchangeBytes;

struct Epilogue {
  const typename KeptType::Storage* bias;  // the linear's dtype: under autocast not the norm's
  const typename NormType::Storage *gamma, *beta;
  const typename NormType::Storage* operands[chain::kSlots];
  const float *row_scale, *column_scale;
  typename OutType::Storage* y;
  typename KeptType::Storage* z;
  float *mean, *rstd;
  int m, n;
};

// This thread's share of the tile's vectors, from global memory; issued before the product, used
// after it.
__device__ __forceinline__ void fetch_vectors(float (&fetched)[kVectorSlots][kVectorLoads],
                                              const Epilogue& e, int first_column, int thread) {
#pragma unroll
  for (int load = 0; load < kVectorLoads; ++load) {
    const int at = load * kWarpgroupThreads + thread, column = first_column + at;
    const bool inside = at < kConsumerN && column < e.n;
    if (kHasBias) fetched[kBiasVector][load] = inside ? KeptType::load(e.bias[column]) : 0.f;
    if (kHasGamma)
      fetched[kGammaVector][load] =
          inside ? NormType::load(e.gamma[column]) * kAffineScale : 0.f;
    if (kHasBeta)
      fetched[kBetaVector][load] =
          inside ? NormType::load(e.beta[column]) * kAffineScale : 0.f;
    if (kScaled) fetched[kScaleVector][load] = inside ? e.column_scale[column] : 0.f;
    int slot = kOperandVector;
#pragma unroll
    for (int i = 0; i < chain::kOperands; ++i)
      if (chain::is_channel(i))
        fetched[slot++][load] = inside ? NormType::load(e.operands[i][column]) : 0.f;
  }
}

__device__ __forceinline__ void share_vectors(const float (&fetched)[kVectorSlots][kVectorLoads],
                                              float* vectors, int consumer, int thread) {
  named_barrier_sync(1 + consumer, kWarpgroupThreads);  // the last tile's are no longer read
#pragma unroll
  for (int vector = 0; vector < kVectors; ++vector)
#pragma unroll
    for (int load = 0; load < kVectorLoads; ++load) {
      const int at = load * kWarpgroupThreads + thread;
      if (at < kConsumerN) vectors[vector * kConsumerN + at] = fetched[vector][load];
    }
  named_barrier_sync(1 + consumer, kWarpgroupThreads);
}

// A vector's values at the two columns of a chunk that this lane holds. Volatile keeps the loads near
// their use: hoisted, they would push accumulators out of the registers.
__device__ __forceinline__ float2 pair_at(const float* vectors, int vector, int chunk, int quad_lane) {
  const float* at = vectors + vector * kConsumerN + chunk * kChunkColumns + quad_lane * 2;
  float2 pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(pair.x), "=f"(pair.y)
               : "r"(shared_address(at)));
  return pair;
}

__device__ __forceinline__ float of(float2 pair, int i) { return i == 0 ? pair.x : pair.y; }

// The chain's tensor operands at one element.
__device__ __forceinline__ void load_operands(float (&t)[chain::kSlots], const Epilogue& e,
                                              const float* vectors, int chunk, int quad_lane, int i,
                                              int row, int first_column) {
  int slot = kOperandVector;
#pragma unroll
  for (int k = 0; k < chain::kOperands; ++k) {
    if (chain::is_channel(k)) {
      t[k] = of(pair_at(vectors, slot++, chunk, quad_lane), i);
    } else {
      const int column = first_column + chunk * kChunkColumns + quad_lane * 2 + i;
      const bool inside = row < e.m && column < e.n;
      t[k] = inside ? NormType::load(e.operands[k][static_cast<i64>(row) * e.n + column]) : 0.f;
    }
  }
}

// The linear's output from the scaled planes' product.
__device__ __forceinline__ void undo_scales(float (&v)[kAccumulators], const float (&row_scale)[2],
                                            const float* vectors, int quad_lane) {
#pragma unroll
  for (int chunk = 0; chunk < kConsumerN / kChunkColumns; ++chunk) {
    const float2 scale = pair_at(vectors, kScaleVector, chunk, quad_lane);
#pragma unroll
    for (int lower = 0; lower < 2; ++lower)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        v[accumulator(chunk, lower, i)] *= row_scale[lower] * of(scale, i);
  }
}

// The sum over a group's lanes, and over both warpgroups' where they share the group. Two buffers in
// turn: who writes one again has passed the barrier that follows the other's last read of it.
struct GroupSum {
  float* exchange;  // [2][kConsumers][kProductM]
  int consumer, turn = 0;

  __device__ __forceinline__ float operator()(float value, int lower) {
    value = Segment::sum(value);
    if (!kSharedGroup) return value;
    const int thread = threadIdx.x % kWarpgroupThreads;
    const int row = thread / 32 * 16 + thread % 32 / 4 + lower * 8;
    float* rows = exchange + turn * kConsumers * kProductM;
    if (thread % 4 == 0) rows[consumer * kProductM + row] = value;
    named_barrier_sync(kExchangeBarrier, kConsumerThreads);
    turn ^= 1;
    return value + rows[(consumer ^ 1) * kProductM + row];
  }
};

// From the linear's output without bias to its normalised value, in place, for one segment.
__device__ __forceinline__ void normalise_segment(float (&v)[kAccumulators], const Epilogue& e,
                                                  const float* vectors, GroupSum& group_sum, int row,
                                                  int first_column, int segment) {
  using Group = Segment;
  const int quad_lane = threadIdx.x % 4;
  const int first = segment * Group::kGroupChunks;
  float t[chain::kSlots];
#pragma unroll
  for (int chunk = first; chunk < first + Group::kGroupChunks; ++chunk) {
    const float2 bias = kHasBias ? pair_at(vectors, kBiasVector, chunk, quad_lane) : float2{};
#pragma unroll
    for (int lower = 0; lower < 2; ++lower)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& value = v[accumulator(chunk, lower, i)];
        load_operands(t, e, vectors, chunk, quad_lane, i, row + lower * 8, first_column);
        value = chain::pre_apply<float>(kHasBias ? value + of(bias, i) : value, t);
      }
  }
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) {
    const Statistics stats =
        normalise_group<kGroupColumns, kSharedGroup ? kConsumerN : kGroupColumns, chain::kCentred>(
            v, segment, lower, chain::epsilon<float>(),
            [&](float sum) { return group_sum(sum, lower); });
    if (kKeep) {
      const int group = first_column / kGroupColumns + Group::group(segment, quad_lane);
      const int groups = e.n / kGroupColumns;
      const bool leads = Group::leads(quad_lane) && (!kSharedGroup || group_sum.consumer == 0);
      if (leads && row + lower * 8 < e.m && group < groups) {
        i64 at = static_cast<i64>(row + lower * 8) * groups + group;
        asm volatile("" : "+l"(at));  // or the compiler keeps the addresses of all segments at once
        if (chain::kCentred) e.mean[at] = stats.mean;
        e.rstd[at] = stats.rstd;
      }
    }
  }
}

// From the normalised value to y, in place, for one chunk.
__device__ __forceinline__ void finish_chunk(float (&v)[kAccumulators], const Epilogue& e,
                                             const float* vectors, int row, int first_column,
                                             int chunk) {
  const int quad_lane = threadIdx.x % 4;
  const float2 gamma = kHasGamma ? pair_at(vectors, kGammaVector, chunk, quad_lane) : float2{};
  const float2 beta = kHasBeta ? pair_at(vectors, kBetaVector, chunk, quad_lane) : float2{};
  float t[chain::kSlots];
#pragma unroll
  for (int lower = 0; lower < 2; ++lower)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float& value = v[accumulator(chunk, lower, i)];
      float y = value;
      if (kHasGamma) y *= of(gamma, i);
      if (kHasBeta) y += of(beta, i);
      load_operands(t, e, vectors, chunk, quad_lane, i, row + lower * 8, first_column);
      value = chain::post_apply<float>(y, t);
    }
}

// Two passes over a row block in registers: the first holds all shuffles and no store, so that they
// overlap; the second computes each part of y just before it is written.
__device__ __forceinline__ void finish_rows(float (&v)[kAccumulators], const Epilogue& e,
                                            const float* vectors, GroupSum& group_sum, u32 buffer,
                                            int warp_row, int first_column) {
  using Store = RowStore<OutType, kConsumerN>;
  constexpr int kSegments = kConsumerN / kChunkColumns / Segment::kGroupChunks;
  constexpr int kPartChunks = Store::kPartColumns / kChunkColumns;
  const int row = warp_row + threadIdx.x % 32 / 4;
#pragma unroll
  for (int segment = 0; segment < kSegments; ++segment)
    normalise_segment(v, e, vectors, group_sum, row, first_column, segment);
#pragma unroll
  for (int part = 0; part < Store::kParts; ++part) {
    // The branch also ends a block of the compiler's schedule, which else keeps too much at once.
    if (first_column + part * Store::kPartColumns >= e.n) break;
#pragma unroll
    for (int chunk = part * kPartChunks; chunk < (part + 1) * kPartChunks; ++chunk)
      finish_chunk(v, e, vectors, row, first_column, chunk);
    Store::store(e.y, buffer, v, part, warp_row, first_column, e.m, e.n);
  }
}

__device__ __forceinline__ void keep_rows(const float (&v)[kAccumulators], const Epilogue& e,
                                          u32 buffer, int warp_row, int first_column) {
  using Store = RowStore<KeptType, kConsumerN>;
#pragma unroll
  for (int part = 0; part < Store::kParts; ++part) {
    if (first_column + part * Store::kPartColumns >= e.n) break;
    Store::store(e.z, buffer, v, part, warp_row, first_column, e.m, e.n);
  }
}

__device__ __forceinline__ void consume(const Ring& ring, const Epilogue& e, unsigned char* shared,
                                        int consumer, int first_tile, int tile_step, int rank,
                                        int k_steps) {
  const int thread = threadIdx.x % kWarpgroupThreads, warp = thread / 32, lane = thread % 32;
  const u32 buffer =
      shared_address(shared + kStoreOffset + consumer * kStoreBytes + warp * kStoreBufferBytes);
  float* vectors = reinterpret_cast<float*>(shared + kVectorOffset + consumer * kVectorBytes);
  GroupSum group_sum = {reinterpret_cast<float*>(shared + kExchangeOffset), consumer};
  const TileOrder order(e.m, e.n);
  const Share share(consumer);
  const int turn = kPingPong ? consumer : 0;
  Slot slot;
  slot.skip(turn * k_steps);
  const int first_index = first_tile + turn * tile_step, index_step = kTurns * tile_step;
  int count = 0;
  Tile next = order.tile_at(first_index, rank);
  for (int index = first_index; index < order.count();
       index += index_step, slot.skip((kTurns - 1) * k_steps), ++count) {
    const Tile tile = next;
    next = order.tile_at(index + index_step, rank);  // its divisions hide behind the products
    const int first_column = tile.n + share.first_column;
    float fetched[kVectorSlots][kVectorLoads];
    fetch_vectors(fetched, e, first_column, thread);
    Accumulators v;
    multiply_tile(v, ring, slot, share, k_steps, count);
    if (kVectors > 0) share_vectors(fetched, vectors, consumer, thread);
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) {
      const int warp_row = tile.m + (share.first_block + block) * kProductM + warp * 16;
      if (kScaled) {
        const int row = warp_row + lane / 4;
        const float row_scale[2] = {row < e.m ? e.row_scale[row] : 0.f,
                                    row + 8 < e.m ? e.row_scale[row + 8] : 0.f};
        undo_scales(v[block], row_scale, vectors, lane % 4);
      }
      if (kKeep) keep_rows(v[block], e, buffer, warp_row, first_column);
      finish_rows(v[block], e, vectors, group_sum, buffer, warp_row, first_column);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    linear_norm(const __grid_constant__ TensorMap x_hi, const __grid_constant__ TensorMap x_lo,
                const __grid_constant__ TensorMap w_hi, const __grid_constant__ TensorMap w_lo,
                typename OutType::Storage* y, typename KeptType::Storage* z,
                const typename KeptType::Storage* bias, const typename NormType::Storage* gamma,
                const typename NormType::Storage* beta, const float* row_scale,
                const float* column_scale, float* mean, float* rstd, int m, int n,
                int k OPERAND_PARAMETERS) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Ring ring(shared_address(shared), shared_address(shared + kBarrierOffset));
  const int warpgroup = threadIdx.x / kWarpgroupThreads;
  const int rank = kCluster == 1 ? 0 : cluster_rank();
  if (threadIdx.x == 0) ring_init(ring);
  if (threadIdx.x == kConsumerThreads) {
    tma_prefetch(&x_hi);
    tma_prefetch(&w_hi);
  }
  if (kCluster == 1)
    __syncthreads();
  else
    cluster_sync();
  wait_for_previous_kernel();

  const int first_tile = blockIdx.x / kCluster, tile_step = gridDim.x / kCluster;
  const int k_steps = (k + kBlockK - 1) / kBlockK;
  if (warpgroup == kConsumers) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x == kConsumerThreads) {
      const Operands16 operands = {{&x_hi, &x_lo}, {&w_hi, &w_lo}};
      const TileOrder order(m, n);
      Slot slot;
      for (int index = first_tile; index < order.count(); index += tile_step)
        load_tile(ring, slot, operands, order.tile_at(index, rank), k_steps, rank);
    }
  } else {
    take_registers<kConsumerRegisters>();
    const Epilogue e = {bias, gamma, beta, OPERAND_LIST, row_scale, column_scale,
                        y, z, mean, rstd, m, n};
    consume(ring, e, shared, warpgroup, first_tile, tile_step, rank, k_steps);
  }
  // A block's shared memory must outlive what its neighbour still copies into it or arrives on.
  if (kCluster > 1) cluster_sync();
}
