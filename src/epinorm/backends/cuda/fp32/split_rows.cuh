// fp32 rows as one or two planes of fp16 and a power of two: v = (hi + lo 2^-11) scale, in one read.
//
// The scale brings a row's largest magnitude into [2^14, 2^15), but for rows that row_shift names. hi is
// v / scale rounded to fp16's 11 bits, lo the rest times 2^11 rounded to 11 bits more; both steps are
// exact but for the last rounding. A row is flagged by kSomeColumns where this does not hold some of its elements to
// kTolerance, and the columns of these are listed; by kWhole where they are more than a list holds,
// where the scale could leave fp32's range once two are multiplied, and where it holds Inf or NaN.
//
// The prelude defines kPlanes, kRowThreads (8 to 256, the team of a row), kRowVectors (float4 that a
// thread keeps in registers; rows longer than kRowThreads * kRowVectors * 4 are read twice),
// kTolerance; kAligned (every row starts at a multiple of 16 bytes); kPlain and kOrdered: whether the
// planes are written as said, and whether a single one goes, in the order of weight_fragments.cuh and in
// rows of whole lines of L2, to where lo is; two go, in place of the plain ones, to where these would.
#pragma once
#include "fp32/planes_prelude.cuh"
#include "common/flags.cuh"
#include "fp32/plane_value.cuh"
#include "common/storage.cuh"

constexpr int kThreads = 256;
constexpr int kTeams = kThreads / kRowThreads;  // of a block

struct alignas(16) Vector {
  float v[4];
};
struct alignas(8) HalfVector {
  u32 pairs[2];
};

// The largest over a row's threads, which then see what any of them wrote to shared memory before.
// `shared` holds a number a warp, and is used once.
__device__ __forceinline__ u32 row_max(u32 value, u32* shared) {
#pragma unroll
  for (int offset = (kRowThreads < 32 ? kRowThreads : 32) / 2; offset > 0; offset /= 2)
    value = max(value, __shfl_xor_sync(0xffffffffu, value, offset));
  if (kRowThreads <= 32) {
    __syncwarp();
    return value;
  }
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) shared[warp] = value;
  __syncthreads();
  constexpr int kWarps = kRowThreads / 32;
  const int first = warp / kWarps * kWarps;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) value = max(value, shared[first + i]);
  return value;
}

__device__ __forceinline__ u32 magnitude(float value) { return __float_as_uint(value) & 0x7fffffffu; }

__device__ __forceinline__ u32 largest_of(const Vector& vector) {
  u32 largest = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) largest = max(largest, magnitude(vector.v[i]));
  return largest;
}

__device__ __forceinline__ Vector load_vector(const float* row, int at, int k) {
  Vector loaded = {};
  if (kAligned && at + 4 <= k) {
    loaded = *reinterpret_cast<const Vector*>(row + at);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (at + i < k) loaded.v[i] = row[at + i];
  }
  return loaded;
}

static_assert(!kOrdered || !kPlain || kPlanes == 1, "lo has another use");
constexpr int kOrderedColumns = 32;
constexpr int kOrderedMultiple = 64;  // columns of a line: no shorter than the plain plane's rows

// Four halves of columns `at` to `at` + 3, in the order of weight_fragments.cuh: chunk 2 q + j of four.
__device__ __forceinline__ void store_ordered(u16* row, int at, const HalfVector& halves) {
  const int chunk = at / 4 % 8, place = at - at % kOrderedColumns + chunk % 2 * 16 + chunk / 2 * 2;
  *reinterpret_cast<u32*>(row + place) = halves.pairs[0];
  *reinterpret_cast<u32*>(row + place + 8) = halves.pairs[1];
}

// Splits four values and stores them, in planes of `padded` columns; says whether all were held.
__device__ __forceinline__ bool split_vector(const Vector& vector, float factor, u16* hi_row,
                                             u16* lo_row, int at, int padded) {
  u16 hi[4], lo[4];
  bool held = true;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const PlaneValue value(vector.v[i], factor);
    hi[i] = value.hi, lo[i] = value.lo;
    held &= value.held(kTolerance);
  }
  const HalfVector halves = {{hi[0] | u32{hi[1]} << 16, hi[2] | u32{hi[3]} << 16}};
  if (kOrdered) store_ordered(kPlanes == 2 ? hi_row : lo_row, at, halves);
  if (kPlain && (!kOrdered || at < padded)) *reinterpret_cast<HalfVector*>(hi_row + at) = halves;
  if (kPlanes == 2) {
    const HalfVector rests = {{lo[0] | u32{lo[1]} << 16, lo[2] | u32{lo[3]} << 16}};
    if (kOrdered)
      store_ordered(lo_row, at, rests);
    else
      *reinterpret_cast<HalfVector*>(lo_row + at) = rests;
  }
  return held;
}

