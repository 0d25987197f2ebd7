// C[m, n] = row_scale[m] sum over k of A[m, k] B[n, k], and nothing after it: the backward products on
// every GPU since Ampere. portable_pipeline.cuh says how it multiplies; operands may lie along k or
// along m and n.
//
// The prelude defines what portable_pipeline.cuh needs, kAlignedRows (rows of C start on 16
// bytes) and kBlocksPerMultiprocessor.
#include "gemm/product_prelude.cuh"
#include "common/dependent.cuh"
#include "gemm/portable/portable_pipeline.cuh"
#include "gemm/row_store.cuh"

// Shared memory: the ring, and where it was the store buffers (portable.py adds them up too).
constexpr int kStoreBytes = kWarps * kStoreBufferBytes;
constexpr int kSharedBytes = kRingBytes > kStoreBytes ? kRingBytes : kStoreBytes;

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    portable_product(const u16* a_hi, const u16* a_lo, const u16* b_hi, const u16* b_lo,
                     i64 a_stride, i64 b_stride, float* c, const float* row_scale, int m, int n,
                     int k) {
  using Store = RowStore<Float32, kWarpN, kAlignedRows>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 base = shared_address(shared);
  wait_for_previous_kernel();

  const Operand a(a_hi, a_lo, a_stride, m, k), b(b_hi, b_lo, b_stride, n, k);
  const TileOrigin origin(m, n);
  Product product(base, a, b, origin.row, origin.column);
  Accumulators sum;
  product.compute(sum);

  const TileOrigin tile(m, n);
  const int warp = threadIdx.x / 32;
  const int first_column = tile.column + warp % kWarpsN * kWarpN;
  const u32 buffer = base + warp * kStoreBufferBytes;
#pragma unroll
  for (int block = 0; block < kRowBlocks; ++block) {
    const int first_row = tile.row + warp / kWarpsN * kWarpM + block * 16;
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const int row = first_row + threadIdx.x % 32 / 4 + lower * 8;
      const float scale = row < m ? row_scale[row] : 0.0f;
#pragma unroll
      for (int chunk = 0; chunk < kColumnBlocks; ++chunk)
#pragma unroll
        for (int i = 0; i < 2; ++i) sum[block][accumulator(chunk, lower, i)] *= scale;
    }
    Store::store(c, buffer, sum[block], first_row, first_column, m, n, [](int) {});
  }
}
