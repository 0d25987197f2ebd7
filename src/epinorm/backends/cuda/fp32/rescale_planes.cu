// Between the backward norm kernel and the products of an fp32 chain, where dz was written as
// planes once (norm_backward_planes.cu): what dW and the range guard need besides.
//
// dW[n, k] = T / w_scale[n] * sum over i of up[i, n] X'[i, k], where up are dz's planes and X' x's,
// row i times 2^(power[i] - t), which is 2 or less; T = 2^t is PowerRange::target(). So this kernel
//   - makes x's planes those of X', in place: rows with that power, ordinarily all of them,
//     stay as they are, of rows with less the least values lose bits;
//   - writes dW's scales, and flags its rows for which that could matter (internals/precision.md);
//   - joins the flags of dz's rows. Those of x's hold for X' too: a row that spoilt some columns of
//     dW spoils the same ones;
//   - sets `any` where anything is flagged, for the kernel that must then compute dz in fp32;
//   - adds up the sums over rows (as norm_column_sums.cu does, without a launch of its own).
//
// kBesideDx: launched behind dX, which waits for the norm kernel before it lets this one start. So this
// one reads what that wrote, and touches nothing of dX's, without waiting, on multiprocessors that have
// no more of dX's tiles. One block waits for dX, so that what waits for this kernel has waited for both.
// (Where dX's sum is split the kernel before is add_splits.cu, which lets this one start as it ends.)
//
// The prelude defines kPlanes; kBesideDx; kSums, and SUM_PARAMETERS and SUM_STORES, where they go.
#include "fp32/gradient_prelude.cuh"
#include "common/dependent.cuh"
#include "common/flags.cuh"
#include "common/integers.cuh"
#include "fp32/plane_value.cuh"
#include "fp32/row_power.cuh"
#include "common/storage.cuh"

constexpr int kThreads = 256;
constexpr int kColumns = 32;                   // of a block that joins columns
constexpr int kShares = kThreads / kColumns;   // of their parts, joined side by side
constexpr int kPieceUnits = 128;               // of a row, that a warp rescales at once
constexpr int kLeastShift = -100;              // nothing is left of a value in fp16 long before
constexpr u32 kInfinity = 0x7f800000u;
constexpr int kSmallestExponent = -126, kLargestExponent = 127;  // of fp32

// All is read from L2, as flags.cuh says: with kBesideDx nothing has been waited for.

// Of dz's rows, over all blocks that wrote them.
__device__ __forceinline__ PowerRange joined_range(const PowerRange* ranges, int count) {
  __shared__ int least[kThreads / 32], most[kThreads / 32];
  PowerRange range;
  for (int i = threadIdx.x; i < count; i += kThreads) {
    range.least = min(range.least, __ldcg(&ranges[i].least));
    range.most = max(range.most, __ldcg(&ranges[i].most));
  }
  range.common = __ldcg(&ranges[0].common);
  range.least = __reduce_min_sync(0xffffffffu, range.least);
  range.most = __reduce_max_sync(0xffffffffu, range.most);
  if (threadIdx.x % 32 == 0) {
    least[threadIdx.x / 32] = range.least;
    most[threadIdx.x / 32] = range.most;
  }
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) {
    range.least = min(range.least, least[warp]);
    range.most = max(range.most, most[warp]);
  }
  return range;
}

// In place of what rounds to infinity where two planes go up: lo takes what is beyond, less than 32.
__device__ __forceinline__ float at_most_fp16(float value) {
  return kPlanes == 2 ? copysignf(fminf(fabsf(value), 65504.0f), value) : value;
}

