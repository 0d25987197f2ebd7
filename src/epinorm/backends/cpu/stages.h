// The stages of a panel of a strip. Each runs over all groups before the next begins: a group's own
// stages wait for one another (two divisions and a root), the groups do not.
#pragma once
#include "elementary.h"
#include "strip.h"

namespace epinorm {

template <class C>
struct Stages {
  using Strip = epinorm::Strip<C>;
  using T = typename C::T;
  using S = typename C::S;
  using V = Vec<T>;
  static constexpr int kCount = Strip::kCount;
  static constexpr int kWidth = Strip::kWidth;

  // u = pre(u), and the mean of each group.
  EPINORM_INLINE void centre(const Strip& s, int64_t count) {
    const T width = T(s.width);
    const auto k = s.constants;  // a copy, which no store can change
    if constexpr (C::kPre)
      for (int64_t c = 0; c < count * s.width; ++c) {
        T* const x = s.u + c * kLanes;
        EPINORM_LANES { x[l] = C::pre(k, x[l], C::values(s.operand, c, l)); }
      }
    for (int64_t g = 0; g < count; ++g) {
      const T* const u = s.u + g * s.width * kLanes;
      V sums[1][kCount] = {};
      sum_channels<T>(s.width, sums, [u](int64_t c, int i, auto& to) {
        to[0][i] += load<T>(u + c * kLanes + i * kWidth);
      });
      for (int i = 0; i < kCount; ++i)
        store<T>(s.mean + g * kLanes + i * kWidth, C::kCentred ? sums[0][i] / width : V{});
    }
  }

  // The mean of the squared distances from the mean, then one over its root. The distances do not
  // add up to zero, because the mean was rounded; their own mean is what is missing. Where a group's
  // values are close together and far from zero, that is most of the error.
  EPINORM_INLINE void deviate(const Strip& s, int64_t count) {
    const T width = T(s.width), eps = T(s.call.eps);
    for (int64_t g = 0; g < count; ++g) {
      const T* const u = s.u + g * s.width * kLanes;
      V mean[kCount], sums[2][kCount] = {};
      for (int i = 0; i < kCount; ++i) mean[i] = load<T>(s.mean + g * kLanes + i * kWidth);
      sum_channels<T>(s.width, sums, [u, &mean](int64_t c, int i, auto& to) {
        const V d = load<T>(u + c * kLanes + i * kWidth) - mean[i];
        to[0][i] += d;
        to[1][i] += d * d;
      });
      for (int i = 0; i < kCount; ++i) {
        const V sum = sums[0][i], missing = C::kCentred ? sum / width : V{};
        if (C::kCentred) sums[1][i] -= sum * missing;  // else infinity times zero
        store<T>(s.shift + g * kLanes + i * kWidth, missing);
        store<T>(s.rstd + g * kLanes + i * kWidth, sums[1][i]);
      }
    }
    for (int64_t g = 0; g < count; ++g) {
      T* const r = s.rstd + g * kLanes;
      const T* const mean = s.mean + g * kLanes;
      EPINORM_LANES {
        const T squares = mean[l] * mean[l] + r[l];
        s.largest[l] = squares > s.largest[l] ? squares : s.largest[l];
        r[l] = T(1) / root(r[l] / width + eps);
      }
    }
  }

  EPINORM_INLINE void finish(const Strip& s, int64_t count) {
    const auto k = s.constants;
    for (int64_t g = 0; g < count; ++g) {
      const T *const mean = s.mean + g * kLanes, *const shift = s.shift + g * kLanes;
      const T* const rstd = s.rstd + g * kLanes;
      for (int64_t c = g * s.width; c < (g + 1) * s.width; ++c) {
        const T scale = s.gamma[c], offset = s.beta[c];
        T* const x = s.u + c * kLanes;
        EPINORM_LANES {
          const T normalised = (x[l] - mean[l] - shift[l]) * rstd[l];
          x[l] = C::post(k, normalised * scale + offset, C::values(s.operand, c, l));
        }
      }
    }
  }

  // w = pre(u), and the shift of each group once more from the mean that forward kept.
  EPINORM_INLINE void centre_again(const Strip& s, int64_t count) {
    const T width = T(s.width);
    const auto k = s.constants;
    for (int64_t c = 0; c < count * s.width; ++c) {
      const T* const x = s.u + c * kLanes;
      T* const h = s.w + c * kLanes;
      EPINORM_LANES { h[l] = C::kSavesSum ? x[l] : C::pre(k, x[l], C::values(s.operand, c, l)); }
    }
    for (int64_t g = 0; g < count; ++g) {
      const T* const h = s.w + g * s.width * kLanes;
      V mean[kCount], sums[1][kCount] = {};
      for (int i = 0; i < kCount; ++i) mean[i] = load<T>(s.mean + g * kLanes + i * kWidth);
      sum_channels<T>(s.width, sums, [h, &mean](int64_t c, int i, auto& to) {
        to[0][i] += load<T>(h + c * kLanes + i * kWidth) - mean[i];
      });
      for (int i = 0; i < kCount; ++i)
        store<T>(s.shift + g * kLanes + i * kWidth, C::kCentred ? sums[0][i] / width : V{});
    }
  }

