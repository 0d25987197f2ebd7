// The second step of a product whose sum was split over blocks: splits (kSplitK, count) in fp32, one
// after the other in a fixed order, into `out`. The prelude defines kSplitK.
#include "gemm/product_prelude.cuh"
#include "common/dependent.cuh"
#include "common/integers.cuh"

constexpr int kThreads = 256;

// count is a multiple of 4, both matrices begin on 16 bytes.
extern "C" __global__ void __launch_bounds__(kThreads)
    add_splits(const float* splits, float* out, i64 count) {
  wait_for_previous_kernel();
  const i64 at = (static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x) * 4;
  if (at >= count) return;
  float4 sum = *reinterpret_cast<const float4*>(splits + at);
#pragma unroll
  for (int split = 1; split < kSplitK; ++split) {
    const float4 v = *reinterpret_cast<const float4*>(splits + split * count + at);
    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
  }
  *reinterpret_cast<float4*>(out + at) = sum;
}
