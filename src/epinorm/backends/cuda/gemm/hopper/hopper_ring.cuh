// The ring in shared memory through which the Hopper kernels' operands come: a block's threads and
// registers, tiles and their order, barriers, and the one thread that loads.
//
// The prelude (hopper/text.py) defines, as constexpr:
//   kBlockM, kBlockN                       the tile
//   kPingPong                              see hopper_pipeline.cuh
//   kConsumers                             warpgroups that multiply, the block's first threads
//   kSplitColumns                          together, but each warpgroup has half of the columns
//   kLoadM                                 rows of A that are loaded: fewer than kBlockM if M is small
//   kElementBytes                          2, or 4: fp32 multiplied as TF32
//   kRegisterA                             TF32 with A out of registers, see register_tf32.cuh
//   kStages                                slots of the ring
//   kPlanes, kFoldSteps                    2 planes: three products, see multiply_tile() there
//   kMajorKA, kMajorKB                     the operand's rows run along the summed index
//   kCluster                               1, or 2: two blocks below each other share B's loads
//   kClusterN                           1, or blocks side by side that share a group's statistics
//   kTileGroup                             see TileOrder
//   kOperandSlots                          slots behind a tile's last step for an operand of the chain
//                                          (held_operand.cuh)
//   kWeightSteps                         0, or the steps of B, which is one column tile, that stay in
//                                          shared memory from the first tile to the last
#pragma once
#include "gemm/hopper/prelude.cuh"
#include "common/hopper_barrier.cuh"
#include "common/hopper_tma.cuh"
#include "common/hopper_wgmma.cuh"
#include "common/shared_units.cuh"
#include "common/tile_order.cuh"

constexpr int kWarpgroupThreads = 128;
constexpr int kClusterBlocks = kCluster * kClusterN;
static_assert(kCluster == 1 || kClusterN == 1, "a cluster has one purpose");
static_assert(kConsumers == 2 || kPingPong, "more than two take turns");
constexpr int kConsumerThreads = kConsumers * kWarpgroupThreads;
constexpr int kThreads = kConsumerThreads + kWarpgroupThreads;
constexpr int kTileConsumers = kPingPong ? 1 : kConsumers;  // that multiply one tile
constexpr int kTurns = kConsumers / kTileConsumers;         // tiles in work at once

// A step along the summed index is a 128-byte row of each operand.
constexpr int kBlockK = kSwizzleRowBytes / kElementBytes;
constexpr int kProductM = 64;                       // rows of one wgmma
constexpr int kProductK = 32 / kElementBytes;       // of the summed index
constexpr int kColumnParts = kSplitColumns ? kConsumers : 1;
constexpr int kConsumerN = kBlockN / kColumnParts;  // columns of a consumer
constexpr int kRowBlocks = kBlockM / kProductM / (kTileConsumers / kColumnParts);  // of a consumer
constexpr int kAccumulators = kProductM * kConsumerN / kWarpgroupThreads;  // of a row block
static_assert(kRowBlocks >= 1 && !(kPingPong && kSplitColumns), "");
static_assert(kMajorKA || kLoadM == kBlockM, "a transposed A is loaded whole");
static_assert(kElementBytes == 2 || (kMajorKA && kMajorKB), "TF32 has no transposed operands");
static_assert(kConsumerN % 8 == 0, "whole swizzle atoms for each consumer");

// setmaxnreg counts in warpgroups, so the producer is a whole one. It moves registers within what the
// block was launched with: as many for each thread as 65536 allow, in steps of 8. With two consumers
// that is 168 for each of 384 threads, of which 128 * 24 + 256 * 240 = 64512.
constexpr int kProducerRegisters = 24;
constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
constexpr int kConsumerRegisters =
    (kLaunchRegisters * kThreads / kWarpgroupThreads - kProducerRegisters) / kConsumers / 8 * 8;

constexpr int kPlaneBytesA = kBlockM * kSwizzleRowBytes;
constexpr int kPlaneBytesB = kBlockN * kSwizzleRowBytes;
constexpr bool kWeightInSmem = kWeightSteps > 0;
constexpr int kResidentBytes = kWeightSteps * kPlaneBytesB;
static_assert(!kWeightInSmem || (kPlanes == 1 && kClusterBlocks == 1), "one plane, one block");
constexpr int kStageBytes = kPlanes * (kPlaneBytesA + (kWeightInSmem ? 0 : kPlaneBytesB));
constexpr int kLoadedBytes =
    kPlanes * (kLoadM * kSwizzleRowBytes + (kWeightInSmem ? 0 : kPlaneBytesB));
