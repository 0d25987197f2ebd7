// C[m, n] = row_scale[m] sum over k of A[m, k] B[n, k], and nothing after it: the backward products.
// hopper_pipeline.cuh says how it multiplies; operands may lie along k or along m and n.
//
// Where there are fewer tiles than multiprocessors and k is long, the sum is split: each of the
// work items is one part of one tile's sum, and goes to a C of its own (add_splits.cu).
//
// The prelude defines, besides what hopper_pipeline.cuh needs, OutType, kScaled and kSplit.
#include "dependent.cuh"
#include "hopper_pipeline.cuh"
#include "row_store.cuh"

constexpr int kStoreBytes = 4 * kStoreBufferBytes;  // of a warpgroup

// Shared memory: the ring, the store buffers, the barriers (hopper.py adds them up too).
constexpr int kStoreOffset = kRingBytes;
constexpr int kBarrierOffset = kStoreOffset + kConsumers * kStoreBytes;

struct Result {
  typename OutType::Storage* c;
  const float* row_scale;
  int m, n;
};

// Parts of tiles' sums in the order in which blocks take them: neighbours share operands, so all tiles
// of one part come before the next part's. The steps of a part that lie beyond k load zeros.
struct Work {
  TileOrder order;
  int parts;

  __device__ __forceinline__ Work(int m, int n, int parts) : order(m, n), parts(parts) {}
  __device__ __forceinline__ int count() const {
    return kSplit ? order.count() * parts : order.count();
  }
  __device__ __forceinline__ int part_at(int index) const {
    return kSplit ? index / order.count() : 0;
  }
  __device__ __forceinline__ Tile tile_at(int index) const {
    return order.tile_at(kSplit ? index % order.count() : index, 0);
  }
};

__device__ __forceinline__ void finish_rows(float (&v)[kAccumulators], const Result& result,
                                            u32 buffer, int warp_row, int first_column) {
  using Store = RowStore<OutType, kConsumerN, true>;
  if (kScaled) {
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const int row = warp_row + threadIdx.x % 32 / 4 + lower * 8;
      const float scale = row < result.m ? result.row_scale[row] : 0.0f;
#pragma unroll
      for (int chunk = 0; chunk < kConsumerN / kChunkColumns; ++chunk)
#pragma unroll
        for (int i = 0; i < 2; ++i) v[accumulator(chunk, lower, i)] *= scale;
    }
  }
  Store::store(result.c, buffer, v, warp_row, first_column, result.m, result.n, [](int) {});
}

__device__ __forceinline__ void consume(const Ring& ring, const Result& whole,
                                        unsigned char* shared, int consumer, int k_steps,
                                        int parts) {
  const int warp = threadIdx.x % kWarpgroupThreads / 32;
  const u32 buffer =
      shared_address(shared + kStoreOffset + consumer * kStoreBytes + warp * kStoreBufferBytes);
  const Work work(whole.m, whole.n, parts);
  const Share share(consumer);
  const int turn = kPingPong ? consumer : 0;
  Slot slot;
  slot.skip(turn * k_steps);
  int count = 0;
  for (int index = blockIdx.x + turn * gridDim.x; index < work.count();
       index += kTurns * gridDim.x, slot.skip((kTurns - 1) * k_steps), ++count) {
    const Tile tile = work.tile_at(index);
    Accumulators v;
    multiply_tile(v, ring, slot, share, k_steps, count, [] {});
    Result result = whole;
    if (kSplit) result.c += static_cast<i64>(work.part_at(index)) * whole.m * whole.n;
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) {
      const int warp_row = tile.m + (share.first_block + block) * kProductM + warp * 16;
      finish_rows(v[block], result, buffer, warp_row, tile.n + share.first_column);
    }
  }
}

static_assert(kClusterBlocks == 1, "blocks do not wait for each other at the end");

// k: of a part; of the last one, less may be there.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    hopper_product(const __grid_constant__ TensorMap a_hi, const __grid_constant__ TensorMap a_lo,
                   const __grid_constant__ TensorMap b_hi, const __grid_constant__ TensorMap b_lo,
                   typename OutType::Storage* c, const float* row_scale, int m, int n, int k,
                   int parts) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Ring ring(shared_address(shared), shared_address(shared + kBarrierOffset));
  const int warpgroup = threadIdx.x / kWarpgroupThreads;
  start_together<0>(ring);
  wait_for_previous_kernel();
  let_next_kernel_start();

  const int k_steps = (k + kBlockK - 1) / kBlockK;
  if (warpgroup == kConsumers) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x == kConsumerThreads) {
      const Operands16 operands = {{&a_hi, &a_lo}, {&b_hi, &b_lo}, false};
      const Work work(m, n, parts);
      Slot slot;
      for (int index = blockIdx.x; index < work.count(); index += gridDim.x)
        load_tile(ring, slot, operands, work.tile_at(index), k_steps, 0,
                  work.part_at(index) * k_steps);
    }
  } else {
    take_registers<kConsumerRegisters>();
    const Result result = {c, row_scale, m, n};
    consume(ring, result, shared, warpgroup, k_steps, parts);
  }
}
