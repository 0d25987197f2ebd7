// The main loop of the kernels that convert fp32 on the way: operand A out of registers (weight_fragments.cuh), B
// from its ring as a plane (two_rings.cuh); A's rows have scales (converted_rows.cuh). A is called W here, and B x, as
// in hopper_fp32_weight.cu; in hopper_fp32_input.cu they are the other way round.
//
// The prelude defines what converted_rows.cuh and two_rings.cuh need; the instruction
// wgmma_a(float (&d)[kBlockM / 2], const u32 (&a)[4], u64 b); with two planes wgmma_a_alone, which d is no part of.
#pragma once
#include "gemm/hopper/fp32_prelude.cuh"
#include "gemm/hopper/converted_rows.cuh"
#include "gemm/hopper/two_rings.cuh"
#include "gemm/hopper/weight_fragments.cuh"

using Operand = Fragments[kPlanes];

// Of all consumers: is it true for any thread?
__device__ __forceinline__ bool any_consumer(bool value) {
  u32 any;
  asm volatile(
      "{ .reg .pred p, q; setp.ne.u32 p, %1, 0; barrier.cta.red.or.aligned.pred q, 1, %2, p;"
      " selp.u32 %0, 1, 0, q; }"
      : "=r"(any)
      : "r"(static_cast<u32>(value)), "n"(kConsumerThreads)
      : "memory");
  return any != 0;
}
__device__ __forceinline__ void consumer_sync() { named_barrier_sync(1, kConsumerThreads); }

__device__ __forceinline__ void release(u32 empty) {
  if (threadIdx.x % 32 == 0) barrier_arrive(empty);
}

// Ties the fragments to this point: the products that read them are done.
__device__ __forceinline__ void keep_fragments(Fragments& a) {
#pragma unroll
  for (int i = 0; i < kStepProducts; ++i)
#pragma unroll
    for (int word = 0; word < kFragmentWords; ++word) asm volatile("" : "+r"(a[i][word])::"memory");
}

// A consumer's places in the rings, and the main loop.
struct Multiplier {
  const Rings& rings;
  SlotW slot_w;
  SlotX slot_x;

  __device__ __forceinline__ explicit Multiplier(const Rings& rings) : rings(rings) {}

  template <class Look>
  __device__ __forceinline__ void make(Operand& a, const WeightRows& rows, u32 offset, int step, bool looks,
                                       Look& look) {
    barrier_wait(rings.full_w(slot_w.stage), slot_w.parity);
    const u32 at = rings.w(slot_w.stage) + offset;
    Raw raw;
    OwnRows::load<kBoxBytesW>(raw, at);
    rows.own.convert(a, raw);
    if (looks) look(a[0], at, step);
    __syncwarp();  // lanes may have come back from it one by one
    slot_w.next();
  }

