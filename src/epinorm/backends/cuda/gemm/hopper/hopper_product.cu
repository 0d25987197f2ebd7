// C[m, n] = row_scale[m] sum over k of A[m, k] B[n, k], and nothing after it: the backward products.
// Operands may lie along k or along m and n.
//
// Where there are fewer tiles than multiprocessors and k is long, the sum is split: each of the
// work items is one part of one tile's sum, and goes to a C of its own (add_splits.cu).
#include "gemm/hopper/hopper_product.cuh"

// k: of a part.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    hopper_product(const __grid_constant__ TensorMap a_hi, const __grid_constant__ TensorMap a_lo,
                   const __grid_constant__ TensorMap b_hi, const __grid_constant__ TensorMap b_lo,
                   float* c, const float* row_scale, int m, int n, int k, int parts) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Ring ring(shared_address(shared), shared_address(shared + kBarrierOffset));
  start_together<0>(ring);
  wait_for_previous_kernel();
  let_next_kernel_start();
  const auto store = [](float(&v)[kAccumulators], const Result& result, u32 buffer, int row,
                        int column) {
    RowStore<Float32, kConsumerN, true>::store(result.c, buffer, v, row, column, result.m, result.n,
                                               [](int) {});
  };
  run_block(ring, shared, {{&a_hi, &a_lo}, {&b_hi, &b_lo}, false}, {c, row_scale, m, n}, k, parts,
            store);
}
