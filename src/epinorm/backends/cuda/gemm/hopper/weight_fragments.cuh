// Rows of an fp32 matrix W as wgmma's operand A: read from shared memory, scaled, rounded to fp16, and
// multiplied out of registers, so that no pass over memory makes a plane of W.
//
// THE ORDER ALONG K. A lane (g = lane / 4, q = lane % 4) gives wgmma, for each 16 along k,
// A[g][2q, 2q+1, 2q+8, 2q+9] and the same of row g + 8. Operands may have any common order along k, so these
// four are neighbours in memory: one 16-byte load. In a box of W a row is 128 bytes, eight chunks of four
// floats, of which the swizzle puts chunk c of row r at place c ^ (r % 8). Such a load is served eight lanes at
// a time: two rows, 2a and 2a + 1, with q = 0 to 3, whose places must all differ. So the four chunks that a row
// gives must hold one of each pair {0,1}, {2,3}, {4,5}, {6,7}: the j-th 16 of 32 columns takes chunk 2q + j.
// split_rows.cuh writes x's plane in this order (kOrdered).
//
// The prelude defines kPlanes, and kTolerance, that of as many; kStepBoxes, boxes of a step along k.
#pragma once
#include "gemm/hopper/fp32_prelude.cuh"
#include "fp32/plane_value.cuh"
#include "common/flags.cuh"
#include "gemm/row_store.cuh"
#include "common/shared_units.cuh"

constexpr int kWarpRows = 16;
constexpr int kBoxColumns = 32;                   // 128 bytes of a row
constexpr int kStepK = kStepBoxes * kBoxColumns;
constexpr int kStepProducts = kStepK / 16;
constexpr int kFragmentWords = 4;                 // pairs of halves: upper, lower, upper, lower row

using Fragments = u32[kStepProducts][kFragmentWords];
using Raw = uint4[kStepProducts][2];  // a lane's values of a step, of its upper and its lower row

// A row's scale and what its values are multiplied by, powers of two.
__device__ __forceinline__ float reciprocal_power(float scale) {
  return __uint_as_float(0x7f000000u - __float_as_uint(scale));
}

// Two floats as two halves, the first below.
__device__ __forceinline__ u32 halves(u32 low, u32 high, float factor) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;"
      : "=r"(pair)
      : "f"(__uint_as_float(high) * factor), "f"(__uint_as_float(low) * factor));
  return pair;
}

// What the halves leave of two floats, times 2^11, as two more.
__device__ __forceinline__ u32 low_halves(u32 low, u32 high, float factor, u32 pair) {
  const float rest[2] = {
      __fmaf_rn(__uint_as_float(low), factor, -Float16::load(static_cast<u16>(pair & 0xffff))),
      __fmaf_rn(__uint_as_float(high), factor, -Float16::load(static_cast<u16>(pair >> 16)))};
  return halves(__float_as_uint(rest[0]), __float_as_uint(rest[1]), kPlaneLowFactor);
}

