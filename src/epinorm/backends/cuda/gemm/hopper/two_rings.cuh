// The rings of hopper_fp32_weight.cu and, with the names exchanged, of hopper_fp32_input.cu: W goes through one as
// fp32, x through another as its plane or two of fp16.
// Two threads load, one each. x's ring is lent to the epilogue at a tile's end (kLendsRing), while W's is
// filled on.
//
// The prelude defines kBlockN, the rows of W of a tile, and kBlockM, those of x; kStagesW, kStagesX; kLendsRing;
// kClusterN, blocks side by side that share groups of x's rows; kTileGroup (TileOrder); what weight_fragments.cuh
// needs.
#pragma once
#include "gemm/hopper/fp32_prelude.cuh"
#include "common/dependent.cuh"
#include "common/hopper_barrier.cuh"
#include "common/hopper_tma.cuh"
#include "common/hopper_wgmma.cuh"
#include "common/tile_order.cuh"
#include "gemm/hopper/weight_fragments.cuh"

constexpr int kWarpgroupThreads = 128, kConsumers = 2;
constexpr int kConsumerThreads = kConsumers * kWarpgroupThreads;
constexpr int kConsumerWarps = kConsumerThreads / 32;
constexpr int kThreads = kConsumerThreads + kWarpgroupThreads;

constexpr int kBoxBytesW = kBlockN * kSwizzleRowBytes;
constexpr int kStageBytesW = kStepBoxes * kBoxBytesW;
constexpr int kRowBytesX = kStepK * 2;
constexpr int kPlaneBytesX = kBlockM * kRowBytesX;
constexpr int kStageBytesX = kPlanes * kPlaneBytesX;
constexpr int kBoxesX = kBlockM > 256 ? 2 : 1, kBoxRowsX = kBlockM / kBoxesX;  // a copy's most
constexpr bool kInHalves = kBoxesX > 1;
constexpr int kStepsAtOnce = kInHalves ? kStagesX : 2;  // of the main loop: so many times less to find slots
constexpr bool kRepeats = !kInHalves;  // a tile whose rows' scales did not suffice
constexpr int kOffsetX = kStagesW * kStageBytesW;
constexpr int kRingsBytes = kOffsetX + kStagesX * kStageBytesX;

template <int kCount>
struct Slot {
  int stage = 0;
  u32 parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kCount) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ int before() const { return stage == 0 ? kCount - 1 : stage - 1; }
};
using SlotW = Slot<kStagesW>;
using SlotX = Slot<kStagesX>;

// Shared addresses. judged: the tile's products are done, and `again` says whether they are made once more; unused
// without kRepeats.
// returned: the epilogue has given x's ring back.
struct Rings {
  u32 data, barriers;

  __device__ __forceinline__ u32 w(int stage) const { return data + stage * kStageBytesW; }
  __device__ __forceinline__ u32 x(int stage) const { return data + kOffsetX + stage * kStageBytesX; }
  __device__ __forceinline__ u32 full_w(int stage) const { return barriers + stage * 16; }
  __device__ __forceinline__ u32 empty_w(int stage) const { return full_w(stage) + 8; }
  __device__ __forceinline__ u32 full_x(int stage) const { return full_w(kStagesW + stage); }
  __device__ __forceinline__ u32 empty_x(int stage) const { return full_x(stage) + 8; }
  __device__ __forceinline__ u32 judged() const { return full_w(kStagesW + kStagesX); }
  __device__ __forceinline__ u32 returned() const { return judged() + 8; }
};
constexpr int kBarrierBytes = (kStagesW + kStagesX + 1) * 16;

// exchanges: barriers behind the others, of parts of groups (part_exchange.cuh).
template <int kExchanges>
__device__ __forceinline__ void rings_init(const Rings& rings) {
#pragma unroll
  for (int stage = 0; stage < kStagesW; ++stage) {
    barrier_init(rings.full_w(stage), 1);
    barrier_init(rings.empty_w(stage), kConsumerWarps);
  }
#pragma unroll
  for (int stage = 0; stage < kStagesX; ++stage) {
    barrier_init(rings.full_x(stage), 1);
    barrier_init(rings.empty_x(stage), kConsumerWarps);
  }
#pragma unroll
  for (int i = 0; i < kExchanges; ++i) barrier_init(rings.barriers + kBarrierBytes + i * 8, 1);
  barrier_init(rings.judged(), 1);
  barrier_init(rings.returned(), kConsumerWarps);
  barrier_init_fence();
}

struct Place {
  int n, m;  // first row of W and of x
};

// Blocks of a cluster take neighbouring tiles of x's rows.
struct TileOrder {
  int row_tiles, column_tiles, rank;  // of W's rows, of x's for a whole cluster

