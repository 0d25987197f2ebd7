// A strip of sixteen rows, forward and backward, for the chain C that codegen.py writes: types T
// (arithmetic), Z (the product's), P (parameters'), Y (results') and S (that of what enters the norm,
// the sum, which with kReturnsSum is a result, and with kSavesSum what backward finds as z), the norm's
// kind, and the operations before and after the norm as functions of one value.
#pragma once
#include "call.h"
#include "lanes.h"

namespace epinorm {

// Whole groups are taken together until they hold about this many channels: enough that turning
// them works on full vectors, few enough that the turned values stay in the first-level cache.
constexpr int64_t kPanelChannels = 64;

// Sums are made of sums of this many channels: rounding errors then grow with the shorter of both.
constexpr int64_t kRun = 16;

inline int64_t panel_groups(int64_t groups, int64_t width) {
  const int64_t wanted = (kPanelChannels + width - 1) / width;
  return wanted < groups ? wanted : groups;
}

template <class C>
struct Strip {
  using T = typename C::T;
  using Z = typename C::Z;
  using P = typename C::P;
  using Y = typename C::Y;
  using S = typename C::S;
  using Saved = std::conditional_t<C::kSavesSum, S, Z>;
  using V = Vec<T>;
  static constexpr int kCount = Vector<T>::kCount;
  static constexpr int kWidth = Vector<T>::kWidth;
  static constexpr int kOperands = C::kOperands;
  static constexpr int kSums = 3 + C::kChannelOperands;

  const EpinormCall& call;
  const int64_t width;         // channels of a group
  const int64_t panel;         // groups of a panel
  const int64_t panel_width;   // channels of a panel
  typename C::Constants constants;
  T *u, *v, *w;                // [panel_width][kLanes]
  T *mean, *shift, *rstd;      // [panel][kLanes]; shift: what rounding took from the mean
  T *gamma, *beta;             // [panel_width]
  T* operand[kOperands + 1];   // [panel_width][kLanes], or [panel_width] for a channel operand
  T* gradient[kOperands + 1];  // likewise, where an element operand wants one
  T* largest;                  // [kLanes]: of each row, mean^2 plus the sum of squares around it

  static int64_t scratch_values(int64_t n, int64_t groups) {
    const int64_t width = n / groups, panel = panel_groups(groups, width);
    return panel * width * (kLanes * (3 + 2 * kOperands) + 2) + 3 * panel * kLanes + kLanes;
  }

  Strip(const EpinormCall& c, void* scratch)
      : call(c), width(c.n / c.groups), panel(panel_groups(c.groups, width)),
        panel_width(panel * width) {
    constexpr int64_t kConstants = sizeof constants.of / sizeof(T);
    for (int64_t i = 0; i < kConstants; ++i) constants.of[i] = T(c.constants[i]);
    T* next = static_cast<T*>(scratch);
    const auto take = [&next](int64_t count) { return std::exchange(next, next + count); };
    u = take(panel_width * kLanes);
    v = take(panel_width * kLanes);
    w = take(panel_width * kLanes);
    for (int i = 0; i < kOperands; ++i) {
      operand[i] = take(panel_width * kLanes);
      gradient[i] = take(panel_width * kLanes);
    }
    mean = take(panel * kLanes);
    shift = take(panel * kLanes);
    rstd = take(panel * kLanes);
    gamma = take(panel_width);
    beta = take(panel_width);
    largest = take(kLanes);
    for (int l = 0; l < kLanes; ++l) largest[l] = T(0);
  }

  template <typename S>
  static void channels(const void* from, int64_t first, int64_t count, T missing, T* to) {
    if (from == nullptr) {
      for (int64_t c = 0; c < count; ++c) to[c] = missing;
    } else {
      const S* values = static_cast<const S*>(from) + first;
      for (int64_t c = 0; c < count; ++c) to[c] = value_as<T>(values[c]);
    }
  }

  void load_parameters(int64_t first, int64_t count) {
    channels<P>(call.norm_weight, first, count, T(1), gamma);
    channels<P>(call.norm_bias, first, count, T(0), beta);
    for (int i = 0; i < kOperands; ++i)
      if (!C::kIsElement[i]) channels<P>(call.operands[i], first, count, T(0), operand[i]);
  }

