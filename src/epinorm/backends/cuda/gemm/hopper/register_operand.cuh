// The main loop of the kernels that convert fp32 on the way: operand A out of registers (weight_fragments.cuh), B
// from its ring as a plane (two_rings.cuh), and the corrections of A's scales. A is called W here, and B x, as in
// hopper_fp32_weight.cu; in hopper_fp32_input.cu they are the other way round.
//
// SCALES. A row's scale must be known before the row is read: sample_rows.cuh estimates it from a part of the
// row, with room above. Where that does not suffice halves overflow: then the block reads the rows that
// overflowed, corrects their scales and multiplies once more. So the scale, and every bit of the result,
// depends on the row alone.
//
// The prelude defines kTolerance; what two_rings.cuh and weight_fragments.cuh need; the instruction
// wgmma_a(float (&d)[kBlockM / 2], const u32 (&a)[4], u64 b); with two planes wgmma_a_alone, which d is no part of.
#pragma once
#include "gemm/hopper/fp32_prelude.cuh"
#include "fp32/plane_value.cuh"
#include "fp32/sample_rows.cuh"
#include "gemm/hopper/two_rings.cuh"
#include "gemm/hopper/weight_fragments.cuh"

static_assert(kPlanes == 1 || !kWritesPlane, "one plane is left for the backward pass");
constexpr int kAccumulators = kBlockM / 2;
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

// What a tile's rows of W are to a thread: `row` and 8 below.
struct WeightRows {
  int row, n;
  OwnRows own;

  __device__ __forceinline__ WeightRows(const float* scales, int row, int n) : row(row), n(n) {
#pragma unroll
    for (int lower = 0; lower < 2; ++lower)
      own.factor[lower] = row + lower * 8 < n ? reciprocal_power(__ldcg(scales + row + lower * 8)) : 1.0f;
  }
};

// A consumer's places in the rings, and the main loop.
struct Multiplier {
  const Rings& rings;
  SlotW slot_w;
  SlotX slot_x;

  __device__ __forceinline__ explicit Multiplier(const Rings& rings) : rings(rings) {}

  template <class Look>
  __device__ __forceinline__ void make(Operand& a, const WeightRows& rows, u32 offset, int step,
                                       Look look) {
    barrier_wait(rings.full_w(slot_w.stage), slot_w.parity);
    const u32 at = rings.w(slot_w.stage) + offset;
    rows.own.convert<kBoxBytesW>(a, at);
    look(a[0], at, step);
    __syncwarp();  // lanes may have come back from it one by one
    slot_w.next();
  }

  // k_steps: even. look(fragments, where they come from, step) is called for each.
  template <class Look>
  __device__ __forceinline__ void multiply(float (&v)[kAccumulators], const WeightRows& rows,
                                           u32 offset, int k_steps, Look look) {
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) v[i] = 0.0f;  // else they live through the epilogue
    Operand a[2];  // one is multiplied while the other is made
    make(a[0], rows, offset, 0, look);
    for (int first = 0; first < k_steps; first += 2) {
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        barrier_wait(rings.full_x(slot_x.stage), slot_x.parity);
        const u64 b = descriptor<true, 0>(rings.x(slot_x.stage));
        wgmma_fence();  // the fragments were written by ordinary instructions
#pragma unroll
        for (int i = 0; i < kStepProducts; ++i)
          wgmma_a(v, a[u][0][i], b + i * (step_bytes<true>() >> 4));
        wgmma_commit();
        wgmma_wait<1>();  // the step before is done: its slot of x, and its registers
        keep_fragments(a[(u + 1) % 2][0]);
        // Only now: an arrival right behind the loads of make() overtakes them, and the copy engine
        // overwrites what has not been read (measured).
        __syncwarp();
        release(rings.empty_w(slot_w.before()));
        if (u > 0 || first > 0) release(rings.empty_x(slot_x.before()));
        slot_x.next();
        if (u == 0 || first + 2 < k_steps) make(a[(u + 1) % 2], rows, offset, first + u + 1, look);
      }
    }
    wgmma_wait<0>();
    keep_after_wait(v);
    keep_fragments(a[1][0]);
    release(rings.empty_x(slot_x.before()));
  }

  // The same by two planes of either operand (hopper_pipeline.cuh): each step is folded, so one is in flight.
  template <class Look>
  __device__ __forceinline__ void multiply_planes(float (&v)[kAccumulators], const WeightRows& rows,
                                                  u32 offset, int k_steps, Look look) {
    float part[kAccumulators], cross[kAccumulators];
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) v[i] = part[i] = cross[i] = 0.0f;
    Operand a[2];
    make(a[0], rows, offset, 0, look);
    for (int first = 0; first < k_steps; first += 2) {
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        barrier_wait(rings.full_x(slot_x.stage), slot_x.parity);
        const u64 high = descriptor<true, 0>(rings.x(slot_x.stage));
        const u64 low = descriptor<true, 0>(rings.x(slot_x.stage) + kPlaneBytesX);
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
        if (u == 0 || first + 2 < k_steps) make(a[1 - u], rows, offset, first + u + 1, look);
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

struct Weight {
  const float* values;
  i64 stride;
  float* scale;
  Flag* flags;
  ColumnList* columns;
  u16* plane;
  int k_padded;
};

// Which of the 32 values that a lane converted, of the step from column k on, are too small for halves? They are
// read from the ring once more: few steps come here, but of a matrix full of zeros. What is too large has its
// row's scale corrected, and does not count.
__device__ __forceinline__ void note_step(const Weight& weight, const WeightRows& rows, u32 at, int k) {
#pragma unroll
  for (int lower = 0; lower < 2; ++lower)
#pragma unroll 1
    for (int i = 0; i < kStepProducts; ++i) {
      const uint4 unit = load_unit(OwnRows::chunk<kBoxBytesW>(at, i, lower));
      const u32 bits[4] = {unit.x, unit.y, unit.z, unit.w};
      u32 bad = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float value = __uint_as_float(bits[j]), factor = rows.own.factor[lower];
        const bool held = PlaneValue(value, factor).held(kTolerance);
        bad |= u32{!held && fabsf(value * factor) < 1.0f} << j;
      }
      const int column = k + i / 2 * kBoxColumns + threadIdx.x % 4 * 8 + i % 2 * 4;
      for (; bad != 0; bad &= bad - 1)
        note_spoilt(weight.flags, weight.columns, rows.row + lower * 8, column + __ffs(bad) - 1);
    }
}

