// What flagged rows spoilt in a backward product of an fp32 chain, computed again in plain fp32:
// result (m, n) = A (m, k) · b (k, n), where A is dZ for dX and dZᵀ for dW.
//
// The kernel before this one multiplied planes of fp16 that cannot hold what is flagged. A flagged row
// of A spoils just that row of the result; an index of the sum, flagged by kSomeColumns, just the
// columns in its list, and flagged by kWhole, everything. Of a column in a list just the numbers are computed
// that are so small that what planes lost may count in them. Nothing else is written. Nothing flagged is
// the ordinary case: every block then reads the flags and ends.
//
// With kAdds that kernel added to a result that was there, but for flagged rows, and they are added
// here. For any flagged index of the sum it added nothing: it would have to know the columns in its
// epilogue, which has no registers left. Then all is added here.
//
// The prelude defines kRows, kColumns = kWidth of a tile; kBlockK and kStages of the ring;
// kTransposedA (`a` is (k, m)); kAligned (every row of an `a` that is (m, k) begins at a multiple of
// 16 bytes); kAdds; kSplitK, the blocks of a cluster, which share the sum over k of each item.
#include "common/dependent.cuh"
#include "fp32/rescue_columns.cuh"
#include "fp32/rescue_splits.cuh"

static_assert(kColumns == kWidth, "columns need not be whole groups here");
static_assert(kThreads % kColumns == 0, "a thread stores one column of a tile");

constexpr int kFlagBytes = 16;        // read at a time
constexpr int kFewFlags = 32 * 1024;  // of rows: up to here a block reads them all

// As any_flag, 16 flags at a time.
EPINORM_FUNCTION u32 any_flag_wide(const Flag* flags, int count) {
  if (reinterpret_cast<u64>(flags) % kFlagBytes != 0) return any_flag(flags, count, kThreads);
  const int whole = count / kFlagBytes;
  const uint4* units = reinterpret_cast<const uint4*>(flags);
  constexpr int kUnits = 8;
  u32 any = 0;
  for (int first = threadIdx.x; first < whole; first += kUnits * kThreads) {
    uint4 unit[kUnits];  // all are on their way at once
#pragma unroll
    for (int i = 0; i < kUnits; ++i)
      unit[i] = first + i * kThreads < whole ? __ldcg(units + first + i * kThreads) : uint4{0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < kUnits; ++i) any |= unit[i].x | unit[i].y | unit[i].z | unit[i].w;
  }
  const int left = whole * kFlagBytes + threadIdx.x;
  if (left < count) any |= __ldcg(flags + left);
  return any;
}

// The same for the rows that the items from `first` on, `step` apart, take theirs from, and for the last three of all.
EPINORM_FUNCTION bool any_row_flag(const ItemOrder& order, int first, int step,
                                   const Flag* row_flags, int m) {
  constexpr int kItems = 8;
  const int count = order.count(), last = m & ~3;
  u32 any = threadIdx.x == 0 && last < m ? four_flags(row_flags, last, m) : 0;
  for (int index = first; index < count; index += kItems * step) {
    u32 words[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int item = index + i * step;
      words[i] = whole_word(row_flags, order.at(item).first_row + threadIdx.x * 4, item < count ? m : 0);
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) any |= words[i];
  }
  return any != 0;
}

// From the first `rows` rows and `columns` columns of the tile to the result, where at(row, column) says,
// and where the result is not kept; with several blocks a sum, each adds their tiles in the order of k for
// its share of the rows.
template <class At, class Keeps>
EPINORM_FUNCTION void store(const float* tile, int rows, int columns, float* result, At at, Keeps keeps) {
  if constexpr (kSplitK > 1) cluster_sync();  // all tiles are there
  const Range own = own_rows(rows);
  for (int i = own.first * kColumns + threadIdx.x; i < own.end * kColumns; i += kThreads) {
    const int row = i / kColumns, column = i % kColumns;
    if (column >= columns) continue;
    const float value = sum_of_blocks(tile + row * kTileStride + column);
    float& target = result[at(row, column)];
    if (keeps(row, column, target)) continue;
    target = kAdds ? target + value : value;
  }
  if constexpr (kSplitK > 1) cluster_sync();  // no tile is read any more
}

