// The main loop of the kernels that convert fp32 on the way: operand A out of registers (weight_fragments.cuh), B
// from its ring as a plane (two_rings.cuh), and the corrections of A's scales. A is called W here, and B x, as in
// hopper_fp32_weight.cu; in hopper_fp32_input.cu they are the other way round.
//
// SCALES. A row's scale must be known before the row is read: sample_rows.cuh estimates it from a part of the
// row, with room above. Where that does not suffice halves overflow: then the block reads the rows that
// overflowed, corrects their scales and multiplies once more. In halves, where that would take as long as all
// else, a row's scale is that of its first columns, and once halves overflow, sums so far are scaled down with it. So
// the scale, and every bit of the result, depends on the row alone.
//
// The prelude defines kTolerance; what two_rings.cuh and weight_fragments.cuh need; the instruction
// wgmma_a(float (&d)[kBlockM / 2], const u32 (&a)[4], u64 b); with two planes wgmma_a_alone, which d is no part of;
#pragma once
#include "gemm/hopper/fp32_prelude.cuh"
#include "fp32/plane_value.cuh"
#include "fp32/sample_rows.cuh"
#include "gemm/hopper/two_rings.cuh"
#include "gemm/hopper/weight_fragments.cuh"

static_assert(kPlanes == 1 || !kWritesPlane, "one plane is left for the backward pass");
constexpr int kAccumulators = kBlockM / 2;
constexpr float kOverflow = 65520.0f;  // rounds to an infinite half
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

struct Weight {
  const float* values;
  i64 stride;
  float* scale;
  Flag* flags;
  ColumnList* columns;
  u16* plane;
  int k_padded;
};

// What a tile's rows of W are to a thread: `row` and 8 below.
struct WeightRows {
  int row, n;
  OwnRows own;

  __device__ __forceinline__ WeightRows(const float* scales, int row, int n) : row(row), n(n) {
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      if (kRepeats)
        own.factor[lower] = row + lower * 8 < n ? reciprocal_power(__ldcg(scales + row + lower * 8)) : 1.0f;
      else
        own.factor[lower] = plane_power_of_two(kMostShift);
    }
  }

  // Above all that rows with a scale have: so far a row is zero, or too small to tell.
  static constexpr int kMostShift = kPlaneTopExponent + kPlaneLargestExponent;

  // Scales that hold values as large as these, too, which may be a lane's part of a row's.
  __device__ __forceinline__ void fit(const float (&found)[2], const Weight& weight) {
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      u32 largest = __float_as_uint(found[lower]);
#pragma unroll
      for (int lanes = 1; lanes < 4; lanes *= 2)  // four have the row
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
      if (__uint_as_float(largest) * own.factor[lower] < kOverflow) continue;
      bool in_range;
      const int shift = row_shift(largest, in_range, kRoom);
      if (in_range)
        own.factor[lower] = plane_power_of_two(shift);
      else if (row + lower * 8 < n)
        raise_flag(weight.flags, row + lower * 8, kWhole);
    }
  }
};

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
    const float largest[2] = {largest_of(raw, 0), largest_of(raw, 1)};
    bool held = true;
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) held &= largest[lower] * rows.own.factor[lower] < kOverflow;
    if (!__all_sync(0xffffffffu, held)) {
      scale_down(v, rows, largest, step, look);
      OwnRows::load<kBoxBytesW>(raw, at);  // once more: registers are few
    }
    rows.own.convert(a, raw);
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

// The row, at this point of the program: addresses that follow from it are not kept in registers that products
// need.
__device__ __forceinline__ int here(int row) {
  asm volatile("" : "+r"(row));
  return row;
}

// Which of the values that a lane converted, of the step from column k on, are too small for halves? They are
// read once more by unit_of(product, upper or lower row): few steps come here, but of a matrix full of zeros. What is
// too large has its row's scale corrected, and does not count.
template <class Unit>
__device__ __forceinline__ void note_step(const Weight& weight, const WeightRows& rows, int row, int k,
                                          Unit unit_of) {
#pragma unroll
  for (int lower = 0; lower < 2; ++lower)
#pragma unroll 1
    for (int i = 0; i < kStepProducts; ++i) {
      const uint4 unit = unit_of(i, lower);
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
        note_spoilt(weight.flags, weight.columns, row + lower * 8, column + __ffs(bad) - 1);
    }
}