  // Of each value: 0 where dropout drops it, else what it is multiplied by.
  void load_factors(int i, T keep, int64_t row, int64_t first, int64_t count) {
    const Seed seed = *static_cast<const Seed*>(call.operands[i]);
    const unsigned last = last_kept(float(keep));
    const T scale = scale_of_kept(keep);
    for (int64_t c = -(first % 2); c < count; c += 2) {
      T even[kLanes], odd[kLanes];
      EPINORM_LANES {
        const RandomPair words = random_words(seed, row + l, (first + c) / 2);
        even[l] = words.even <= last ? scale : T(0);
        odd[l] = words.odd <= last ? scale : T(0);
      }
      T* const to = operand[i] + c * kLanes;
      if (c >= 0) std::memcpy(to, even, sizeof even);
      if (c + 1 < count) std::memcpy(to + kLanes, odd, sizeof odd);
    }
  }

  void load_elements(int64_t row, int rows, int64_t first, int64_t count) {
    for (int i = 0; i < kOperands; ++i)
      if (C::kKeepOf[i] >= 0)
        load_factors(i, constants.of[C::kKeepOf[i]], row, first, count);
      else if (C::kIsElement[i])
        load_lanes<T>(static_cast<const P*>(call.operands[i]) + row * call.operand_strides[i] +
                          first,
                      call.operand_strides[i], rows, count, operand[i]);
  }

