// The matrix product of the Hopper kernels: D[m, n] = sum over k of A[m, k] B[n, k], both operands as
// one or two planes of 16-bit numbers, from tensor maps through a ring in shared memory into
// registers. One producer thread loads; two warpgroups or more multiply.
//
// Two ways to share the work. Ping-pong: the warpgroups take tiles in turn, each for itself, so that
// one's epilogue runs behind the others' products. Together: both multiply one tile, each half of its
// rows; two planes need this, since their accumulators fill the registers.
//
// The prelude (hopper/text.py) defines what hopper_ring.cuh says, and the instruction
// wgmma(float (&d)[kAccumulators], u64 a, u64 b, int accumulate).
#pragma once
#include "common/tf32.cuh"
#include "gemm/hopper/hopper_consumer.cuh"
#include "gemm/hopper/product_in_halves.cuh"
#include "gemm/hopper/register_tf32.cuh"

// The planes of a step's i-th product, and the row block of A.
struct Multiplied {
  const Ring& ring;
  int stage, step, i, first_block, first_column;

  __device__ __forceinline__ u64 a(int plane, int block) const {
    constexpr u32 kRowBlockBytes = kMajorKA ? kProductM * kSwizzleRowBytes : kBoxBytes;
    const u32 row_block = ring.a(stage, plane) + (first_block + block) * kRowBlockBytes;
    return descriptor<kMajorKA, kBoxBytes>(row_block) + i * (step_bytes<kMajorKA>() >> 4);
  }
  __device__ __forceinline__ u64 b(int plane) const {
    const u32 bytes = kMajorKB ? first_column * kSwizzleRowBytes : first_column / 64 * kBoxBytes;
    return descriptor<kMajorKB, kBoxBytes>(ring.b(stage, step, plane) + bytes) +
           i * (step_bytes<kMajorKB>() >> 4);
  }
};

// v = hi + lo 2^-11: lo hi and hi lo go into accumulators of their own, which are 2^-11 of the result and
// so need no folding.
__device__ __forceinline__ void multiply_cross(Accumulators& cross, const Multiplied& of, int block,
                                               bool started) {
  wgmma(cross[block], of.a(1, block), of.b(0), started);
  wgmma(cross[block], of.a(0, block), of.b(1), 1);
}

// The i-th product of a step.
__device__ __forceinline__ void multiply_product(Accumulators& main, Accumulators* cross,
                                                 const Multiplied& of, bool main_started,
                                                 bool cross_started) {
#pragma unroll
  for (int block = 0; block < kRowBlocks; ++block) {
    if constexpr (kPlanes == 2) multiply_cross(*cross, of, block, cross_started);
    wgmma(main[block], of.a(0, block), of.b(0), main_started);
  }
}

// One step of 128 bytes along k.
__device__ __forceinline__ void multiply_step(Accumulators& main, Accumulators* cross,
                                              const Ring& ring, int stage, int step,
                                              int first_block, int first_column,
                                              bool main_started, bool cross_started) {
#pragma unroll
  for (int i = 0; i < kStepProducts; ++i)
    multiply_product(main, cross, {ring, stage, step, i, first_block, first_column},
                     main_started || i > 0, cross_started || i > 0);
}

// In place, by the one warpgroup that a step belongs to.
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
      if (at + i * pass_bytes < bytes) store_unit(from + at + i * pass_bytes, rounded_tf32(units[i]));
  }
  fence_for_async_reads();
}

__device__ __forceinline__ void round_step_to_tf32(const Ring& ring, int stage, int consumer) {
  static_assert(kElementBytes == 2 || kPingPong || kRegisterA, "each step has one reader");
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
      release(ring, slot.before());
    }
    slot.next();
  }
  issued(last);
  wgmma_wait<0>();
  keep_after_wait(main);
  if constexpr (kPlanes == 2) keep_after_wait(*cross);
  release(ring, slot.before());
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
      if (first + i < kUnits) store_unit(address(first + i), rounded_tf32(units[i]));
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

// All steps, each product of 16 folded into `result` by itself while lo hi and hi lo are multiplied:
// three in four of the cuts are saved.
template <class Issued>
__device__ __forceinline__ void multiply_and_fold(Accumulators& result, Accumulators& part,
                                                  Accumulators& cross, const Ring& ring, Slot& slot,
                                                  const Share& share, int k_steps, Issued issued) {
  for (int step = 0; step < k_steps; ++step, slot.next()) {
    barrier_wait(ring.full_barrier(slot.stage), slot.parity);
#pragma unroll
    for (int i = 0; i < kStepProducts; ++i) {
      const Multiplied of = {ring, slot.stage, step, i, share.first_block, share.first_column};
      wgmma_fence();
#pragma unroll
      for (int block = 0; block < kRowBlocks; ++block) wgmma(part[block], of.a(0, block), of.b(0), 0);
      wgmma_commit();
#pragma unroll
      for (int block = 0; block < kRowBlocks; ++block)
        multiply_cross(cross, of, block, step > 0 || i > 0);
      wgmma_commit();
      if (i == kStepProducts - 1) issued(step);
      wgmma_wait<1>();  // the step before is done
      if (i == 0 && step > 0) release(ring, slot.before());
      keep_after_wait(part);
      add_to(result, part, 1.0f);
    }
  }
  wgmma_wait<0>();
  keep_after_wait(cross);
  release(ring, slot.before());
}

// What comes behind a tile's last step.
__device__ __forceinline__ void wait_for_operand(const Ring& ring, Slot slot) {
#pragma unroll
  for (int i = 0; i < kOperandSlots; ++i, slot.next())
    barrier_wait(ring.full_barrier(slot.stage), slot.parity);
}

// One tile's product into `result`. Hopper's tensor cores cut sums toward zero at 25 bits (MMA-Sim,
// arXiv 2511.10909): with two planes the running sum is added into full fp32 every kFoldSteps, or after
// each product if that is 0.
//
// In ping-pong a consumer starts when the other has seen all slots of its tile arrive: a barrier's
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
    if (kPingPong) {
      wait_for_operand(ring, slot);
      pass_turn();
    } else {
      meanwhile();
    }
  };
  if constexpr (kRegisterA) {
    define(result);
    multiply_from_registers(result, ring, slot, share, k_steps, issued);
  } else if constexpr (kElementBytes == 4 && kWeightInSmem && kWeightSteps <= kStages) {
    define(result);
    multiply_at_once(result, ring, slot, share, pass_turn);
#ifdef IN_HALVES
  } else if constexpr (kInHalves) {
    define(result);
    multiply_in_halves(result, ring, slot, share, k_steps, issued);
#endif
  } else if constexpr (kPlanes == 1) {
    define(result);
    multiply_steps(result, nullptr, ring, slot, share, 0, k_steps - 1, issued);
  } else {
    Accumulators part, cross;
    set_to_zero(result);
    define(part);
    define(cross);
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
