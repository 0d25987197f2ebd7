// Element operands of a chain, (m, n) as y is, on their way from memory to a warp's accumulators: 16 rows of a
// part at a time, in whole units through the warp's buffer (row_store.cuh). Read where a lane has its
// accumulators, two columns of two rows, each load of a warp would touch eight lines for 32 bytes of each.
//
// Included by epilogue_values.cuh, whose Epilogue and NormType it uses.
#pragma once
#include "gemm/element_prelude.cuh"
#include "gemm/row_store.cuh"

// Two columns of two rows of each chunk, as a lane's accumulators lie.
template <class Type, int kChunks>
struct ElementPairs {
  static constexpr int kWords = sizeof(typename Type::Storage) / 2;
  u32 words[kChunks][2][kWords];

  // From shared memory; at(chunk, lower) says where.
  template <class At>
  __device__ __forceinline__ void read(At at) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk)
#pragma unroll
      for (int lower = 0; lower < 2; ++lower) {
        if constexpr (kWords == 2) {
          const float2 pair = load_pair(at(chunk, lower));
          words[chunk][lower][0] = __float_as_uint(pair.x);
          words[chunk][lower][1] = __float_as_uint(pair.y);
        } else {
          words[chunk][lower][0] = __float_as_uint(load_shared(at(chunk, lower)));
        }
      }
  }
  __device__ __forceinline__ float value(int chunk, int lower, int i) const {
    if constexpr (kWords == 2) {
      return __uint_as_float(words[chunk][lower][i]);
    } else {
      const float2 pair = Type::load_pair(words[chunk][lower][0]);
      return i == 0 ? pair.x : pair.y;
    }
  }
};

// 16 rows of kColumns columns, at most a line of each.
template <class Type, int kColumns>
struct ElementPart {
  using Storage = typename Type::Storage;
  static constexpr int kSize = sizeof(Storage), kWidth = kColumns * kSize;
  static constexpr int kChunks = kColumns / kChunkColumns;
  static constexpr int kUnits = kWidth / kUnitBytes, kUnitColumns = kUnitBytes / kSize;
  static constexpr int kRowsAtOnce = kUnits == 1 ? kStoreRows : 32 / kUnits;
  static constexpr int kPasses = kStoreRows / kRowsAtOnce;
  static constexpr int kPairWords = kSize / 2;  // of two columns' numbers
  static_assert(kWidth <= kStoreWidth, "a row of the buffer");

  uint4 ahead[kPasses];  // on their way
  ElementPairs<Type, kChunks> pairs;

  // One that does not begin on 16 bytes is read number by number.
  static __device__ __forceinline__ uint4 unit_of_numbers(const Storage* from) {
    if constexpr (kSize == 4) {
      const u32* words = reinterpret_cast<const u32*>(from);
      return {words[0], words[1], words[2], words[3]};
    } else {
      const auto pair = [&](int i) { return u32{from[i]} | u32{from[i + 1]} << 16; };
      return {pair(0), pair(2), pair(4), pair(6)};
    }
  }

  // Of a contiguous matrix (m, n), whose rows are whole units.
  __device__ __forceinline__ void fetch(const Storage* matrix, int row, int column, int m, int n) {
    const int lane = lane_here(), unit_row = row + lane / kUnits;
    const int unit_column = column + lane % kUnits * kUnitColumns;
    const bool loads = unit_column < n && lane / kUnits < kStoreRows;
    const Storage* from = matrix + static_cast<i64>(unit_row) * n + unit_column;
    const bool aligned = reinterpret_cast<unsigned long long>(matrix) % kUnitBytes == 0;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) ahead[pass] = uint4{0, 0, 0, 0};
    if (aligned) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass)
        if (loads && unit_row + pass * kRowsAtOnce < m)
          ahead[pass] = *reinterpret_cast<const uint4*>(from + static_cast<i64>(pass) * kRowsAtOnce * n);
    } else {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass)
        if (loads && unit_row + pass * kRowsAtOnce < m)
          ahead[pass] = unit_of_numbers(from + static_cast<i64>(pass) * kRowsAtOnce * n);
    }
  }

  // From what was fetched to this lane's pairs.
  __device__ __forceinline__ void spread(u32 buffer) {
    const u32 lane = lane_here(), row = lane / 4, quad_lane = lane % 4;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass)
      if (lane / kUnits < kStoreRows)
        store_unit(buffer + swizzled<kWidth, kSize>(pass * kRowsAtOnce + lane / kUnits, lane % kUnits),
                   ahead[pass]);
    __syncwarp();
    pairs.read([&](int chunk, int lower) {
      const u32 unit = chunk * kPairWords + quad_lane * kPairWords / 4;
      return buffer + swizzled<kWidth, kSize>(row + lower * 8, unit) + quad_lane * kPairWords % 4 * 4;
    });
    __syncwarp();
  }

  __device__ __forceinline__ float value(int chunk, int lower, int i) const {
    return pairs.value(chunk, lower, i);
  }
};