  // The stages of a panel run over all its groups before the next begins: a group's own stages wait
  // for one another (two divisions and a root), the groups do not.

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
      V sum[kCount] = {};
      for (int64_t begin = 0; begin < s.width; begin += kRun) {
        const int64_t end = begin + kRun < s.width ? begin + kRun : s.width;
        V part[kCount] = {};
        for (int64_t c = begin; c < end; ++c)
          for (int i = 0; i < kCount; ++i) part[i] += load<T>(u + c * kLanes + i * kWidth);
        for (int i = 0; i < kCount; ++i) sum[i] += part[i];
      }
      for (int i = 0; i < kCount; ++i)
        store<T>(s.mean + g * kLanes + i * kWidth, C::kCentred ? sum[i] / width : V{});
    }
  }

  // The mean of the squared distances from the mean, then one over its root. The distances do not
  // add up to zero, because the mean was rounded; their own mean is what is missing. Where a group's
  // values are close together and far from zero, that is most of the error.
  EPINORM_INLINE void deviate(const Strip& s, int64_t count) {
    const T width = T(s.width), eps = T(s.call.eps);
    for (int64_t g = 0; g < count; ++g) {
      const T* const u = s.u + g * s.width * kLanes;
      V mean[kCount], sum[kCount] = {}, squares[kCount] = {};
      for (int i = 0; i < kCount; ++i) mean[i] = load<T>(s.mean + g * kLanes + i * kWidth);
      for (int64_t begin = 0; begin < s.width; begin += kRun) {
        const int64_t end = begin + kRun < s.width ? begin + kRun : s.width;
        V part[kCount] = {}, part_squares[kCount] = {};
        for (int64_t c = begin; c < end; ++c)
          for (int i = 0; i < kCount; ++i) {
            const V d = load<T>(u + c * kLanes + i * kWidth) - mean[i];
            part[i] += d;
            part_squares[i] += d * d;
          }
        for (int i = 0; i < kCount; ++i) {
          sum[i] += part[i];
          squares[i] += part_squares[i];
        }
      }
      for (int i = 0; i < kCount; ++i) {
        const V missing = C::kCentred ? sum[i] / width : V{};
        if (C::kCentred) squares[i] -= sum[i] * missing;  // else infinity times zero
        store<T>(s.shift + g * kLanes + i * kWidth, missing);
        store<T>(s.rstd + g * kLanes + i * kWidth, squares[i]);
      }
    }
    for (int64_t g = 0; g < count; ++g) {
      T* const r = s.rstd + g * kLanes;
      const T* const mean = s.mean + g * kLanes;
      EPINORM_LANES {
        const T squares = mean[l] * mean[l] + r[l];
        s.largest[l] = squares > s.largest[l] ? squares : s.largest[l];
        r[l] = T(1) / std::sqrt(r[l] / width + eps);
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

  void keep_statistics(int64_t row, int rows, int64_t group, int64_t count) {
    const int64_t at = row * call.groups + group;
    if (call.rstd != nullptr)
      store_lanes<T, T>(rstd, rows, count, static_cast<T*>(call.rstd) + at, call.groups);
    if (call.mean != nullptr)
      store_lanes<T, T>(mean, rows, count, static_cast<T*>(call.mean) + at, call.groups);
  }

  void forward(int64_t row, int rows, const Z* z, int64_t z_stride, Y* y, int64_t y_stride) {
    for (int64_t group = 0; group < call.groups; group += panel) {
      const int64_t count = call.groups - group < panel ? call.groups - group : panel;
      const int64_t first = group * width, channels = count * width;
      load_parameters(first, channels);
      load_elements(row, rows, first, channels);
      load_lanes<T>(z + first, z_stride, rows, channels, u);
      centre(*this, count);
      if constexpr (C::kReturnsSum)
        store_lanes<T>(u, rows, channels, static_cast<S*>(call.sum) + row * call.n + first, call.n);
      deviate(*this, count);
      finish(*this, count);
      keep_statistics(row, rows, group, count);
      store_lanes<T>(u, rows, channels, y + first, y_stride);
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
      V mean[kCount], sum[kCount] = {};
      for (int i = 0; i < kCount; ++i) mean[i] = load<T>(s.mean + g * kLanes + i * kWidth);
      for (int64_t c = 0; c < s.width; ++c)
        for (int i = 0; i < kCount; ++i) sum[i] += load<T>(h + c * kLanes + i * kWidth) - mean[i];
      for (int i = 0; i < kCount; ++i)
        store<T>(s.shift + g * kLanes + i * kWidth, C::kCentred ? sum[i] / width : V{});
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

  // Where squares overflow, PyTorch's own kernels give NaN or not by how they cut a row into
  // vectors: so they are asked. No value of a row whose `largest` is a sixteenth of the largest
  // number has a square that overflows, nor has the mean of any part of it.
  void tell_overflow() const {
    bool overflows = false;
    for (int l = 0; l < kLanes; ++l) overflows |= std::isinf(largest[l] * T(16));
    if (overflows) __atomic_store_n(&call.overflow, 1, __ATOMIC_RELAXED);
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
      V total[kCount] = {}, weighted[kCount] = {};
      for (int64_t begin = 0; begin < s.width; begin += kRun) {
        const int64_t end = begin + kRun < s.width ? begin + kRun : s.width;
        V part[kCount] = {}, weighted_part[kCount] = {};
        for (int64_t c = begin; c < end; ++c)
          for (int i = 0; i < kCount; ++i) {
            const V gradient = load<T>(g + c * kLanes + i * kWidth);
            part[i] += gradient;
            weighted_part[i] += gradient * load<T>(h + c * kLanes + i * kWidth);
          }
        for (int i = 0; i < kCount; ++i) {
          total[i] += part[i];
          weighted[i] += weighted_part[i];
        }
      }
      for (int i = 0; i < kCount; ++i) {
        total[i] = C::kCentred ? total[i] / width : V{};
        weighted[i] /= width;
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

  // The gradients of the operands lie in `gradient`: (N,) ones are summed, (M, N) ones stored.
  void keep_operand_gradients(int64_t row, int rows, int64_t first, int64_t count, T* sums) {
    int64_t next = 3;
    for (int i = 0; i < kOperands; ++i) {
      if (!C::kIsElement[i]) {
        T* const into = sums + (next++ * call.n + first) * kLanes;
        for (int64_t c = 0; c < count; ++c) {
          T *const to = into + c * kLanes, *const d = gradient[i] + c * kLanes;
          EPINORM_LANES { to[l] += l < rows ? d[l] : T(0); }
        }
      } else if (call.operand_gradients[i] != nullptr) {
        P* const to = static_cast<P*>(call.operand_gradients[i]) + row * call.n + first;
        store_lanes<T>(gradient[i], rows, count, to, call.n);
      }
    }
  }

  void backward(int64_t row, int rows, const Saved* z, int64_t z_stride, const Y* dy,
                int64_t dy_stride, Z* dz, int64_t dz_stride, T* sums) {
    const T* const kept_mean = static_cast<const T*>(call.mean);
    const T* const kept_rstd = static_cast<const T*>(call.rstd);
    for (int64_t group = 0; group < call.groups; group += panel) {
      const int64_t count = call.groups - group < panel ? call.groups - group : panel;
      const int64_t first = group * width, channels = count * width;
      const int64_t at = row * call.groups + group;
      load_parameters(first, channels);
      load_elements(row, rows, first, channels);
      load_lanes<T>(z + first, z_stride, rows, channels, u);
      load_lanes<T>(dy + first, dy_stride, rows, channels, v);
      load_lanes<T>(kept_rstd + at, call.groups, rows, count, rstd);
      if (kept_mean != nullptr)
        load_lanes<T>(kept_mean + at, call.groups, rows, count, mean);
      else
        for (int64_t i = 0; i < count * kLanes; ++i) mean[i] = T(0);
      measure(*this, count);
      centre_again(*this, count);
      differentiate_post(*this, rows, count, first, sums);
      project(*this, count);
      if constexpr (C::kReturnsSum) add_gradient_of_sum(*this, row, rows, first, count);
      differentiate_pre(*this, rows, count, first, sums);
      keep_operand_gradients(row, rows, first, channels, sums);
      store_lanes<T>(v, rows, channels, dz + first, dz_stride);
    }
  }
};

template <class C>
void forward_rows(const EpinormCall* call, int64_t first, int64_t rows, const void* z,
                  int64_t z_stride, void* y, int64_t y_stride, void* scratch) {
  Strip<C> strip(*call, scratch);
  for (int64_t r = 0; r < rows; r += kLanes)
    strip.forward(first + r, int(rows - r < kLanes ? rows - r : kLanes),
                  static_cast<const typename C::Z*>(z) + r * z_stride, z_stride,
                  static_cast<typename C::Y*>(y) + r * y_stride, y_stride);
  strip.tell_overflow();
}

template <class C>
void backward_rows(const EpinormCall* call, int64_t first, int64_t rows, const void* z,
                   int64_t z_stride, const void* dy, int64_t dy_stride, void* dz,
                   int64_t dz_stride, void* sums, void* scratch) {
  Strip<C> strip(*call, scratch);
  for (int64_t r = 0; r < rows; r += kLanes)
    strip.backward(first + r, int(rows - r < kLanes ? rows - r : kLanes),
                   static_cast<const typename Strip<C>::Saved*>(z) + r * z_stride, z_stride,
                   static_cast<const typename C::Y*>(dy) + r * dy_stride, dy_stride,
                   static_cast<typename C::Z*>(dz) + r * dz_stride, dz_stride,
                   static_cast<typename C::T*>(sums));
  strip.tell_overflow();
}

// Adds the lanes of a block's sums to the totals, in double and in one order on every machine, and
// clears them: a column's sum of many rows, small against its terms, keeps its digits.
template <class C>
void fold_sums(const EpinormCall* call, void* sums, double* totals) {
  using T = typename C::T;
  T* const from = static_cast<T*>(sums);
  for (int64_t i = 0; i < Strip<C>::kSums * call->n; ++i) {
    T* const values = from + i * kLanes;
    double lane[kLanes];
    for (int l = 0; l < kLanes; ++l) lane[l] = values[l];
    for (int half = kLanes / 2; half > 0; half /= 2)
      for (int l = 0; l < half; ++l) lane[l] += lane[l + half];
    totals[i] += lane[0];
    for (int l = 0; l < kLanes; ++l) values[l] = T(0);
  }
}

template <class C>
void describe(int64_t n, int64_t groups, EpinormKernel* kernel) {
  using T = typename C::T;
  kernel->forward = forward_rows<C>;
  kernel->backward = backward_rows<C>;
  kernel->fold = fold_sums<C>;
  kernel->scratch_bytes = Strip<C>::scratch_values(n, groups) * int64_t(sizeof(T));
  kernel->sums_bytes = Strip<C>::kSums * n * kLanes * int64_t(sizeof(T));
  kernel->totals = Strip<C>::kSums;
}

}  // namespace epinorm
