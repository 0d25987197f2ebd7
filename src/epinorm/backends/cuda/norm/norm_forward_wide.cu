// norm_forward for groups that do not fit the registers of a block: a block a (row, group) at a time.
// The values stay in shared memory between the passes (kCached), or are read and computed again.
// y may be written over z, as there.
// The layout's kVector and kLanes hold, kVectors does not: how many a lane takes is a run-time loop.
#include "common/dependent.cuh"
#include "norm/norm_layout.cuh"
#include "common/variance.cuh"

struct WideGroup {
  const Z* z;
  const Sources& from;
  i64 row;
  int base;  // first column of the group

  // The kVector values from this channel on that enter the norm.
  EPINORM_FUNCTION void compute(int channel, T (&v)[kVector]) const {
    Channels channels;
    Elements elements;
    channels.load(from, base + channel);
    elements.load(from, row, base + channel);
    Vector<Z, kVector> raw;
    raw.load_own(z + base + channel);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      T t[chain::kSlots];
      operands_at(from, channels, elements, j, t);
      const T z_value = raw.template get<T>(j);
      v[j] = chain::pre_apply<T>(from.constants, channels.with_bias(z_value, j), t);
    }
  }

  EPINORM_FUNCTION void get(const T* cache, int channel, T (&v)[kVector]) const {
    if (!kCached) return compute(channel, v);
#pragma unroll
    for (int j = 0; j < kVector; ++j) v[j] = cache[channel + j];
  }

  EPINORM_FUNCTION void finish(int channel, const T (&distance)[kVector], T shift, T rstd,
                               Y* y) const {
    Channels channels;
    Elements elements;
    channels.load(from, base + channel);
    elements.load(from, row, base + channel);
    T out[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      T t[chain::kSlots];
      operands_at(from, channels, elements, j, t);
      const T u_value = channels.normalized(distance[j], shift, rstd, j);
      out[j] = chain::post_apply<T>(from.constants, u_value, t);
    }
    Vector<Y, kVector> packed;
    packed.set(out);
    packed.store(y + base + channel);
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocksPerSm)
norm_forward_wide(const Z* z, i64 z_stride, const Z* __restrict__ bias,
                  const P* __restrict__ gamma, const P* __restrict__ beta, Y* y,
                  T* __restrict__ mean, T* __restrict__ rstd, i64 rows,
                  int groups EPINORM_CHAIN_PARAMETERS EPINORM_SUM_PARAMETER) {
  wait_for_previous_kernel();
  using BlockTeam = Team<kLanes, T, 2>;
  __shared__ T scratch[2][2][BlockTeam::kWarps];
  extern __shared__ double dynamic_shared[];
  T* const cache = reinterpret_cast<T*>(dynamic_shared);
  const Sources from = {bias, gamma, beta, EPINORM_OPERAND_POINTERS, EPINORM_OPERAND_STRIDES,
                        EPINORM_CONSTANTS,
                        chain::drops_of<T>(EPINORM_CONSTANTS, EPINORM_OPERAND_POINTERS)};
  BlockTeam team(scratch);
  constexpr T kInverse = T(1) / T(kChannels);
  constexpr int kStep = kLanes * kVector;
  const int begin = threadIdx.x * kVector;
  const int group = blockIdx.x;

  for (i64 row = rows - 1 - blockIdx.y; row >= 0; row -= gridDim.y) {  // as norm_forward
    const WideGroup wide = {z + row * z_stride, from, row, group * kChannels};
    T v[kVector], sum[1] = {T(0)}, both[2] = {T(0), T(0)};

    // A thread caches what it alone reads again, so no barrier is needed.
    for (int channel = begin; channel < kChannels; channel += kStep) {
      wide.compute(channel, v);
      if constexpr (kWritesSum) {
        Vector<S, kVector> packed;
        packed.set(v);
        packed.store(EPINORM_SUM + row * (i64(groups) * kChannels) + wide.base + channel);
      }
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        sum[0] += v[j];
        if (kCached) cache[channel + j] = v[j];
      }
    }
    if (chain::kCentred) team.sum(sum);
    const T centre = chain::kCentred ? sum[0] * kInverse : T(0);

    for (int channel = begin; channel < kChannels; channel += kStep) {
      wide.get(cache, channel, v);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const T distance = v[j] - centre;
        both[0] += distance * distance;
        both[1] += distance;
      }
    }
    team.sum(both);
    const T shift = chain::kCentred ? both[1] * kInverse : T(0);
    const T spread = chain::kCentred ? variance<kChannels>(both[0], both[1], shift) : both[0] * kInverse;
    const T scale = reciprocal_sqrt(spread + chain::epsilon<T>());

    const Applied applied(centre, shift, scale);
    for (int channel = begin; channel < kChannels; channel += kStep) {
      wide.get(cache, channel, v);
#pragma unroll
      for (int j = 0; j < kVector; ++j) v[j] -= centre;
      wide.finish(channel, v, applied.shift, applied.rstd, y + row * (i64(groups) * kChannels));
    }
    if (kKeepStatistics && threadIdx.x == 0) {
      if (chain::kCentred) mean[row * groups + group] = centre + shift;
      rstd[row * groups + group] = scale;
    }
  }
}
