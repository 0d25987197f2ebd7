// y = post(norm(pre(x Wᵀ + bias))) in one kernel: load, multiply, normalise, activate, store.
//
// Persistent blocks of one producer thread and two warpgroups that multiply; see hopper_pipeline.cuh.
// When a tile's product is done its warpgroup normalises it in registers, while the other one
// multiplies and the producer loads ahead.
//
// The prelude defines, besides what hopper_pipeline.cuh needs: the chain (codegen.py); kGroupColumns;
// kHasBias, kHasGamma, kHasBeta; kScaled (operands are scaled planes); kKeep (training: z, mean and
// rstd are written); kAffineScale (of gamma and beta: a constant taken out of post); the types OutType, KeptType and NormType; OPERAND_PARAMETERS and OPERAND_LIST.
#include "dependent.cuh"
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

// A group wider than a warpgroup's columns: all that share it add up their parts through shared memory.
constexpr bool kSharedGroup = kGroupColumns > kConsumerN;
constexpr int kParts = kGroupBlocks * kColumnParts;
static_assert(!kSharedGroup || kGroupColumns == kParts * kConsumerN, "a group is all parts");
static_assert(!kSharedGroup || kCluster == 1, "the cluster's rank is the part's");
using Segment = Segments<kSharedGroup ? kConsumerN : kGroupColumns>;
constexpr int kExchanges = kSharedGroup ? 2 : 0;  // buffers in turn, each with a barrier
constexpr int kExchangeBytes = kExchanges * kParts * kProductM * 4;
constexpr int kExchangeBarrier = 2 + kConsumers;  // named, after hopper_pipeline.cuh's

// Shared memory: the ring, the store buffers, the vectors, the exchange, the barriers (hopper.py
// adds them up too).
constexpr int kStoreOffset = kRingBytes;
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

// This thread's share of the tile's vectors as they lie in memory. Issued before the product and
// converted after it: a conversion here would wait for the load.
using Fetched = u32[kVectorSlots][kVectorLoads];

