// The matrix product of the Hopper kernels: D[m, n] = sum over k of A[m, k] B[n, k], both operands as
// one or two planes of 16-bit numbers, from tensor maps through a ring in shared memory into
// registers. One producer thread loads; two warpgroups or more multiply.
//
// Two ways to share the work. Ping-pong: the warpgroups take tiles in turn, each for itself, so that
// one's epilogue runs behind the others' products. Together: both multiply one tile, each half of its
// rows; two planes need this, since their accumulators fill the registers.
//
// The prelude (hopper.py) defines, as constexpr:
//   kBlockM, kBlockN                       the tile
//   kPingPong                              see above
//   kConsumers                             warpgroups that multiply, the block's first threads
//   kSplitColumns                          together, but each warpgroup has half of the columns
//   kLoadM                                 rows of A that are loaded: fewer than kBlockM if M is small
//   kElementBytes                          2, or 4: fp32 multiplied as TF32
//   kStages                                slots of the ring
//   kPlanes, kFoldSteps                    2 planes: three products, see multiply_tile()
//   kMajorKA, kMajorKB                     the operand's rows run along the summed index
//   kCluster                               1, or 2: two blocks below each other share B's loads
//   kClusterN                           1, or blocks side by side that share a group's statistics
//   kTileGroup                             see TileOrder
//   kWeightSteps                         0, or the steps of B, which is one column tile, that stay in
//                                          shared memory from the first tile to the last
// and the instruction wgmma(float (&d)[kAccumulators], u64 a, u64 b, int accumulate).
#pragma once
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

constexpr float kLowScale = 1.0f / 2048.0f;  // the lo plane is stored times 2^11

// Shared addresses. turn: in ping-pong, a barrier a consumer that says: yours are the next steps.
struct Ring {
  u32 resident, data, full, empty, turn, resident_barrier;

  __device__ __forceinline__ u32 a(int stage, int plane) const {
    return data + stage * kStageBytes + plane * kPlaneBytesA;
  }
  __device__ __forceinline__ u32 b(int stage, int step, int plane) const {
    if (kWeightInSmem) return resident + step * kPlaneBytesB;
    return data + stage * kStageBytes + kPlanes * kPlaneBytesA + plane * kPlaneBytesB;
  }
  __device__ __forceinline__ Ring(u32 data, u32 barriers)
      : resident(data),
        data(data + kResidentBytes),
        full(barriers),
        empty(barriers + kStages * 8),
        turn(barriers + 2 * kStages * 8),
        resident_barrier(turn + kConsumers * 8) {}

  __device__ __forceinline__ u32 full_barrier(int stage) const { return full + stage * 8; }
  __device__ __forceinline__ u32 empty_barrier(int stage) const { return empty + stage * 8; }
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
  for (int stage = 0; stage < kStages; ++stage) {
    barrier_init(ring.full_barrier(stage), 1);
    barrier_init(ring.empty_barrier(stage), kConsumerWarps * kCluster);
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

// ---- the consumers: a warpgroup ----

// The slot is free as soon as every consumer warp of every block that it was loaded into says so.
__device__ __forceinline__ void release(const Ring& ring, int stage) {
  const int lane = threadIdx.x % 32;
  if (kCluster == 1) {
    if (lane == 0) barrier_arrive(ring.empty_barrier(stage));
  } else if (lane < kCluster) {
    barrier_arrive_at(ring.empty_barrier(stage), lane);
  }
}

using Accumulators = float[kRowBlocks][kAccumulators];

__device__ __forceinline__ void keep_after_wait(Accumulators& values) {
#pragma unroll
  for (int block = 0; block < kRowBlocks; ++block) keep_after_wait(values[block]);
}

constexpr int kStepProducts = kBlockK / kProductK;

// The i-th product of a step. With two planes, v = hi + lo 2^-11: the products lo hi and hi lo go into
// accumulators of their own, which are 2^-11 of the result and so need no folding.
__device__ __forceinline__ void multiply_product(Accumulators& main, Accumulators* cross,
                                                 const Ring& ring, int stage, int step, int i,
                                                 int first_block, int first_column,
                                                 bool main_started, bool cross_started) {
  constexpr u32 kRowBlockBytes = kMajorKA ? kProductM * kSwizzleRowBytes : kBoxBytes;
  const u32 column_bytes = kMajorKB ? first_column * kSwizzleRowBytes : first_column / 64 * kBoxBytes;
  const u64 at_a = i * (step_bytes<kMajorKA>() >> 4), at_b = i * (step_bytes<kMajorKB>() >> 4);
  u64 b[kPlanes];
#pragma unroll
  for (int plane = 0; plane < kPlanes; ++plane)
    b[plane] = descriptor<kMajorKB, kBoxBytes>(ring.b(stage, step, plane) + column_bytes) + at_b;
#pragma unroll
  for (int block = 0; block < kRowBlocks; ++block) {
    u64 a[kPlanes];
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane)
      a[plane] = descriptor<kMajorKA, kBoxBytes>(ring.a(stage, plane) +
                                                 (first_block + block) * kRowBlockBytes) +
                 at_a;
    if constexpr (kPlanes == 2) {
      wgmma((*cross)[block], a[1], b[0], cross_started);
      wgmma((*cross)[block], a[0], b[1], 1);
    }
    wgmma(main[block], a[0], b[0], main_started);
  }
}

// One step of 128 bytes along k.
__device__ __forceinline__ void multiply_step(Accumulators& main, Accumulators* cross,
                                              const Ring& ring, int stage, int step,
                                              int first_block, int first_column,
                                              bool main_started, bool cross_started) {
#pragma unroll
  for (int i = 0; i < kStepProducts; ++i)
    multiply_product(main, cross, ring, stage, step, i, first_block, first_column,
                     main_started || i > 0, cross_started || i > 0);
}

// Which part of a tile a consumer multiplies: its row blocks and its first column.
struct Share {
  int consumer, first_block, first_column;

