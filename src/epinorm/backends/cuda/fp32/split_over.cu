// split.cu where nobody reads x afterwards: x's planes over x, and W's in a buffer, by one launch.
//
// A row of k numbers becomes k halves of hi and, behind them, k of lo (one plane: what was there). All of
// a row is in registers before any of it is written: row_max orders what all of its threads have read
// before what follows it. A row of x that is flagged at all is flagged by kWhole and stays as it is, for
// rescue_spent.cu. W's flags are split.cu's, without lists: nobody reads one in inference.
#include "common/dependent.cuh"
#include "fp32/split_rows.cuh"

static_assert(kPlain && !kOrdered && kAligned, "rows of whole vectors");

// x: (m, k), rows x_stride apart; w: (rows - w_begin, k). hi, lo: W's, rows of k_padded, which is k, a
// multiple of 8, at most kRowThreads * kRowVectors * 4. scale, flag: (rows,), x's first, W's from w_begin
// on, between them nothing.
extern "C" __global__ void __launch_bounds__(kThreads)
    split_over(float* x, i64 x_stride, const float* w, i64 w_stride, u16* hi, u16* lo, float* scale,
               Flag* flag, int m, int w_begin, int rows, int k, int k_padded) {
  __shared__ u32 shared[2][kThreads / 32];
  __shared__ Spoilt counts[kTeams];
  wait_for_previous_kernel();
  const int row = blockIdx.x * kTeams + threadIdx.x / kRowThreads, thread = threadIdx.x % kRowThreads;
  const bool of_x = row < m, inside = of_x || (row >= w_begin && row < rows);
  float* const own = x + row * x_stride;
  const i64 w_row = row - w_begin;
  const float* const w_from = w + w_row * w_stride;
  const float* const from = of_x ? own : w_from;
  Spoilt& spoilt = counts[threadIdx.x / kRowThreads];
  if (thread == 0) spoilt.count = 0;

  constexpr int kStep = kRowThreads * 4;
  Vector kept[kRowVectors];
  u32 largest = 0;
#pragma unroll
  for (int i = 0; i < kRowVectors; ++i)
    kept[i] = load_vector(from, i * kStep + thread * 4, inside ? k : 0);
#pragma unroll
  for (int i = 0; i < kRowVectors; ++i) largest = max(largest, largest_of(kept[i]));
  largest = row_max(largest, shared[0]);

  bool in_range;
  const int shift = row_shift(largest, in_range);
  const float factor = plane_power_of_two(shift);
  bool held = in_range;
#pragma unroll
  for (int i = 0; i < kRowVectors; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) held &= PlaneValue(kept[i].v[j], factor).held(kTolerance);
  if (!held && in_range && !of_x) list_spoilt(spoilt, w_from, thread * 4, kStep, k, factor);
  const bool flagged = row_max(!held, shared[1]) != 0;
  if (inside && thread == 0) {
    const bool few = !of_x && in_range && spoilt.count <= kListed;
    scale[row] = plane_power_of_two(-shift);
    flag[row] = !flagged ? 0 : few ? kSomeColumns : kWhole;
  }
  if (!inside || (of_x && flagged)) return;
  u16* const hi_row = of_x ? reinterpret_cast<u16*>(own) : hi + w_row * k_padded;
  u16* const lo_row = of_x ? hi_row + k : lo + w_row * k_padded;
#pragma unroll
  for (int i = 0; i < kRowVectors; ++i) {
    const int at = i * kStep + thread * 4;
    if (at >= k) break;
    // Planes made above and held till here would take twice the registers: these are made again.
#pragma unroll
    for (int j = 0; j < 4; ++j) asm volatile("" : "+f"(kept[i].v[j]));
    split_vector(kept[i], factor, hi_row, lo_row, at, k_padded);
  }
}
