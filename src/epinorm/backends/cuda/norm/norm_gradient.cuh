// One element of the norm's backward pass, shared by the kernels that need it.
//
// With h = (v - mean) * rstd, u = gamma * h + beta, y = post(u) and g = gamma * du the gradient of h:
//     dv = rstd * (g - sum(g) / C - h * sum(g * h) / C)        (RMSNorm: without the first sum)
//
// Without a norm dv is dy, and neither statistics nor sums are read.
#pragma once
#include "norm/norm_layout.cuh"

// The prelude adds: kSums, how many sums over rows are wanted, and the place of each, -1 for none:
// kSumGamma, kSumBeta, kSumBias, sum_of_operand(i); writes_operand(i), whether the gradient of element
// operand i is wanted; kWriteDz; kRowLargest, kColumnLargest; kSumsGiven.

// Rounded by itself: the compiler does not fuse it with an addition.
EPINORM_FUNCTION float product(float a, float b) { return __fmul_rn(a, b); }
EPINORM_FUNCTION double product(double a, double b) { return __dmul_rn(a, b); }

struct ElementGradient {
  T h;
  T du;                       // gradient of the norm's output
  T operand[chain::kSlots];   // gradients of the post operations' operands
};

EPINORM_FUNCTION ElementGradient through_post(chain::Constants<T> constants, T dy, T x,
                                              T mean, T rstd, const Channels& channels, int j,
                                              const T (&t)[chain::kSlots]) {
  ElementGradient element;
#pragma unroll
  for (int i = 0; i < chain::kSlots; ++i) element.operand[i] = T(0);
  if constexpr (!chain::kNormalises) {
    element.h = T(0);
    element.du = dy;
    return element;
  }
  const T v = chain::pre_apply<T>(constants, x, t);
  element.h = (chain::kCentred ? v - mean : v) * rstd;
  element.du =
      chain::post_backward<T>(constants, dy, channels.affine(element.h, j), t, element.operand);
  return element;
}

// What a whole group shares: rstd, and the means of g and of g * h.
struct GroupGradient {
  T rstd, mean_g, mean_gh;

  EPINORM_FUNCTION GroupGradient(T rstd, T sum_g, T sum_gh) : rstd(rstd) {
    constexpr T kInverse = T(1) / T(kChannels);
    mean_g = sum_g * kInverse;
    mean_gh = sum_gh * kInverse;
  }

  // One rounding less by a fused multiply-add, but in the smallest groups, whose gradient all but
  // cancels: there g must be the very number that went into the sums, so that for one channel
  // g - mean_g is zero.
  EPINORM_FUNCTION T through_norm(T h, T du, T gamma) const {
    if constexpr (!chain::kNormalises) return du;
    const T mean = chain::kCentred ? h * mean_gh + mean_g : h * mean_gh;
    if (kChannels <= 4) return rstd * (product(du, gamma) - mean);
    return rstd * (du * gamma - mean);
  }
};