  // The same from what forward kept.
  EPINORM_INLINE void measure(const Strip& s, int64_t count) {
    const T width = T(s.width);
    for (int64_t g = 0; g < count; ++g) {
      const T *const mean = s.mean + g * kLanes, *const rstd = s.rstd + g * kLanes;
      EPINORM_LANES {
        const T squares = mean[l] * mean[l] + width / (rstd[l] * rstd[l]);
        s.largest[l] = squares > s.largest[l] ? squares : s.largest[l];
      }
    }
  }

  // u: z. v: dy, then the gradient of the normalised value, then dz. w: the normalised value.
  EPINORM_INLINE void differentiate_post(const Strip& s, int rows, int64_t count, int64_t column,
                                         T* sums) {
    const auto k = s.constants;
    for (int64_t group = 0; group < count; ++group) {
      const T *const mean = s.mean + group * kLanes, *const shift = s.shift + group * kLanes;
      const T* const rstd = s.rstd + group * kLanes;
      for (int64_t c = group * s.width; c < (group + 1) * s.width; ++c) {
        const T scale = s.gamma[c], offset = s.beta[c];
        T *const g = s.v + c * kLanes, *const h = s.w + c * kLanes;
        T* const dgamma = sums + (s.call.n + column + c) * kLanes;
        T* const dbeta = sums + (2 * s.call.n + column + c) * kLanes;
        EPINORM_LANES {
          const T normalised = (h[l] - mean[l] - shift[l]) * rstd[l];
          typename C::Values d = {};
          const T gradient = C::post_backward(k, g[l], normalised * scale + offset,
                                              C::values(s.operand, c, l), d);
          C::keep_post(s.gradient, c, l, d);
          h[l] = normalised;
          dgamma[l] += l < rows ? gradient * normalised : T(0);
          dbeta[l] += l < rows ? gradient : T(0);
          g[l] = gradient * scale;
        }
      }
    }
  }

  // v -= mean(v) + w mean(v w), the means taken over each group: what the norm's statistics take
  // from the gradient. RMSNorm has no mean to take.
  EPINORM_INLINE void project(const Strip& s, int64_t count) {
    const T width = T(s.width);
    for (int64_t group = 0; group < count; ++group) {
      T* const g = s.v + group * s.width * kLanes;
      const T* const h = s.w + group * s.width * kLanes;
      V sums[2][kCount] = {};
      sum_channels<T>(s.width, sums, [g, h](int64_t c, int i, auto& to) {
        const V gradient = load<T>(g + c * kLanes + i * kWidth);
        to[0][i] += gradient;
        to[1][i] += gradient * load<T>(h + c * kLanes + i * kWidth);
      });
      V total[kCount], weighted[kCount];
      for (int i = 0; i < kCount; ++i) {
        total[i] = C::kCentred ? sums[0][i] / width : V{};
        weighted[i] = sums[1][i] / width;
      }
      for (int64_t c = 0; c < s.width; ++c)
        for (int i = 0; i < kCount; ++i) {
          T* const at = g + c * kLanes + i * kWidth;
          const V normalised = load<T>(h + c * kLanes + i * kWidth);
          store<T>(at, load<T>(at) - total[i] - normalised * weighted[i]);
        }
    }
  }

  // v: the gradient of what enters the norm, with that of the sum; w is no longer needed.
  EPINORM_INLINE void add_gradient_of_sum(const Strip& s, int64_t row, int rows, int64_t first,
                                          int64_t count) {
    const int64_t channels = count * s.width;
    if (s.call.dsum != nullptr)
      load_lanes<T>(static_cast<const S*>(s.call.dsum) + row * s.call.dsum_stride + first,
                    s.call.dsum_stride, rows, channels, s.w);
    for (int64_t group = 0; group < count; ++group) {
      const T* const rstd = s.rstd + group * kLanes;
      for (int64_t c = group * s.width; c < (group + 1) * s.width; ++c) {
        T *const g = s.v + c * kLanes, *const d = s.w + c * kLanes;
        EPINORM_LANES { g[l] = s.call.dsum == nullptr ? rstd[l] * g[l] : rstd[l] * g[l] + d[l]; }
      }
    }
  }

  EPINORM_INLINE void differentiate_pre(const Strip& s, int rows, int64_t count, int64_t column,
                                        T* sums) {
    const auto k = s.constants;
    for (int64_t group = 0; group < count; ++group) {
      const T* const rstd = s.rstd + group * kLanes;
      for (int64_t c = group * s.width; c < (group + 1) * s.width; ++c) {
        T *const x = s.u + c * kLanes, *const g = s.v + c * kLanes;
        T* const dbias = sums + (column + c) * kLanes;
        EPINORM_LANES {
          typename C::Values d = {};
          const T du = C::kReturnsSum ? g[l] : rstd[l] * g[l];
          const T dz = C::pre_backward(k, du, x[l], C::values(s.operand, c, l), d);
          C::keep_pre(s.gradient, c, l, d);
          dbias[l] += l < rows ? dz : T(0);
          g[l] = dz;
        }
      }
    }
  }
};

}  // namespace epinorm
