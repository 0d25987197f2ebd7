// dy, z, mean, rstd -> dz, the gradients of element operands, and this block's share of the sums over
// rows (gamma, beta, bias, channel operands). One read of dy and z, one write of dz.
//
// Deterministic: a thread adds up its own columns in registers, the block's warps add theirs in a
// fixed order, and each block writes one row of `partial` (gridDim.y, kSums, N) that
// norm_column_sums adds up. No atomics.
//
// kSumsGiven: groups too wide for a block's registers. sum(g) and sum(g*h) of each (row, group) come
// from norm_backward_sums, and a lane holds any kVector neighbouring columns.
#include "dependent.cuh"
#include "dz_store.cuh"
#include "norm_gradient.cuh"

struct Outputs {
  P* operand[chain::kSlots];  // gradients of element operands (M, N); null where not wanted
};

// The sums over this thread's rows, for its columns.
struct ColumnSums {
  T sum[kSums > 0 ? kSums : 1][kValues];

  EPINORM_FUNCTION ColumnSums() {
#pragma unroll
    for (int s = 0; s < kSums; ++s)
#pragma unroll
      for (int i = 0; i < kValues; ++i) sum[s][i] = T(0);
  }

  EPINORM_FUNCTION void add(int s, int i, T x) {
    if (s >= 0) sum[s][i] += x;
  }
};

// Where this lane's columns lie.
struct Columns {
  Position at;
  int group, first;
  bool live;

  EPINORM_FUNCTION explicit Columns(int groups) {
    if (kSumsGiven) {
      const int lane = (blockIdx.x * kWarpsX + threadIdx.x / 32 % kWarpsX) * 32 + threadIdx.x % 32;
      first = lane * kVector;
      live = first < groups * kChannels;
      group = live ? first / kChannels : 0;
    } else {
      group = at.group;
      live = group < groups;
      first = 0;
    }
  }

  EPINORM_FUNCTION bool inside(int e) const { return live && (kSumsGiven || at.inside(e)); }
  EPINORM_FUNCTION int column(int e) const { return kSumsGiven ? first : at.column(e); }
};

template <typename TeamType>
EPINORM_FUNCTION void backward_rows(TeamType team, const Columns& here, ColumnSums& columns,
                                    const Y* dy, i64 dy_stride, const Z* z, i64 z_stride,
                                    const T* mean, const T* rstd, const T* row_sums,
                                    const Sources& from, const Outputs& outputs, Z* dz, i64 rows,
                                    int groups) {
  const i64 width = i64(groups) * kChannels;
  Channels kept[kKeep ? kVectors : 1];
  if (kKeep) {
#pragma unroll
    for (int e = 0; e < kVectors; ++e)
      if (here.inside(e)) kept[e].load(from, here.column(e));
  }

  for (i64 first = i64(blockIdx.y) * kRowsPerPass + here.at.row; first < rows;
       first += i64(gridDim.y) * kRowsPerPass) {
    Vector<Z, kVector> raw_z[kRows][kVectors];
    Vector<Y, kVector> raw_dy[kRows][kVectors];
    Elements elements[kRows][kVectors];
    T centre[kRows], scale[kRows];
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const i64 row = first + u * kWarpsY;
      const bool in_rows = here.live && row < rows;
      centre[u] = in_rows && chain::kCentred ? mean[row * groups + here.group] : T(0);
      scale[u] = in_rows ? rstd[row * groups + here.group] : T(0);
#pragma unroll
      for (int e = 0; e < kVectors; ++e)
        if (in_rows && here.inside(e)) {
          raw_z[u][e].load(z + row * z_stride + here.column(e));
          raw_dy[u][e].load(dy + row * dy_stride + here.column(e));
          elements[u][e].load(from, row, here.column(e));
        }
    }

    T h[kRows][kValues], g[kRows][kValues], sums[2 * kRows];
    T operand_gradient[kRows][kValues][chain::kSlots];
#pragma unroll
    for (int u = 0; u < kRows; ++u) sums[2 * u] = sums[2 * u + 1] = T(0);
#pragma unroll
    for (int e = 0; e < kVectors; ++e) {
      Channels channels;
      if (kKeep) channels = kept[e];
      else if (here.inside(e)) channels.load(from, here.column(e));
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        const bool counts = first + u * kWarpsY < rows && here.inside(e);
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          const int i = e * kVector + j;
          T t[chain::kSlots];
          operands_at(channels, elements[u][e], j, t);
          ElementGradient one = through_post(
              raw_dy[u][e].template get<T>(j),
              channels.with_bias(raw_z[u][e].template get<T>(j), j), centre[u], scale[u], channels, j,
              t);
          if (!counts) one = ElementGradient{};
          h[u][i] = one.normalized;
          g[u][i] = one.scaled;
          sums[2 * u] += one.scaled;
          sums[2 * u + 1] += one.scaled * one.normalized;
          columns.add(kSumGamma, i, one.output * one.normalized);
          columns.add(kSumBeta, i, one.output);
#pragma unroll
          for (int k = 0; k < chain::kOperands; ++k) operand_gradient[u][i][k] = one.operand[k];
        }
      }
    }
    if (kSumsGiven) {
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        const i64 row = first + u * kWarpsY;
        const bool in_rows = here.live && row < rows;
        const T* const pair = row_sums + 2 * (row * groups + here.group);
        sums[2 * u] = in_rows ? pair[0] : T(0);
        sums[2 * u + 1] = in_rows ? pair[1] : T(0);
      }
    } else {
      team.sum(sums);
    }

