// dz (m, n) in fp32 as the planes that its two products sum over, both in one read.
//
// dX[i, k] = sum over n of dz[i, n] W[n, k], and W's planes have a scale a row n, along the summed
// index: it is taken into dz, whose planes then have a scale a row i. dW[n, k] = sum over i of
// dz[i, n] x[i, k] is the same with x's scales, and planes with a scale a column n. All scales are
// powers of two. A row or column is flagged if its largest magnitude, which makes its scale, is out of
// range. Elements so small that planes hold fewer of their bits, or that leave fp32's normal range on the way, lose less
// than counts beside the largest. internals/precision.md.
//
// norm_backward.cu has found the largest magnitudes of rows and columns as it wrote dz.
//
// The prelude defines kPlanes, and which planes are wanted: kByRow for dX, kByColumn for dW.
#include "fp32/gradient_prelude.cuh"
#include "common/dependent.cuh"
#include "common/empty_rows.cuh"
#include "common/integers.cuh"
#include "fp32/plane_value.cuh"

constexpr int kThreads = 256;
constexpr int kStripColumns = 256;                          // of a block
constexpr int kStripRows = kThreads / (kStripColumns / 4);  // that it reads at once
constexpr int kMostRows = 64;                               // of a block
constexpr int kRowLanes = kThreads / kMostRows;             // that find a row's scale
static_assert(kStripColumns == kThreads, "a thread finds a column's scale");

// The shift of a line of nothing but zeros, in the scale of the other matrix; plane_shift has no such.
constexpr int kNothing = 120;

// Rows are multiples of 4 long and start on 16 bytes.
struct Four {
  float v[4];

  __device__ __forceinline__ Four() : v{} {}
  __device__ __forceinline__ explicit Four(const float* from) {
    const float4 four = __ldg(reinterpret_cast<const float4*>(from));
    v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
  }
};

// Where planes of (m, n) go, with a scale and a flag each row or column; the flags are 0 before.
struct Target {
  u16 *hi, *lo;
  float* scale;
  unsigned char* flag;

  __device__ __forceinline__ void store(i64 at, const PlaneValue (&p)[4]) const {
    *reinterpret_cast<uint2*>(hi + at) = {p[0].hi | u32{p[1].hi} << 16, p[2].hi | u32{p[3].hi} << 16};
    if (kPlanes == 2)
      *reinterpret_cast<uint2*>(lo + at) = {p[0].lo | u32{p[1].lo} << 16,
                                            p[2].lo | u32{p[3].lo} << 16};
  }
};

// The largest magnitudes that the scales are made from, as bits: of rows (m, row_parts), of columns (n,).
struct Largest {
  const u32 *row, *column;
  int row_parts;
};

// The planes of four neighbours times by[j], in the scale of factor[j].
__device__ __forceinline__ void split_four(const Target& target, i64 at, const Four& values,
                                           const float (&by)[4], const float (&factor)[4]) {
  float scaled[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) scaled[i] = values.v[i] * by[i];
  target.store(at, {{scaled[0], factor[0]},
                    {scaled[1], factor[1]},
                    {scaled[2], factor[2]},
                    {scaled[3], factor[3]}});
}

// The shifts of a block's rows, a few lanes a row; the first strip's blocks write their scales.
__device__ __forceinline__ void find_row_shifts(int* shift_of, const Largest& largest,
                                                const Target& target, int first, int end) {
  const int in_block = threadIdx.x / kRowLanes, row = first + in_block;
  const u32* parts = largest.row + static_cast<i64>(row) * largest.row_parts;
  u32 total = 0;
#pragma unroll 8
  for (int part = threadIdx.x % kRowLanes; part < largest.row_parts; part += kRowLanes)
    if (row < end) total = max(total, parts[part]);
#pragma unroll
  for (int lanes = kRowLanes / 2; lanes > 0; lanes /= 2)
    total = max(total, __shfl_xor_sync(0xffffffffu, total, lanes));
  if (threadIdx.x % kRowLanes != 0 || row >= end) return;
  bool in_range;
  const int shift = plane_shift(total, in_range);
  shift_of[in_block] = total == 0 ? kNothing : shift;
  if (blockIdx.y != 0) return;
  target.scale[row] = plane_power_of_two(-shift);
  if (!in_range) target.flag[row] = 1;
}

