// Estimates, from a part of each row, the scale that brings the row's largest magnitude near fp16's upper
// end: for hopper_fp32_weight.cu, which learns the whole row only as it multiplies it.
//
// A warp reads kPieces pieces of 64 bytes, spread evenly. A part's largest magnitude is put at 2^13 to 2^14:
// the whole row's may be four to eight times as large before halves overflow. Of normal values, the largest
// of 8192 is 1.4 times that of 256. A row whose sample is zero takes what its neighbours have.
#pragma once
#include "flags.cuh"
#include "plane_value.cuh"

constexpr int kSampleThreads = 256, kSampleRows = kSampleThreads / 32;  // of a block
constexpr int kPieces = 16, kPieceColumns = 16;
constexpr int kLoads = kPieces * kPieceColumns / 4 / 32;
constexpr int kRoom = 1;  // powers of two, where the row is not read whole

// A block's kSampleRows rows from `first` on. w: (n, k) fp32, k a multiple of 4, rows w_stride apart, on 16
// bytes. scale: (n,). flag: (n,), kWhole where no scale fits, else 0. columns: (n,), empty.
__device__ __forceinline__ void sample_rows(const float* w, i64 w_stride, float* scale, Flag* flag,
                                            ColumnList* columns, int first, int n, int k) {
  __shared__ u32 of_rows[kSampleRows];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = first + warp;
  const int pieces = (k + kPieceColumns - 1) / kPieceColumns;
  u32 largest = 0;
#pragma unroll
  for (int load = 0; load < kLoads; ++load) {
    const int place = load * 8 + lane / 4;
    const int piece = pieces > kPieces ? static_cast<int>(i64{place} * pieces / kPieces) : place;
    const int column = piece * kPieceColumns + lane % 4 * 4;
    if (row >= n || column >= k) continue;
    const uint4 four = __ldg(reinterpret_cast<const uint4*>(w + row * w_stride + column));
    const u32 a = max(four.x & 0x7fffffffu, four.y & 0x7fffffffu);
    const u32 b = max(four.z & 0x7fffffffu, four.w & 0x7fffffffu);
    largest = max(largest, max(a, b));
  }
  largest = __reduce_max_sync(0xffffffffu, largest);
  if (lane == 0) of_rows[warp] = largest;
  __syncthreads();
  if (largest == 0)
#pragma unroll
    for (int other = 0; other < kSampleRows; ++other) largest = max(largest, of_rows[other]);
  if (lane != 0 || row >= n) return;
  bool in_range;
  const int shift = plane_shift(largest, in_range);
  const int room = pieces > kPieces && in_range && largest != 0 ? kRoom : 0;
  scale[row] = plane_power_of_two(room - shift);
  flag[row] = in_range ? 0 : kWhole;
  columns[row] = {-1, -1, -1, -1};
}
