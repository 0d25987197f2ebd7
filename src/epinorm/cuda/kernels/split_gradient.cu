// dz (m, n) in fp32 as the planes that its two products sum over.
//
// dX[i, k] = sum over n of dz[i, n] W[n, k], and W's planes have a scale a row n, along the summed
// index: it is taken into dz, whose planes then have a scale a row i. dW[n, k] = sum over i of
// dz[i, n] x[i, k] is the same with x's scales, and planes with a scale a column n. All scales are
// powers of two; what leaves fp32's normal range on the way is flagged. docs/precision.md.
//
// The prelude defines kPlanes and kTolerance.
#include "dependent.cuh"
#include "integers.cuh"
#include "plane_value.cuh"

constexpr int kThreads = 256;
constexpr int kStripColumns = 64;                        // of a block of the column kernels
constexpr int kStripRows = kThreads / (kStripColumns / 4);  // that it reads at once

__device__ __forceinline__ u32 bits_of_magnitude(float value) {
  return __float_as_uint(value) & 0x7fffffffu;
}

// Rows are multiples of 4 long and start on 16 bytes.
struct Four {
  float v[4];

  __device__ __forceinline__ explicit Four(const float* from) {
    const float4 four = __ldg(reinterpret_cast<const float4*>(from));
    v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
  }
};

struct Planes {
  u16 *hi, *lo;

  __device__ __forceinline__ void store(i64 at, const PlaneValue (&p)[4]) const {
    *reinterpret_cast<uint2*>(hi + at) = {p[0].hi | u32{p[1].hi} << 16, p[2].hi | u32{p[3].hi} << 16};
    if (kPlanes == 2)
      *reinterpret_cast<uint2*>(lo + at) = {p[0].lo | u32{p[1].lo} << 16,
                                            p[2].lo | u32{p[3].lo} << 16};
  }
};

// A product with a power of two is exact unless it leaves the normal range.
__device__ __forceinline__ bool exact(float value, float scaled) {
  return value == 0.0f || fabsf(scaled) >= kSmallestNormal;
}

__device__ __forceinline__ void store_four(const Planes& planes, i64 at, const Four& values,
                                           const float (&scaled)[4], float factor0, float factor1,
                                           float factor2, float factor3, bool (&held)[4]) {
  const PlaneValue p[4] = {{scaled[0], factor0, kTolerance},
                           {scaled[1], factor1, kTolerance},
                           {scaled[2], factor2, kTolerance},
                           {scaled[3], factor3, kTolerance}};
#pragma unroll
  for (int i = 0; i < 4; ++i) held[i] = p[i].held && exact(values.v[i], scaled[i]);
  planes.store(at, p);
}

// One block a row: planes of dz[i, :] * column_scale[:], a scale and a flag for the row.
extern "C" __global__ void __launch_bounds__(kThreads)
    split_gradient_rows(const float* dz, const float* column_scale, u16* hi, u16* lo, float* scale,
                        unsigned char* flag, int n) {
  __shared__ u32 largest_of_warp[kThreads / 32];
  wait_for_previous_kernel();
  const int row = blockIdx.x;
  const float* from = dz + static_cast<i64>(row) * n;
  u32 largest = 0;
#pragma unroll 8
  for (int at = threadIdx.x * 4; at < n; at += kThreads * 4) {
    const Four values(from + at), scales(column_scale + at);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      largest = max(largest, bits_of_magnitude(values.v[i] * scales.v[i]));
  }
  largest = __reduce_max_sync(0xffffffffu, largest);
  if (threadIdx.x % 32 == 0) largest_of_warp[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) largest = max(largest, largest_of_warp[warp]);

  bool all_held;
  const int shift = plane_shift(largest, all_held);
  const float factor = plane_power_of_two(shift);
  const Planes planes = {hi + static_cast<i64>(row) * n, lo + static_cast<i64>(row) * n};
#pragma unroll 4
  for (int at = threadIdx.x * 4; at < n; at += kThreads * 4) {
    const Four values(from + at), scales(column_scale + at);
    float scaled[4];
    bool held[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) scaled[i] = values.v[i] * scales.v[i];
    store_four(planes, at, values, scaled, factor, factor, factor, factor, held);
    all_held &= held[0] && held[1] && held[2] && held[3];
  }
  const bool flagged = __syncthreads_or(!all_held);
  if (threadIdx.x == 0) {
    scale[row] = plane_power_of_two(-shift);
    flag[row] = flagged;
  }
}