// The shifts of a block's columns; the first rows' blocks write their scales.
__device__ __forceinline__ void find_column_shifts(int* shift_of, const Largest& largest,
                                                   const Target& target, int strip, int n) {
  const int column = strip + threadIdx.x;
  bool in_range;
  const u32 total = column < n ? largest.column[column] : 0;
  const int shift = plane_shift(total, in_range);
  shift_of[threadIdx.x] = total == 0 ? kNothing : shift;
  if (blockIdx.x != 0 || column >= n) return;
  target.scale[column] = plane_power_of_two(-shift);
  if (!in_range) target.flag[column] = 1;
}

// column_factor (n,) and row_factor (m,): the scales of W's and x's planes. A line of nothing but zeros is
// flagged by whoever finds a value there that was something.
extern "C" __global__ void __launch_bounds__(kThreads)
    split_gradient(const float* dz, const float* column_factor, const float* row_factor,
                   const u32* row_largest, int row_parts, const u32* column_largest, u16* row_hi, u16* row_lo, float* row_scale,
                   unsigned char* row_flag, u16* column_hi, u16* column_lo, float* column_scale,
                   unsigned char* column_flag, int m, int n, int rows_of_block) {
  __shared__ int row_shift[kMostRows];
  __shared__ int column_shift[kStripColumns];
  wait_for_previous_kernel();
  const Largest largest = {row_largest, column_largest, row_parts};
  const Target by_row = {row_hi, row_lo, row_scale, row_flag};
  const Target by_column = {column_hi, column_lo, column_scale, column_flag};
  const int strip = blockIdx.y * kStripColumns;
  const int first = blockIdx.x * rows_of_block, end = min(first + rows_of_block, m);
  if (kByRow) find_row_shifts(row_shift, largest, by_row, first, end);
  if (kByColumn) find_column_shifts(column_shift, largest, by_column, strip, n);
  __syncthreads();

  const int in_strip = threadIdx.x % (kStripColumns / 4) * 4, column = strip + in_strip;
  if (column >= n) return;
  Four of_columns;
  if (kByRow) of_columns = Four(column_factor + column);
#pragma unroll
  for (int i = 0; i < 4; ++i) of_columns.v[i] = scale_that_counts(of_columns.v[i]);
  float column_factors[4] = {};
  bool nothing[4] = {};
  if (kByColumn)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      column_factors[i] = plane_power_of_two(column_shift[in_strip + i]);
      nothing[i] = column_shift[in_strip + i] == kNothing;
    }
  bool column_lost[4] = {};
#pragma unroll 4
  for (int row = first + threadIdx.x / (kStripColumns / 4); row < end; row += kStripRows) {
    const i64 at = static_cast<i64>(row) * n + column;
    const Four values(dz + at);
    if (kByRow) {
      const int shift = row_shift[row - first];
      const float factor = plane_power_of_two(shift);
      split_four(by_row, at, values, of_columns.v, {factor, factor, factor, factor});
      if (shift == kNothing)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (values.v[i] != 0.0f && of_columns.v[i] != 0.0f) row_flag[row] = 1;
    }
    if (kByColumn) {
      const float by = scale_that_counts(__ldg(row_factor + row));
      split_four(by_column, at, values, {by, by, by, by}, column_factors);
#pragma unroll
      for (int i = 0; i < 4; ++i) column_lost[i] |= nothing[i] && values.v[i] != 0.0f && by != 0.0f;
    }
  }
  if (kByColumn)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (column_lost[i]) column_flag[column + i] = 1;
}
