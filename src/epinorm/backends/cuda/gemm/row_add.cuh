// From a warp's accumulators into fp32 rows of global memory that hold something already: as
// row_store.cuh, through a buffer of the warp's own.
//
// By reductions, which the L2 cache carries out: nothing is read into registers, of which the longer
// tiles have none to spare, and nobody waits. Each number is added to once, so the result does not
// depend on any order. Numbers below fp32's normal range count as 0, as in all of the GPU's reductions.
#pragma once
#include "common/flags.cuh"
#include "gemm/row_store.cuh"

// red.global.v4, sm_90
__device__ __forceinline__ void add_line_unit(float* to, const uint4& unit) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to),
               "f"(__uint_as_float(unit.x)), "f"(__uint_as_float(unit.y)),
               "f"(__uint_as_float(unit.z)), "f"(__uint_as_float(unit.w))
               : "memory");
}

// A warp's 16 rows of a tile of kColumns columns, a line at a time. Rows of the matrix start on 16 bytes.
// (Another way to write for RowStore would be shorter; the tile of 128 x 192 then spills 36 bytes.)
template <int kColumns>
struct RowAdd {
  static constexpr int kPartColumns = kStoreWidth / 4, kParts = kColumns / kPartColumns;
  static constexpr int kUnits = kStoreWidth / kUnitBytes, kUnitColumns = kUnitBytes / 4;
  static constexpr int kRowsAtOnce = 32 / kUnits, kPasses = kStoreRows / kRowsAtOnce;
  static_assert(kColumns % kPartColumns == 0, "whole lines");

  // Adds to the rows from `row` on of a contiguous matrix (m, n), but for those that are flagged;
  // `column` is the tile's first.
  template <int kCount>
  static __device__ __forceinline__ void add(float* matrix, u32 buffer,
                                             const float (&values)[kCount], int row, int column,
                                             int m, int n, const Flag* row_flag) {
    const int lane = lane_here(), unit_row = lane / kUnits, unit = lane % kUnits;
    bool adds[kPasses];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int at = row + unit_row + pass * kRowsAtOnce;
      adds[pass] = at < m && row_flag[at] == 0;
    }
    const int unit_column = column + unit * kUnitColumns;
    float* const to = matrix + static_cast<i64>(row + unit_row) * n + unit_column;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      // The branch also ends a block of the compiler's schedule, as in row_store.cuh.
      if (column + part * kPartColumns >= n) break;
      fill_buffer<kStoreWidth>(buffer, values, part * kPartColumns / kChunkColumns, lane, Float32{});
      __syncwarp();
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const uint4 bits =
            load_unit(buffer + swizzled<kStoreWidth, 4>(pass * kRowsAtOnce + unit_row, unit));
        if (adds[pass] && unit_column + part * kPartColumns < n)
          add_line_unit(to + part * kPartColumns + static_cast<i64>(pass * kRowsAtOnce) * n, bits);
      }
      __syncwarp();
    }
  }
};
