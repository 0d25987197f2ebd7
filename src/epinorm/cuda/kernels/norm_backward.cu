// dy, z, mean, rstd -> dz, the gradients of element operands, and this block's share of the sums over
// rows (gamma, beta, bias, channel operands). One read of dy and z, one write of dz.
//
// Deterministic: a thread adds up its own columns in registers, the block's warps add theirs in a
// fixed order, and each block writes one row of `partial` (gridDim.y, kSums, N) that
// norm_column_sums adds up. No atomics.
//
// Where dz goes on to be split into planes (split_gradient.cu), also the largest magnitudes that its
// scales are made from: of each row, kRowLargest, and of each column, kColumnLargest.
//
// kSumsGiven: groups too wide for a block's registers. sum(g) and sum(g*h) of each (row, group) come
// from norm_backward_sums, and a lane holds any kVector neighbouring columns.
#include "dependent.cuh"
#include "dz_store.cuh"
#include "norm_gradient.cuh"

struct Outputs {
  P* operand[chain::kSlots];  // gradients of element operands (M, N); null where not wanted
};

// What split_gradient.cu needs, all fp32. W's and x's planes have scales that dz takes over before it
// is split: `row` is of dz[i, n] * column_factor[n], `column` of dz[i, n] * row_factor[i].
struct Largest {
  const float *column_factor, *row_factor;   // (N,), (M,); null where not wanted
  unsigned *row, *column;                    // bits of magnitudes: (M, row_parts()), (gridDim.y, N)
  unsigned char *row_flag, *column_flag;     // (M,), (N,), set to 0 here
};

constexpr int kRowWarps = kBlockTeam ? kLanes / 32 : kWarpsX;  // of a block, side by side in a row

EPINORM_FUNCTION int row_parts() { return gridDim.x * kRowWarps; }
EPINORM_FUNCTION int row_part() {
  return blockIdx.x * kRowWarps + threadIdx.x / 32 % kRowWarps;
}

EPINORM_FUNCTION unsigned magnitude(float value) { return __float_as_uint(value) & 0x7fffffffu; }

// The sums over this thread's rows, for its columns; and the largest magnitudes.
struct ColumnSums {
  T sum[kSums > 0 ? kSums : 1][kValues];
  unsigned largest[kColumnLargest ? kValues : 1];

  EPINORM_FUNCTION ColumnSums() {
#pragma unroll
    for (int s = 0; s < kSums; ++s)
#pragma unroll
      for (int i = 0; i < kValues; ++i) sum[s][i] = T(0);
#pragma unroll
    for (int i = 0; i < (kColumnLargest ? kValues : 1); ++i) largest[i] = 0;
  }

  EPINORM_FUNCTION void add(int s, int i, T x) {
    if (s >= 0) sum[s][i] += x;
  }

  // Row s of what a block writes: the sums, then the largest, as they lie in memory.
  EPINORM_FUNCTION T value(int s, int i) const {
    if constexpr (kColumnLargest) return s < kSums ? sum[s][i] : __uint_as_float(largest[i]);
    return sum[s][i];
  }
  static EPINORM_FUNCTION T joined(int s, T a, T b) {
    if constexpr (kColumnLargest)
      if (s == kSums) return __uint_as_float(max(__float_as_uint(a), __float_as_uint(b)));
    return a + b;
  }
};

// Where this lane's columns lie.
struct Columns {
  Position at;
  int group, first;
  bool live;

  EPINORM_FUNCTION explicit Columns(int groups) : at(groups) {
    if (kSumsGiven) {
      const int lane = (blockIdx.x * kWarpsX + threadIdx.x / 32 % kWarpsX) * 32 + threadIdx.x % 32;
      first = lane * kVector;
      live = first < groups * kChannels;
      group = live ? first / kChannels : 0;
    } else {
      first = 0;
      live = at.live;
      group = at.group;
    }
  }

  EPINORM_FUNCTION bool inside(int e) const { return live && (kSumsGiven || at.in_group(e)); }
  EPINORM_FUNCTION int column(int e) const { return kSumsGiven ? first : at.column(e); }
};

// Where everything is: what norm_backward is called with.
struct Tensors {
  const Y* dy;
  const Z* z;
  i64 dy_stride, z_stride;
  const T *mean, *rstd, *row_sums;
  Sources from;
  Z* dz;
  Outputs outputs;
  i64 rows, width;
  int groups;
  Largest largest;
};

// What a thread reads of the kRows rows of one pass. Beyond the last row all is zero, and stays so.
struct Pass {
  Vector<Z, kVector> z[kRows][kVectors];
  Vector<Y, kVector> dy[kRows][kVectors];
  Elements elements[kRows][kVectors];
  T mean[kRows], rstd[kRows];

  EPINORM_FUNCTION Pass() {}

