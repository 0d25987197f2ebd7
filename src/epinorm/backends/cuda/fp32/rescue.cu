// What flagged rows of x or W spoilt in y = post(norm(pre(x Wᵀ + bias))), computed again in plain fp32.
//
// The kernel before this one multiplied planes of fp16 that cannot hold the flagged rows (split_rows.cuh).
// Each (row, group) with a flagged row, or a flagged column among its channels, is overwritten here;
// no other is touched, so that a result never depends on its neighbours' flags.
//
// Where the product is in memory (kProduct), single elements that are not held cost only rows of it with
// a number so small that they may count.
//
// Nothing flagged is the ordinary case: every block then reads the flags, or its share of them where
// there are many, and ends.
//
// The prelude defines the chain (codegen.py); kRows, kColumns and kWidth of a tile: rows, columns
// used, columns multiplied; kBlockK and kStages of the ring; kSplitK, the blocks of a cluster, which
// share the sum over k of each item; kGroupParts, those that share a group wider than a tile, each with
// kColumns of it; kAligned (every row of x and w begins at a multiple of 16 bytes);
// kGroup, the columns of a group; kHasBias, kHasGamma, kHasBeta; kSaveForBackward (z or, with kKeepsSum, what enters
// the norm is written), kKeepStatistics (mean and rstd are); kProduct, where the product is: kNowhere, kInZ
// or kInY; kFlagsLate (the previous kernel writes flags); kMomentRows: 0, or of how many rows of y the product
// left a column's moments in `mean` (gemm/column_moments.cuh); CHAIN_PARAMETERS, OPERAND_LIST,
// STRIDE_LIST, CONSTANT_LIST.
#include "common/dependent.cuh"
#include "common/numeric.cuh"
#include "fp32/rescue_splits.cuh"
#include "common/variance.cuh"

#ifndef X_ROWS  // rescue_spent.cu has its own
#define X_ROWS x
#endif

struct Epilogue {
  const float *bias, *gamma, *beta;
  const float* operands[chain::kSlots];
  i64 strides[chain::kSlots];
  chain::Constants<float> constants;
  const Flag *row_flags, *column_flags;
  const float *x_scale, *w_scale;
  float *y, *z, *mean, *rstd;
  int n;
  chain::Drops<float> drops;
};

// The rows of an item, and its groups with a flagged column.
constexpr int kGroups = kGroupParts > 1 ? 1 : kColumns / kGroup;  // of a tile
struct GroupSelection : Selection {
  Flag groups[kGroups];
  bool kept[kRows];  // by `keep_rows`
};

// Leaves of the item's rows those that any lane of a warp wants, in order; by the whole block. Returns how
// many there are; every thread gets the same number.
template <class Wanted>
EPINORM_FUNCTION int keep_rows(GroupSelection& selection, int rows, Wanted wanted) {
  const int thread = threadIdx.x;
  for (int i = thread / 32; i < rows; i += kWarps) {
    const bool keep = __any_sync(kAllLanes, wanted(selection.rows[i])) != 0;
    if (thread % 32 == 0) selection.kept[i] = keep;
  }
  __syncthreads();
  const bool keep = thread < rows && selection.kept[thread];
  const int row = keep ? selection.rows[thread] : 0;
  int place = 0;
  for (int before = 0; before < thread && keep; ++before) place += selection.kept[before];
  const int count = __syncthreads_count(keep);
  if (keep) selection.rows[place] = row;
  __syncthreads();
  return count;
}

constexpr int kNowhere = 0, kInZ = 1, kInY = 2;
static_assert(kProduct == kNowhere || kGroupParts == 1, "a cluster's blocks write before all have looked");

// What is left of the item's rows: but for flagged ones of which nothing is said of single elements, those
// with a product that flagged elements of its row of x or of W may count in.
EPINORM_FUNCTION int rows_that_count(GroupSelection& selection, const Item& item, int rows,
                                     const Epilogue& e) {
  if constexpr (kProduct == kNowhere) return rows;
  const float* const product = kProduct == kInZ ? e.z : e.y;
  return keep_rows(selection, rows, [&](int row) {
    const Flag of_row = e.row_flags[row];
    bool wanted = of_row > kSomeColumns;
    for (int at = threadIdx.x % 32; at < kStrip; at += 32) {
      const int column = item.first_column + at;
      if (column >= e.n) break;
      const Flag of_column = e.column_flags[column];
      if (of_row == 0 && of_column == 0) continue;
      wanted |= of_column > kSomeColumns ||
                may_count(__ldcg(product + static_cast<i64>(row) * e.n + column),
                          e.x_scale[row] * e.w_scale[column]);
    }
    return wanted;
  });
}

