// BatchNorm's kernels: which thread holds what. A thread keeps kVector neighbouring columns of (M, N)
// and walks over rows, kRows of them in flight; 32 lanes lie side by side, and kWarpsY warps below each
// other. Blocks walk over rows as one front, so that what a pass reads last is what the next one, which
// comes from the other end, finds in the L2 cache.
#pragma once
#include "norm/norm_layout.cuh"

constexpr int kStripLanes = 32;
constexpr int kStripColumns = kStripLanes * kVector;

struct Strip {
  int first, warp, columns;

  EPINORM_FUNCTION explicit Strip(int groups)
      : first((blockIdx.x * kStripLanes + threadIdx.x % kStripLanes) * kVector),
        warp(threadIdx.x / kStripLanes),
        columns(groups * kChannels) {}

  EPINORM_FUNCTION bool inside(int) const { return first < columns; }
  EPINORM_FUNCTION int column(int) const { return first; }
  // The first of the rows that this thread has in a block's first pass, and from one pass to the next.
  EPINORM_FUNCTION i64 begin() const { return i64(blockIdx.y) * kRowsPerPass + warp; }
  EPINORM_FUNCTION i64 step() const { return i64(gridDim.y) * kRowsPerPass; }
};

// What a thread reads of z for one pass, and what enters the norm there: of `row(u)` for each u, where
// that is a row.
struct Rows {
  Vector<Z, kVector> raw[kRows];
  Elements elements[kRows];

  template <typename Row>
  EPINORM_FUNCTION Rows(const Strip& at, const Z* z, i64 z_stride, const Sources& from, i64 rows, Row row) {
#pragma unroll
    for (int u = 0; u < kRows; ++u)
      if (row(u) >= 0 && row(u) < rows && at.inside(0)) {
        raw[u].load_own(z + row(u) * z_stride + at.column(0));
        elements[u].load(from, row(u), at.column(0));
      }
  }

  EPINORM_FUNCTION T value(const Sources& from, const Channels& channels, int u, int j) const {
    T t[chain::kSlots];
    operands_at(from, channels, elements[u], j, t);
    return chain::pre_apply<T>(from.constants, channels.with_bias(raw[u].template get<T>(j), j), t);
  }
};

// A column's values so far: how many, their mean, and the sum of squares around it. Joined by Chan,
// Golub and LeVeque's formula ("Updating formulae and a pairwise algorithm for computing sample
// variances", 1979): E[x^2] - E[x]^2 would lose everything where the mean is large.
struct Moments {
  T mean, squares;

  // share: of all values, those of the other; weight: the same times how many there were.
  EPINORM_FUNCTION void join(const Moments& other, T share, T weight) {
    const T distance = other.mean - mean;
    mean += distance * share;
    squares += other.squares + distance * distance * weight;
  }
};
