// What hopper_fp32_weight.cu needs before it begins, by one launch: x as a plane (split_rows.cuh), and the
// scales of W's rows (sample_rows.cuh).
#include "dependent.cuh"
#include "sample_rows.cuh"
#include "split_rows.cuh"

static_assert(kThreads == kSampleThreads, "blocks of either kind");

// x: (m, k), rows x_stride apart, by the first blocks; the others take W's rows. The rest as in split.cu and
// sample_rows.cuh.
extern "C" __global__ void __launch_bounds__(kThreads)
    split_and_sample(const float* x, i64 x_stride, u16* hi, u16* ordered, float* scale, Flag* flag,
                     ColumnList* columns, const float* w, i64 w_stride, float* w_scale, Flag* w_flag,
                     ColumnList* w_columns, int m, int n, int k, int k_padded) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int splitting = (m + kTeams - 1) / kTeams, block = blockIdx.x;
  if (block < splitting) {
    const int row = block * kTeams + threadIdx.x / kRowThreads;
    split_row(row < m ? x + row * x_stride : nullptr, row, k,
              {hi, ordered, scale, flag, columns, k_padded});
  } else {
    sample_rows(w, w_stride, w_scale, w_flag, w_columns, (block - splitting) * kSampleRows, n, k);
  }
}
