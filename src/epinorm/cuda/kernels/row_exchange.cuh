// The largest of a number over a whole row that the warps of a cluster of blocks hold side by side.
//
// Each warp sends its own number to every block, which counts the bytes on a barrier: no block
// waits for another's threads, and no fence for anybody's stores to global memory. A row is sent
// kAhead rows before the one that is waited for, so the way there costs no time.
#pragma once
#include "hopper_barrier.cuh"

template <int kBlocks, int kWarps>
struct RowExchange {
  static constexpr int kParts = kBlocks * kWarps;
  static constexpr int kAhead = 1;
  // A warp sends row q when it has received row q - 1 - kAhead, so when every warp has sent that
  // one and, before that, read row q - 2 - 2 kAhead: the numbers that row q overwrites are no
  // longer needed.
  static constexpr int kTurns = 2 + 2 * kAhead;
  static_assert(kBlocks <= 32, "a lane sends to a block");

  struct Shared {
    alignas(8) u64 barrier[kTurns];
    u32 parts[kTurns][kParts];
  };
  u32 barrier, parts;                // of this block
  u32 remote_barrier, remote_parts;  // of the block that this lane sends to, and its place there

  // Every thread of every block; the barriers are then ready in all of them.
  __device__ __forceinline__ explicit RowExchange(Shared& shared)
      : barrier(shared_address(shared.barrier)), parts(shared_address(shared.parts)) {
    const u32 block = threadIdx.x % 32 < kBlocks ? threadIdx.x % 32 : 0;
    remote_barrier = address_in_block(barrier, block);
    const u32 part = cluster_rank() * kWarps + threadIdx.x / 32;
    remote_parts = address_in_block(parts, block) + part * 4;
    if (threadIdx.x == 0) {
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) barrier_init(barrier + turn * 8, 1);
      barrier_init_fence();
    }
    cluster_sync();
  }

  // Every thread: the largest of this warp's values of row `index`, which counts up from 0.
  __device__ __forceinline__ void send(u32 index, u32 value) const {
    const u32 turn = index % kTurns;
    const u32 own = __reduce_max_sync(0xffffffffu, value);
    if (threadIdx.x == 0) barrier_arrive_expect(barrier + turn * 8, kParts * 4);
    if (threadIdx.x % 32 < kBlocks)
      store_async(remote_parts + turn * kParts * 4, own, remote_barrier + turn * 8);
  }

  // Every thread: the largest of row `index`, the same for all.
  __device__ __forceinline__ u32 receive(u32 index) const {
    const u32 turn = index % kTurns;
    barrier_wait(barrier + turn * 8, index / kTurns % 2);
    u32 largest = 0;
#pragma unroll
    for (int part = 0; part < kParts; part += 32)
      if (part + threadIdx.x % 32 < kParts)
        largest = max(largest, load_word(parts + (turn * kParts + part + threadIdx.x % 32) * 4));
    return __reduce_max_sync(0xffffffffu, largest);
  }

 private:
  // ld.shared.u32
  static __device__ __forceinline__ u32 load_word(u32 address) {
    u32 value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
  }
};