  __device__ __forceinline__ explicit Share(int consumer)
      : consumer(consumer),
        first_block(kPingPong || kSplitColumns ? 0 : consumer * kRowBlocks),
        first_column(kSplitColumns ? consumer * kConsumerN : 0) {}
};

// To 10 bits behind the point, ties away from zero; Inf and NaN stay what they are.
__device__ __forceinline__ u32 rounded_tf32(u32 bits) {
  u32 rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(bits)));
  return rounded;
}

__device__ __forceinline__ uint4 rounded(const uint4& unit) {
  return {rounded_tf32(unit.x), rounded_tf32(unit.y), rounded_tf32(unit.z), rounded_tf32(unit.w)};
}

// The tensor cores cut TF32 operands off where PyTorch's products round them, which costs 13 % more
// error. So they are rounded in place, by the one warpgroup that a step belongs to.
__device__ __forceinline__ void round_to_tf32(u32 from, int bytes, u32 thread, int threads) {
  constexpr int kAtOnce = 4;
  const u32 pass_bytes = threads * kUnitBytes;
  for (u32 at = thread * kUnitBytes; at < bytes; at += kAtOnce * pass_bytes) {
    uint4 units[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (at + i * pass_bytes < bytes) units[i] = load_unit(from + at + i * pass_bytes);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (at + i * pass_bytes < bytes) store_unit(from + at + i * pass_bytes, rounded(units[i]));
  }
  fence_for_async_reads();
}

__device__ __forceinline__ void round_step_to_tf32(const Ring& ring, int stage, int consumer) {
  static_assert(kElementBytes == 2 || kPingPong, "each step has one reader");
  const u32 thread = threadIdx.x % kWarpgroupThreads;
  round_to_tf32(ring.a(stage, 0), kLoadM * kSwizzleRowBytes, thread, kWarpgroupThreads);
  if (!kWeightInSmem) round_to_tf32(ring.b(stage, 0, 0), kPlaneBytesB, thread, kWarpgroupThreads);
  named_barrier_sync(1 + consumer, kWarpgroupThreads);
}

constexpr int kResidentBarrier = 1 + kConsumers;  // named; 0 is bar.sync's, then one a consumer

__device__ __forceinline__ void wait_for_resident(const Ring& ring) {
  barrier_wait(ring.resident_barrier, 0);
  if (kElementBytes == 4) {
    round_to_tf32(ring.resident, kResidentBytes, threadIdx.x, kConsumerThreads);
    named_barrier_sync(kResidentBarrier, kConsumerThreads);
  }
}

// The products of steps [first, last] into main, which starts from nothing; all done on return.
template <class Issued>
__device__ __forceinline__ void multiply_steps(Accumulators& main, Accumulators* cross,
                                               const Ring& ring, Slot& slot, const Share& share,
                                               int first, int last, Issued issued) {
  for (int step = first; step <= last; ++step) {
    barrier_wait(ring.full_barrier(slot.stage), slot.parity);
    if constexpr (kElementBytes == 4) round_step_to_tf32(ring, slot.stage, share.consumer);
    wgmma_fence();
    multiply_step(main, cross, ring, slot.stage, step, share.first_block, share.first_column,
                  step > first, step > 0);
    wgmma_commit();
    if (step > first) {
      wgmma_wait<1>();
      release(ring, slot.stage == 0 ? kStages - 1 : slot.stage - 1);
    }
    slot.next();
  }
  issued(last);
  wgmma_wait<0>();
  keep_after_wait(main);
  if constexpr (kPlanes == 2) keep_after_wait(*cross);
  release(ring, slot.stage == 0 ? kStages - 1 : slot.stage - 1);
}

// A tile's product by TF32 with B resident and a ring that holds all of the tile's steps: these are
// rounded in one go and multiplied in one go, so that each latency is paid once.
template <class Arrived>
__device__ __forceinline__ void multiply_at_once(Accumulators& result, const Ring& ring, Slot& slot,
                                                 const Share& share, Arrived arrived) {
  static_assert(!kWeightInSmem || kLoadM == kBlockM, "all of A's rows are loaded");
  constexpr int kStepUnits = kPlaneBytesA / kUnitBytes / kWarpgroupThreads;  // of a thread
  constexpr int kUnits = kWeightSteps * kStepUnits, kAtOnce = kUnits < 16 ? kUnits : 16;
  int stages[kWeightSteps];
#pragma unroll
  for (int step = 0; step < kWeightSteps; ++step, slot.next()) {
    barrier_wait(ring.full_barrier(slot.stage), slot.parity);
    stages[step] = slot.stage;
  }
  __syncwarp();  // no lane may still wait for its turn when the next but one is given
  arrived();
  const u32 own = threadIdx.x % kWarpgroupThreads * kUnitBytes;
  const auto address = [&](int unit) {
    return ring.a(stages[unit / kStepUnits], 0) + own +
           unit % kStepUnits * kWarpgroupThreads * kUnitBytes;
  };
#pragma unroll
  for (int first = 0; first < kUnits; first += kAtOnce) {
    uint4 units[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (first + i < kUnits) units[i] = load_unit(address(first + i));
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (first + i < kUnits) store_unit(address(first + i), rounded(units[i]));
  }
  fence_for_async_reads();
  named_barrier_sync(1 + share.consumer, kWarpgroupThreads);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kWeightSteps; ++step)
    multiply_step(result, nullptr, ring, stages[step], step, share.first_block, share.first_column,
                  step > 0, false);
  wgmma_commit();
  wgmma_wait<0>();
  keep_after_wait(result);
#pragma unroll
  for (int step = 0; step < kWeightSteps; ++step) release(ring, stages[step]);
}

__device__ __forceinline__ void add_to(Accumulators& sum, const Accumulators& part, float factor) {
#pragma unroll
  for (int block = 0; block < kRowBlocks; ++block)
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) sum[block][i] += part[block][i] * factor;
}