  // k_steps: even. look(fragments, where they come from, step) is called for each that look.due(number) says.
  template <class Look>
  __device__ __forceinline__ void multiply(float (&v)[kAccumulators], const WeightRows& rows,
                                           u32 offset, int k_steps, Look& look) {
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) v[i] = 0.0f;  // else they live through the epilogue
    Operand a[2];  // one is multiplied while the other is made
    make(a[0], rows, offset, 0, look.due(0), look);
    for (int first = 0; first < k_steps; first += 2) {
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        barrier_wait(rings.full_x(slot_x.stage), slot_x.parity);
        const u64 b = descriptor<true, 0, kRowBytesX>(rings.x(slot_x.stage));
        wgmma_fence();  // the fragments were written by ordinary instructions
#pragma unroll
        for (int i = 0; i < kStepProducts; ++i)
          wgmma_a(v, a[u][0][i], further(b, i * (step_bytes<true>() >> 4)));
        wgmma_commit();
        wgmma_wait<1>();  // the step before is done: its slot of x, and its registers
        keep_fragments(a[(u + 1) % 2][0]);
        // Only now: an arrival right behind the loads of make() overtakes them, and the copy engine
        // overwrites what has not been read (measured).
        __syncwarp();
        release(rings.empty_w(slot_w.before()));
        if (u > 0 || first > 0) release(rings.empty_x(slot_x.before()));
        slot_x.next();
        if (u == 0 || first + 2 < k_steps)
          make(a[(u + 1) % 2], rows, offset, first + u + 1, look.due(first + u + 1), look);
      }
    }
    wgmma_wait<0>();
    keep_after_wait(v);
    keep_fragments(a[1][0]);
    release(rings.empty_x(slot_x.before()));
  }

  // The same where a product is two, of half the columns. A warpgroup's own conversions, one after the other, take
  // as long as its products: so they are kept short. x's slots are known to the compiler.
  template <class Look>
  __device__ __forceinline__ void multiply_in_halves(float (&v)[kAccumulators], WeightRows& rows,
                                                     u32 offset, int k_steps, Look& look) {
    static_assert(kStagesX % 2 == 0, "fragments take turns");
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) v[i] = 0.0f;
    Operand a[2];
    bool looks = look.due(0);  // at as many steps as x has slots, or at none of them
    make_and_release(v, a[0], rows, offset, 0, looks, look);
    for (int first = 0; first < k_steps; first += kStagesX) {
#pragma unroll
      for (int u = 0; u < kStagesX; ++u) {
        barrier_wait(rings.full_x(u), slot_x.parity);
        const u64 b = descriptor<true, 0, kRowBytesX>(rings.x(u));
        wgmma_fence();  // the fragments were written by ordinary instructions
#pragma unroll
        for (int i = 0; i < kStepProducts; ++i)
          wgmma_a(v, a[u % 2][0][i], further(b, i * (step_bytes<true>() >> 4)));
        wgmma_commit();
        wgmma_wait<1>();  // the step before is done: its slot of x, and its registers
        keep_fragments(a[(u + 1) % 2][0]);
        if (u > 0 || first > 0) release(rings.empty_x((u + kStagesX - 1) % kStagesX));
        if (u == kStagesX - 1) looks = look.due(first / kStagesX + 1);
        if (u < kStagesX - 1 || first + kStagesX < k_steps)
          make_and_release(v, a[(u + 1) % 2], rows, offset, first + u + 1, looks, look);
      }
      slot_x.parity ^= 1;
    }
    wgmma_wait<0>();
    keep_after_wait(v);
    keep_fragments(a[1][0]);
    release(rings.empty_x(kStagesX - 1));
  }

  template <class Look>
  __device__ __forceinline__ void make_and_release(float (&v)[kAccumulators], Operand& a, WeightRows& rows,
                                                   u32 offset, int step, bool looks, Look& look) {
    barrier_wait(rings.full_w(slot_w.stage), slot_w.parity);
    const u32 at = rings.w(slot_w.stage) + offset;
    Raw raw;
    OwnRows::load<kBoxBytesW>(raw, at);
    rows.own.convert(a, raw);
    if (__any_sync(0xffffffffu, any_infinite(a[0]))) {
      OwnRows::load<kBoxBytesW>(raw, at);  // once more: registers are few
      scale_down(v, rows, {largest_of(raw, 0), largest_of(raw, 1)}, step, look);
      rows.own.convert(a, raw);
    }
    if (looks) look(a[0], at, step);
    keep_fragments(a[0]);  // the slot's values have been read
    __syncwarp();          // lanes may have come back one by one
    release(rings.empty_w(slot_w.stage));
    slot_w.next();
  }

  // Sums so far are of halves by other scales.
  template <class Look>
  __device__ __forceinline__ void scale_down(float (&v)[kAccumulators], WeightRows& rows,
                                             const float (&largest)[2], int step, Look& look) {
    // PTX wants a warpgroup's four warps here or none of them. Each waits for products of its own rows, though, and
    // that some come here alone was tried with outliers everywhere (test_halves.py).
    wgmma_wait<0>();
    keep_after_wait(v);
    const float before[2] = {rows.own.factor[0], rows.own.factor[1]};
    rows.fit(largest, look.weight);
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      look.scaled_down |= step > 0 && rows.own.factor[lower] != before[lower];
      const float ratio = rows.own.factor[lower] * reciprocal_power(before[lower]);
#pragma unroll
      for (int chunk = 0; chunk < kBlockM / 8; ++chunk)
#pragma unroll
        for (int i = 0; i < 2; ++i) v[accumulator(chunk, lower, i)] *= ratio;
    }
  }

  // The same by two planes of either operand (hopper_pipeline.cuh): each step is folded, so one is in flight.
  template <class Look>
  __device__ __forceinline__ void multiply_planes(float (&v)[kAccumulators], const WeightRows& rows,
                                                  u32 offset, int k_steps, Look& look) {
    float part[kAccumulators], cross[kAccumulators];
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) v[i] = part[i] = cross[i] = 0.0f;
    Operand a[2];
    make(a[0], rows, offset, 0, look.due(0), look);
    for (int first = 0; first < k_steps; first += 2) {
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        barrier_wait(rings.full_x(slot_x.stage), slot_x.parity);
        const u64 high = descriptor<true, 0, kRowBytesX>(rings.x(slot_x.stage));
        const u64 low = descriptor<true, 0, kRowBytesX>(rings.x(slot_x.stage) + kPlaneBytesX);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kStepProducts; ++i) {
          const u64 at = i * (step_bytes<true>() >> 4);
          wgmma_a(cross, a[u][1][i], high + at);
          wgmma_a(cross, a[u][0][i], low + at);
          if (i == 0)
            wgmma_a_alone(part, a[u][0][i], high);
          else
            wgmma_a(part, a[u][0][i], high + at);
        }
        wgmma_commit();
        __syncwarp();
        release(rings.empty_w(slot_w.before()));  // its values are in registers that products read
        if (u == 0 || first + 2 < k_steps)
          make(a[1 - u], rows, offset, first + u + 1, look.due(first + u + 1), look);
        wgmma_wait<0>();
        keep_after_wait(part);
        keep_after_wait(cross);
        keep_fragments(a[u][0]);
        keep_fragments(a[u][1]);
        release(rings.empty_x(slot_x.stage));
        slot_x.next();
