// C[m, n] = row_scale[m] sum over k of A[m, k] B[n, k], and nothing after it: the backward products.
// hopper_pipeline.cuh says how it multiplies; operands may lie along k or along m and n.
//
// The prelude defines, besides what hopper_pipeline.cuh needs, OutType and kScaled.
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
#pragma unroll
  for (int part = 0; part < Store::kParts; ++part) {
    if (first_column + part * Store::kPartColumns >= result.n) break;
    Store::store(result.c, buffer, v, part, warp_row, first_column, result.m, result.n);
  }
}

__device__ __forceinline__ void consume(const Ring& ring, const Result& result,
                                        unsigned char* shared, int consumer, int k_steps) {
  const int warp = threadIdx.x % kWarpgroupThreads / 32;
  const u32 buffer =
      shared_address(shared + kStoreOffset + consumer * kStoreBytes + warp * kStoreBufferBytes);
  const TileOrder order(result.m, result.n);
  const Share share(consumer);
  const int turn = kPingPong ? consumer : 0;
  Slot slot;
  slot.skip(turn * k_steps);
  int count = 0;
  for (int index = blockIdx.x + turn * gridDim.x; index < order.count();
       index += kTurns * gridDim.x, slot.skip((kTurns - 1) * k_steps), ++count) {
    const Tile tile = order.tile_at(index, 0);
    Accumulators v;
    multiply_tile(v, ring, slot, share, k_steps, count);
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) {
      const int warp_row = tile.m + (share.first_block + block) * kProductM + warp * 16;
      finish_rows(v[block], result, buffer, warp_row, tile.n + share.first_column);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    hopper_product(const __grid_constant__ TensorMap a_hi, const __grid_constant__ TensorMap a_lo,
                   const __grid_constant__ TensorMap b_hi, const __grid_constant__ TensorMap b_lo,
                   typename OutType::Storage* c, const float* row_scale, int m, int n, int k) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Ring ring(shared_address(shared), shared_address(shared + kBarrierOffset));
  const int warpgroup = threadIdx.x / kWarpgroupThreads;
  if (threadIdx.x == 0) ring_init(ring);
  __syncthreads();
  wait_for_previous_kernel();

  const int k_steps = (k + kBlockK - 1) / kBlockK;
  if (warpgroup == kConsumers) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x == kConsumerThreads) {
      const Operands16 operands = {{&a_hi, &a_lo}, {&b_hi, &b_lo}};
      const TileOrder order(m, n);
      Slot slot;
      for (int index = blockIdx.x; index < order.count(); index += gridDim.x)
        load_tile(ring, slot, operands, order.tile_at(index, 0), k_steps, 0);
    }
  } else {
    take_registers<kConsumerRegisters>();
    const Result result = {c, row_scale, m, n};
    consume(ring, result, shared, warpgroup, k_steps);
  }
}
