// Which rows and columns are flagged, and how the work that they make is shared out.
//
// An item is kRows of the rows that a pair (chunk of kChunk rows, strip of kStrip columns) needs:
// those flagged, or all of them where a column of the strip is flagged. Gathering the flagged rows
// of a chunk makes the work follow their number, not the number of tiles that they lie in.
#pragma once
#include "fp32/rescue_prelude.cuh"
#include "common/chain.cuh"
#include "common/flags.cuh"

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kChunk = 1024;             // rows
constexpr int kSlices = kChunk / kRows;  // items of a pair
constexpr int kPasses = kChunk / kThreads;
constexpr int kStrip = kColumns * kGroupParts;  // of a cluster whose blocks share each group, or of a block
static_assert(kPasses * kWarps == 32, "a warp adds up the counts of all warps and passes");

struct Item {
  int first_row, first_column, slice;
};

// Slices are the slowest: where few rows are flagged, all items with work have slice 0, and
// neighbouring ones go to different blocks.
struct ItemOrder {
  int strips, pairs;

  EPINORM_FUNCTION ItemOrder(int m, int n) {
    strips = (n + kStrip - 1) / kStrip;
    pairs = strips * ((m + kChunk - 1) / kChunk);
  }
  EPINORM_FUNCTION int count() const { return pairs * kSlices; }
  EPINORM_FUNCTION Item at(int index) const {
    const int pair = index % pairs;
    return {pair / strips * kChunk, pair % strips * kStrip, index / pairs};
  }
};

// This lane's part of the question whether anything near an item is flagged: columns up to a multiple of
// 128 are looked at, which may be the next strip's.
EPINORM_FUNCTION bool flagged_near(const Item& item, const Flag* row_flags, const Flag* column_flags,
                                   int m, int n) {
  const int at = threadIdx.x % 32 * 4;
  const u32 of_rows = any_flag_of<kChunk / 128>(row_flags, item.first_row + at, 128, m);
  return (of_rows | any_flag_of<(kStrip + 127) / 128>(column_flags, item.first_column + at, 128, n)) != 0;
}

// The rows of one item, found by the whole block.
struct Selection {
  int rows[kRows];  // of the matrix; a row of the item each
  int counts[32];   // rows needed: of each warp in each pass
};

// Fills `selection`, which nobody reads any more, and returns how many rows the item has; every
// thread gets the same number.
EPINORM_FUNCTION int select_rows(Selection& selection, const Item& item, bool every_row,
                                 const Flag* row_flags, int m) {
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  unsigned needed[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row = item.first_row + pass * kThreads + thread;
    needed[pass] = __ballot_sync(kAllLanes, row < m && (every_row || row_flags[row] != 0));
    if (lane == 0) selection.counts[pass * kWarps + warp] = __popc(needed[pass]);
  }
  __syncthreads();
  const int count = selection.counts[lane];
  int end = count;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int before = __shfl_up_sync(kAllLanes, end, offset);
    if (lane >= offset) end += before;
  }
  const int first = item.slice * kRows;
  const int rows = min(__shfl_sync(kAllLanes, end, 31) - first, kRows);
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int start = __shfl_sync(kAllLanes, end - count, pass * kWarps + warp);
    const int place = start + __popc(needed[pass] & ((1u << lane) - 1)) - first;
    if (needed[pass] >> lane & 1 && place >= 0 && place < kRows)
      selection.rows[place] = item.first_row + pass * kThreads + thread;
  }
  __syncthreads();
  return rows;
}

// Of a product by planes, and of the power of two that its operands' scales give it: whether what planes lost
// of elements that they do not hold can count in it. These are at most 32 (8 forward, one tile's columns
// backward) and below 2^-35 (two planes) or 2^-24 (one) of the scale, their factors below 2^16: so
// beyond kSurely they are less than 2^-24 (2^-13) of the product. internals/precision.md.
constexpr float kSurely = 0x1p10f;

EPINORM_FUNCTION bool may_count(float product, float scale) {
  const float size = fabsf(product);
  return !(size >= kSurely * scale && size < static_cast<float>(EPINORM_INFINITY));
}
