// Normalisation of the groups of a row straight from the tensor cores' accumulators. A quad of four
// lanes holds a row of a warp's 16: lane q the columns 8 j + 2 q and 8 j + 2 q + 1 of every chunk j of
// 8 columns, and the same of the row 8 below (PTX ISA, "Register Fragments for wgmma.m64nNk16" and
// "Matrix Fragments for mma.m16n8k16").
#pragma once

constexpr int kChunkColumns = 8;

// Where column 8 chunk + 2 q + i stands in the accumulators, for the upper and the lower row.
__device__ __forceinline__ constexpr int accumulator(int chunk, int lower, int i) {
  return chunk * 4 + lower * 2 + i;
}

// A segment is what a lane normalises at once: kGroupChunks chunks of one row. Groups of fewer than
// 8 columns share a chunk, each on its own lanes of the quad. Groups of 12, 20, 28 .. columns straddle: two
// of them are a segment, and share the chunk in its middle.
template <int kGroupColumns>
struct Segments {
  static_assert(kGroupColumns == 2 || kGroupColumns % 4 == 0, "");
  static constexpr bool kStraddle = kGroupColumns > 8 && kGroupColumns % 8 == 4;
  static constexpr int kGroupChunks = kStraddle ? kGroupColumns / 4 : kGroupColumns >= 8 ? kGroupColumns / 8 : 1;
  static constexpr int kLanes = kStraddle ? 2 : kGroupColumns >= 8 ? 4 : kGroupColumns / 2;  // of a quad

  // The sum over the lanes that hold columns of one group.
  static __device__ __forceinline__ float sum(float value) {
    if (kLanes >= 2) value += __shfl_xor_sync(0xffffffffu, value, 1);
    if (kLanes == 4) value += __shfl_xor_sync(0xffffffffu, value, 2);
    return value;
  }
  // Which group of the tile a lane's part of a segment belongs to, and whether it speaks for it.
  static __device__ __forceinline__ int group(int segment, int quad_lane) {
    return segment * (4 / kLanes) + quad_lane / kLanes;
  }
  static __device__ __forceinline__ bool leads(int quad_lane) { return quad_lane % kLanes == 0; }
};

// The sum of kCount terms in kChains independent sums. They begin with a term: a sum that begins with
// zero costs an addition, since 0 + -0 is not -0.
template <int kCount, int kChains, class Term>
__device__ __forceinline__ float sum_terms(Term term) {
  static_assert(kCount >= kChains && (kChains == 2 || kChains == 4), "");
  float sums[kChains];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i < kChains)
      sums[i] = term(i);
    else
      sums[i % kChains] += term(i);
  }
  return kChains == 4 ? (sums[0] + sums[1]) + (sums[2] + sums[kChains - 1]) : sums[0] + sums[1];
}

// 1 / sqrt(value) to 2^-22.9. Where eps keeps the value from being subnormal, the form that would
// flush it to zero does the same with a third of the instructions.
__device__ __forceinline__ float reciprocal_root(float value, float eps) {
  constexpr float kSmallestNormal = 0x1p-126f;
  if (eps < kSmallestNormal) return rsqrtf(value);
  float root;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(value));
  return root;
}

struct Statistics {
  float mean, rstd;
};

// How statistics are applied is what ``Applied`` says (AppliedStatistics in norm_epilogue.cuh): rounded as
// PyTorch's norm keeps them, and rstd by the mean too.

// Normalises a segment of both rows in place, and finds their means and 1 / sqrt(variance + eps). The
// variance is the mean of the centred squares: as the difference of two large numbers it would lose
// everything. kLocalColumns of the group lie in this warp; whole_sum(sums) turns the lane's sums
// of the two rows into the group's.
template <int kGroupColumns, int kLocalColumns, bool kCentred, class Applied,
          int kCount, class WholeSum>
__device__ __forceinline__ void normalise_group(Statistics (&stats)[2], float (&values)[kCount],
                                                int segment, float eps, WholeSum& whole_sum) {
  using Group = Segments<kLocalColumns>;
  constexpr float kWeight = 1.0f / kGroupColumns;
  constexpr int kValues = Group::kGroupChunks * 2;  // of a row in this lane
  constexpr int kChains = kValues % 4 == 0 ? 4 : 2;  // independent sums
  const int first = segment * Group::kGroupChunks;
  float whole[2];
  if (kCentred) {
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      whole[lower] = sum_terms<kValues, kChains>(
          [&](int i) { return values[accumulator(first + i / 2, lower, i % 2)]; });
    }
    whole_sum(whole);
  }
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) {
    stats[lower].mean = kCentred ? whole[lower] * kWeight : 0.0f;
    whole[lower] = sum_terms<kValues, kChains>([&](int i) {
      float& value = values[accumulator(first + i / 2, lower, i % 2)];
      const float centred = kCentred ? value - stats[lower].mean : value;
      if (!Applied::kRounds) value = centred;
      return centred * centred;
    });
  }
  whole_sum(whole);
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) {
    stats[lower].rstd = Applied::rstd(reciprocal_root(whole[lower] * kWeight + eps, eps), stats[lower].mean);
    Statistics by = stats[lower];
    Applied::round(by);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      // Three numbers of 16 bits: both products are exact, and their difference is rounded once.
      float& value = values[accumulator(first + i / 2, lower, i % 2)];
      value = Applied::kRounds ? fmaf(value, by.rstd, -(by.mean * by.rstd)) : value * by.rstd;
    }
  }
}