  __device__ __forceinline__ TileOrder(int n, int m)
      : row_tiles((n + kBlockN - 1) / kBlockN),
        column_tiles((m + kClusterN * kBlockM - 1) / (kClusterN * kBlockM)),
        rank(kClusterN == 1 ? 0 : cluster_rank()) {}
  __device__ __forceinline__ int count() const { return row_tiles * column_tiles; }
  __device__ __forceinline__ int first() const { return blockIdx.x / kClusterN; }
  __device__ __forceinline__ int step() const { return gridDim.x / kClusterN; }
  __device__ __forceinline__ Place at(int index) const {
    const TilePlace place = grouped_tile<kTileGroup>(index, row_tiles, column_tiles);
    return {place.row * kBlockN, (place.column * kClusterN + rank) * kBlockM};
  }
};

// Waits until the tile's products are done; whether they are to be made once more.
__device__ __forceinline__ bool wait_for_verdict(const Rings& rings, const volatile int* again,
                                                 u32& parity) {
  barrier_wait(rings.judged(), parity);
  parity ^= 1;
  return *again != 0;
}

// What else goes through W's ring, or beside: nothing.
struct NothingElse {
  __device__ __forceinline__ void ahead(const Place&, int, int) const {}
  __device__ __forceinline__ void load(const Rings&, SlotW&, const Place&) const {}
};

// what_else: is asked for beside a step, and behind a tile's last.
template <class Else>
__device__ __forceinline__ void load_w(const Rings& rings, const TensorMap* w,
                                       const TileOrder& order, int k_steps,
                                       const volatile int* again, const Else& what_else) {
  SlotW slot;
  u32 parity = 0;
  for (int index = order.first(); index < order.count(); index += order.step()) {
    const Place place = order.at(index);
    do {
      for (int step = 0; step < k_steps; ++step, slot.next()) {
        const u32 full = rings.full_w(slot.stage);
        barrier_wait(rings.empty_w(slot.stage), slot.parity ^ 1);
        barrier_arrive_expect(full, kStageBytesW);
#pragma unroll
        for (int box = 0; box < kStepBoxes; ++box)
          tma_load(rings.w(slot.stage) + box * kBoxBytesW, w, full, step * kStepK + box * kBoxColumns,
                   place.n);
        what_else.ahead(place, step, k_steps);
      }
    } while (kRepeats && wait_for_verdict(rings, again, parity));
    what_else.load(rings, slot, place);
  }
}

// rows: of a plane of x; one lies behind the other.
__device__ __forceinline__ void load_x(const Rings& rings, const TensorMap* x,
                                       const TileOrder& order, int rows, int k_steps,
                                       const volatile int* again) {
  SlotX slot;
  u32 parity = 0, returned = 0;
  for (int index = order.first(); index < order.count(); index += order.step(), returned ^= 1) {
    const int row = order.at(index).m;
    do {
      for (int step = 0; step < k_steps; ++step, slot.next()) {
        const u32 full = rings.full_x(slot.stage);
        barrier_wait(rings.empty_x(slot.stage), slot.parity ^ 1);
        barrier_arrive_expect(full, kStageBytesX);
#pragma unroll
        for (int plane = 0; plane < kPlanes; ++plane)
#pragma unroll
          for (int box = 0; box < kBoxesX; ++box)
            tma_load(rings.x(slot.stage) + plane * kPlaneBytesX + box * kBoxRowsX * kRowBytesX, x, full,
                     step * kStepK, plane * rows + row + box * kBoxRowsX);
      }
    } while (kRepeats && wait_for_verdict(rings, again, parity));
    if (kLendsRing) barrier_wait(rings.returned(), returned);
  }
}

// The block's threads by their work: two load, and the consumer warpgroups call consume(warpgroup,
// k_steps). rows: of the matrix that is converted; w, x: its map and that of the plane.
template <int kExchanges, class Else, class Consume>
__device__ __forceinline__ void share_work(const Rings& rings, const volatile int* again,
                                           const TensorMap* w, const TensorMap* x, int rows,
                                           int columns, int k, const Else& what_else, Consume consume) {
  const int warpgroup = threadIdx.x / kWarpgroupThreads;
  if (threadIdx.x == kConsumerThreads) rings_init<kExchanges>(rings);
  if (kClusterN > 1) cluster_arrive_relaxed();
  __syncthreads();
  wait_for_previous_kernel();
  let_next_kernel_start();

  const int k_steps = (k + kStepsAtOnce * kStepK - 1) / (kStepsAtOnce * kStepK) * kStepsAtOnce;
  if (warpgroup == kConsumers) {
    give_registers<24>();
    const TileOrder order(rows, columns);
    if (threadIdx.x == kConsumerThreads)
      load_w(rings, w, order, k_steps, again, what_else);
    else if (threadIdx.x == kConsumerThreads + 32)
      load_x(rings, x, order, columns, k_steps, again);
  } else {
    take_registers<240>();
    if (kClusterN > 1) cluster_wait();  // the neighbour's barriers are set up
    consume(warpgroup, k_steps);
  }
}