// Fills `selection` as `select_rows` does: a flagged column needs every row.
EPINORM_FUNCTION int select(GroupSelection& selection, const Item& item, const Flag* row_flags,
                            const Flag* column_flags, int m, int n) {
  __syncthreads();  // the last item's selection is no longer read
  if (threadIdx.x < kGroups) selection.groups[threadIdx.x] = 0;
  __syncthreads();
  bool any = false;
  for (int at = threadIdx.x; at < kStrip; at += kThreads) {
    const int column = item.first_column + at;
    if (column >= n || column_flags[column] == 0) continue;
    selection.groups[at / kGroup] = 1;
    any = true;
  }
  const bool every_row = __syncthreads_or(any) != 0;
  return select_rows(selection, item, every_row, row_flags, m);
}

// Adds the tiles of all blocks of the cluster up in this block's own, in its part of the rows, which it
// returns. No other block reads these rows of this tile, nor are they written in any other.
EPINORM_FUNCTION Range add_tiles(float* tile, int rows) {
  const Range own = own_rows(rows);
  if constexpr (kSplitK > 1) {
    cluster_sync();  // all tiles are there
    for (int i = own.first * kColumns + threadIdx.x; i < own.end * kColumns; i += kThreads) {
      float* place = tile + i / kColumns * kTileStride + i % kColumns;
      *place = sum_of_blocks(place);
    }
    cluster_sync();  // the sums are there, and from here on a block reads its own tile alone
  }
  return own;
}

// A team holds one (row, group): the lanes' columns are interleaved, and divide the group.
constexpr int kLowestBit = kGroup & -kGroup;
constexpr int kLanes = kLowestBit < 32 ? kLowestBit : 32;
constexpr int kTeams = kThreads / kLanes;

