// fp32 rows as one or two planes of fp16 and a power of two: v = (hi + lo 2^-11) scale, in one read.
//
// The scale brings a row's largest magnitude into [2^14, 2^15). hi is v / scale rounded to fp16's 11
// bits, lo the rest times 2^11 rounded to 11 bits more; both steps are exact but for the last
// rounding. Rows that this cannot hold to kTolerance for every element, or whose scale could leave
// fp32's range once two are multiplied, or that hold Inf or NaN, are flagged: they take another path.
//
// The prelude defines kPlanes, kRowThreads (32 to 256, of a row), kRowVectors (float4 that a thread
// keeps in registers; rows longer than kRowThreads * kRowVectors * 4 are read twice), kTolerance and
// kAligned (every row of values starts at a multiple of 16 bytes).
#include "integers.cuh"
#include "storage.cuh"

constexpr int kThreads = 256;
constexpr int kRows = kThreads / kRowThreads;  // of a block
constexpr float kLowFactor = 2048.0f;          // 2^11
constexpr int kTopExponent = 14;               // of a row's largest magnitude, scaled
constexpr int kLargestExponent = 60;           // of what is not flagged, unscaled

struct alignas(16) Vector {
  float v[4];
};
struct alignas(8) HalfVector {
  u32 pairs[2];
};

__device__ __forceinline__ float power_of_two(int exponent) {
  return __int_as_float((exponent + 127) << 23);
}

// The largest over the kRowThreads threads of a row; `shared` holds a number a warp.
__device__ __forceinline__ u32 row_max(u32 value, u32* shared) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    value = max(value, __shfl_xor_sync(0xffffffffu, value, offset));
  if (kRowThreads == 32) return value;
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) shared[warp] = value;
  __syncthreads();
  constexpr int kWarps = kRowThreads / 32;
  const int first = warp / kWarps * kWarps;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) value = max(value, shared[first + i]);
  __syncthreads();
  return value;
}

__device__ __forceinline__ u32 magnitude(float value) { return __float_as_uint(value) & 0x7fffffffu; }

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

// Splits four values and stores them; says whether all were held to kTolerance.
__device__ __forceinline__ bool split_vector(const Vector& vector, float factor, u16* hi_row,
                                             u16* lo_row, int at) {
  u16 hi[4], lo[4];
  bool held = true;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float v = vector.v[i] * factor;
    hi[i] = Float16::store(v);
    float rest = v - Float16::load(hi[i]);
    if (kPlanes == 2) {
      lo[i] = Float16::store(rest * kLowFactor);
      rest -= Float16::load(lo[i]) * (1.0f / kLowFactor);
    }
    held &= fabsf(rest) <= fabsf(v) * kTolerance;
  }
  *reinterpret_cast<HalfVector*>(hi_row + at) = {{hi[0] | u32{hi[1]} << 16, hi[2] | u32{hi[3]} << 16}};
  if (kPlanes == 2)
    *reinterpret_cast<HalfVector*>(lo_row + at) = {
        {lo[0] | u32{lo[1]} << 16, lo[2] | u32{lo[3]} << 16}};
  return held;
}

// values: (rows, k), row_stride apart. hi, lo: (rows, k_padded), the padding of zeros; k_padded is a
// multiple of 4. scale: (rows,). flag: (rows,), 1 where the planes do not hold the row.
extern "C" __global__ void __launch_bounds__(kThreads)
    split(const float* values, i64 row_stride, u16* hi, u16* lo, float* scale,
          unsigned char* flag, int rows, int k, int k_padded) {
  __shared__ u32 shared[kThreads / 32];
  const int thread = threadIdx.x % kRowThreads;
  const int row = blockIdx.x * kRows + threadIdx.x / kRowThreads;
  const bool inside = row < rows;
  const float* from = values + (inside ? row : 0) * row_stride;
  const int k_here = inside ? k : 0;

  Vector kept[kRowVectors];
  u32 largest = 0;
#pragma unroll
  for (int i = 0; i < kRowVectors; ++i)
    kept[i] = load_vector(from, (i * kRowThreads + thread) * 4, k_here);
#pragma unroll
  for (int i = 0; i < kRowVectors; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) largest = max(largest, magnitude(kept[i].v[j]));
  constexpr int kKept = kRowVectors * kRowThreads * 4;
  for (int at = kKept + thread * 4; at < k_here; at += kRowThreads * 4) {
    const Vector more = load_vector(from, at, k_here);
#pragma unroll
    for (int j = 0; j < 4; ++j) largest = max(largest, magnitude(more.v[j]));
  }
  largest = row_max(largest, shared);

  const int exponent = static_cast<int>(largest >> 23) - 127;
  const bool in_range = exponent >= -kLargestExponent && exponent <= kLargestExponent;
  const int shift = in_range ? kTopExponent - exponent : 0;
  const float factor = power_of_two(shift);
  bool held = in_range || largest == 0;
  u16* hi_row = hi + static_cast<i64>(row) * k_padded;
  u16* lo_row = lo + static_cast<i64>(row) * k_padded;
#pragma unroll
  for (int i = 0; i < kRowVectors; ++i) {
    const int at = (i * kRowThreads + thread) * 4;
    if (inside && at < k_padded) held &= split_vector(kept[i], factor, hi_row, lo_row, at);
  }
  if (inside)
    for (int at = kKept + thread * 4; at < k_padded; at += kRowThreads * 4)
      held &= split_vector(load_vector(from, at, k), factor, hi_row, lo_row, at);
  const bool flagged = row_max(!held, shared) != 0;
  if (inside && thread == 0) {
    scale[row] = power_of_two(-shift);
    flag[row] = flagged;
  }
}