constexpr int kRingBytes = kResidentBytes + kStages * kStageBytes;
constexpr int kBoxBytes = 64 * kSwizzleRowBytes;  // 64 x 64 elements of an operand not K-major
static_assert(kMajorKB || kBlockN % 64 == 0, "boxes of 64 cover the tile");
static_assert(kPlaneBytesB / kCluster % kAtomBytes == 0, "each block's share is whole atoms");

// Of tiles wider than one product a slot has two parts (product_in_halves.cuh).
constexpr int kWidestProduct = 256;
constexpr bool kInHalves = kConsumerN > kWidestProduct;
constexpr int kSlotParts = kInHalves ? 2 : 1;

constexpr float kLowScale = 1.0f / 2048.0f;  // the lo plane is stored times 2^11

// Shared addresses. turn: in ping-pong, a barrier a consumer that says: yours are the next steps.
struct Ring {
  u32 resident, data, full, empty, turn, resident_barrier;

  __device__ __forceinline__ u32 slot(int stage) const { return data + stage * kStageBytes; }
  __device__ __forceinline__ u32 a(int stage, int plane) const {
    return slot(stage) + plane * kPlaneBytesA;
  }
  __device__ __forceinline__ u32 b(int stage, int step, int plane) const {
    if (kWeightInSmem) return resident + step * kPlaneBytesB;
    return slot(stage) + kPlanes * kPlaneBytesA + plane * kPlaneBytesB;
  }
  __device__ __forceinline__ Ring(u32 data, u32 barriers)
      : resident(data),
        data(data + kResidentBytes),
        full(barriers),
        empty(barriers + kStages * kSlotParts * 8),
        turn(barriers + 2 * kStages * kSlotParts * 8),
        resident_barrier(turn + kConsumers * 8) {}

  __device__ __forceinline__ u32 full_barrier(int stage, int part = 0) const {
    return full + (stage * kSlotParts + part) * 8;
  }
  __device__ __forceinline__ u32 empty_barrier(int stage, int part = 0) const {
    return empty + (stage * kSlotParts + part) * 8;
  }
  __device__ __forceinline__ u32 turn_barrier(int consumer) const { return turn + consumer * 8; }
};

// A place in the ring; its parity flips each time round.
struct Slot {
  int stage = 0;
  u32 parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ int before() const { return stage == 0 ? kStages - 1 : stage - 1; }
  __device__ __forceinline__ void skip(int steps) {
    const int rounds = (stage + steps) / kStages;
    stage += steps - rounds * kStages;
    parity ^= rounds & 1;
  }
};

struct Operands16 {
  const TensorMap *a[2], *b[2];  // plane hi, plane lo
  bool b_once;                   // nobody else reads the same of B, whose rows run along k
};

struct Tile {
  int m, n;  // first row and column
};

// Blocks of a cluster take neighbouring tiles.
struct TileOrder {
  int row_tiles, column_tiles;  // of a whole cluster

  __device__ __forceinline__ TileOrder(int m, int n)
      : row_tiles((m + kCluster * kBlockM - 1) / (kCluster * kBlockM)),
        column_tiles((n + kClusterN * kBlockN - 1) / (kClusterN * kBlockN)) {}

  __device__ __forceinline__ int count() const { return row_tiles * column_tiles; }

  __device__ __forceinline__ Tile tile_at(int index, int rank) const {
    const TilePlace place = grouped_tile<kTileGroup>(index, row_tiles, column_tiles);
    return {(place.row * kCluster + (kCluster > 1 ? rank : 0)) * kBlockM,
            (place.column * kClusterN + (kClusterN > 1 ? rank : 0)) * kBlockN};
  }
};

// By one thread, at addresses that the compiler knows: lanes that share the work would take turns, since
// the instruction takes its address from a uniform register. exchanges: barriers behind the resident B's.
template <int kExchanges>
__device__ __forceinline__ void ring_init(const Ring& ring) {
  constexpr int kConsumerWarps = kTileConsumers * kWarpgroupThreads / 32;
#pragma unroll
  for (int stage = 0; stage < kStages * kSlotParts; ++stage) {
    barrier_init(ring.full + stage * 8, 1);
    barrier_init(ring.empty + stage * 8, kConsumerWarps * kCluster);
  }
#pragma unroll
  for (int consumer = 0; consumer < kConsumers; ++consumer)
    barrier_init(ring.turn_barrier(consumer), kWarpgroupThreads / 32);
#pragma unroll
  for (int i = 0; i <= kExchanges; ++i) barrier_init(ring.resident_barrier + i * 8, 1);
  barrier_init_fence();
}

