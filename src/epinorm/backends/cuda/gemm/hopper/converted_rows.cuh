// Rows of the matrix that is converted on the way (called W, as in register_operand.cuh): their scales, and what
// halves do not hold of them.
//
// A row's scale must be known before the row is read: sample_rows.cuh estimates it from a part of the row, with room
// above. Where that does not suffice halves overflow: then the block reads the rows that overflowed, corrects their
// scales and multiplies once more. In halves, where that would take as long as all else, a row's scale is that of its
// first columns, and before halves overflow, sums so far are scaled down with it. So the scale, and every bit of the
// result, depends on the row alone.
//
// The prelude defines kTolerance, kWritesPlane; what two_rings.cuh needs.
#pragma once
#include "gemm/hopper/fp32_prelude.cuh"
#include "fp32/plane_value.cuh"
#include "fp32/sample_rows.cuh"
#include "gemm/hopper/two_rings.cuh"
#include "gemm/hopper/weight_fragments.cuh"

static_assert(kPlanes == 1 || !kWritesPlane, "one plane is left for the backward pass");
constexpr int kAccumulators = kBlockM / 2;
constexpr float kOverflow = 65520.0f;  // rounds to an infinite half

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

  // No factor is larger. A row keeps this one while it is zero, or at most 2^-58.
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

// What is left to do for rows whose scales are known behind their products only: they are written, of rows that kept
// the first one what is out of range is flagged, and of rows that were scaled down the plane is written once more.
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
      Fragments a[kPlanes];
      rows.own.convert(a, raw);
      share.look(a[0], step, unit_of);
    }
}
