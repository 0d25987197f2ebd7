// The tiles of the portable product: how they lie in shared memory, and how cp.async brings them there.
// portable_pipeline.cuh says what the prelude defines.
#pragma once
#include "gemm/portable/portable_mma.cuh"
#include "common/shared_units.cuh"
#include "common/tile_order.cuh"

constexpr int kWarps = kWarpsM * kWarpsN;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlockM = kWarpsM * kWarpM, kBlockN = kWarpsN * kWarpN;
constexpr int kRowBlocks = kWarpM / 16;      // of a warp
constexpr int kColumnBlocks = kWarpN / 8;    // of a warp
constexpr int kAccumulators = kWarpN / 2;    // of a thread, of a row block
constexpr int kProductK = 16;                // of one mma.sync
constexpr int kProducts = kBlockK / kProductK;
constexpr int kUnitNumbers = kUnitBytes / 2;
constexpr bool kWide = kPlanes * kColumnBlocks > 16;  // see multiply_wide()
constexpr bool kHasCross = kPlanes == 2 && !kWide;    // see multiply_planes()
constexpr int kCrossAccumulators = kHasCross ? kAccumulators : 1;
static_assert(kWarpM % 16 == 0 && kWarpN % 8 == 0, "whole products");
static_assert(kBlockK == 32 || kBlockK == 64, "rows of half a line of shared memory or of a whole one");
static_assert(kStages >= 2, "one slot is read while another is filled");

constexpr float kLowScale = 1.0f / 2048.0f;  // the lo plane is stored times 2^11

using Accumulators = float[kRowBlocks][kAccumulators];
using CrossAccumulators = float[kRowBlocks][kCrossAccumulators];

// An operand's tile in shared memory: rows of 16-byte units that trade places within a line of 128
// bytes, so that the eight rows of a matrix that ldmatrix reads lie in different banks.
//
// K-major: kLines rows of kBlockK numbers. Otherwise kBlockK rows of kLines numbers, which ldmatrix
// transposes. kWarpLines: of the lines, a warp's.
template <bool kMajorK, int kLines, int kWarpLines>
struct OperandTile {
  static constexpr int kRows = kMajorK ? kLines : kBlockK;
  static constexpr int kRowUnits = (kMajorK ? kBlockK : kLines) / kUnitNumbers;
  static constexpr int kRowBytes = kRowUnits * kUnitBytes;
  static constexpr int kBytes = kRows * kRowBytes;
  static constexpr bool kHalfLines = kRowBytes == 64;
  static_assert(kMajorK || (kLines % 64 == 0 && (kWarpLines & (kWarpLines - 1)) == 0),
                "whole lines of shared memory, and a warp's part of one is addressed by XOR");

  static __device__ __forceinline__ u32 offset(int row, int unit) {
    return row * kRowBytes + (unit ^ (kHalfLines ? row / 2 % 4 : row % 8)) * kUnitBytes;
  }

  // Where this lane's row of the four matrices of a warp's first fragment begins: 16 lines by 16
  // along k. In A the second matrix is of the next 8 lines, in B of the next 8 along k.
  static __device__ __forceinline__ u32 lane_offset(int first_line, bool lines_first) {
    const int lane = threadIdx.x % 32, near = lane / 8 % 2, far = lane / 16;
    const int line = first_line + lane % 8 * kMajorK + (lines_first ? near : far) * 8;
    const int k = lane % 8 * !kMajorK + (lines_first ? far : near) * 8;
    return kMajorK ? offset(line, k / kUnitNumbers) : offset(k, line / kUnitNumbers);
  }

  // The same for the fragment `line` lines and `k` along the summed index further.
  static __device__ __forceinline__ u32 further(u32 lane_address, int line, int k) {
    if (kMajorK) return (lane_address ^ (k * 2)) + line * kRowBytes;
    return (lane_address ^ (line % 64 * 2)) + line / 64 * 128 + k * kRowBytes;
  }
};
using TileA = OperandTile<kMajorKA, kBlockM, kWarpM>;
using TileB = OperandTile<kMajorKB, kBlockN, kWarpN>;

