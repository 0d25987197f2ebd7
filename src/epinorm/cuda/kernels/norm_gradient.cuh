// One element of the norm's backward pass, shared by the kernels that need it.
//
// With h = (v - mean) * rstd, u = gamma * h + beta, y = post(u) and g the gradient of h:
//     dv = rstd * (g - sum(g) / C - h * sum(g * h) / C)        (RMSNorm: without the first sum)
#pragma once
#include "norm_layout.cuh"

// The prelude adds: kSums, how many sums over rows are wanted, and the place of each, -1 for none:
// kSumGamma, kSumBeta, kSumBias, sum_of_operand(i); writes_operand(i), whether the gradient of element
// operand i is wanted; kWriteDz; kSumsGiven.

// What an element adds to the sums over rows, and its operands' gradients.
struct ElementGradient {
  T normalized, scaled;  // h and g
  T output;              // gradient of u: beta's
  T operand[chain::kSlots];
};

EPINORM_FUNCTION ElementGradient through_post(T dy, T x, T mean, T rstd, const Channels& channels, int j,
                                              const T (&t)[chain::kSlots]) {
  ElementGradient element;
#pragma unroll
  for (int i = 0; i < chain::kSlots; ++i) element.operand[i] = T(0);
  const T v = chain::pre_apply<T>(x, t);
  element.normalized = (chain::kCentred ? v - mean : v) * rstd;
  element.output =
      chain::post_backward<T>(dy, channels.affine(element.normalized, j), t, element.operand);
  element.scaled = element.output * channels.scale(j);
  return element;
}

EPINORM_FUNCTION T through_norm(T h, T g, T rstd, T sum_g, T sum_gh) {
  constexpr T kInverse = T(1) / T(kChannels);
  const T centred = chain::kCentred ? g - sum_g * kInverse : g;
  return rstd * (centred - h * (sum_gh * kInverse));
}
