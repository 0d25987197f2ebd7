// Estimates, from a part of each row, the scale that brings the row's largest magnitude near fp16's upper
// end: for hopper_fp32_weight.cu, which learns the whole row only as it multiplies it.
//
// A warp reads kPieces pieces of 64 bytes, spread evenly. A part's largest magnitude is put at 2^13 to 2^14:
// the whole row's may be four to eight times as large before halves overflow. Of normal values, the largest
// of 8192 is 1.4 times that of 256. A row whose sample is zero is read whole.
#pragma once
#include "fp32/planes_prelude.cuh"
#include "common/flags.cuh"
#include "fp32/plane_value.cuh"

constexpr int kSampleThreads = 256, kSampleRows = kSampleThreads / 32;  // of a block
constexpr int kPieces = 16, kPieceColumns = 16;
constexpr int kLoads = kPieces * kPieceColumns / 4 / 32;
constexpr int kRoom = 1;  // powers of two, where the row is not read whole

// The largest magnitude of four numbers on 16 bytes, as bits.
__device__ __forceinline__ u32 largest_of_four(const float* from) {
  const uint4 four = __ldg(reinterpret_cast<const uint4*>(from));
  const u32 first = max(four.x & 0x7fffffffu, four.y & 0x7fffffffu);
  return max(first, max(four.z & 0x7fffffffu, four.w & 0x7fffffffu));
}

// Of a row of k, a multiple of 4, by a warp.
__device__ __forceinline__ u32 largest_of_row(const float* row, int k) {
  u32 largest = 0;
#pragma unroll 4
  for (int at = threadIdx.x % 32 * 4; at < k; at += 128)
    largest = max(largest, largest_of_four(row + at));
  return __reduce_max_sync(0xffffffffu, largest);
}

// A block's kSampleRows rows from `first` on. w: (n, k) fp32, k a multiple of 4, rows w_stride apart, on 16
// bytes. scale: (n,). flag: (n,), kWhole where no scale fits, else 0. columns: (n,), empty.
__device__ __forceinline__ void sample_rows(const float* w, i64 w_stride, float* scale, Flag* flag,
                                            ColumnList* columns, int first, int n, int k) {
  const int lane = threadIdx.x % 32, row = first + threadIdx.x / 32;
  if (row >= n) return;
  const float* from = w + row * w_stride;
  const int pieces = (k + kPieceColumns - 1) / kPieceColumns;
  u32 largest = 0;
#pragma unroll
  for (int load = 0; load < kLoads; ++load) {
    const int place = load * 8 + lane / 4;
    const int piece = pieces > kPieces ? static_cast<int>(i64{place} * pieces / kPieces) : place;
    const int column = piece * kPieceColumns + lane % 4 * 4;
    if (column < k) largest = max(largest, largest_of_four(from + column));
  }
  largest = __reduce_max_sync(0xffffffffu, largest);
  const bool whole = pieces <= kPieces || largest == 0;
  if (whole && pieces > kPieces) largest = largest_of_row(from, k);
  if (lane != 0) return;
  bool in_range;
  const int shift = row_shift(largest, in_range, whole ? 0 : kRoom);
  scale[row] = plane_power_of_two(-shift);
  flag[row] = in_range ? 0 : kWhole;
  columns[row] = {-1, -1, -1, -1};
}