// Eight values of one row in their new scale.
__device__ __forceinline__ void rescale(uint4& hi, uint4& lo, float factor) {
  u32* const his = reinterpret_cast<u32*>(&hi);
  u32* const los = reinterpret_cast<u32*>(&lo);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 v = Float16::load_pair(his[i]);
    if (kPlanes == 2) {
      const float2 rest = Float16::load_pair(los[i]);
      v.x += rest.x * (1.0f / kPlaneLowFactor);  // exact: both come from one fp32 number
      v.y += rest.y * (1.0f / kPlaneLowFactor);
    }
    v.x *= factor;
    v.y *= factor;
    his[i] = Float16::store_pair(at_most_fp16(v.x), at_most_fp16(v.y));
    if (kPlanes == 2) {
      const float2 held = Float16::load_pair(his[i]);
      los[i] = Float16::store_pair((v.x - held.x) * kPlaneLowFactor, (v.y - held.y) * kPlaneLowFactor);
    }
  }
}

// x's planes (m, units * 8), in pieces of a row, which the warps of all these blocks take in turn: a lane
// looks at a piece's power, and the warp rescales those whose row has another. A row without a power counts
// nothing: it is zero here or in dz's planes, or out of range in one of both, and what it takes part in is
// flagged.
__device__ __forceinline__ void rescale_rows(uint4* hi, uint4* lo, const int* power, int target,
                                             int block, int blocks, int m, int units) {
  const u32 lane = threadIdx.x % 32, warps = blocks * (kThreads / 32);
  const u32 pieces = (units + kPieceUnits - 1) / kPieceUnits, count = m * pieces;
  for (u32 first = (block * kThreads + threadIdx.x) / 32; first < count; first += 32 * warps) {
    const u32 piece = first + lane * warps;
    const int own = piece < count ? __ldcg(power + piece / pieces) : target;
    u32 others = __ballot_sync(0xffffffffu, own != target && own != kNoPower);
    for (; others != 0; others &= others - 1) {
      const int which = __ffs(others) - 1;
      const u32 chosen = first + which * warps, row = chosen / pieces;
      const u32 start = chosen % pieces * kPieceUnits;
      const int shift = __shfl_sync(0xffffffffu, own, which) - target;
      const float factor = plane_power_of_two(max(shift, kLeastShift));
#pragma unroll
      for (u32 i = lane; i < kPieceUnits; i += 32) {
        if (start + i >= units) continue;
        const u32 at = row * units + start + i;
        uint4 high = __ldcg(hi + at), low;
        if (kPlanes == 2) low = __ldcg(lo + at);
        rescale(high, low, factor);
        hi[at] = high;
        if (kPlanes == 2) lo[at] = low;
      }
    }
  }
}

// What all parts have of a column, joined in a fixed order, for the threads of the first share; the
// others help. from: (parts,), `stride` apart, of this thread's column, null beyond the last one.
template <typename Value, typename Join>
__device__ __forceinline__ Value joined(const Value* from, i64 stride, int parts, Join join) {
  __shared__ Value shared[kShares][kColumns];
  const int x = threadIdx.x % kColumns, share = threadIdx.x / kColumns;
  Value total = 0;
#pragma unroll 8
  for (int part = share; part < parts; part += kShares)
    if (from != nullptr) total = join(total, __ldcg(from + part * stride));
  shared[share][x] = total;
  __syncthreads();
  if (share == 0)
#pragma unroll
    for (int other = 1; other < kShares; ++other) total = join(total, shared[other][x]);
  return total;
}

// Which columns planes with a scale a row do not serve, by the exponent of their largest
// |up[i, n]| 2^(power[i] - t): below `tiny`, dz's own planes have too few bits of them. Where there
// are rows of less than `power` below t, of which X' has too few, also those below `largest`, since
// such rows could carry them. internals/precision.md.
struct Faint {
  int power, largest, tiny;
};

// largest: (parts, n), the bits of the largest |up[i, n]| 2^power[i], no finite number where a
// row out of range has an element. scale: (n,), of dW's rows.
struct ColumnJoin {
  const float* w_scale;
  const u32* largest;
  float* scale;
  Flag* flag;
  Faint faint;

