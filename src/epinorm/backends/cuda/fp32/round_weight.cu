// W as TF32, for products whose other operand comes from registers (gemm/hopper/register_tf32.cuh, which says
// why the columns are in that order).
#include "common/dependent.cuh"
#include "common/integers.cuh"
#include "common/tf32.cuh"

constexpr int kGroup = 32;  // columns that trade places: 128 bytes

// w: (n, k) fp32, rows w_stride apart. rounded: (n, padded) fp32, padded a multiple of 32; zeros from k on. A thread
// writes four neighbours.
extern "C" __global__ void __launch_bounds__(256)
    round_weight(const float* w, i64 w_stride, float* rounded, int n, int k, int padded) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int units = padded / 4;
  const i64 index = i64{blockIdx.x} * blockDim.x + threadIdx.x;
  if (index >= i64{n} * units) return;
  const int row = static_cast<int>(index / units), unit = static_cast<int>(index % units);
  const int product = unit / 2 % 4, second = unit % 2;  // of a group: eight columns each, in two halves
  const int first = unit / 8 * kGroup + product / 2 * 4 + product % 2 * 2 + second;
  const float* from = w + row * w_stride;
  u32 values[4];
#pragma unroll
  for (int lane = 0; lane < 4; ++lane) {
    const int column = first + lane * 8;
    values[lane] = column < k ? rounded_tf32(__float_as_uint(__ldg(from + column))) : 0;
  }
  reinterpret_cast<uint4*>(rounded)[index] = {values[0], values[1], values[2], values[3]};
}
