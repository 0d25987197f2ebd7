// fp32 rows as one or two planes of fp16 and a power of two: v = (hi + lo 2^-11) scale, in one read.
// The rows of one matrix, or of two (x and W) with as many columns, by one launch.
//
// The scale brings a row's largest magnitude into [2^14, 2^15). hi is v / scale rounded to fp16's 11
// bits, lo the rest times 2^11 rounded to 11 bits more; both steps are exact but for the last
// rounding. A row is flagged by kSomeColumns where this does not hold some of its elements to
// kTolerance, and the columns of these are listed; by kWhole where they are more than a list holds,
// where the scale could leave fp32's range once two are multiplied, and where it holds Inf or NaN.
//
// The prelude defines kPlanes, kRowThreads (8 to 256, the team of a row), kRowVectors (float4 that a
// thread keeps in registers; rows longer than kRowThreads * kRowVectors * 4 are read twice),
// kTolerance and kAligned (every row of both matrices starts at a multiple of 16 bytes).
#include "dependent.cuh"
#include "flags.cuh"
#include "storage.cuh"

constexpr int kThreads = 256;
constexpr int kTeams = kThreads / kRowThreads;  // of a block
constexpr float kLowFactor = 2048.0f;           // 2^11
constexpr int kTopExponent = 14;                // of a row's largest magnitude, scaled
constexpr int kLargestExponent = 60;            // of what is not flagged, unscaled

struct alignas(16) Vector {
  float v[4];
};
struct alignas(8) HalfVector {
  u32 pairs[2];
};

__device__ __forceinline__ float power_of_two(int exponent) {
  return __int_as_float((exponent + 127) << 23);
}

// The largest over a row's threads, who then see what any of them wrote to shared memory before.
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

// Splits a value; says whether it was held to kTolerance.
__device__ __forceinline__ bool split_value(float value, float factor, u16& hi, u16& lo) {
  const float v = value * factor;
  hi = Float16::store(v);
  float rest = v - Float16::load(hi);
  if (kPlanes == 2) {
    lo = Float16::store(rest * kLowFactor);
    rest -= Float16::load(lo) * (1.0f / kLowFactor);
  }
  // Scaled down, a value below the smallest fp32 is lost without a rest.
  return fabsf(rest) <= fabsf(v) * kTolerance && (v != 0.0f || value == 0.0f);
}

// Splits four values and stores them; says whether all were held.
__device__ __forceinline__ bool split_vector(const Vector& vector, float factor, u16* hi_row,
                                             u16* lo_row, int at) {
  u16 hi[4], lo[4];
  bool held = true;
#pragma unroll
  for (int i = 0; i < 4; ++i) held &= split_value(vector.v[i], factor, hi[i], lo[i]);
  *reinterpret_cast<HalfVector*>(hi_row + at) = {{hi[0] | u32{hi[1]} << 16, hi[2] | u32{hi[3]} << 16}};
  if (kPlanes == 2)
    *reinterpret_cast<HalfVector*>(lo_row + at) = {
        {lo[0] | u32{lo[1]} << 16, lo[2] | u32{lo[3]} << 16}};
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
      u16 hi, lo;
      if (split_value(vector.v[i], factor, hi, lo)) continue;
      const int place = atomicAdd(&spoilt.count, 1);
      if (place >= kListed) return;  // too many: the others of this thread need not be counted
      spoilt.columns[place] = at + i;
    }
  }
}

// Two matrices one below the other: the rows [0, first_rows) of the first and, from second_begin on,
// those of the second; between them lies nothing.
struct Rows {
  const float *first, *second;
  i64 first_stride, second_stride;
  int first_rows, second_begin, end;

  __device__ __forceinline__ bool has(int row) const {
    return row < first_rows || (row >= second_begin && row < end);
  }
  __device__ __forceinline__ const float* at(int row) const {
    return row < first_rows ? first + row * first_stride
                            : second + (row - second_begin) * second_stride;
  }
};

// first: (first_rows, k), rows first_stride apart; second: (rows - second_begin, k). hi, lo: (rows,
// k_padded), the padding of zeros; k_padded is a multiple of 4. scale, flag: (rows,). columns: (rows,),
// written where the flag is kSomeColumns.
extern "C" __global__ void __launch_bounds__(kThreads)
    split(const float* first, i64 first_stride, const float* second, i64 second_stride, u16* hi,
          u16* lo, float* scale, Flag* flag, ColumnList* columns, int first_rows, int second_begin,
          int rows, int k, int k_padded) {
  __shared__ u32 shared[2][kThreads / 32];
  __shared__ Spoilt lists[kTeams];
  wait_for_previous_kernel();
  const Rows all = {first, second, first_stride, second_stride, first_rows, second_begin, rows};
  const int thread = threadIdx.x % kRowThreads;
  const int row = blockIdx.x * kTeams + threadIdx.x / kRowThreads;
  const bool inside = all.has(row);
  Spoilt& spoilt = lists[threadIdx.x / kRowThreads];
  if (thread == 0) spoilt = {0, {-1, -1, -1, -1}};
  const float* from = inside ? all.at(row) : nullptr;

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

  const int exponent = static_cast<int>(largest >> 23) - 127;
  const bool in_range = exponent >= -kLargestExponent && exponent <= kLargestExponent;
  const int shift = in_range ? kTopExponent - exponent : 0;
  const float factor = power_of_two(shift);
  bool held = in_range || largest == 0;
  u16* hi_row = hi + static_cast<i64>(row) * k_padded;
  u16* lo_row = lo + static_cast<i64>(row) * k_padded;
#pragma unroll
  for (int i = 0; i < kRowVectors; ++i) {
    const int at = i * kStep + thread * 4;
    if (inside && at < k_padded) held &= split_vector(kept[i], factor, hi_row, lo_row, at);
  }
  for (int at = kKept + thread * 4; inside && at < k_padded; at += kStep)
    held &= split_vector(load_vector(from, at, k), factor, hi_row, lo_row, at);
  if (!held && in_range) list_spoilt(spoilt, from, thread * 4, kStep, k, factor);
  const bool flagged = row_max(!held, shared[1]) != 0;
  if (inside && thread == 0) {
    const bool listed = in_range && spoilt.count <= kListed;
    scale[row] = power_of_two(-shift);
    flag[row] = !flagged ? 0 : listed ? kSomeColumns : kWhole;
    if (flagged && listed) {
      const int* c = spoilt.columns;
      columns[row] = {c[0], c[1], c[2], c[3]};
    }
  }
}