// The columns of a row's elements that are not held, in any order; -1 from `count` on.
struct Spoilt {
  int count;
  int columns[kListed];
};

// Adds to the list what this thread holds of a row. It reads the row again: to remember what was not
// held would cost every row registers, for the sake of very few.
__device__ void list_spoilt(Spoilt& spoilt, const float* row, int first, int step, int k,
                            float factor) {
  for (int at = first; at < k; at += step) {
    const Vector vector = load_vector(row, at, k);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (PlaneValue(vector.v[i], factor).held(kTolerance)) continue;
      const int place = atomicAdd(&spoilt.count, 1);
      if (place >= kListed) return;  // too many: the others of this thread need not be counted
      spoilt.columns[place] = at + i;
    }
  }
}

// Where rows' planes go, each of `padded` columns, the padding of zeros; with kOrdered lo's rows are as long as
// that order wants. columns: written where the flag is kSomeColumns; null where nobody reads them.
struct SplitTarget {
  u16 *hi, *lo;
  float* scale;
  Flag* flag;
  ColumnList* columns;
  int padded;
};

// This thread's part of a block's kTeams rows; from: its row of k columns, null where there is none.
__device__ __forceinline__ void split_row(const float* from, int row, int k, const SplitTarget& to) {
  __shared__ u32 shared[2][kThreads / 32];
  __shared__ Spoilt lists[kTeams];
  const int thread = threadIdx.x % kRowThreads;
  const bool inside = from != nullptr;
  Spoilt& spoilt = lists[threadIdx.x / kRowThreads];
  if (thread == 0) spoilt = {0, {-1, -1, -1, -1}};

  constexpr int kStep = kRowThreads * 4, kKept = kRowVectors * kStep;
  Vector kept[kRowVectors];
  u32 largest = 0;
#pragma unroll
  for (int i = 0; i < kRowVectors; ++i)
    kept[i] = load_vector(from, i * kStep + thread * 4, inside ? k : 0);
#pragma unroll
  for (int i = 0; i < kRowVectors; ++i) largest = max(largest, largest_of(kept[i]));
  for (int at = kKept + thread * 4; inside && at < k; at += kStep)
    largest = max(largest, largest_of(load_vector(from, at, k)));
  largest = row_max(largest, shared[0]);

  bool in_range;
  const int shift = row_shift(largest, in_range);
  const float factor = plane_power_of_two(shift);
  bool held = in_range;
  const int lines = (k + kOrderedMultiple - 1) / kOrderedMultiple;
  const int columns = kOrdered ? lines * kOrderedMultiple : to.padded;
  u16* hi_row = to.hi + static_cast<i64>(row) * (kPlain ? to.padded : columns);
  u16* lo_row = to.lo + static_cast<i64>(row) * columns;
#pragma unroll
  for (int i = 0; i < kRowVectors; ++i) {
    const int at = i * kStep + thread * 4;
    if (inside && at < columns) held &= split_vector(kept[i], factor, hi_row, lo_row, at, to.padded);
  }
  for (int at = kKept + thread * 4; inside && at < columns; at += kStep)
    held &= split_vector(load_vector(from, at, k), factor, hi_row, lo_row, at, to.padded);
  if (!held && in_range) list_spoilt(spoilt, from, thread * 4, kStep, k, factor);
  const bool flagged = row_max(!held, shared[1]) != 0;
  if (inside && thread == 0) {
    const bool listed = in_range && spoilt.count <= kListed;
    to.scale[row] = plane_power_of_two(-shift);
    to.flag[row] = !flagged ? 0 : listed ? kSomeColumns : kWhole;
    if (flagged && listed && to.columns != nullptr) {
      const int* c = spoilt.columns;
      to.columns[row] = {c[0], c[1], c[2], c[3]};
    }
  }
}
