// sum(g) and sum(g*h) of each (row, group), for groups too wide for norm_backward to hold: a block a
// (row, group) at a time. row_sums: (M, groups, 2).
#include "common/dependent.cuh"
#include "norm/norm_gradient.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocksPerSm)
norm_backward_sums(const Y* __restrict__ dy, i64 dy_stride, const S* __restrict__ z, i64 z_stride,
                   const T* __restrict__ mean, const T* __restrict__ rstd, T* __restrict__ row_sums,
                   const Z* __restrict__ bias, const P* __restrict__ gamma,
                   const P* __restrict__ beta, i64 rows, int groups EPINORM_CHAIN_PARAMETERS) {
  wait_for_previous_kernel();
  using BlockTeam = Team<kLanes, T, 2>;
  __shared__ T scratch[2][2][BlockTeam::kWarps];
  BlockTeam team(scratch);
  const Sources from = {bias, gamma, beta, EPINORM_OPERAND_POINTERS, EPINORM_OPERAND_STRIDES,
                        EPINORM_CONSTANTS,
                        chain::drops_of<T>(EPINORM_CONSTANTS, EPINORM_OPERAND_POINTERS)};
  const int group = blockIdx.x;

  for (i64 row = blockIdx.y; row < rows; row += gridDim.y) {
    const i64 statistic = row * groups + group;
    const T centre = chain::kCentred ? mean[statistic] : T(0), scale = rstd[statistic];
    T sums[2] = {T(0), T(0)};
    for (int channel = threadIdx.x * kVector; channel < kChannels; channel += kLanes * kVector) {
      const int column = group * kChannels + channel;
      Channels channels;
      Elements elements;
      channels.load(from, column);
      elements.load(from, row, column);
      const auto raw_z = loaded<S, kVector>(z + row * z_stride + column);
      const auto raw_dy = loaded<Y, kVector>(dy + row * dy_stride + column);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        T t[chain::kSlots];
        operands_at(from, channels, elements, j, t);
        const T x = channels.with_bias(raw_z.template get<T>(j), j);
        const ElementGradient one = through_post(
            from.constants, raw_dy.template get<T>(j), x, centre, scale, channels, j, t);
        const T g = product(one.du, channels.scale(j));
        sums[0] += g;
        sums[1] += g * one.h;
      }
    }
    team.sum(sums);
    if (threadIdx.x == 0) {
      row_sums[2 * statistic] = sums[0];
      row_sums[2 * statistic + 1] = sums[1];
    }
  }
}