// All of a short tile's steps, each product folded into `result` by itself: three in four of the cuts
// are saved, and the pauses between the products cost a short sum little.
template <class Issued>
__device__ __forceinline__ void multiply_and_fold(Accumulators& result, Accumulators& part,
                                                  Accumulators& cross, const Ring& ring, Slot& slot,
                                                  const Share& share, int k_steps, Issued issued) {
  for (int step = 0; step < k_steps; ++step, slot.next()) {
    barrier_wait(ring.full_barrier(slot.stage), slot.parity);
#pragma unroll
    for (int i = 0; i < kStepProducts; ++i) {
      wgmma_fence();
      multiply_product(part, &cross, ring, slot.stage, step, i, share.first_block,
                       share.first_column, false, step > 0 || i > 0);
      wgmma_commit();
      if (i == kStepProducts - 1) issued(step);
      wgmma_wait<0>();
      keep_after_wait(part);
      keep_after_wait(cross);
      add_to(result, part, 1.0f);
    }
    release(ring, slot.stage);
  }
}

// One tile's product into `result`. Hopper's tensor cores cut sums toward zero at 25 bits (MMA-Sim,
// arXiv 2511.10909): with two planes the running sum is added into full fp32 every kFoldSteps, or after
// each product if that is 0.
//
// In ping-pong a consumer starts when the other has seen all steps of its tile arrive: a barrier's
// parity tells a phase from the next one, not from the one after that.
//
// meanwhile(): what the consumer has to do once a tile beside. It runs behind the last step's products;
// in ping-pong after them, where the tensor cores are the other's by then and do not wait for it.
template <class Meanwhile>
__device__ __forceinline__ void multiply_tile(Accumulators& result, const Ring& ring, Slot& slot,
                                              const Share& share, int k_steps, int count,
                                              Meanwhile meanwhile) {
  const int consumer = share.consumer;
  if (kPingPong) barrier_wait(ring.turn_barrier(consumer), (count & 1) ^ (consumer == 0));
  const auto pass_turn = [&] {
    if (threadIdx.x % 32 == 0) barrier_arrive(ring.turn_barrier((consumer + 1) % kConsumers));
  };
  const auto issued = [&](int last) {
    if (last != k_steps - 1) return;
    if (kPingPong)
      pass_turn();
    else
      meanwhile();
  };
  if constexpr (kElementBytes == 4 && kWeightInSmem && kWeightSteps <= kStages) {
    multiply_at_once(result, ring, slot, share, pass_turn);
  } else if constexpr (kPlanes == 1) {
    multiply_steps(result, nullptr, ring, slot, share, 0, k_steps - 1, issued);
  } else {
    Accumulators part, cross;
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block)
#pragma unroll
      for (int i = 0; i < kAccumulators; ++i) result[block][i] = 0.0f;
    if constexpr (kFoldSteps == 0) {
      multiply_and_fold(result, part, cross, ring, slot, share, k_steps, issued);
    } else {
      for (int first = 0; first < k_steps; first += kFoldSteps) {
        const int last = min(first + kFoldSteps, k_steps) - 1;
        multiply_steps(part, &cross, ring, slot, share, first, last, issued);
        add_to(result, part, 1.0f);
      }
    }
    add_to(result, cross, kLowScale);
  }
  if (kPingPong) meanwhile();
}
