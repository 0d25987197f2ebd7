// z (the linear's output without its bias) -> y = post(norm(pre(z + bias))), mean and rstd, and, with
// kWritesSum, what enters the norm.
// y may be written over z (executable.py): each thread reads its part of z before it writes there.
// One read of z, one write of y; the values stay in registers between the passes of the statistics.
// From the last row to the first: the rows that the product wrote last are still in the L2 cache.
#include "common/dependent.cuh"
#include "norm/norm_layout.cuh"
#include "common/variance.cuh"

struct Statistics {
  T mean, shift, rstd;  // the values' mean is mean + shift
};

template <typename TeamType>
EPINORM_FUNCTION void statistics(TeamType& team, const Position& at, const T (&v)[kRows][kValues],
                                 Statistics (&stats)[kRows]) {
  constexpr T kInverse = T(1) / T(kChannels);
  T sum[kRows], both[2 * kRows];
  if (chain::kCentred) {
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      sum[u] = T(0);
#pragma unroll
      for (int i = 0; i < kValues; ++i) sum[u] += v[u][i];
    }
    team.sum(sum);
  }
#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    stats[u].mean = chain::kCentred ? sum[u] * kInverse : T(0);
    both[2 * u] = both[2 * u + 1] = T(0);
#pragma unroll
    for (int e = 0; e < kVectors; ++e)
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const T distance = at.in_group(e) ? v[u][e * kVector + j] - stats[u].mean : T(0);
        both[2 * u] += distance * distance;
        both[2 * u + 1] += distance;
      }
  }
  if (chain::kCentred) {
    team.sum(both);
  } else {
    T squares[kRows];
#pragma unroll
    for (int u = 0; u < kRows; ++u) squares[u] = both[2 * u];
    team.sum(squares);
#pragma unroll
    for (int u = 0; u < kRows; ++u) both[2 * u] = squares[u], both[2 * u + 1] = T(0);
  }
#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    stats[u].shift = chain::kCentred ? both[2 * u + 1] * kInverse : T(0);
    const T spread = variance<kChannels>(both[2 * u], both[2 * u + 1], stats[u].shift) + chain::epsilon<T>();
    stats[u].rstd = chain::eagers_rstd<kChannels>(reciprocal_sqrt(spread), stats[u].mean);
  }
}

// What a thread reads of the kRows rows of one pass. What lies beyond the first row is not set where all of a
// thread's vectors are read, or none: what comes of it is stored nowhere.
struct Pass {
  Unset<Vector<Z, kVector>> raw[kRows][kVectors];
  Elements elements[kRows][kVectors];

  EPINORM_FUNCTION Pass() {
    if (kAhead) return;
#pragma unroll
    for (int u = 0; u < kRows; ++u)
#pragma unroll
      for (int e = 0; e < kVectors; ++e) raw[u][e].it = Vector<Z, kVector>();
  }

  EPINORM_FUNCTION Pass(const Position& at, const Z* z, i64 z_stride, const Sources& from, i64 first,
                        i64 rows)
      : Pass() {
#pragma unroll
    for (int u = 0; u < kRows; ++u)
#pragma unroll
      for (int e = 0; e < kVectors; ++e) {
        const i64 row = rows - 1 - (first + u * kWarpsY);
        if (row >= 0 && at.inside(e)) {
          raw[u][e].it.load_own(z + row * z_stride + at.column(e));
          elements[u][e].load(from, row, at.column(e));
        }
      }
  }
};

EPINORM_FUNCTION void store_sum(S* to, const T* from) {
  T values[kVector];
#pragma unroll
  for (int j = 0; j < kVector; ++j) values[j] = from[j];
  Vector<S, kVector> packed;
  packed.set(values);
  packed.store(to);
}

template <typename TeamType>
EPINORM_FUNCTION void normalize_rows(TeamType team, const Z* z, i64 z_stride, const Sources& from,
                                     Y* y, T* mean, T* rstd, S* sum, i64 rows, int groups) {
  const Position at(groups);
  const i64 width = i64(groups) * kChannels;
  const i64 step = i64(gridDim.y) * kRowsPerPass;
  const ChannelStore store(from, at);
  i64 first = i64(blockIdx.y) * kRowsPerPass + at.row;
  Pass next;
  if (kPrefetch) next = Pass(at, z, z_stride, from, first, rows);

  for (; first < rows; first += step) {
    const Pass pass = kPrefetch ? next : Pass(at, z, z_stride, from, first, rows);
    if (kPrefetch) next = Pass(at, z, z_stride, from, first + step, rows);

    T v[kRows][kValues];
#pragma unroll
    for (int e = 0; e < kVectors; ++e) {
      const Channels channels = store.get(from, at, e);
#pragma unroll
      for (int u = 0; u < kRows; ++u)
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          T t[chain::kSlots];
          operands_at(from, channels, pass.elements[u][e], j, t);
          const T z_value = pass.raw[u][e].it.template get<T>(j);
          const T x = chain::pre_apply<T>(from.constants, channels.with_bias(z_value, j), t);
          v[u][e * kVector + j] = at.in_group(e) ? x : T(0);
        }
    }

    Statistics stats[kRows];
    statistics(team, at, v, stats);

#pragma unroll
    for (int e = 0; e < kVectors; ++e) {
      const Channels channels = store.get(from, at, e);
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        const Applied applied(stats[u].mean, stats[u].shift, stats[u].rstd);
        T out[kVector];
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          T t[chain::kSlots];
          operands_at(from, channels, pass.elements[u][e], j, t);
          const T distance = v[u][e * kVector + j] - stats[u].mean;
          const T u_value = channels.normalized(distance, applied.shift, applied.rstd, j);
          out[j] = chain::post_apply<T>(from.constants, u_value, t);
        }
        const i64 row = rows - 1 - (first + u * kWarpsY);
        if (row >= 0 && at.inside(e)) {
          const i64 place = row * width + at.column(e);
          Vector<Y, kVector> packed;
          packed.set(out);
          packed.store(y + place);
          if constexpr (kWritesSum) store_sum(sum + place, &v[u][e * kVector]);
        }
      }
    }

    if (kKeepStatistics && at.live && at.lane == 0) {
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        const i64 row = rows - 1 - (first + u * kWarpsY);
        if (row < 0) continue;
        if (chain::kCentred) mean[row * groups + at.group] = stats[u].mean + stats[u].shift;
        rstd[row * groups + at.group] = stats[u].rstd;
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocksPerSm)
norm_forward(const Z* z, i64 z_stride, const Z* __restrict__ bias,
             const P* __restrict__ gamma, const P* __restrict__ beta, Y* y,
             T* __restrict__ mean, T* __restrict__ rstd, i64 rows,
             int groups EPINORM_CHAIN_PARAMETERS EPINORM_SUM_PARAMETER) {
  wait_for_previous_kernel();
  const Sources from = {bias, gamma, beta, EPINORM_OPERAND_POINTERS, EPINORM_OPERAND_STRIDES,
                        EPINORM_CONSTANTS,
                        chain::drops_of<T>(EPINORM_CONSTANTS, EPINORM_OPERAND_POINTERS)};
  if constexpr (kBlockTeam) {
    using BlockTeam = Team<kLanes, T, 2 * kRows>;
    __shared__ T scratch[2][2 * kRows][BlockTeam::kWarps];
    normalize_rows(BlockTeam(scratch), z, z_stride, from, y, mean, rstd, EPINORM_SUM, rows,
                   groups);
  } else {
    normalize_rows(WarpTeam<kLanes, T>(), z, z_stride, from, y, mean, rstd, EPINORM_SUM, rows,
                   groups);
  }
}