  EPINORM_FUNCTION Pass(const Columns& here, const Tensors& from, i64 first) {
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const i64 row = first + u * kWarpsY;
      const bool in_rows = here.live && row < from.rows;
      const i64 group = row * from.groups + here.group;
      mean[u] = in_rows && chain::kCentred ? from.mean[group] : T(0);
      rstd[u] = in_rows ? from.rstd[group] : T(0);
#pragma unroll
      for (int e = 0; e < kVectors; ++e)
        if (in_rows && here.inside(e)) {
          z[u][e].load(from.z + row * from.z_stride + here.column(e));
          dy[u][e].load(from.dy + row * from.dy_stride + here.column(e));
          elements[u][e].load(from.from, row, here.column(e));
        }
    }
  }
};

// The first half of a pass: everything up to the sums over the group.
struct Halfway {
  T h[kRows][kValues], du[kRows][kValues], sums[2 * kRows];
  T operand[kRows][kValues][chain::kSlots];

  EPINORM_FUNCTION Halfway(const Pass& pass, const Columns& here, const Tensors& tensors,
                           const ChannelStore& store, i64 first, ColumnSums& columns) {
#pragma unroll
    for (int u = 0; u < kRows; ++u) sums[2 * u] = sums[2 * u + 1] = T(0);
#pragma unroll
    for (int e = 0; e < kVectors; ++e) {
      const Channels channels = store.get(tensors.from, here, e);
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        const bool counts = first + u * kWarpsY < tensors.rows && here.inside(e);
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          const int i = e * kVector + j;
          T t[chain::kSlots];
          operands_at(channels, pass.elements[u][e], j, t);
          const T x = channels.with_bias(pass.z[u][e].template get<T>(j), j);
          const T dy = pass.dy[u][e].template get<T>(j);
          ElementGradient one = through_post(dy, x, pass.mean[u], pass.rstd[u], channels, j, t);
          if (!counts) one = ElementGradient{};
          h[u][i] = one.h;
          du[u][i] = one.du;
          const T g = product(one.du, channels.scale(j));
          sums[2 * u] += g;
          sums[2 * u + 1] += g * one.h;
          columns.add(kSumGamma, i, one.du * one.h);
          columns.add(kSumBeta, i, one.du);
#pragma unroll
          for (int k = 0; k < chain::kOperands; ++k) operand[u][i][k] = one.operand[k];
        }
      }
    }
  }
};

// The second half: through the norm and the operations before it.
EPINORM_FUNCTION void finish_pass(const Pass& pass, const Halfway& half, const Columns& here,
                                  const Tensors& tensors, const ChannelStore& store, i64 first,
                                  ColumnSums& columns) {
  unsigned row_largest[kRows] = {};
#pragma unroll
  for (int e = 0; e < kVectors; ++e) {
    const Channels channels = store.get(tensors.from, here, e);
    Vector<float, kVector> column_factor;
    if (kRowLargest && here.inside(e))
      column_factor.load(tensors.largest.column_factor + here.column(e));
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const i64 row = first + u * kWarpsY;
      if (row >= tensors.rows || !here.inside(e)) continue;
      const GroupGradient group(pass.rstd[u], half.sums[2 * u], half.sums[2 * u + 1]);
      T dx[kVector], dt[kVector][chain::kSlots];
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const int i = e * kVector + j;
        T t[chain::kSlots];
        operands_at(channels, pass.elements[u][e], j, t);
        const T dv = group.through_norm(half.h[u][i], half.du[u][i], channels.scale(j));
#pragma unroll
        for (int k = 0; k < chain::kOperands; ++k) dt[j][k] = half.operand[u][i][k];
        const T x = channels.with_bias(pass.z[u][e].template get<T>(j), j);
        dx[j] = chain::pre_backward<T>(dv, x, t, dt[j]);
        columns.add(kSumBias, i, dx[j]);
#pragma unroll
        for (int k = 0; k < chain::kOperands; ++k) columns.add(sum_of_operand(k), i, dt[j][k]);
      }
      const i64 offset = row * tensors.width;
      if (kWriteDz) store_dz<kVector>(tensors.dz, offset, here.column(e), dx);
      if constexpr (kRowLargest)
#pragma unroll
        for (int j = 0; j < kVector; ++j)
          row_largest[u] = max(row_largest[u], magnitude(dx[j] * column_factor.value[j]));
      if constexpr (kColumnLargest) {
        const float row_factor = __ldg(tensors.largest.row_factor + row);
#pragma unroll
        for (int j = 0; j < kVector; ++j)
          columns.largest[e * kVector + j] =
              max(columns.largest[e * kVector + j], magnitude(dx[j] * row_factor));
      }
#pragma unroll
      for (int k = 0; k < chain::kOperands; ++k) {
        if (!writes_operand(k)) continue;
        T gradient[kVector];
#pragma unroll
        for (int j = 0; j < kVector; ++j) gradient[j] = dt[j][k];
        Vector<P, kVector> packed;
        packed.set(gradient);
        packed.store(tensors.outputs.operand[k] + offset + here.column(e));
      }
    }
  }
  if constexpr (kRowLargest)
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const i64 row = first + u * kWarpsY;  // the same in all lanes
      const unsigned largest = __reduce_max_sync(0xffffffffu, row_largest[u]);
      if (row >= tensors.rows || threadIdx.x % 32 != 0) continue;
      tensors.largest.row[row * row_parts() + row_part()] = largest;
      if (row_part() == 0) tensors.largest.row_flag[row] = 0;
    }
}