#pragma unroll
    for (int e = 0; e < kVectors; ++e) {
      Channels channels;
      if (kKeep) channels = kept[e];
      else if (here.inside(e)) channels.load(from, here.column(e));
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        const i64 row = first + u * kWarpsY;
        const bool counts = row < rows && here.inside(e);
        T dx[kVector];
        T dt[kVector][chain::kSlots];
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          const int i = e * kVector + j;
          T t[chain::kSlots];
          operands_at(channels, elements[u][e], j, t);
          const T dv = through_norm(h[u][i], g[u][i], scale[u], sums[2 * u], sums[2 * u + 1]);
#pragma unroll
          for (int k = 0; k < chain::kOperands; ++k) dt[j][k] = operand_gradient[u][i][k];
          dx[j] = chain::pre_backward<T>(
              dv, channels.with_bias(raw_z[u][e].template get<T>(j), j), t, dt[j]);
          if (!counts) continue;
          columns.add(kSumBias, i, dx[j]);
#pragma unroll
          for (int k = 0; k < chain::kOperands; ++k)
            columns.add(sum_of_operand(k), i, dt[j][k]);
        }
        if (!counts) continue;
        if (kWriteDz) store_dz<kVector>(dz, row * width, here.column(e), dx);
#pragma unroll
        for (int k = 0; k < chain::kOperands; ++k) {
          if (chain::is_channel(k) || !writes_operand(k)) continue;
          T column[kVector];
#pragma unroll
          for (int j = 0; j < kVector; ++j) column[j] = dt[j][k];
          Vector<P, kVector> packed;
          packed.set(column);
          packed.store(outputs.operand[k] + row * width + here.column(e));
        }
      }
    }
  }
}

// One row of `partial`: warps that share columns add up through shared memory, warp 0 first.
EPINORM_FUNCTION void write_partial(const Columns& here, const ColumnSums& columns, T* partial,
                                    i64 width) {
  T* const mine = partial + i64(blockIdx.y) * kSums * width;
  if constexpr (kWarpsY == 1) {
#pragma unroll
    for (int s = 0; s < kSums; ++s)
#pragma unroll
      for (int e = 0; e < kVectors; ++e) {
        if (!here.inside(e)) continue;
#pragma unroll
        for (int j = 0; j < kVector; ++j)
          mine[s * width + here.column(e) + j] = columns.sum[s][e * kVector + j];
      }
  } else {
    constexpr int kLane = 32 * kWarpsX;
    __shared__ T shared[kWarpsY][kValues][kLane];
    const int x = threadIdx.x % kLane, y = threadIdx.x / kLane;
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
      if (s > 0) __syncthreads();
#pragma unroll
      for (int i = 0; i < kValues; ++i) shared[y][i][x] = columns.sum[s][i];
      __syncthreads();
      for (int i = y; i < kValues; i += kWarpsY) {
        T total = shared[0][i][x];
#pragma unroll
        for (int w = 1; w < kWarpsY; ++w) total += shared[w][i][x];
        const int e = i / kVector;
        if (here.inside(e)) mine[s * width + here.column(e) + i % kVector] = total;
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
norm_backward(const Y* __restrict__ dy, i64 dy_stride, const Z* __restrict__ z, i64 z_stride,
              const T* __restrict__ mean, const T* __restrict__ rstd,
              const T* __restrict__ row_sums, const Z* __restrict__ bias,
              const P* __restrict__ gamma, const P* __restrict__ beta, Z* __restrict__ dz,
              T* __restrict__ partial, i64 rows, int groups EPINORM_OPERAND_PARAMETERS
                  EPINORM_OUTPUT_PARAMETERS) {
  wait_for_previous_kernel();
  const Sources from = {bias, gamma, beta, EPINORM_OPERAND_POINTERS, EPINORM_OPERAND_STRIDES};
  const Outputs outputs = {EPINORM_OUTPUT_POINTERS};
  const Columns here(groups);
  ColumnSums columns;
  if constexpr (kBlockTeam) {
    using BlockTeam = Team<kLanes, T, 2 * kRows>;
    __shared__ T scratch[2][2 * kRows][BlockTeam::kWarps];
    backward_rows(BlockTeam(scratch), here, columns, dy, dy_stride, z, z_stride, mean, rstd,
                  row_sums, from, outputs, dz, rows, groups);
  } else {
    backward_rows(WarpTeam<kLanes, T>(), here, columns, dy, dy_stride, z, z_stride, mean, rstd,
                  row_sums, from, outputs, dz, rows, groups);
  }
  let_next_kernel_start();
  if (kSums > 0) write_partial(here, columns, partial, i64(groups) * kChannels);
}