// Of this warp's rows that may have overflowed, reads all of each, and gives those that did the scale that
// split_rows.cuh would. Whether any of them can be multiplied with it; one that cannot is flagged.
__device__ __forceinline__ bool correct_scales(WeightRows& rows, const bool (&infinite)[2],
                                               const Weight& weight, int k) {
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

// What this block does with its share of the steps, or of as many together as x has slots: those numbered `next`,
// and each step_between-th from there on.
struct LookAtShare {
  const Weight& weight;
  const WeightRows& rows;
  int first, step_between, next = first;
  bool scaled_down = false;  // one of the rows, after its first step

  __device__ __forceinline__ bool due(int number) {
    if (number != next) return false;
    next += step_between;
    return true;
  }
  __device__ __forceinline__ void operator()(const Fragments& a, u32 at, int step) const {
    look(a, step, [&](int i, int lower) { return load_unit(OwnRows::chunk<kBoxBytesW>(at, i, lower)); });
  }
  template <class Unit>
  __device__ __forceinline__ void look(const Fragments& a, int step, Unit unit_of) const {
    if (kWritesPlane)
      write_pieces(weight.plane, a, here(rows.row), step * kStepK, rows.n, weight.k_padded);
    if (any_small(a)) note_step(weight, rows, here(rows.row), step * kStepK, unit_of);
  }
};

// Of the thread's upper or lower row, the four values of product i of a step, from memory.
__device__ __forceinline__ uint4 unit_in_memory(const Weight& weight, const WeightRows& rows, int step, int i,
                                                int lower, int k) {
  const int row = rows.row + lower * 8;
  const int column = step * kStepK + i / 2 * kBoxColumns + threadIdx.x % 4 * 8 + i % 2 * 4;
  if (row >= rows.n || column >= k) return {};
  return __ldg(reinterpret_cast<const uint4*>(weight.values + row * weight.stride + column));
}

// What is left to do for rows whose scales are known behind their products only: they are written, rows that got
// none are zero or flagged, and of rows that were scaled down the plane is written once more.
__device__ __forceinline__ void settle_rows(const WeightRows& rows, const Weight& weight, LookAtShare& share, int k,
                                            int k_steps) {
  const float kUnscaled = plane_power_of_two(WeightRows::kMostShift);
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) {
    const int row = rows.row + lower * 8;
    float scale = reciprocal_power(rows.own.factor[lower]);
    if (rows.own.factor[lower] == kUnscaled) {
      u32 largest = 0;
#pragma unroll 4
      for (int unit = 0; unit < k_steps * kStepProducts; ++unit) {
        const uint4 four = unit_in_memory(weight, rows, unit / kStepProducts, unit % kStepProducts, lower, k);
        largest = max(largest, max(four.x & 0x7fffffffu, four.y & 0x7fffffffu));
        largest = max(largest, max(four.z & 0x7fffffffu, four.w & 0x7fffffffu));
      }
      const u32 quad = 15u << threadIdx.x % 32 / 4 * 4;
#pragma unroll
      for (int lanes = 1; lanes < 4; lanes *= 2)
        largest = max(largest, __shfl_xor_sync(quad, largest, lanes));
      bool in_range;
      row_shift(largest, in_range);
      if (largest == 0 || !in_range) scale = 1.0f / (1 << kEmptyRowShift);
      if (!in_range && row < rows.n) raise_flag(weight.flags, row, kWhole);
    }
    if (threadIdx.x % 4 == 0 && row < rows.n) weight.scale[row] = scale;
  }
  if (!kWritesPlane || !share.scaled_down) return;
  for (int number = share.first; number * kStagesX < k_steps; number += share.step_between)
#pragma unroll 1
    for (int step = number * kStagesX; step < (number + 1) * kStagesX; ++step) {
      const auto unit_of = [&](int i, int lower) { return unit_in_memory(weight, rows, step, i, lower, k); };
      Raw raw;
#pragma unroll
      for (int i = 0; i < kStepProducts; ++i)
#pragma unroll
        for (int lower = 0; lower < 2; ++lower) raw[i][lower] = unit_of(i, lower);
      Operand a;
      rows.own.convert(a, raw);
      share.look(a[0], step, unit_of);
    }
}

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
