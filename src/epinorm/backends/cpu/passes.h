// Both passes of rows, a strip at a time, and what the runner is told of a kernel.
#pragma once
#include "stages.h"

namespace epinorm {

template <class C>
void forward(Strip<C>& s, int64_t row, int rows, const typename C::Z* z, int64_t z_stride,
             typename C::Y* y, int64_t y_stride) {
  using T = typename C::T;
  for (int64_t group = 0; group < s.call.groups; group += s.panel) {
    const int64_t count = s.call.groups - group < s.panel ? s.call.groups - group : s.panel;
    const int64_t first = group * s.width, channels = count * s.width;
    s.load_parameters(first, channels);
    s.load_elements(row, rows, first, channels);
    load_lanes<T>(z + first, z_stride, rows, channels, s.u);
    Stages<C>::centre(s, count);
    if constexpr (C::kReturnsSum) {
      auto* const sum = static_cast<typename C::S*>(s.call.sum) + row * s.call.n + first;
      store_lanes<T>(s.u, rows, channels, sum, s.call.n);
    }
    Stages<C>::deviate(s, count);
    Stages<C>::finish(s, count);
    s.keep_statistics(row, rows, group, count);
    store_lanes<T>(s.u, rows, channels, y + first, y_stride);
  }
}

template <class C>
void backward(Strip<C>& s, int64_t row, int rows, const typename Strip<C>::Saved* z,
              int64_t z_stride, const typename C::Y* dy, int64_t dy_stride, typename C::Z* dz,
              int64_t dz_stride, typename C::T* sums) {
  using T = typename C::T;
  const T* const kept_mean = static_cast<const T*>(s.call.mean);
  const T* const kept_rstd = static_cast<const T*>(s.call.rstd);
  for (int64_t group = 0; group < s.call.groups; group += s.panel) {
    const int64_t count = s.call.groups - group < s.panel ? s.call.groups - group : s.panel;
    const int64_t first = group * s.width, channels = count * s.width;
    const int64_t at = row * s.call.groups + group;
    s.load_parameters(first, channels);
    s.load_elements(row, rows, first, channels);
    load_lanes<T>(z + first, z_stride, rows, channels, s.u);
    load_lanes<T>(dy + first, dy_stride, rows, channels, s.v);
    load_lanes<T>(kept_rstd + at, s.call.groups, rows, count, s.rstd);
    if (kept_mean != nullptr)
      load_lanes<T>(kept_mean + at, s.call.groups, rows, count, s.mean);
    else
      for (int64_t i = 0; i < count * kLanes; ++i) s.mean[i] = T(0);
    Stages<C>::measure(s, count);
    Stages<C>::centre_again(s, count);
    Stages<C>::differentiate_post(s, rows, count, first, sums);
    Stages<C>::project(s, count);
    if constexpr (C::kReturnsSum) Stages<C>::add_gradient_of_sum(s, row, rows, first, count);
    Stages<C>::differentiate_pre(s, rows, count, first, sums);
    s.keep_operand_gradients(row, rows, first, channels, sums);
    store_lanes<T>(s.v, rows, channels, dz + first, dz_stride);
  }
}

template <class C>
void forward_rows(const EpinormCall* call, int64_t first, int64_t rows, const void* z,
                  int64_t z_stride, void* y, int64_t y_stride, void* scratch) {
  Strip<C> strip(*call, scratch);
  for (int64_t r = 0; r < rows; r += kLanes)
    forward(strip, first + r, int(rows - r < kLanes ? rows - r : kLanes),
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
    backward(strip, first + r, int(rows - r < kLanes ? rows - r : kLanes),
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