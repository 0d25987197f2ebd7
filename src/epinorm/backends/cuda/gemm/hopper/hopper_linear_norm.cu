// y = post(norm(pre(x Wᵀ + bias))) in one kernel: load, multiply, normalise, activate, store.
//
// Persistent blocks of one producer thread and two warpgroups that multiply; see hopper_pipeline.cuh.
// When a tile's product is done its warpgroup normalises it in registers, while the other one
// multiplies and the producer loads ahead.
//
// The prelude defines what hopper_pipeline.cuh and norm_epilogue.cuh need, kAlignedRows,
// HELD_PARAMETER, CHAIN_PARAMETERS, OPERAND_LIST, CONSTANT_LIST and AFFINE_SCALE.
#include "common/dependent.cuh"
#include "gemm/hopper/hopper_pipeline.cuh"

constexpr int kWarpColumns = kConsumerN;
constexpr int kVectorColumns = kConsumerN, kVectorThreads = kWarpgroupThreads;
constexpr int kParts = kClusterN * kColumnParts;
constexpr bool kPacksAffine = !kPingPong;  // all warps are in the epilogue at once
constexpr int kSpareRegisters = kConsumerRegisters - kAccumulators;
#define COMBINES_PARTS
#include "gemm/hopper/held_operand.cuh"
#include "gemm/norm_epilogue.cuh"
constexpr int kExchangeBarrier = 2 + kConsumers;  // named, after hopper_pipeline.cuh's
#include "gemm/hopper/part_exchange.cuh"

constexpr int kStoreBytes = 4 * kStoreBufferBytes;  // of a warpgroup

static_assert(!kSharedGroup || kCluster == 1, "the cluster's rank is the part's");

// Shared memory: the ring, the store buffers, the vectors, the exchange, the barriers (hopper.py
// adds them up too).
constexpr int kStoreOffset = kRingBytes;
constexpr int kVectorOffset = kStoreOffset + kConsumers * kStoreBytes;
constexpr int kExchangeOffset = kVectorOffset + kConsumers * kVectorBytes;
constexpr int kBarrierOffset = kExchangeOffset + kExchangeBytes;

__device__ __forceinline__ void share_vectors(const Fetched& fetched, float* vectors, int consumer,
                                              int thread, float affine_scale) {
  named_barrier_sync(1 + consumer, kWarpgroupThreads);  // the last tile's are no longer read
  store_vectors(fetched, vectors, thread, affine_scale);
  named_barrier_sync(1 + consumer, kWarpgroupThreads);
}

