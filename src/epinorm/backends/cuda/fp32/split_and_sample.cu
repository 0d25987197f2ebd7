// What hopper_fp32_weight.cu needs before it begins, by one launch: x as a plane (split_rows.cuh), and the scales of W's
// rows (sample_rows.cuh), or no more than their flags, cleared, where kSamples is false. It lets no kernel start early:
// hopper_fp32_weight's blocks take a whole multiprocessor each, and kept blocks of this one waiting (measured: 6 us).
#include "common/dependent.cuh"
#include "fp32/sample_rows.cuh"
#include "fp32/split_rows.cuh"

static_assert(kThreads == kSampleThreads, "blocks of either kind");

// No flag and no columns, where the scales are found by who multiplies.
__device__ __forceinline__ void clear_row(Flag* flag, ColumnList* columns, int row, int n) {
  if (row >= n) return;
  flag[row] = 0;
  columns[row] = {-1, -1, -1, -1};
}

// x: (m, k), rows x_stride apart, by the first blocks, which take longest; the last sample W's rows where kSamples.
// The rest as in split_rows.cuh and sample_rows.cuh.
extern "C" __global__ void __launch_bounds__(kThreads)
    split_and_sample(const float* x, i64 x_stride, u16* hi, u16* ordered, float* scale, Flag* flag,
                     ColumnList* columns, const float* w, i64 w_stride, float* w_scale, Flag* w_flag,
                     ColumnList* w_columns, int m, int n, int k, int k_padded) {
  wait_for_previous_kernel();
  const int splitting = (m + kTeams - 1) / kTeams, block = blockIdx.x;
  if (block < splitting) {
    const int row = block * kTeams + threadIdx.x / kRowThreads;
    split_row(row < m ? x + row * x_stride : nullptr, row, k,
              {hi, ordered, scale, flag, columns, k_padded});
  } else if (kSamples) {
    sample_rows(w, w_stride, w_scale, w_flag, w_columns, (block - splitting) * kSampleRows, n, k);
  } else {
    clear_row(w_flag, w_columns, (block - splitting) * kThreads + threadIdx.x, n);
  }
}