// Every thread, once. The blocks of a cluster that load into each other must all be there before they
// do; those that share groups alone wait for each other later, while their first loads are under way.
template <int kExchanges>
__device__ __forceinline__ void start_together(const Ring& ring) {
  if (threadIdx.x == kConsumerThreads) ring_init<kExchanges>(ring);
  if (kClusterBlocks > 1) cluster_arrive_relaxed();
  if (kCluster > 1)
    cluster_wait();
  else
    __syncthreads();
}

// Before a consumer writes into another block. For launches as a cluster alone: in any other, the wait
// is a barrier of the whole block, which the producer does not join.
__device__ __forceinline__ void wait_for_neighbours() {
  if (kClusterBlocks > 1 && kCluster == 1) cluster_wait();
}

// What a neighbour still copies into this block's shared memory, or arrives on, must find it there.
// Blocks that share groups alone have then received all that was sent to them.
__device__ __forceinline__ void end_together() {
  if (kCluster > 1) cluster_sync();
}

// ---- the producer: one thread ----

constexpr int kLargestBox = 256;  // rows that one copy can have

template <bool kMajorK, int kRows>
__device__ __forceinline__ void load_operand(u32 to, const TensorMap* map, u32 barrier, int k,
                                             int row, bool once = false) {
  if (kMajorK) {
    constexpr int kBoxRows = kRows > kLargestBox ? kRows / 2 : kRows;
    for (int first = 0; first < kRows; first += kBoxRows) {
      if (once)
        tma_load_once(to + first * kSwizzleRowBytes, map, barrier, k, row + first);
      else
        tma_load(to + first * kSwizzleRowBytes, map, barrier, k, row + first);
    }
  } else {
    for (int box = 0; box < kRows / 64; ++box)
      tma_load(to + box * kBoxBytes, map, barrier, row + box * 64, k);
  }
}

// This block's half of B, into both blocks.
template <bool kMajorK, int kRows>
__device__ __forceinline__ void load_shared_operand(u32 to, const TensorMap* map, u32 barrier,
                                                    int k, int row, int rank) {
  constexpr u16 kBothBlocks = 3;
  constexpr int kHalf = kRows / kCluster;
  if (kMajorK) {
    tma_load_multicast(to + rank * kHalf * kSwizzleRowBytes, map, barrier, k, row + rank * kHalf,
                       kBothBlocks);
  } else {
    for (int box = rank * kHalf / 64; box < (rank + 1) * kHalf / 64; ++box)
      tma_load_multicast(to + box * kBoxBytes, map, barrier, row + box * 64, k, kBothBlocks);
  }
}

// k_steps steps, from first_step on.
__device__ __forceinline__ void load_tile(const Ring& ring, Slot& slot, const Operands16& operands,
                                          Tile tile, int k_steps, int rank, int first_step = 0) {
  for (int step = 0; step < k_steps; ++step, slot.next()) {
    const int k = (first_step + step) * kBlockK;
    const u32 full = ring.full_barrier(slot.stage);
    barrier_wait(ring.empty_barrier(slot.stage), slot.parity ^ 1);
    barrier_arrive_expect(full, kLoadedBytes);
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      load_operand<kMajorKA, kLoadM>(ring.a(slot.stage, plane), operands.a[plane], full, k, tile.m);
      if (kWeightInSmem) continue;
      const u32 b = ring.b(slot.stage, step, plane);
      if (kCluster == 1)
        load_operand<kMajorKB, kBlockN>(b, operands.b[plane], full, k, tile.n, operands.b_once);
      else
        load_shared_operand<kMajorKB, kBlockN>(b, operands.b[plane], full, k, tile.n, rank);
    }
  }
}

__device__ __forceinline__ void load_resident(const Ring& ring, const Operands16& operands) {
  barrier_arrive_expect(ring.resident_barrier, kResidentBytes);
  for (int step = 0; step < kWeightSteps; ++step)
    load_operand<kMajorKB, kBlockN>(ring.b(0, step, 0), operands.b[0], ring.resident_barrier,
                                    step * kBlockK, 0);
}