template <typename TeamType>
EPINORM_FUNCTION void backward_rows(TeamType team, const Columns& here, const Tensors& tensors,
                                    ColumnSums& columns) {
  const ChannelStore store(tensors.from, here);
  const i64 step = i64(gridDim.y) * kRowsPerPass;
  i64 first = i64(blockIdx.y) * kRowsPerPass + here.at.row;
  Pass next;
  if (kPrefetch) next = Pass(here, tensors, first);

  for (; first < tensors.rows; first += step) {
    const Pass pass = kPrefetch ? next : Pass(here, tensors, first);
    if (kPrefetch) next = Pass(here, tensors, first + step);

    Halfway half(pass, here, tensors, store, first, columns);
    if (kSumsGiven) {
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        const i64 row = first + u * kWarpsY;
        if (!here.live || row >= tensors.rows) continue;
        const T* const pair = tensors.row_sums + 2 * (row * tensors.groups + here.group);
        half.sums[2 * u] = pair[0];
        half.sums[2 * u + 1] = pair[1];
      }
    } else {
      team.sum(half.sums);
    }
    finish_pass(pass, half, here, tensors, store, first, columns);
  }
}

// Rows of `partial` and of `largest.column`: warps that share columns join theirs through shared memory,
// warp 0 first.
EPINORM_FUNCTION void write_partial(const Columns& here, const ColumnSums& columns, T* partial,
                                    const Largest& largest, i64 width) {
  const auto put = [&](int s, int column, T value) {
    if constexpr (kColumnLargest)
      if (s == kSums) {
        largest.column[i64(blockIdx.y) * width + column] = __float_as_uint(value);
        if (blockIdx.y == 0) largest.column_flag[column] = 0;
        return;
      }
    partial[(i64(blockIdx.y) * kSums + s) * width + column] = value;
  };
  constexpr int kWritten = kSums + kColumnLargest;
  if constexpr (kWarpsY == 1) {
#pragma unroll
    for (int s = 0; s < kWritten; ++s)
#pragma unroll
      for (int e = 0; e < kVectors; ++e) {
        if (!here.inside(e)) continue;
#pragma unroll
        for (int j = 0; j < kVector; ++j)
          put(s, here.column(e) + j, columns.value(s, e * kVector + j));
      }
  } else {
    constexpr int kLane = 32 * kWarpsX;
    __shared__ T shared[kWarpsY][kValues][kLane];
    const int x = threadIdx.x % kLane, y = threadIdx.x / kLane;
#pragma unroll
    for (int s = 0; s < kWritten; ++s) {
      if (s > 0) __syncthreads();
#pragma unroll
      for (int i = 0; i < kValues; ++i) shared[y][i][x] = columns.value(s, i);
      __syncthreads();
      for (int i = y; i < kValues; i += kWarpsY) {
        T total = shared[0][i][x];
#pragma unroll
        for (int w = 1; w < kWarpsY; ++w) total = ColumnSums::joined(s, total, shared[w][i][x]);
        const int e = i / kVector;
        if (here.inside(e)) put(s, here.column(e) + i % kVector, total);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kResident)
norm_backward(const Y* __restrict__ dy, i64 dy_stride, const Z* __restrict__ z, i64 z_stride,
              const T* __restrict__ mean, const T* __restrict__ rstd,
              const T* __restrict__ row_sums, const Z* __restrict__ bias,
              const P* __restrict__ gamma, const P* __restrict__ beta, Z* __restrict__ dz,
              T* __restrict__ partial, i64 rows, int groups EPINORM_OPERAND_PARAMETERS
                  EPINORM_OUTPUT_PARAMETERS EPINORM_LARGEST_PARAMETERS) {
  wait_for_previous_kernel();
  const Sources from = {bias, gamma, beta, EPINORM_OPERAND_POINTERS, EPINORM_OPERAND_STRIDES};
  const i64 width = i64(groups) * kChannels;
  const Tensors tensors = {dy,   z,    dy_stride, z_stride, mean,
                           rstd, row_sums, from,  dz,       {EPINORM_OUTPUT_POINTERS},
                           rows, width, groups, EPINORM_LARGEST};
  const Columns here(groups);
  ColumnSums columns;
  if constexpr (kBlockTeam) {
    using BlockTeam = Team<kLanes, T, 2 * kRows>;
    __shared__ T scratch[2][2 * kRows][BlockTeam::kWarps];
    backward_rows(BlockTeam(scratch), here, tensors, columns);
  } else {
    backward_rows(WarpTeam<kLanes, T>(), here, tensors, columns);
  }
  let_next_kernel_start();
  if (kSums + kColumnLargest > 0) write_partial(here, columns, partial, tensors.largest, width);
}