// The largest of dz[i, n] * row_scale[i] over each block's rows: (gridDim.y, n) bits of magnitudes.
extern "C" __global__ void __launch_bounds__(kThreads)
    gradient_column_max(const float* dz, const float* row_scale, u32* largest, int m, int n,
                        int rows_of_block) {
  __shared__ u32 shared[kStripRows][kStripColumns];
  wait_for_previous_kernel();
  const int thread_row = threadIdx.x / (kStripColumns / 4);
  const int in_strip = threadIdx.x % (kStripColumns / 4) * 4;
  const int column = blockIdx.x * kStripColumns + in_strip;
  const int first = blockIdx.y * rows_of_block, end = min(first + rows_of_block, m);
  u32 mine[4] = {};
#pragma unroll 8
  for (int row = first + thread_row; row < end && column < n; row += kStripRows) {
    const Four values(dz + static_cast<i64>(row) * n + column);
    const float scale = row_scale[row];
#pragma unroll
    for (int i = 0; i < 4; ++i) mine[i] = max(mine[i], bits_of_magnitude(values.v[i] * scale));
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) shared[thread_row][in_strip + i] = mine[i];
  __syncthreads();
  const int at = blockIdx.x * kStripColumns + threadIdx.x;
  if (threadIdx.x < kStripColumns && at < n) {
    u32 total = 0;
#pragma unroll
    for (int row = 0; row < kStripRows; ++row) total = max(total, shared[row][threadIdx.x]);
    largest[static_cast<i64>(blockIdx.y) * n + at] = total;
  }
}

// Planes of dz[i, n] * row_scale[i], a scale and a flag a column. The flags are 0 before.
extern "C" __global__ void __launch_bounds__(kThreads)
    split_gradient_columns(const float* dz, const float* row_scale, const u32* largest, u16* hi,
                           u16* lo, float* scale, unsigned char* flag, int m, int n,
                           int rows_of_block) {
  __shared__ int shift_of[kStripColumns];
  __shared__ int lost[kStripColumns];
  wait_for_previous_kernel();
  const int strip = blockIdx.x * kStripColumns;
  if (threadIdx.x < kStripColumns) {
    const int column = strip + threadIdx.x;
    u32 total = 0;
    if (column < n)
      for (u32 block = 0; block < gridDim.y; ++block)
        total = max(total, largest[static_cast<i64>(block) * n + column]);
    bool in_range;
    shift_of[threadIdx.x] = plane_shift(total, in_range);
    lost[threadIdx.x] = !in_range;
    if (blockIdx.y == 0 && column < n) scale[column] = plane_power_of_two(-shift_of[threadIdx.x]);
  }
  __syncthreads();
  const int in_strip = threadIdx.x % (kStripColumns / 4) * 4, column = strip + in_strip;
  const int first = blockIdx.y * rows_of_block, end = min(first + rows_of_block, m);
  float factor[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) factor[i] = plane_power_of_two(shift_of[in_strip + i]);
  bool all_held[4] = {true, true, true, true};
  if (column < n) {
    const Planes planes = {hi, lo};
#pragma unroll 4
    for (int row = first + threadIdx.x / (kStripColumns / 4); row < end; row += kStripRows) {
      const i64 at = static_cast<i64>(row) * n + column;
      const Four values(dz + at);
      const float by = row_scale[row];
      float scaled[4];
      bool held[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) scaled[i] = values.v[i] * by;
      store_four(planes, at, values, scaled, factor[0], factor[1], factor[2], factor[3], held);
#pragma unroll
      for (int i = 0; i < 4; ++i) all_held[i] &= held[i];
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (!all_held[i]) lost[in_strip + i] = 1;
  __syncthreads();
  if (threadIdx.x < kStripColumns && strip + threadIdx.x < n && lost[threadIdx.x])
    flag[strip + threadIdx.x] = 1;
}
