// The largest of a number over a whole row that the warps of a cluster of blocks hold side by side.
//
// Each warp sends its own number to every block, which counts the bytes on a barrier: no block
// waits for another's threads, and no fence for anybody's stores to global memory. A row is sent
// kAhead rows before the one that is waited for, so the way there costs no time.
#pragma once
#include "common/hopper_barrier.cuh"

template <int kBlocks, int kWarps>
struct RowExchange {
  static constexpr int kParts = kBlocks * kWarps;
  static constexpr int kAhead = 1;
  // A warp sends row q when it has received row q - 1 - kAhead, so when every warp has sent that
  // one and, before that, read row q - 2 - 2 kAhead: the numbers that row q overwrites are no
  // longer needed.
  static constexpr int kTurns = 2 + 2 * kAhead;
  // st.async is illegal in a launch without clusters. A block by itself stores its numbers, and
  // each of its warps arrives.
  static constexpr bool kCluster = kBlocks > 1;
  static_assert(kBlocks <= 32, "a lane sends to a block");

  struct Shared {
    alignas(8) u64 barrier[kTurns];
    u32 parts[kTurns][kParts];
  };
  u32 barrier, parts;        // of this block
  u32 to_barrier, to_parts;  // of the block that this lane sends to, and its place there

  // Every thread of every block; the barriers are then ready in all of them.
  __device__ __forceinline__ explicit RowExchange(Shared& shared)
      : barrier(shared_address(shared.barrier)), parts(shared_address(shared.parts)) {
    const u32 warp = threadIdx.x / 32;
    to_barrier = barrier;
    to_parts = parts + warp * 4;
    if constexpr (kCluster) {
      const u32 block = threadIdx.x % 32 < kBlocks ? threadIdx.x % 32 : 0;
      to_barrier = address_in_block(barrier, block);
      to_parts = address_in_block(parts, block) + (cluster_rank() * kWarps + warp) * 4;
    }
    if (threadIdx.x == 0) {
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn)
        barrier_init(barrier + turn * 8, kCluster ? 1 : kWarps);
      barrier_init_fence();
    }
    if constexpr (kCluster)
      cluster_sync();
    else
      __syncthreads();
  }

  // Every thread: the largest of this warp's values of row `index`, which counts up from 0.
  __device__ __forceinline__ void send(u32 index, u32 value) const {
    const u32 turn = index % kTurns;
    const u32 own = __reduce_max_sync(0xffffffffu, value);
    const u32 at = to_parts + turn * kParts * 4;
    if constexpr (kCluster) {
      // Bytes may come before they are expected: the phase still waits for this arrival.
      if (threadIdx.x == 0) barrier_arrive_expect(barrier + turn * 8, kParts * 4);
      if (threadIdx.x % 32 < kBlocks) store_async(at, own, to_barrier + turn * 8);
    } else if (threadIdx.x % 32 == 0) {
      store_shared(at, __uint_as_float(own));
      barrier_arrive(to_barrier + turn * 8);
    }
  }

  // Every thread: the largest of row `index`, the same for all. Who has received the last row has
  // had all that will ever be sent to its block, and may end.
  __device__ __forceinline__ u32 receive(u32 index) const {
    const u32 turn = index % kTurns;
    barrier_wait(barrier + turn * 8, index / kTurns % 2);
    u32 largest = 0;
#pragma unroll
    for (int part = 0; part < kParts; part += 32) {
      const int own = part + threadIdx.x % 32;
      if (own < kParts)
        largest = max(largest, __float_as_uint(load_shared(parts + (turn * kParts + own) * 4)));
    }
    return __reduce_max_sync(0xffffffffu, largest);
  }
};
