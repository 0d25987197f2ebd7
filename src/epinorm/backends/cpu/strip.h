// The memory of a strip of sixteen rows for the chain C that codegen.py writes: types T (arithmetic),
// Z (the product's), P (parameters'), Y (results') and S (that of what enters the norm, the sum, which
// with kReturnsSum is a result) and Saved (what backward finds as z: with kSavesSum the sum), the norm's
// kind, and the operations before and after the norm as functions of one value.
#pragma once
#include "call.h"
#include "lanes.h"

namespace epinorm {

// Whole groups are taken together until they hold about this many channels: enough that turning
// them works on full vectors, few enough that the turned values stay in the first-level cache.
constexpr int64_t kPanelChannels = 64;

// Sums are made of sums of this many channels, which are added in double: rounding errors grow with a run alone.
constexpr int64_t kRun = 16;

// Of each lane's values of `width` channels: term(c, i, sums) adds the channel's to the i-th vector of each sum.
template <class T, int kSums, class Term>
EPINORM_INLINE void sum_channels(int64_t width, Vec<T> (&sums)[kSums][Vector<T>::kCount], Term term) {
  constexpr int kCount = Vector<T>::kCount, kWidth = Vector<T>::kWidth;
  if (width <= kRun) {
    for (int64_t c = 0; c < width; ++c)
      for (int i = 0; i < kCount; ++i) term(c, i, sums);
    return;
  }
  double total[kSums][kLanes] = {};
  T values[kLanes];
  for (int64_t begin = 0; begin < width; begin += kRun) {
    const int64_t end = begin + kRun < width ? begin + kRun : width;
    Vec<T> part[kSums][kCount] = {};
    for (int64_t c = begin; c < end; ++c)
      for (int i = 0; i < kCount; ++i) term(c, i, part);
    for (int k = 0; k < kSums; ++k) {
      for (int i = 0; i < kCount; ++i) store<T>(values + i * kWidth, part[k][i]);
      EPINORM_LANES { total[k][l] += double(values[l]); }
    }
  }
  for (int k = 0; k < kSums; ++k) {
    EPINORM_LANES { values[l] = T(total[k][l]); }
    for (int i = 0; i < kCount; ++i) sums[k][i] = load<T>(values + i * kWidth);
  }
}

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
  using Saved = typename C::Saved;
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
    const auto take = [&next](int64_t count) { return (next += count) - count; };
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

  // One value for all columns of a row.
  void load_rows(int i, int64_t row, int rows, int64_t count) {
    T values[kLanes];
    for (int l = 0; l < kLanes; ++l) {
      const int64_t at = row + (l < rows ? l : 0);
      values[l] = value_as<T>(static_cast<const P*>(call.operands[i])[at * call.operand_strides[i]]);
    }
    for (int64_t c = 0; c < count; ++c) std::memcpy(operand[i] + c * kLanes, values, sizeof values);
  }

  void load_elements(int64_t row, int rows, int64_t first, int64_t count) {
    for (int i = 0; i < kOperands; ++i)
      if (C::kKeepOf[i] >= 0)
        load_factors(i, constants.of[C::kKeepOf[i]], row, first, count);
      else if (C::kIsRow[i])
        load_rows(i, row, rows, count);
      else if (C::kIsElement[i])
        load_lanes<T>(static_cast<const P*>(call.operands[i]) + row * call.operand_strides[i] +
                          first,
                      call.operand_strides[i], rows, count, operand[i]);
  }

  void keep_statistics(int64_t row, int rows, int64_t group, int64_t count) {
    const int64_t at = row * call.groups + group;
    if (call.rstd != nullptr)
      store_lanes<T, T>(rstd, rows, count, static_cast<T*>(call.rstd) + at, call.groups);
    if (call.mean != nullptr)
      store_lanes<T, T>(mean, rows, count, static_cast<T*>(call.mean) + at, call.groups);
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

  // Where squares overflow, PyTorch's own kernels give NaN or not by how they cut a row into
  // vectors: so they are asked. No value of a row whose `largest` is a sixteenth of the largest
  // number has a square that overflows, nor has the mean of any part of it.
  void tell_overflow() const {
    bool overflows = false;
    for (int l = 0; l < kLanes; ++l) overflows |= __builtin_isinf(largest[l] * T(16));
    if (overflows) __atomic_store_n(&call.overflow, 1, __ATOMIC_RELAXED);
  }
};

}  // namespace epinorm