__device__ __forceinline__ void fetch_vectors(Fetched& fetched, const Epilogue& e, int first_column,
                                              int thread) {
#pragma unroll
  for (int load = 0; load < kVectorLoads; ++load) {
    const int at = load * kWarpgroupThreads + thread, column = first_column + at;
    const bool inside = at < kConsumerN && column < e.n;
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

__device__ __forceinline__ float fetched_value(u32 bits, int vector) {
  if (kHasBias && vector == kBiasVector) return from_raw_bits<KeptType>(bits);
  if (kScaled && vector == kScaleVector) return from_raw_bits<Float32>(bits);
  const float value = from_raw_bits<NormType>(bits);
  return vector < kScaleVector ? value * kAffineScale : value;  // gamma, beta; an operand
}

__device__ __forceinline__ void share_vectors(const Fetched& fetched, float* vectors, int consumer,
                                              int thread) {
  named_barrier_sync(1 + consumer, kWarpgroupThreads);  // the last tile's are no longer read
#pragma unroll
  for (int vector = 0; vector < kVectors; ++vector)
#pragma unroll
    for (int load = 0; load < kVectorLoads; ++load) {
      const int at = load * kWarpgroupThreads + thread;
      if (at < kConsumerN)
        vectors[vector * kConsumerN + at] = fetched_value(fetched[vector][load], vector);
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

__device__ __forceinline__ void store_shared(u32 address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

__device__ __forceinline__ float load_shared(u32 address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
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

// The sums of two rows over a group's lanes, and over all parts where the group is shared: every part
// sends its sums to every block of the cluster. Two buffers in turn: who fills one again has waited
// for the exchange after it, and a part takes part in that only after reading the buffer.
struct GroupSum {
  u32 buffers, barriers;  // [2][kParts][kProductM] and [2], shared addresses
  int part;
  u32 uses = 0;

  __device__ __forceinline__ void operator()(float (&sums)[2]) {
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) sums[lower] = Segment::sum(sums[lower]);
    if constexpr (kSharedGroup) exchange(sums);
  }

  __device__ __forceinline__ void exchange(float (&sums)[2]) {
    constexpr u32 kPartBytes = kProductM * 4;
    const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroupThreads / 32;
    const u32 turn = uses % 2, barrier = barriers + turn * 8;
    const u32 rows = buffers + turn * kParts * kPartBytes + (warp * 16 + lane / 4) * 4;
    ++uses;
    if (kGroupBlocks == 1) {
      if (lane % 4 == 0)
        for (int lower = 0; lower < 2; ++lower)
          store_shared(rows + part * kPartBytes + lower * 8 * 4, sums[lower]);
      named_barrier_sync(kExchangeBarrier, kConsumerThreads);
    } else {
      send_to_blocks(sums, rows + part * kPartBytes, barrier);
      barrier_wait(barrier, (uses - 1) / 2 % 2);
    }
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      sums[lower] = 0.0f;
#pragma unroll
      for (int other = 0; other < kParts; ++other)
        sums[lower] += load_shared(rows + other * kPartBytes + lower * 8 * 4);
    }
  }

  static __device__ __forceinline__ void send_to_blocks(const float (&sums)[2], u32 to, u32 barrier) {
    if (threadIdx.x == 0) barrier_arrive_expect(barrier, kParts * kProductM * 4);
    if (threadIdx.x % 4 != 0) return;
#pragma unroll
    for (int block = 0; block < kGroupBlocks; ++block)
#pragma unroll
      for (int lower = 0; lower < 2; ++lower)
        store_async(address_in_block(to + lower * 8 * 4, block), sums[lower],
                    address_in_block(barrier, block));
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
  Statistics stats[2];
  normalise_group<kGroupColumns, kSharedGroup ? kConsumerN : kGroupColumns, chain::kCentred>(
      stats, v, segment, chain::epsilon<float>(), group_sum);
  if (!kKeep) return;
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) {
    const int group = first_column / kGroupColumns + Group::group(segment, quad_lane);
    const int groups = e.n / kGroupColumns;
    const bool leads = Group::leads(quad_lane) && (!kSharedGroup || group_sum.part == 0);
    if (leads && row + lower * 8 < e.m && group < groups) {
      i64 at = static_cast<i64>(row + lower * 8) * groups + group;
      asm volatile("" : "+l"(at));  // or the compiler keeps the addresses of all segments at once
      if (chain::kCentred) e.mean[at] = stats[lower].mean;
      e.rstd[at] = stats[lower].rstd;
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
  GroupSum group_sum = {shared_address(shared + kExchangeOffset), ring.resident_barrier + 8,
                        rank * kColumnParts + consumer};
  const TileOrder order(e.m, e.n);
  const Share share(consumer);
  const int turn = kPingPong ? consumer : 0;
  Slot slot;
  slot.skip(turn * k_steps);
  if (kResident) wait_for_resident(ring);
  const int first_index = first_tile + turn * tile_step, index_step = kTurns * tile_step;
  int count = 0;
  Tile next = order.tile_at(first_index, rank);
  for (int index = first_index; index < order.count();
       index += index_step, slot.skip((kTurns - 1) * k_steps), ++count) {
    const Tile tile = next;
    next = order.tile_at(index + index_step, rank);  // its divisions hide behind the products
    const int first_column = tile.n + share.first_column;
    Fetched fetched;
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
  const int rank = kClusterBlocks == 1 ? 0 : cluster_rank();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kExchanges; ++i)
      barrier_init(ring.resident_barrier + (1 + i) * 8, 1);
    ring_init(ring);
  }
  if (threadIdx.x == kConsumerThreads) {
    tma_prefetch(&x_hi);
    tma_prefetch(&w_hi);
  }
  if (kClusterBlocks == 1)
    __syncthreads();
  else
    cluster_sync();
  wait_for_previous_kernel();

  const int first_tile = blockIdx.x / kClusterBlocks, tile_step = gridDim.x / kClusterBlocks;
  const int k_steps = (k + kBlockK - 1) / kBlockK;
  if (warpgroup == kConsumers) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x == kConsumerThreads) {
      const Operands16 operands = {{&x_hi, &x_lo}, {&w_hi, &w_lo}};
      const TileOrder order(m, n);
      if (kResident) load_resident(ring, operands);
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
  if (kClusterBlocks > 1) cluster_sync();
}
