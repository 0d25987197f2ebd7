// C[m, n] += row_scale[m] sum over k of A[m, k] B[n, k], of fp16 planes into fp32: dW into a gradient that
// is there already, in one pass over it.
//
// Rows that the planes do not hold (row_flag) stay as they are, and all rows if an index of the sum is
// flagged (sum_flag), in whichever way: rescue_gradient.cu, which follows, adds those.
#include "common/flags.cuh"
#include "gemm/hopper/hopper_product.cuh"
#include "gemm/row_add.cuh"

static_assert(!kSplit, "parts of a sum are added up elsewhere");

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    hopper_product_into(const __grid_constant__ TensorMap a_hi,
                        const __grid_constant__ TensorMap a_lo,
                        const __grid_constant__ TensorMap b_hi,
                        const __grid_constant__ TensorMap b_lo, float* c, const float* row_scale,
                        const Flag* row_flag, const Flag* sum_flag, int m, int n, int k) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Ring ring(shared_address(shared), shared_address(shared + kBarrierOffset));
  start_together<0>(ring);
  wait_for_previous_kernel();
  let_next_kernel_start();
  // No rows rather than an exit: one that both roles share costs them their register counts.
  const int rows = __syncthreads_or(any_flag(sum_flag, k, kThreads)) ? 0 : m;
  const auto add = [row_flag](float(&v)[kAccumulators], const Result& result, u32 buffer, int row,
                              int column) {
    RowAdd<kConsumerN>::add(result.c, buffer, v, row, column, result.m, result.n, row_flag);
  };
  run_block(ring, shared, {{&a_hi, &a_lo}, {&b_hi, &b_lo}, false}, {c, row_scale, rows, n}, k, 1,
            add);
}