#ifndef HOLDS_OPERAND
struct HeldOperand {
  __device__ __forceinline__ void release() const {}
};
#endif

// None.
struct NoParts {
  static constexpr bool kAny = false;
  static __device__ constexpr bool holds(int) { return false; }
  __device__ __forceinline__ void take(int, bool) {}
  __device__ __forceinline__ void reach(int) {}
  __device__ __forceinline__ float value(int, int, int, int) const { return 0.0f; }
};

// The element operands from kFirst to kEnd of the chain, one part of kPartColumns columns after the other.
template <int kFirst, int kEnd, int kPartColumns>
struct OperandParts {
  static constexpr bool kAny = true;
  const Epilogue& e;
  u32 buffer;
  int row, column;  // the warp's first
  ElementPart<NormType, kPartColumns> parts[kEnd - kFirst];

  static __device__ constexpr bool holds(int k) {
    return k >= kFirst && k < kEnd && chain::is_element(k);
  }
  __device__ __forceinline__ OperandParts(const Epilogue& e, u32 buffer, int row, int column, const HeldOperand&)
      : e(e), buffer(buffer), row(row), column(column) {
    fetch(0);
  }
  __device__ __forceinline__ void fetch(int part) {
#pragma unroll
    for (int k = kFirst; k < kEnd; ++k)
      if (holds(k))
        parts[k - kFirst].fetch(e.operands[k], row, column + part * kPartColumns, e.m, e.n);
  }
  // Puts this part's numbers at hand, and sends for the next one's.
  __device__ __forceinline__ void take(int part, bool last) {
#pragma unroll
    for (int k = kFirst; k < kEnd; ++k)
      if (holds(k)) parts[k - kFirst].spread(buffer);
    if (!last) fetch(part + 1);
  }
  __device__ __forceinline__ void reach(int) {}
  __device__ __forceinline__ float value(int k, int chunk, int lower, int i) const {
    return parts[k - kFirst].value(chunk, lower, i);
  }
};

__device__ constexpr bool any_element(int first, int end) {
  return first < end && (chain::is_element(first) || any_element(first + 1, end));
}

template <bool kStaged, int kFirst, int kEnd, int kPartColumns>
struct StagedParts {
  struct Type : NoParts {
    __device__ __forceinline__ Type(const Epilogue&, u32, int, int, const HeldOperand&) {}
  };
};
#ifdef HOLDS_OPERAND
// The same of one that the kernel holds in shared memory.
template <int kFirst, int kEnd, int kPartColumns>
struct HeldParts {
  static constexpr bool kAny = true;
  static_assert(kPartColumns * sizeof(typename NormType::Storage) == kStoreWidth, "a part is a line");
  const HeldOperand& held;
  typename HeldOperand::Lines lines;
  ElementPairs<NormType, 1> pair;  // of one chunk: registers are few

  static __device__ constexpr bool holds(int k) { return chain::is_element(k); }
  __device__ __forceinline__ HeldParts(const Epilogue&, u32, int, int, const HeldOperand& held) : held(held) {}
  __device__ __forceinline__ void take(int part, bool) {
    held.reach(lines, part);
  }
  __device__ __forceinline__ void reach(int chunk) {
    pair.read([&](int, int lower) { return lines.at(chunk, lower); });
  }
  __device__ __forceinline__ float value(int, int, int lower, int i) const {
    return pair.value(0, lower, i);
  }
};
template <int kFirst, int kEnd, int kPartColumns>
struct StagedParts<true, kFirst, kEnd, kPartColumns> {
  using Type = HeldParts<kFirst, kEnd, kPartColumns>;
};
#else
template <int kFirst, int kEnd, int kPartColumns>
struct StagedParts<true, kFirst, kEnd, kPartColumns> {
  using Type = OperandParts<kFirst, kEnd, kPartColumns>;
};
#endif
template <bool kStaged, int kFirst, int kEnd, int kPartColumns>
using StagedOperands =
    typename StagedParts<kStaged && any_element(kFirst, kEnd), kFirst, kEnd, kPartColumns>::Type;