constexpr int kStageBytes = kPlanes * (TileA::kBytes + TileB::kBytes);
constexpr int kRingBytes = kStages * kStageBytes;

// One operand in global memory: plane hi, and plane lo `low` numbers further, with `stride` numbers from
// row to row. lines, k: its extent along the tile's own index and along the summed one.
struct Operand {
  const u16* hi;
  i64 low, stride;
  int lines, k;

  __device__ __forceinline__ Operand(const u16* hi, const u16* lo, i64 stride, int lines, int k)
      : hi(hi), low(lo - hi), stride(stride), lines(lines), k(k) {}
};

// One unit of which `count` numbers lie inside the matrix (less than one: none); the rest are zeros, but
// for a unit copied at once, which ends inside its row or in a padding of zeros. No address is read that
// is not inside.
__device__ __forceinline__ void load_numbers(u32 to, const u16* from, int count) {
  if (kCopyBytes == 16) {
    copy_unit(to, from, count > 0);
  } else if (kCopyBytes == 4) {
#pragma unroll
    for (int i = 0; i < kUnitNumbers; i += 2) copy_word(to + i * 2, from + i, i < count);
  } else {
    u32 words[4] = {};
#pragma unroll
    for (int i = 0; i < kUnitNumbers; ++i)
      if (i < count) words[i / 2] |= u32{__ldg(from + i)} << (i % 2 * 16);
    store_unit(to, {words[0], words[1], words[2], words[3]});
  }
}

// This thread's units of an operand's tiles: one column of units, every kStep-th row.
template <class Tile, bool kMajorK>
struct Loader {
  static constexpr int kStep = kThreads / Tile::kRowUnits;
  static constexpr int kParts = (Tile::kRows + kStep - 1) / kStep;
  static_assert(kThreads % Tile::kRowUnits == 0, "a thread keeps its column of units");

  // Rows 8 apart trade places alike: then all places follow from the first.
  static constexpr bool kAlike = kStep % 8 == 0;
  // Whether a whole unit is inside changes with the row alone.
  static constexpr bool kOneTest = kCopyBytes == 16 && !kMajorK;

  const u16* from;
  u32 tile, first;              // where the tile and this thread's first unit of it go
  int row, unit;                // of that unit
  int rows_left, numbers_left;  // of the matrix, from its first row and number on

  __device__ __forceinline__ Loader(const Operand& operand, u32 tile, int first_line)
      : tile(tile),
        row(threadIdx.x / Tile::kRowUnits),
        unit(threadIdx.x % Tile::kRowUnits) {
    const int lines = operand.lines - first_line, number = unit * kUnitNumbers;
    rows_left = (kMajorK ? lines : operand.k) - row;
    numbers_left = (kMajorK ? operand.k : lines) - number;
    if (kOneTest && numbers_left < 1) rows_left = 0;
    first = tile + Tile::offset(row, unit);
    from = operand.hi + (kMajorK ? (first_line + row) * operand.stride + number
                                 : row * operand.stride + first_line + number);
  }

  // This thread's unit number `part` of a step, into a slot that begins `slot` bytes into the ring.
  __device__ __forceinline__ void load(const Operand& operand, u32 slot, int part) const {
    if (Tile::kRows % kStep != 0 && row + part * kStep >= Tile::kRows) return;
    const int count = part * kStep < rows_left ? (kOneTest ? 1 : numbers_left) : 0;
    const u32 to = kAlike ? first + part * kStep * Tile::kRowBytes
                          : tile + Tile::offset(row + part * kStep, unit);
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane)
      load_numbers(to + slot + plane * Tile::kBytes,
                   from + part * kStep * operand.stride + plane * operand.low, count);
  }

  __device__ __forceinline__ void next(const Operand& operand) {
    from += kMajorK ? i64{kBlockK} : kBlockK * operand.stride;
    (kMajorK ? numbers_left : rows_left) -= kBlockK;
  }
};