EPINORM_FUNCTION float team_sum(float value) {
#pragma unroll
  for (int offset = 1; offset < kLanes; offset *= 2)
    value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

EPINORM_FUNCTION void load_operands(float (&t)[chain::kSlots], const Epilogue& e, int row,
                                    int column) {
#pragma unroll
  for (int i = 0; i < chain::kOperands; ++i)
    if (chain::is_seed(i))
      t[i] = chain::factor_of(e.drops, i, row, column & ~1, column & 1);
    else
      t[i] = e.operands[i][(chain::is_channel(i) ? 0 : row * e.strides[i]) +
                           (chain::is_row(i) ? 0 : column)];
}

// From the tile of the linear's output without bias to y, for the (row, group)s that are flagged in
// these rows of the tile. Every lane only reads and writes its own values of it, so no barrier is
// needed.
EPINORM_FUNCTION void finish(float* tile, const GroupSelection& selection, Range rows,
                             int first_column, const Epilogue& e) {
  constexpr float kInverse = 1.0f / kGroup;
  const int lane = threadIdx.x % kLanes;
  const int end_cell = rows.end * kGroups;
  for (int first = rows.first * kGroups + threadIdx.x / 32 * (32 / kLanes); first < end_cell;
       first += kTeams) {
    const int cell = first + threadIdx.x % 32 / kLanes;
    const int group = cell % kGroups, column = first_column + group * kGroup;
    const bool inside = cell < end_cell && column < e.n;
    const int row = inside ? selection.rows[cell / kGroups] : 0;
    const bool flagged = inside && (selection.groups[group] || e.row_flags[row]);
    if (!__any_sync(kAllLanes, flagged)) continue;
    const int end = flagged ? kGroup : 0;  // a team that is not flagged only takes part in the sums
    float* values = tile + cell / kGroups * kTileStride + group * kGroup;
    const i64 at = static_cast<i64>(row) * e.n + column;
    float t[chain::kSlots];

    float sum = 0.0f;
#pragma unroll 4
    for (int i = lane; i < end; i += kLanes) {
      const float z = values[i];
      load_operands(t, e, row, column + i);
      values[i] = chain::pre_apply<float>(e.constants, kHasBias ? z + e.bias[column + i] : z, t);
      if (kSaveForBackward) e.z[at + i] = kKeepsSum ? values[i] : z;
      if (!chain::kNormalises) e.y[at + i] = values[i];
      // Whoever reads the moments computes those again that are NaN.
      if constexpr (kMomentRows > 0)
        e.mean[row / max(kMomentRows, 1) * 2ll * e.n + column + i] = __uint_as_float(0x7fffffff);
      sum += values[i];
    }
    if constexpr (!chain::kNormalises) continue;
    const float mean = chain::kCentred ? team_sum(sum) * kInverse : 0.0f;
    float squares = 0.0f, distances = 0.0f;
#pragma unroll 4
    for (int i = lane; i < end; i += kLanes) {
      const float distance = values[i] - mean;
      squares += distance * distance;
      distances += distance;
    }
    squares = team_sum(squares);
    distances = chain::kCentred ? team_sum(distances) : 0.0f;
    const float shift = distances * kInverse;  // what rounding left out of the mean
    const float spread = variance<kGroup>(squares, distances, shift) + chain::epsilon<float>();
    const float rstd = chain::eagers_rstd<kGroup>(reciprocal_sqrt(spread), mean);
#pragma unroll 4
    for (int i = lane; i < end; i += kLanes) {
      const float factor = kHasGamma ? rstd * e.gamma[column + i] : rstd;
      const float constant = (kHasBeta ? e.beta[column + i] : 0.0f) - shift * factor;
      const float distance = values[i] - mean;
      load_operands(t, e, row, column + i);
      const bool moved = chain::kCentred || kHasBeta;
      const float normalised = moved ? distance * factor + constant : distance * factor;
      e.y[at + i] = chain::post_apply<float>(e.constants, normalised, t);
    }
    if (kKeepStatistics && flagged && lane == 0) {
      const i64 cell_at = static_cast<i64>(row) * (e.n / kGroup) + column / kGroup;
      if (chain::kCentred) e.mean[cell_at] = mean + shift;
      e.rstd[cell_at] = rstd;
    }
  }
}

#include "fp32/rescue_parts.cuh"

constexpr int kFewFlags = 8192;  // of a kind: up to here a block reads them all first
constexpr int kLooks = 4;        // items that a warp looks at in a round

// x: (m, k), rows x_stride apart. w: (n, k), w_stride. row_flags: (m,), column_flags: (n,), both at
// multiples of 4 bytes and, but for kFlagsLate, written before the previous kernel began. x_scale: (m,),
// w_scale: (n,), powers of two, of their planes; read with kProduct and by rescue_spent.cu alone. y, z: (m, n).
// mean, rstd: (m, groups).
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    rescue(const float* x, i64 x_stride, const float* w, i64 w_stride, const float* bias,
           const float* gamma, const float* beta, const Flag* row_flags, const Flag* column_flags,
           const float* x_scale, const float* w_scale, float* y, float* z, float* mean, float* rstd,
           int m, int n, int k CHAIN_PARAMETERS) {
  extern __shared__ __align__(16) float shared[];
  __shared__ GroupSelection selection;
  __shared__ Flag near[kLooks * kWarps];
  let_next_kernel_start();  // it waits for this one, which waits for the one before
  if (kFlagsLate) wait_for_previous_kernel();
  if (m <= kFewFlags && n <= kFewFlags) {
    constexpr int kStep = kThreads * 4, kWords = kFewFlags / kStep;
    static_assert(kWords * kStep == kFewFlags, "");
    const bool any = (any_flag_of<kWords>(row_flags, threadIdx.x * 4, kStep, m) |
                      any_flag_of<kWords>(column_flags, threadIdx.x * 4, kStep, n)) != 0;
    if (!__syncthreads_or(any)) {
      wait_for_previous_kernel();  // the next kernel must not run beside the previous one
      return;
    }
  }
  const ItemOrder order(m, n);
  // All below is decided by flags and an item's index, so alike in all blocks of a cluster.
  const int warp = threadIdx.x / 32, step = gridDim.x / kClusterBlocks;
  bool waited = false;
  for (int first = blockIdx.x / kClusterBlocks; first < order.count(); first += step * kLooks * kWarps) {
    bool any = false;
    for (int look = 0; look < kLooks; ++look) {
      const int index = first + (look * kWarps + warp) * step;
      bool found = false;
      if (index < order.count())
        found = __any_sync(kAllLanes,
                           flagged_near(order.at(index), row_flags, column_flags, m, n));
      if (threadIdx.x % 32 == 0) near[look * kWarps + warp] = found;
      any |= found;
    }
    const bool work = __syncthreads_or(any) != 0;
    if (!waited) wait_for_previous_kernel();
    waited = true;
    if (!work) continue;
    const Epilogue e = {bias, gamma, beta, OPERAND_LIST, STRIDE_LIST, CONSTANT_LIST, row_flags, column_flags,
                        x_scale, w_scale, y, z, mean, rstd, n,
                        chain::drops_of<float>(CONSTANT_LIST, OPERAND_LIST)};
    for (int look = 0; look < kLooks * kWarps; ++look) {
      if (!near[look]) continue;
      const Item item = order.at(first + look * step);
      int rows = select(selection, item, row_flags, column_flags, m, n);
      if (rows > 0) rows = rows_that_count(selection, item, rows, e);
      if (rows <= 0) continue;
      const int column = item.first_column + (kGroupParts > 1 ? rank_in_cluster() * kColumns : 0);
      const Range own = own_k(k);
      const int length = own.end - own.first;
      const auto own_x = X_ROWS + own.first;
      const float* const own_w = w + own.first;
      if (rows <= Place<kThinRows>::kHeight)
        multiply<kThinRows>(shared, selection.rows, rows, own_x, x_stride, own_w, w_stride, column, n,
                            length);
      else
        multiply<kFullRows>(shared, selection.rows, rows, own_x, x_stride, own_w, w_stride, column, n,
                            length);
      if constexpr (kGroupParts > 1)
        finish_parts(shared, selection, rows, column, e);
      else
        finish(shared, selection, add_tiles(shared, rows), column, e);
    }
    __syncthreads();  // `near` is read no more
  }
}