  // Returns whether this thread's column, if any, is flagged.
  __device__ __forceinline__ bool join(int column, const PowerRange& range, int parts, int n) const {
    const bool inside = column < n;
    const u32 total = joined(inside ? largest + column : nullptr, n, parts,
                             [](u32 a, u32 b) { return max(a, b); });
    if (threadIdx.x >= kColumns || !inside) return false;
    const int target = range.target(), exponent = target - power_of(__ldcg(w_scale + column));
    const bool fits = total < kInfinity && exponent >= kSmallestExponent &&
                      exponent <= kLargestExponent;
    const int of_largest = static_cast<int>(total >> 23) - 127 - target;
    const bool any_faint = range.least < target + faint.power;
    const bool lost = of_largest < (any_faint ? max(faint.largest, faint.tiny) : faint.tiny);
    const bool flagged = total != 0 && (!fits || lost);
    scale[column] = total != 0 && fits ? plane_power_of_two(exponent) : 1.0f;
    flag[column] = flagged;
    return flagged;
  }
};

// Of one of the kSums sums over rows, for the threads of the first share. partial: (parts, kSums, n).
__device__ __forceinline__ float sum_of(const float* partial, int which, int column, int parts, int n) {
  const i64 first = static_cast<i64>(which) * n + column;
  return joined(column < n ? partial + first : nullptr, static_cast<i64>(kSums) * n, parts,
                [](float a, float b) { return a + b; });
}

// spoilt: bits of (row_parts, parts, words), as norm_backward_planes.cu counts rows.
__device__ __forceinline__ bool join_row(int row, const u32* spoilt, int row_parts, int parts, int words,
                                         Flag* flag) {
  const int place = row / parts;
  u32 any = 0;
#pragma unroll 8
  for (int part = 0; part < row_parts; ++part)
    any |= __ldcg(spoilt + (part * parts + row % parts) * words + place / 32);
  any = any >> place % 32 & 1;
  flag[row] = any != 0;
  return any != 0;
}

// x_hi, x_lo: (m, units * 8) fp16. x_flag: (m,), w_flag: (n,). power: (m,).
// ranges: (parts,); column_largest: (parts, n); partial: (parts, kSums, n).
extern "C" __global__ void __launch_bounds__(kThreads)
    rescale_planes(uint4* x_hi, uint4* x_lo, const Flag* x_flag, const float* w_scale,
                   const Flag* w_flag, const int* power, const u32* spoilt, int row_parts, int words,
                   const PowerRange* ranges, const u32* column_largest, const float* partial,
                   int parts, Flag* row_flag, float* column_scale, Flag* column_flag, unsigned* any,
                   int m, int units, int n, int faint_power, int faint_largest, int tiny SUM_PARAMETERS) {
  const int strips = (n + kColumns - 1) / kColumns, column_blocks = strips * (1 + kSums);
  const int row_blocks = (m + kThreads - 1) / kThreads, others = column_blocks + row_blocks;
  const int block = blockIdx.x;
  bool flagged = false;
  if (!kBesideDx) wait_for_previous_kernel();
  if (block >= others) {
    const PowerRange range = joined_range(ranges, parts);
    if (range.least < range.most)
      rescale_rows(x_hi, x_lo, power, range.target(), block - others, gridDim.x - others, m, units);
  } else if (block >= column_blocks) {
    const int row = (block - column_blocks) * kThreads + threadIdx.x;
    if (row < m) flagged = join_row(row, spoilt, row_parts, parts, words, row_flag) ||
                           __ldcg(x_flag + row) != 0;
  } else {
    const int column = block % strips * kColumns + threadIdx.x % kColumns;
    if (block >= strips) {
      const int which = block / strips - 1;
      const float sum = sum_of(partial, which, column, parts, n);
      if (threadIdx.x < kColumns && column < n) switch (which) { SUM_STORES }
    } else {
      const PowerRange range = joined_range(ranges, parts);
      const Faint faint = {faint_power, faint_largest, tiny};
      const ColumnJoin columns = {w_scale, column_largest, column_scale, column_flag, faint};
      flagged = columns.join(column, range, parts, n);
      if (threadIdx.x < kColumns && column < n) flagged |= __ldcg(w_flag + column) != 0;
    }
  }
  if (flagged) *any = 1;
  if (kBesideDx && block + 1 == gridDim.x) wait_for_previous_kernel();
}