#pragma unroll
        for (int i = 0; i < kAccumulators; ++i) v[i] += part[i];
      }
    }
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) v[i] += cross[i] * (1.0f / kPlaneLowFactor);
  }
};

// The product of a tile, once more where a row's scale was estimated too small. again: a word of shared memory that
// tells the producers.
__device__ __forceinline__ void multiply_until_held(float (&v)[kAccumulators], Multiplier& multiplier,
                                                    WeightRows& rows, const Weight& weight, LookAtShare& share,
                                                    u32 offset, int k, int k_steps, volatile int* again) {
  bool first_time = true, repeat;
  do {
    share.next = share.first;
    if constexpr (kPlanes == 2)
      multiplier.multiply_planes(v, rows, offset, k_steps, share);
    else
      multiplier.multiply(v, rows, offset, k_steps, share);
    const float kInfinite = __int_as_float(0x7f800000);
    const float upper = v[accumulator(0, 0, 0)], lower = v[accumulator(0, 1, 0)];
    const bool suspect = !(fabsf(upper) < kInfinite && fabsf(lower) < kInfinite);
    repeat = any_consumer(first_time && suspect);  // and behind it nobody reads x's ring
    if (repeat) {
      const bool infinite[2] = {row_infinite(v, 0), row_infinite(v, 1)};
      repeat = any_consumer(correct_scales(rows, infinite, weight, k));
    }
    first_time = false;
    if (threadIdx.x == 0) {
      *again = repeat;
      barrier_arrive(multiplier.rings.judged());
    }
  } while (repeat);
}

// The product of a tile. Of the steps, or of as many together as x has slots, this block looks at `look` and each
// look_step-th from there on. On return all products of the block are done where tiles repeat, and x's ring is read
// no more; else those of the thread's warpgroup.
__device__ __forceinline__ void multiply_tile(float (&v)[kAccumulators], Multiplier& multiplier,
                                              WeightRows& rows, const Weight& weight, u32 offset,
                                              int look, int look_step, int k, int k_steps,
                                              volatile int* again) {
  LookAtShare share = {weight, rows, look, look_step};
  if constexpr (kRepeats) {
    multiply_until_held(v, multiplier, rows, weight, share, offset, k, k_steps, again);
  } else {
    multiplier.multiply_in_halves(v, rows, offset, k_steps, share);
    settle_rows(rows, weight, share, k, k_steps);
  }
}