// Spoilt columns of the result, all rows of them: rows of the transposed product bᵀ · Aᵀ, since whole
// strips of it would be computed for a few columns each. `first` and `step` share its tiles out. row_scale:
// (m,), of A's planes, null where all of a column is to be computed.
EPINORM_FUNCTION void compute_columns(float* shared, const SpoiltColumns& spoilt, int first, int step,
                                      const float* a, i64 a_stride, const float* b, i64 b_stride,
                                      const float* row_scale, const Flag* row_flags, float* result,
                                      int m, int n, int k) {
  constexpr int kHeight = Place<kThinRows>::kHeight;
  const int strips = (m + kColumns - 1) / kColumns;
  const int tiles = strips * ((spoilt.count + kHeight - 1) / kHeight);
  for (int tile = first; tile < tiles; tile += step) {
    const int first_row = tile % strips * kColumns, begin = tile / strips * kHeight;
    const int* const columns = spoilt.columns + begin;
    const int count = min(spoilt.count - begin, kHeight);
    const auto at = [&](int column, int row) {
      return static_cast<i64>(first_row + row) * n + columns[column];
    };
    const auto keeps = [&](int, int row, float product) {
      return row_scale != nullptr && !may_count(product, __ldcg(row_scale + first_row + row));
    };
    bool any = false;
    for (int i = threadIdx.x; i < count * kColumns; i += kThreads) {
      const int column = i / kColumns, row = i % kColumns;
      // A flagged row's number may be written by another cluster at this moment, and blocks of one agree.
      if (first_row + row < m && __ldcg(row_flags + first_row + row) == 0)
        any |= !keeps(column, row, __ldcg(result + at(column, row)));
    }
    if (!__syncthreads_or(any)) continue;  // and no more reads of the last tile
    multiply<kThinRows, true, kTransposedA>(shared, columns, count, b, b_stride, a, a_stride,
                                            first_row, m, k);
    store(shared, count, m - first_row, result, at, keeps);
  }
}

// a: (m, k), or (k, m) with kTransposedA, rows a_stride apart. b: (k, n), b_stride. row_flags: (m,),
// sum_flags: (k,), both at multiples of 4 bytes, sum_columns: (k,), all written before the previous
// kernel began; with kAdds sum_columns is not read. row_scale: (m,), powers of two, of A's planes.
// result: (m, n), of which the previous kernel wrote the rows that are not flagged.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    rescue_gradient(const float* a, i64 a_stride, const float* b, i64 b_stride,
                    const Flag* row_flags, const Flag* sum_flags, const ColumnList* sum_columns,
                    const float* row_scale, float* result, int m, int n, int k) {
  extern __shared__ __align__(16) float shared[];
  __shared__ Selection selection;
  __shared__ SpoiltColumns spoilt;
  let_next_kernel_start();  // it waits for this one, which waits for the one before
  const ItemOrder order(m, n);
  const int step = gridDim.x / kClusterBlocks, first = blockIdx.x / kClusterBlocks;
  const bool any_row = m <= kFewFlags ? any_flag_wide(row_flags, m)
                                      : any_row_flag(order, first, step, row_flags, m);
  const u32 of_sum = any_flag_wide(sum_flags, k);
  const bool any_index = __syncthreads_or(of_sum) != 0;
  const bool some_rows = __syncthreads_or(any_row) != 0;
  wait_for_previous_kernel();  // also without work: the next kernel must not run beside that one
  if (!some_rows && !any_index) return;
  bool everything = any_index;
  if (!kAdds && any_index)
    everything = __syncthreads_or(any_whole(of_sum)) != 0 ||
                 !gather(spoilt, sum_flags, sum_columns, k);

  const Range own = own_k(k);
  const int length = own.end - own.first;
  const float* own_a = a + (kTransposedA ? own.first * a_stride : own.first);
  const float* own_b = b + own.first * b_stride;
  for (int index = first; (some_rows || everything) && index < order.count(); index += step) {
    const Item item = order.at(index);
    const int column = item.first_column;
    __syncthreads();  // no more reads of the last selection, tile
    const int rows = select_rows(selection, item, everything, row_flags, m);
    if (rows <= 0) continue;
    if (rows <= Place<kThinRows>::kHeight)
      multiply<kThinRows, kTransposedA, true>(shared, selection.rows, rows, own_a, a_stride, own_b,
                                              b_stride, column, n, length);
    else
      multiply<kFullRows, kTransposedA, true>(shared, selection.rows, rows, own_a, a_stride, own_b,
                                              b_stride, column, n, length);
    const auto at = [&](int row, int j) {
      return static_cast<i64>(selection.rows[row]) * n + column + j;
    };
    store(shared, rows, n - column, result, at, [](int, int, float) { return false; });
  }
  if (kAdds || !any_index || everything) return;
  // Of more columns than a tile has, tiles may share one: two clusters would write and look at a number.
  if (spoilt.count > Place<kThinRows>::kHeight) row_scale = nullptr;
  compute_columns(shared, spoilt, first, step, own_a, a_stride, own_b, b_stride, row_scale, row_flags,
                  result, m, n, length);
}