// Of this warp's rows that may have overflowed, reads all of each, and gives those that did the scale that
// split_rows.cuh would. Whether any of them can be multiplied with it; one that cannot is flagged.
__device__ __forceinline__ bool correct_scales(WeightRows& rows, const bool (&infinite)[2],
                                               const Weight& weight, int k) {
  constexpr float kOverflow = 65520.0f;  // rounds to infinity
  const int g = threadIdx.x % 32 / 4;
  bool any = false;
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) {
    u32 lanes = __ballot_sync(0xffffffffu, infinite[lower] && rows.row + lower * 8 < rows.n);
    while (lanes != 0) {
      const int i = (__ffs(lanes) - 1) / 4, row = rows.row - g + i + lower * 8;
      lanes &= ~(15u << i * 4);  // four lanes have the row
      const u32 largest = largest_of_row(weight.values + row * weight.stride, k);
      const float factor = __shfl_sync(0xffffffffu, rows.own.factor[lower], i * 4);
      if (__uint_as_float(largest) * factor < kOverflow) continue;  // false for NaN
      bool in_range;
      const int shift = row_shift(largest, in_range);
      any |= in_range;
      if (g == i) rows.own.factor[lower] = plane_power_of_two(shift);
      if (threadIdx.x % 32 == 0) {
        weight.scale[row] = plane_power_of_two(-shift);
        if (!in_range) raise_flag(weight.flags, row, kWhole);
      }
      __syncwarp();
    }
  }
  return any;
}

// Where a row of W overflowed as halves, all its products are infinite or NaN: does this thread see that of
// the upper or the lower row?
__device__ __forceinline__ bool row_infinite(const float (&v)[kAccumulators], int lower) {
  float smallest = __int_as_float(0x7f800000);  // fminf passes NaN over
#pragma unroll
  for (int chunk = 0; chunk < kBlockM / 8; ++chunk)
    smallest = fminf(smallest, fminf(fabsf(v[accumulator(chunk, lower, 0)]),
                                     fabsf(v[accumulator(chunk, lower, 1)])));
  return smallest == __int_as_float(0x7f800000);
}

// The product of a tile, once more where a row's scale was estimated too small. Of the steps, this block looks
// at `look` and each look_step-th from there on. again: a word of shared memory that tells the producers. On
// return all products of the block are done, and x's ring is read no more.
__device__ __forceinline__ void multiply_tile(float (&v)[kAccumulators], Multiplier& multiplier,
                                              WeightRows& rows, const Weight& weight, u32 offset,
                                              int look, int look_step, int k, int k_steps,
                                              volatile int* again) {
  bool first_time = true, repeat;
  do {
    int next = look;
    const auto look_at = [&](const Fragments& a, u32 at, int step) {
      if (step != next) return;
      next += look_step;
      if (kWritesPlane)
        write_pieces(weight.plane, a, rows.row, step * kStepK, rows.n, weight.k_padded);
      if (any_small(a)) note_step(weight, rows, at, step * kStepK);
    };
    if constexpr (kPlanes == 2)
      multiplier.multiply_planes(v, rows, offset, k_steps, look_at);
    else
      multiplier.multiply(v, rows, offset, k_steps, look_at);
    const bool infinite[2] = {row_infinite(v, 0), row_infinite(v, 1)};
    repeat = any_consumer(infinite[0] || infinite[1]) && first_time;
    if (repeat) repeat = any_consumer(correct_scales(rows, infinite, weight, k));
    first_time = false;
    if (threadIdx.x == 0) {
      *again = repeat;
      barrier_arrive(multiplier.rings.judged());
    }
  } while (repeat);
}
