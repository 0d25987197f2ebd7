// From a warp's accumulators to global memory: 16 rows at a time through a small buffer of the warp's
// own in shared memory, so that each lane stores 16 bytes and rows leave as whole lines.
//
// Not by the copy engine (TMA): it serves one request after the other, and when a tile ends the next
// one's loads are queued first. Measured on kb62 with fp32 output: 201 us by TMA stores in boxes of
// 16 rows x 64 bytes; decision 4 has the comparison.
#pragma once
#include "common/group_stats.cuh"
#include "common/shared_units.cuh"
#include "common/storage.cuh"

// The lane, found out anew: what the compiler computes from it is not kept in registers while products
// need them.
__device__ __forceinline__ int lane_here() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// Columns of a warp whose accumulators leave few registers: of rows in two products.
template <int kColumns>
constexpr bool kFillsRegisters = kColumns > 256;

constexpr int kStoreRows = 16;
constexpr int kStoreWidth = 128;  // bytes of a buffer's row, at most
constexpr int kStoreBufferBytes = kStoreRows * kStoreWidth;

// The widest buffer row that divides a tile's row.
template <int kRowBytes>
constexpr int kWidthFor = kRowBytes % 128 == 0  ? 128
                          : kRowBytes % 64 == 0 ? 64
                          : kRowBytes % 32 == 0 ? 32
                                                : 16;

// Where a 16-byte unit of a row stands: units trade places so that a warp's writes and reads spread
// over all banks. Writes are 8 rows of one unit (16-bit numbers) or 4 rows of two (fp32).
template <int kWidth, int kSize>
__device__ __forceinline__ u32 swizzled(u32 row, u32 unit) {
  constexpr u32 kRowsPerLine = 128 / kWidth, kUnits = kWidth / kUnitBytes;
  const u32 line = row / kRowsPerLine;
  unit ^= (kSize == 2 ? line : line << 1) & (kUnits - 1);
  return row * kWidth + unit * kUnitBytes;
}

#if __CUDA_ARCH__ >= 900
// stmatrix: 8 x 8 matrices of 16-bit numbers; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
__device__ __forceinline__ void store_matrices(u32 address, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a),
               "r"(b)
               : "memory");
}
#endif
// st.shared.v2
__device__ __forceinline__ void store_pair(u32 address, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(first), "f"(second)
               : "memory");
}
// st.shared.u32
__device__ __forceinline__ void store_word(u32 address, u32 bits) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(bits) : "memory");
}

// Columns of 16-bit numbers into the buffer: a chunk of 8 columns is one unit.
template <int kWidth, class Type, int kCount>
__device__ __forceinline__ void fill_buffer(u32 buffer, const float (&v)[kCount], int first_chunk,
                                            int lane, Type) {
  constexpr int kUnits = kWidth / kUnitBytes;
#if __CUDA_ARCH__ >= 900
  const u32 row = lane % 16;
#pragma unroll
  for (int unit = 0; unit + 1 < kUnits; unit += 2) {
    const int c = first_chunk + unit;
    store_matrices(buffer + swizzled<kWidth, 2>(row, unit + lane / 16),
                   Type::store_pair(v[accumulator(c, 0, 0)], v[accumulator(c, 0, 1)]),
                   Type::store_pair(v[accumulator(c, 1, 0)], v[accumulator(c, 1, 1)]),
                   Type::store_pair(v[accumulator(c + 1, 0, 0)], v[accumulator(c + 1, 0, 1)]),
                   Type::store_pair(v[accumulator(c + 1, 1, 0)], v[accumulator(c + 1, 1, 1)]));
  }
  if (kUnits == 1) {
    const int c = first_chunk;
    store_matrices(buffer + swizzled<kWidth, 2>(row, 0),
                   Type::store_pair(v[accumulator(c, 0, 0)], v[accumulator(c, 0, 1)]),
                   Type::store_pair(v[accumulator(c, 1, 0)], v[accumulator(c, 1, 1)]));
  }
#else
  const u32 row = lane / 4, quad_lane = lane % 4;
#pragma unroll
  for (int unit = 0; unit < kUnits; ++unit)
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const int c = first_chunk + unit;
      store_word(buffer + swizzled<kWidth, 2>(row + lower * 8, unit) + quad_lane * 4,
                 Type::store_pair(v[accumulator(c, lower, 0)], v[accumulator(c, lower, 1)]));
    }
#endif
}

// Columns of fp32: a chunk of 8 columns is two units, a lane's pair of columns half of one.
template <int kWidth, int kCount>
__device__ __forceinline__ void fill_buffer(u32 buffer, const float (&v)[kCount], int first_chunk,
                                            int lane, Float32) {
  const u32 row = lane / 4, quad_lane = lane % 4;
#pragma unroll
  for (int chunk = 0; chunk < kWidth / 32; ++chunk) {
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const u32 at = swizzled<kWidth, 4>(row + lower * 8, chunk * 2 + quad_lane / 2);
      const int c = first_chunk + chunk;
      store_pair(buffer + at + quad_lane % 2 * 8, v[accumulator(c, lower, 0)],
                 v[accumulator(c, lower, 1)]);
    }
  }
}