// The same for two groups that straddle: `second` lanes of a quad hold the second group's columns of the chunk
// that both share, and get its statistics.
template <int kGroupColumns, bool kCentred, class Applied, int kCount>
__device__ __forceinline__ void normalise_straddling(Statistics (&stats)[2], float (&values)[kCount],
                                                     int segment, float eps) {
  constexpr float kWeight = 1.0f / kGroupColumns;
  constexpr int kOwn = kGroupColumns / 8;  // chunks of one group alone
  const int first = segment * (2 * kOwn + 1);
  const bool second = threadIdx.x % 4 >= 2;
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) {
    const auto own = [&](int group, int i) -> float& {
      return values[accumulator(first + group * (kOwn + 1) + i / 2, lower, i % 2)];
    };
    const auto shared = [&](int i) -> float& { return values[accumulator(first + kOwn, lower, i)]; };
    const auto sum = [&](int group, float of_own, float of_shared) {
      return Segments<8>::sum(of_own + (second == (group == 1) ? of_shared : 0.0f)) * kWeight;
    };
    const auto applied = [](float centred, const Statistics& by) {
      if (kCentred && Applied::kRounds) centred += by.mean - Applied::rounded(by.mean);
      return centred * Applied::rounded(by.rstd);
    };
    Statistics of[2];
    if (kCentred) {
#pragma unroll
      for (int group = 0; group < 2; ++group)
        of[group].mean = sum(group, sum_terms<2 * kOwn, 2>([&](int i) { return own(group, i); }),
                             shared(0) + shared(1));
    }
    stats[lower].mean = kCentred ? second ? of[1].mean : of[0].mean : 0.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) shared(i) -= stats[lower].mean;
    const float of_shared = shared(0) * shared(0) + shared(1) * shared(1);
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      const float squares = sum_terms<2 * kOwn, 2>([&](int i) {
        float& value = own(group, i);
        if (kCentred) value -= of[group].mean;
        return value * value;
      });
      of[group].rstd = Applied::rstd(reciprocal_root(sum(group, squares, of_shared) + eps, eps), of[group].mean);
#pragma unroll
      for (int i = 0; i < 2 * kOwn; ++i) own(group, i) = applied(own(group, i), of[group]);
    }
    stats[lower].rstd = second ? of[1].rstd : of[0].rstd;
#pragma unroll
    for (int i = 0; i < 2; ++i) shared(i) = applied(shared(i), stats[lower]);
  }
}

// The same for a group whose parts of kLocalColumns lie in several warps, with one exchange between
// them: a part's mean and squares around it say all that the group needs (Chan, Golub and LeVeque,
// "Updating formulae and a pairwise algorithm for computing sample variances", 1979). combine(means,
// squares) turns this part's into the group's.
template <int kGroupColumns, int kLocalColumns, class Applied, int kCount,
          class Combine>
__device__ __forceinline__ void normalise_parts(Statistics (&stats)[2], float (&values)[kCount],
                                                float eps, Combine& combine) {
  using Part = Segments<kLocalColumns>;
  constexpr int kValues = Part::kGroupChunks * 2, kChains = kValues % 4 == 0 ? 4 : 2;
  float own_means[2], means[2], squares[2];
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) {
    const float sum = sum_terms<kValues, kChains>(
        [&](int i) { return values[accumulator(i / 2, lower, i % 2)]; });
    own_means[lower] = Part::sum(sum) * (1.0f / kLocalColumns);
    squares[lower] = Part::sum(sum_terms<kValues, kChains>([&](int i) {
      float& value = values[accumulator(i / 2, lower, i % 2)];
      value -= own_means[lower];
      return value * value;
    }));
    means[lower] = own_means[lower];
  }
  combine(means, squares);
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) {
    stats[lower].mean = means[lower];
    stats[lower].rstd =
        Applied::rstd(reciprocal_root(squares[lower] * (1.0f / kGroupColumns) + eps, eps), means[lower]);
    const float rstd = Applied::rounded(stats[lower].rstd);
    const float shift = (own_means[lower] - Applied::rounded(means[lower])) * rstd;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      float& value = values[accumulator(i / 2, lower, i % 2)];
      value = value * rstd + shift;
    }
  }
}