// The smaller magnitudes of two pairs of halves, and the larger ones, of which NaN is the largest; with any sign.
__device__ __forceinline__ u32 smaller_halves(u32 a, u32 b) {
  asm("min.xorsign.abs.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}
__device__ __forceinline__ u32 larger_halves(u32 a, u32 b) {
  asm("max.NaN.xorsign.abs.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}

// Is a half of the pair below `limit`? As bits, which order magnitudes as they do.
__device__ __forceinline__ bool any_below(u32 pair, u32 limit) {
  return (pair & 0xffff) < limit || pair >> 16 < limit;
}

// Up to 2^-17 halves, whose steps are 2^-24 down there, may not hold a value to 2^-8; up to 2^-16 two
// planes, whose steps are 2^-35, not to 2^-20.
constexpr u32 kSmallBits = kPlanes == 2 ? 0x0101 : 0x0081;

// Two rows of W, one and the one 8 below, as a lane sees them.
struct OwnRows {
  float factor[2];

  static constexpr u32 kLowerBytes = 8 * 128;

  static __device__ __forceinline__ u32 offset_in_box(int row_in_tile) {
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    return row_in_tile * 128 + ((2 * q) ^ g) * kUnitBytes;  // row_in_tile % 8 == g
  }
  // Of the chunk of product i, upper or lower row.
  template <int kBoxBytes>
  static __device__ __forceinline__ u32 chunk(u32 at, int i, int lower) {
    return (i % 2 ? at ^ kUnitBytes : at) + i / 2 * kBoxBytes + lower * kLowerBytes;
  }

  // A step's values, as they lie in the ring.
  template <int kBoxBytes>
  static __device__ __forceinline__ void load(Raw& raw, u32 at) {
#pragma unroll
    for (int i = 0; i < kStepProducts; ++i)
#pragma unroll
      for (int lower = 0; lower < 2; ++lower) raw[i][lower] = load_unit(chunk<kBoxBytes>(at, i, lower));
  }

  __device__ __forceinline__ void convert(Fragments (&planes)[kPlanes], const Raw& raw) const {
    Fragments& a = planes[0];
#pragma unroll
    for (int i = 0; i < kStepProducts; ++i)
#pragma unroll
      for (int lower = 0; lower < 2; ++lower) {
        a[i][lower] = halves(raw[i][lower].x, raw[i][lower].y, factor[lower]);
        a[i][lower + 2] = halves(raw[i][lower].z, raw[i][lower].w, factor[lower]);
        if constexpr (kPlanes == 2) {
          planes[1][i][lower] =
              low_halves(raw[i][lower].x, raw[i][lower].y, factor[lower], a[i][lower]);
          planes[1][i][lower + 2] =
              low_halves(raw[i][lower].z, raw[i][lower].w, factor[lower], a[i][lower + 2]);
        }
      }
  }
};

// A lane's eight neighbouring halves of one box and row, in W's order.
__device__ __forceinline__ uint4 piece_of(const Fragments& a, int box, int lower) {
  return {a[2 * box][lower], a[2 * box][lower + 2], a[2 * box + 1][lower], a[2 * box + 1][lower + 2]};
}

// Of a step's halves, two and two, by a tree.
template <class Combine>
__device__ __forceinline__ u32 all_halves(const Fragments& a, Combine combine) {
  u32 found[kFragmentWords];
#pragma unroll
  for (int word = 0; word < kFragmentWords; ++word) {
    found[word] = a[0][word];
#pragma unroll
    for (int i = 1; i < kStepProducts; ++i) found[word] = combine(found[word], a[i][word]);
  }
  return combine(combine(found[0], found[1]), combine(found[2], found[3])) & 0x7fff7fffu;
}

// Is a half so small that its value must be looked at? Zeros are.
__device__ __forceinline__ bool any_small(const Fragments& a) {
  return any_below(all_halves(a, smaller_halves), kSmallBits);
}
// Is one infinite, or NaN?
__device__ __forceinline__ bool any_infinite(const Fragments& a) {
  return (all_halves(a, larger_halves) + 0x04000400u & 0x80008000u) != 0;
}

// max.NaN: what is no number is the largest.
__device__ __forceinline__ float larger_magnitude(float a, u32 b) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(fabsf(__uint_as_float(b))));
  return a;
}

// The largest magnitude of a row's values.
__device__ __forceinline__ float largest_of(const Raw& raw, int lower) {
  float largest = fabsf(__uint_as_float(raw[0][lower].x));
#pragma unroll
  for (int i = 0; i < kStepProducts; ++i) {
    const uint4& four = raw[i][lower];
    if (i > 0) largest = larger_magnitude(largest, four.x);
    largest = larger_magnitude(larger_magnitude(largest, four.y), four.z);
    largest = larger_magnitude(largest, four.w);
  }
  return largest;
}

// A step's halves into W's plane, (n, k_padded), from column k on.
__device__ __forceinline__ void write_pieces(u16* plane, const Fragments& a, int row, int k, int n,
                                             int k_padded) {
  const int first = k + threadIdx.x % 4 * 8;
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) {
    u16* to = plane + static_cast<i64>(row + lower * 8) * k_padded + first;
#pragma unroll
    for (int box = 0; box < kStepBoxes; ++box)
      if (row + lower * 8 < n && first + box * kBoxColumns < k_padded)
        store_line_unit(to + box * kBoxColumns, piece_of(a, box, lower));
  }
}

// A flag of a row, beside what other blocks set: where kWhole is among them it stays so.
__device__ __forceinline__ void raise_flag(Flag* flags, int row, Flag flag) {
  atomicOr(reinterpret_cast<u32*>(flags + (row & ~3)), u32{flag} << row % 4 * 8);
}

// Notes a column that a row's halves do not hold: once, whoever finds it.
__device__ __forceinline__ void note_spoilt(Flag* flags, ColumnList* lists, int row, int column) {
  if (__ldcg(flags + row) & kWhole) return;
  int* list = reinterpret_cast<int*>(lists + row);
  for (int i = 0; i < kListed; ++i) {
    const int there = atomicCAS(list + i, -1, column);
    if (there == -1 || there == column) return raise_flag(flags, row, kSomeColumns);
  }
  raise_flag(flags, row, kWhole);
}
