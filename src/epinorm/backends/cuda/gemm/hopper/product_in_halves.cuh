// The main loop of tiles wider than one product: both warpgroups together, 64 rows and up to 384 columns each, as
// many as registers hold. That reads least from L2 for a product, but a step is long and the ring holds few. So a
// slot is filled and freed in two parts: B's first half of the rows half a step before A and its second half
// (bert_ffn in bf16: 121 us by whole slots, 112 so).
//
// A slot's two full barriers: A and the first half, which are multiplied first; the second half. Its two empty
// ones: the first half; A and the second.
//
// The prelude defines IN_HALVES, and with it wgmma_half<kHalf>(float (&d)[kAccumulators], u64 a, u64 b, int
// accumulate), which multiplies into one half of the accumulators by one half of B's rows.
#pragma once
#include "gemm/hopper/hopper_consumer.cuh"

#ifndef IN_HALVES
static_assert(!kInHalves, "product and ring go together");
#endif
static_assert(!kInHalves || (kPlanes == 1 && !kPingPong && !kSplitColumns && !kRegisterA), "together, of one plane");
static_assert(!kInHalves || (kElementBytes == 2 && kCluster == 1 && !kWeightInSmem), "B through this block's ring");
static_assert(!kInHalves || (kMajorKA && kMajorKB && kLoadM == kBlockM), "rows along k, all of which are loaded");
static_assert(!kInHalves || (kRowBlocks == 1 && kConsumerN % 16 == 0), "64 rows, and halves of whole chunks");

// The producer: k_steps steps. beside(step): what else it asks for meanwhile.
template <class Beside>
__device__ __forceinline__ void load_in_halves(const Ring& ring, Slot& slot, const Operands16& operands,
                                               Tile tile, int k_steps, Beside beside) {
  constexpr int kHalfBytesB = kPlaneBytesB / 2;
  for (int step = 0; step < k_steps; ++step, slot.next()) {
    const int k = step * kBlockK;
    const u32 first = ring.full_barrier(slot.stage, 0), second = ring.full_barrier(slot.stage, 1);
    const u32 b = ring.b(slot.stage, step, 0);
    barrier_wait(ring.empty_barrier(slot.stage, 0), slot.parity ^ 1);
    barrier_arrive_expect(first, kPlaneBytesA + kHalfBytesB);
    load_operand<true, kBlockN / 2>(b, operands.b[0], first, k, tile.n, operands.b_once);
    barrier_wait(ring.empty_barrier(slot.stage, 1), slot.parity ^ 1);
    load_operand<true, kBlockM>(ring.a(slot.stage, 0), operands.a[0], first, k, tile.m);
    barrier_arrive_expect(second, kHalfBytesB);
    load_operand<true, kBlockN / 2>(b + kHalfBytesB, operands.b[0], second, k, tile.n + kBlockN / 2,
                                    operands.b_once);
    beside(step);
  }
}

#ifdef IN_HALVES
template <int kHalf>
__device__ __forceinline__ void multiply_half(Accumulators& sum, const Ring& ring, const Slot& slot,
                                              const Share& share, int step) {
  const u32 rows = share.first_block * kProductM * kSwizzleRowBytes;
  const u64 a = descriptor<true, kBoxBytes>(ring.a(slot.stage, 0) + rows);
  const u64 b = descriptor<true, kBoxBytes>(ring.b(slot.stage, step, 0));
  barrier_wait(ring.full_barrier(slot.stage, kHalf), slot.parity);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kStepProducts; ++i) {
    const u64 along_k = i * (step_bytes<true>() >> 4);
    wgmma_half<kHalf>(sum[0], a + along_k, b + along_k, step > 0 || i > 0);
  }
  wgmma_commit();
}

// A tile's product into `sum`; all of it is done on return. issued(step): the last step's are on their way.
template <class Issued>
__device__ __forceinline__ void multiply_in_halves(Accumulators& sum, const Ring& ring, Slot& slot,
                                                   const Share& share, int k_steps, Issued issued) {
  for (int step = 0; step < k_steps; ++step, slot.next()) {
    multiply_half<0>(sum, ring, slot, share, step);
    if (step > 0) {
      wgmma_wait<1>();
      release(ring, slot.before(), 1);
    }
    multiply_half<1>(sum, ring, slot, share, step);
    wgmma_wait<1>();
    release(ring, slot.stage, 0);
  }
  issued(k_steps - 1);
  wgmma_wait<0>();
  keep_after_wait(sum);
  release(ring, slot.before(), 1);
}
#endif