// st.global.v4. As an assignment the compiler takes every other one apart into four words.
__device__ __forceinline__ void store_line_unit(void* to, const uint4& unit) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(unit.x), "r"(unit.y),
               "r"(unit.z), "r"(unit.w)
               : "memory");
}

// One number that lies in shared memory, to global memory as it is.
__device__ __forceinline__ void copy_number(u16* to, u32 address) {
  u16 bits;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(address) : "memory");
  *to = bits;
}
__device__ __forceinline__ void copy_number(float* to, u32 address) { *to = load_shared(address); }

struct NoInspection {
  __device__ __forceinline__ void operator()(int, u32) const {}
};

// A warp's 16 rows of a tile of kColumns columns, written in parts of at most a line each. kAligned:
// rows of the matrix start on 16 bytes; else numbers are stored one by one.
template <class Type, int kColumns, bool kAligned>
struct RowStore {
  using Storage = typename Type::Storage;
  static constexpr int kSize = sizeof(Storage);
  static constexpr int kWidth = kWidthFor<kColumns * kSize>;
  static constexpr int kParts = kColumns * kSize / kWidth, kPartColumns = kWidth / kSize;
  static constexpr int kUnits = kWidth / kUnitBytes, kUnitColumns = kUnitBytes / kSize;
  static constexpr int kRowsAtOnce = kUnits == 1 ? kStoreRows : 32 / kUnits;
  static constexpr bool kSpareLanes = kRowsAtOnce * kUnits < 32;  // one unit a row: half of them

  static constexpr int kPasses = kStoreRows / kRowsAtOnce;
  // A part of 16-bit numbers is read back while the next one is computed; of fp32, with twice as many
  // parts, or of rows in two products, that would need more registers than there are.
  static constexpr bool kReadAhead = kSize == 2 && !kFillsRegisters<kColumns>;

  // Writes the rows from `row` on of a contiguous matrix (m, n); `column` is the tile's first.
  // prepare(part) computes the values of a part just before it is written; inspect(part, buffer) reads
  // them in the buffer, of aligned rows.
  template <int kCount, class Prepare, class Inspect = NoInspection>
  static __device__ __forceinline__ void store(Storage* matrix, u32 buffer,
                                               const float (&values)[kCount], int row, int column,
                                               int m, int n, Prepare prepare, Inspect&& inspect = {}) {
    uint4 ahead[kPasses];  // this lane's units of the part before
    Storage* to = nullptr;
    int rows_left = 0;  // from the lane's first on; none for a lane that stores nothing
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      // The branch also ends a block of the compiler's schedule, which else keeps too much at once.
      if (column + part * kPartColumns >= n) break;
      prepare(part);
      if constexpr (!kAligned) {
        store_numbers(matrix, buffer, values, part, row, column, m, n);
        continue;
      }
      if (kReadAhead && part > 0) write_units(to, ahead, rows_left, n);
      const int lane = lane_here(), unit_row = row + lane / kUnits, unit = lane % kUnits;
      const int unit_column = column + part * kPartColumns + unit * kUnitColumns;
      const bool stores = unit_column < n && (!kSpareLanes || lane < kRowsAtOnce * kUnits);
      rows_left = stores ? m - unit_row : 0;
      to = matrix + static_cast<i64>(unit_row) * n + unit_column;
      fill_buffer<kWidth>(buffer, values, part * kPartColumns / kChunkColumns, lane, Type{});
      __syncwarp();
      Storage* at = to;
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass, at += kRowsAtOnce * n) {
        const int at_row = pass * kRowsAtOnce;
        const uint4 bits =
            load_unit(buffer + swizzled<kWidth, kSize>(at_row + lane / kUnits, unit));
        if (kReadAhead)
          ahead[pass] = bits;
        else if (at_row < rows_left)
          store_line_unit(at, bits);
      }
      inspect(part, buffer);
      __syncwarp();
    }
    if (kAligned && kReadAhead) write_units(to, ahead, rows_left, n);
  }

  static __device__ __forceinline__ void write_units(Storage* to, const uint4 (&units)[kPasses],
                                                     int rows_left, int n) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass, to += kRowsAtOnce * n)
      if (pass * kRowsAtOnce < rows_left) store_line_unit(to, units[pass]);
  }

  template <int kCount>
  static __device__ __forceinline__ void store_numbers(Storage* matrix, u32 buffer,
                                                       const float (&values)[kCount], int part,
                                                       int row, int column, int m, int n) {
    const int lane = threadIdx.x % 32;
    column += part * kPartColumns;
    fill_buffer<kWidth>(buffer, values, part * kPartColumns / kChunkColumns, lane, Type{});
    __syncwarp();
    const int rows = min(kStoreRows, m - row), columns = min(kPartColumns, n - column);
    for (int at_row = 0; at_row < rows; ++at_row) {
      Storage* at = matrix + static_cast<i64>(row + at_row) * n + column;
      for (int i = lane; i < columns; i += 32)
        copy_number(at + i, buffer + swizzled<kWidth, kSize>(at_row, i / kUnitColumns) +
                                i % kUnitColumns * kSize);
    }
    __syncwarp();
  }
};
