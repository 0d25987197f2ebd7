// Rows of x times rows of W in plain fp32, on the CUDA cores: tiles of kBlockK along K go through a
// ring in shared memory, and each thread multiplies a small matrix of them.
//
// A warp multiplies 8 kThreadRows rows by 32 columns, a lane kThreadRows by 8, four values of K at a
// time.
#pragma once
#include "fp32/rescue_lines.cuh"

constexpr int kFoldSteps = 64 / kBlockK;   // between sums into the second accumulator
constexpr int kThreadColumns = 8;
constexpr int kColumnWarps = kWidth / 32;
constexpr int kRowWarps = kWarps / kColumnWarps;
constexpr int kFullRows = kRows / (kRowWarps * 8);  // of a thread
constexpr int kThinRows = 2;                        // of a thread, where an item has few rows
constexpr int kTileStride = kWidth + 4;             // floats
static_assert(64 % kBlockK == 0 && kFullRows == 8, "");

// Where a lane's values stand in the tile: rows 8 apart, columns 4 apart.
template <int kThreadRows>
struct Place {
  static constexpr int kHeight = kRowWarps * 8 * kThreadRows;  // rows of the tile
  int row, column;

  EPINORM_FUNCTION Place() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    row = warp / kColumnWarps * 8 * kThreadRows + lane / 4;
    column = warp % kColumnWarps * 32 + lane % 4;
  }
};

template <int kThreadRows>
using Sums = float[kThreadRows][kThreadColumns];

// Adds the partial sums into the totals; what that rounds off is where the next partial sums begin
// (Fast2Sum: Dekker, 1971). So rounding errors grow with the length of a partial sum alone, not with K.
template <int kThreadRows>
EPINORM_FUNCTION void fold(Sums<kThreadRows>& total, Sums<kThreadRows>& part) {
  float check = 0.0f;
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r)
#pragma unroll
    for (int c = 0; c < kThreadColumns; ++c) {
      const float sum = total[r][c] + part[r][c];
      part[r][c] -= sum - total[r][c];
      total[r][c] = sum;
      check += part[r][c];
    }
  if (fabsf(check) < static_cast<float>(EPINORM_INFINITY)) return;
  // Inf and NaN leave no remainder.
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r)
#pragma unroll
    for (int c = 0; c < kThreadColumns; ++c)
      if (!(fabsf(total[r][c]) < static_cast<float>(EPINORM_INFINITY))) part[r][c] = 0.0f;
}

EPINORM_FUNCTION float element(const float4& four, int i) {
  return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

// The products of one stage, each sum in the order of K. Two steps hold 512 multiplications; unrolled
// whole, a kernel takes twice the time to compile.
template <int kThreadRows>
EPINORM_FUNCTION void multiply_stage(Sums<kThreadRows>& part, const float* a, const float* b) {
#pragma unroll 2
  for (int k = 0; k < kBlockK; k += kVector) {
    float4 rows[kThreadRows];
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r)
      rows[r] = *reinterpret_cast<const float4*>(a + r * 8 * kPitch + k);
#pragma unroll
    for (int c = 0; c < kThreadColumns; ++c) {
      const float4 column = *reinterpret_cast<const float4*>(b + c * 4 * kPitch + k);
#pragma unroll
      for (int i = 0; i < kVector; ++i)
#pragma unroll
        for (int r = 0; r < kThreadRows; ++r)
          part[r][c] = fmaf(element(rows[r], i), element(column, i), part[r][c]);
    }
  }
}

// Rows, or columns, of a matrix that are selected, on their way; rescue_spent.cu has others.
template <int kLines, bool kAcross>
EPINORM_FUNCTION Lines<kLines, kAcross> lines_of(const float* x, i64 stride, const int* selected,
                                                 int rows) {
  return {[&](int i) { return x + selected[min(i, rows - 1)] * (kAcross ? 1 : stride); }, stride};
}

// The product of `rows` selected rows, their numbers in `selected`, and the strip's columns, left in
// `shared` as rows of kTileStride.
// kAcrossX: x is (k, m), of which columns are selected; kAcrossW: w is (k, n). Else (m, k), (n, k).
template <int kThreadRows, bool kAcrossX = false, bool kAcrossW = false, class X>
EPINORM_FUNCTION void multiply(float* shared, const int* selected, int rows, const X& x,
                               i64 x_stride, const float* w, i64 w_stride, int first_column, int n,
                               int k) {
  using Here = Place<kThreadRows>;
  constexpr int kColumnPart = Here::kHeight * kPitch;       // floats, of x in a stage
  constexpr int kStage = kColumnPart + kWidth * kPitch;
  const Here here;
  const auto x_lines = lines_of<Here::kHeight, kAcrossX>(x, x_stride, selected, rows);
  const Lines<kWidth, kAcrossW> w_lines(
      [&](int j) { return w + min(first_column + j, n - 1) * (kAcrossW ? 1 : w_stride); }, w_stride);
  const u32 ring = static_cast<u32>(__cvta_generic_to_shared(shared));
  const int steps = (k + kBlockK - 1) / kBlockK;
  const auto copy = [&](int step) {
    if (step < steps) {
      const u32 stage = ring + step % kStages * kStage * 4;
      x_lines.copy(stage, step * kBlockK, k);
      w_lines.copy(stage + kColumnPart * 4, step * kBlockK, k);
    }
    commit_copies();
  };

  Sums<kThreadRows> part = {}, total = {};
  for (int step = 0; step < kStages - 1; ++step) copy(step);
  for (int step = 0; step < steps; ++step) {
    wait_for_copies<kStages - 2>();
    __syncthreads();  // all have this stage, and are done with the one before it
    copy(step + kStages - 1);
    const float* stage = shared + step % kStages * kStage;
    multiply_stage<kThreadRows>(part, stage + here.row * kPitch,
                                stage + kColumnPart + here.column * kPitch);
    if ((step + 1) % kFoldSteps == 0) fold<kThreadRows>(total, part);
  }
  wait_for_copies<0>();
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r)
#pragma unroll
    for (int c = 0; c < kThreadColumns; ++c)
      shared[(here.row + r * 8) * kTileStride + here.column + c * 4] = total[r][c] + part[r][c];
  __syncthreads();
}
