// How parts of a group that several warpgroups hold, in one block or in those of a cluster, come to its statistics.
//
// The kernel defines kParts, kClusterN, kConsumers, kColumnParts (consumers of a block that hold the same rows),
// kProductM (rows of a consumer), kWarpgroupThreads and kExchangeBarrier, a named barrier's number, before it includes
// this behind norm_epilogue.cuh.
#pragma once
#include "gemm/epilogue_prelude.cuh"
#include "gemm/hopper/exchange_prelude.cuh"
#include "common/hopper_barrier.cuh"
#include "common/shared_units.cuh"
#include "gemm/norm_epilogue.cuh"

constexpr int kPairBytes = 2 * 4;  // two numbers that parts of a group exchange
// Warpgroups that hold the same rows exchange together; those with rows of their own each for itself.
constexpr int kExchangers = kSharedGroup ? kConsumers / kColumnParts : 0;
constexpr int kExchangeThreads = kColumnParts * kWarpgroupThreads;
constexpr int kExchanges = 2 * kExchangers;  // buffers in turn, each with a barrier
constexpr int kExchangeBufferBytes = kParts * kProductM * kPairBytes;
constexpr int kExchangeBytes = kExchanges * kExchangeBufferBytes;

// What the parts of a shared group tell each other about two rows: each sends two numbers a row to
// every block of the cluster. Two buffers in turn: who fills one again has waited for the exchange
// after it, and a part takes part in that only after reading the buffer.
struct PartExchange {
  u32 buffers, barriers;  // [2][kParts][kProductM] pairs and [2], shared addresses of the exchangers'
  int part;
  u32 uses = 0;

  static constexpr u32 kPartBytes = kProductM * kPairBytes;

  // On return every part's pair of the lane's first row lies at the address, kPartBytes apart, and
  // those of the row 8 below 8 pairs further.
  __device__ __forceinline__ u32 exchange(const float (&first)[2], const float (&second)[2]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroupThreads / 32;
    const u32 turn = uses % 2, barrier = barriers + turn * 8;
    const u32 rows = buffers + turn * kParts * kPartBytes + (warp * 16 + lane / 4) * kPairBytes;
    const u32 own = rows + part * kPartBytes;
    ++uses;
    if (kClusterN == 1) {
      if (lane % 4 == 0)
        for (int lower = 0; lower < 2; ++lower)
          store_pair(own + lower * 8 * kPairBytes, first[lower], second[lower]);
      named_barrier_sync(kExchangeBarrier, kExchangeThreads);
    } else {
      if (threadIdx.x % kExchangeThreads == 0) barrier_arrive_expect(barrier, kParts * kPartBytes);
      if (lane % 4 == 0) send_to_blocks(first, second, own, barrier);
      barrier_wait(barrier, (uses - 1) / 2 % 2);
    }
    return rows;
  }

  static __device__ __forceinline__ void send_to_blocks(const float (&first)[2],
                                                        const float (&second)[2], u32 to,
                                                        u32 barrier) {
#pragma unroll
    for (int block = 0; block < kClusterN; ++block)
#pragma unroll
      for (int lower = 0; lower < 2; ++lower)
        store_async(address_in_block(to + lower * 8 * kPairBytes, block), first[lower],
                    second[lower], address_in_block(barrier, block));
  }

  // From this part's means and squares around them to the group's.
  __device__ __forceinline__ void operator()(float (&means)[2], float (&squares)[2]) {
    const u32 rows = exchange(means, squares);
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const u32 row = rows + lower * 8 * kPairBytes;
      float sum = 0.0f, around_own = 0.0f, between = 0.0f;
#pragma unroll 4
      for (int other = 0; other < kParts; ++other) {
        const float2 pair = load_pair(row + other * kPartBytes);
        sum += pair.x;
        around_own += pair.y;
      }
      means[lower] = sum * (1.0f / kParts);
#pragma unroll 4
      for (int other = 0; other < kParts; ++other) {
        const float distance = load_pair(row + other * kPartBytes).x - means[lower];
        between += distance * distance;
      }
      squares[lower] = around_own + between * kWarpColumns;
    }
  }
};

// The sums of two rows over a group's lanes, and over all parts where the group is shared.
struct GroupSum {
  PartExchange parts;
  int part = parts.part;

  __device__ __forceinline__ void operator()(float (&sums)[2]) {
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) sums[lower] = Segment::sum(sums[lower]);
    if constexpr (kSharedGroup) {
      const u32 rows = parts.exchange(sums, sums);
#pragma unroll
      for (int lower = 0; lower < 2; ++lower) {
        sums[lower] = 0.0f;
#pragma unroll
        for (int other = 0; other < kParts; ++other)
          sums[lower] += load_pair(rows + lower * 8 * kPairBytes + other * PartExchange::kPartBytes).x;
      }
    }
  }
};