__device__ __forceinline__ void consume(const Ring& ring, const Epilogue& e, unsigned char* shared,
                                        int consumer, int first_tile, int tile_step, int rank,
                                        int k_steps) {
  const int thread = threadIdx.x % kWarpgroupThreads, warp = thread / 32;
  const u32 buffer =
      shared_address(shared + kStoreOffset + consumer * kStoreBytes + warp * kStoreBufferBytes);
  float* vectors = reinterpret_cast<float*>(shared + kVectorOffset + consumer * kVectorBytes);
  const int exchanger = consumer / kColumnParts;
  GroupSum group_sum = {
      {shared_address(shared + kExchangeOffset + exchanger * 2 * kExchangeBufferBytes),
       ring.resident_barrier + 8 + exchanger * 2 * 8,
       static_cast<int>(rank * kColumnParts + consumer % kColumnParts)}};
  const TileOrder order(e.m, e.n);
  const Share share(consumer);
  const int turn = kPingPong ? consumer : 0;
  Slot slot;
  const int tile_slots = k_steps + kOperandSlots;
  slot.skip(turn * tile_slots);
  if (kWeightInSmem && kVectors > 0) {  // one column tile: its vectors stay
    Fetched fetched;
    fetch_vectors(fetched, e, share.first_column, thread);
    share_vectors(fetched, vectors, consumer, thread, e.affine_scale);
  }
  if (kWeightInSmem) wait_for_resident(ring);
  const int first_index = first_tile + turn * tile_step, index_step = kTurns * tile_step;
  int count = 0;
  Tile next = order.tile_at(first_index, rank);
  for (int index = first_index; index < order.count();
       index += index_step, slot.skip((kTurns - 1) * tile_slots + kOperandSlots), ++count) {
    const Tile tile = next;
    const int first_column = tile.n + share.first_column;
    Fetched fetched;
    if (!kWeightInSmem) fetch_vectors(fetched, e, first_column, thread);
    if (kOperandSlots == 0)
      prefetch_operands<kRowBlocks * kProductM>(e, tile.m + share.first_block * kProductM,
                                                first_column, thread);
    Accumulators v;
    multiply_tile(v, ring, slot, share, k_steps, count, [&] {
      if (!kWeightInSmem && kVectors > 0)
        share_vectors(fetched, vectors, consumer, thread, e.affine_scale);
      next = order.tile_at(index + index_step, rank);
    });
    if (!kPingPong && !kInHalves) wait_for_operand(ring, slot);
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) {
      const int row = (share.first_block + block) * kProductM + warp * 16;
#ifdef HOLDS_OPERAND
      const HeldOperand held = {ring, slot, row, share.first_column, block == kRowBlocks - 1};
#else
      const HeldOperand held{};
#endif
      finish_row_block(v[block], e, {vectors, 0}, group_sum, buffer, tile.m + row, first_column, held);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    linear_norm(HELD_PARAMETER const __grid_constant__ TensorMap x_hi, const __grid_constant__ TensorMap x_lo,
                const __grid_constant__ TensorMap w_hi, const __grid_constant__ TensorMap w_lo,
                typename OutType::Storage* y, typename KeptType::Storage* z,
                const typename LinearType::Storage* bias, const typename NormType::Storage* gamma,
                const typename NormType::Storage* beta, const float* row_scale,
                const float* column_scale, float* mean, float* rstd, int m, int n,
                int k CHAIN_PARAMETERS) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Ring ring(shared_address(shared), shared_address(shared + kBarrierOffset));
  const int warpgroup = threadIdx.x / kWarpgroupThreads;
  const int rank = kClusterBlocks == 1 ? 0 : cluster_rank();
  const int first_tile = blockIdx.x / kClusterBlocks, tile_step = gridDim.x / kClusterBlocks;
  const TileOrder order(m, n);
  const Tile first = order.tile_at(first_tile, rank);  // its divisions hide behind the barriers' start
  if (threadIdx.x == kConsumerThreads) {
    tma_prefetch(&x_hi);
    tma_prefetch(&w_hi);
  }
  start_together<kExchanges>(ring);
  wait_for_previous_kernel();
  let_next_kernel_start();

  const int k_steps = (k + kBlockK - 1) / kBlockK;
  if (warpgroup == kConsumers) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x == kConsumerThreads) {
      const Operands16 operands = {{&x_hi, &x_lo}, {&w_hi, &w_lo}, order.row_tiles == 1};
      if (kWeightInSmem) load_resident(ring, operands);
      Slot slot;
      Tile tile = first;
      for (int index = first_tile; index < order.count();) {
        if constexpr (kInHalves) {
#ifdef HOLDS_OPERAND
          load_in_halves(ring, slot, operands, tile, k_steps, OperandAhead{&element, tile, k_steps});
#else
          load_in_halves(ring, slot, operands, tile, k_steps, [](int) {});
#endif
        } else {
          load_tile(ring, slot, operands, tile, k_steps, rank);
        }
#ifdef HOLDS_OPERAND
        load_operand(ring, slot, &element, tile);
#endif
        index += tile_step;
        tile = order.tile_at(index, rank);
      }
    }
  } else {
    take_registers<kConsumerRegisters>();
    wait_for_neighbours();
    const Epilogue e = {bias, gamma, beta, OPERAND_LIST, CONSTANT_LIST, AFFINE_SCALE,
                        row_scale, column_scale, y, z, mean, rstd, m, n,
                        chain::drops_of<float>(CONSTANT_LIST, OPERAND_LIST)};
    consume(ring, e, shared, warpgroup, first_tile, tile_step, rank, k_steps);
  }
  end_together();
}
