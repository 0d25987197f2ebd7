// The plain product of the Hopper core, persistent blocks and roles: what hopper_product.cu and
// hopper_product_into.cu have in common. hopper_pipeline.cuh says how it multiplies.
//
// The prelude defines, besides what hopper_pipeline.cuh needs, kSplit.
#pragma once
#include "gemm/product_prelude.cuh"
#include "common/dependent.cuh"
#include "gemm/hopper/hopper_pipeline.cuh"
#include "gemm/row_store.cuh"

constexpr int kStoreBytes = 4 * kStoreBufferBytes;  // of a warpgroup

// Shared memory: the ring, the store buffers, the barriers (hopper.py adds them up too).
constexpr int kStoreOffset = kRingBytes;
constexpr int kBarrierOffset = kStoreOffset + kConsumers * kStoreBytes;

struct Result {
  float* c;
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

// Undoes the scales of A's rows.
__device__ __forceinline__ void scale_rows(float (&v)[kAccumulators], const Result& result,
                                           int warp_row) {
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

// finish(v, result, buffer, first row, first column) stores 16 rows of a warp.
template <class Finish>
__device__ __forceinline__ void consume(const Ring& ring, const Result& whole,
                                        unsigned char* shared, int consumer, int k_steps,
                                        int parts, Finish finish) {
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
      scale_rows(v[block], result, warp_row);
      finish(v[block], result, buffer, warp_row, tile.n + share.first_column);
    }
  }
}

static_assert(!kInHalves, "load_tile() fills whole slots");
static_assert(kClusterBlocks == 1, "blocks do not wait for each other at the end");

// The roles of a block, from the set-up of its ring on. k: of a part; of the last one, less may be there.
template <class Finish>
__device__ __forceinline__ void run_block(const Ring& ring, unsigned char* shared,
                                          const Operands16& operands, const Result& result, int k,
                                          int parts, Finish finish) {
  const int k_steps = (k + kBlockK - 1) / kBlockK;
  const int warpgroup = threadIdx.x / kWarpgroupThreads;
  if (warpgroup == kConsumers) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x == kConsumerThreads) {
      const Work work(result.m, result.n, parts);
      Slot slot;
      for (int index = blockIdx.x; index < work.count(); index += gridDim.x)
        load_tile(ring, slot, operands, work.tile_at(index), k_steps, 0,
                  work.part_at(index) * k_steps);
    }
  } else {
    take_registers<kConsumerRegisters>();
    consume(ring, result, shared, warpgroup, k_steps, parts, finish);
  }
}
