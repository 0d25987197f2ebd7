// What the kernels that read dy and z and hold a group in registers share: norm_backward.cu, which
// writes dz, and norm_backward_planes.cu, which writes its planes.
//
// Deterministic: a thread adds up its own columns in registers, the block's warps add theirs in a
// fixed order, and each block writes one row of `partial` (gridDim.y, kSums, N) that
// norm_column_sums adds up. No atomics.
#pragma once
#include "norm/norm_gradient.cuh"

struct Outputs {
  P* operand[chain::kSlots];  // gradients of element operands (M, N); null where not wanted
};

// What split_gradient.cu needs, all fp32. W's and x's planes have scales that dz takes over before
// it is split: `row` is of dz[i, n] * column_factor[n], `column` of dz[i, n] * row_factor[i], but for
// those of empty rows.
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

// Where this lane's columns lie. kEveryGroup: no lane is beyond the last group. kRaggedRows: a pass may
// reach beyond the last row.
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
      live = kEveryGroup || at.live;
      group = at.group;
    }
  }

  EPINORM_FUNCTION bool inside(int e) const { return live && (kSumsGiven || at.in_group(e)); }
  EPINORM_FUNCTION int column(int e) const { return kSumsGiven ? first : at.column(e); }
};

// Where everything is: what norm_backward is called with.
struct Tensors {
  const Y* dy;
  const S* z;  // or the sum in its place
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
  Vector<S, kVector> z[kRows][kVectors];
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
      rstd[u] = in_rows && chain::kNormalises ? from.rstd[group] : T(0);
#pragma unroll
      for (int e = 0; e < kVectors; ++e)
        if (in_rows && here.inside(e)) {
          z[u][e].load_own(from.z + row * from.z_stride + here.column(e));
          const Y* const at = from.dy + row * from.dy_stride + here.column(e);
          if (kOwnsDy)
            dy[u][e].load_own(at);
          else
            dy[u][e].load(at);
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
        const bool counts = (!kRaggedRows || first + u * kWarpsY < tensors.rows) && here.inside(e);
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          const int i = e * kVector + j;
          T t[chain::kSlots];
          operands_at(tensors.from, channels, pass.elements[u][e], j, t);
          const T x = channels.with_bias(pass.z[u][e].template get<T>(j), j);
          const T dy = pass.dy[u][e].template get<T>(j);
          ElementGradient one = through_post(tensors.from.constants, dy, x, pass.mean[u],
                                             pass.rstd[u], channels, j, t);
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

// The second half of vector e in row u: through the norm and the operations before it. dx becomes
// dz. writes: whether element operands' gradients are stored.
EPINORM_FUNCTION void finish_vector(const Pass& pass, const Halfway& half, const Columns& here,
                                    const Tensors& tensors, const Channels& channels, i64 row,
                                    int u, int e, ColumnSums& columns, T (&dx)[kVector],
                                    bool writes = true) {
  const GroupGradient group(pass.rstd[u], half.sums[2 * u], half.sums[2 * u + 1]);
  T dt[kVector][chain::kSlots];
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    const int i = e * kVector + j;
    T t[chain::kSlots];
    operands_at(tensors.from, channels, pass.elements[u][e], j, t);
    const T dv = group.through_norm(half.h[u][i], half.du[u][i], channels.scale(j));
#pragma unroll
    for (int k = 0; k < chain::kOperands; ++k) dt[j][k] = half.operand[u][i][k];
    const T x = channels.with_bias(pass.z[u][e].template get<T>(j), j);
    dx[j] = chain::pre_backward<T>(tensors.from.constants, dv, x, t, dt[j]);
    columns.add(kSumBias, i, dx[j]);
#pragma unroll
    for (int k = 0; k < chain::kOperands; ++k) columns.add(sum_of_operand(k), i, dt[j][k]);
  }
#pragma unroll
  for (int k = 0; k < chain::kOperands; ++k) {
    if (!writes_operand(k) || !writes) continue;
    T gradient[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) gradient[j] = dt[j][k];
    Vector<P, kVector> packed;
    packed.set(gradient);
    packed.store(tensors.outputs.operand[k] + row * tensors.width + here.column(e));
  }
}

// Rows of `partial` and of `largest.column`, 16 bytes a store: a word of a sector at a time they took half of the
// kernel's time where there are few rows. Warps that share columns join theirs through shared memory, warp 0 first.
EPINORM_FUNCTION void write_partial(const Columns& here, const ColumnSums& columns, T* partial,
                                    const Largest& largest, i64 width) {
  constexpr int kUnit = kVector < 4 ? kVector : 4;  // values of a store
  const auto put = [&](int s, int column, const T (&values)[kUnit]) {
    if constexpr (kColumnLargest)
      if (s == kSums) {
        Vector<unsigned, kUnit> bits;
#pragma unroll
        for (int j = 0; j < kUnit; ++j) bits.value[j] = __float_as_uint(values[j]);
        bits.store(largest.column + i64(blockIdx.y) * width + column);
#pragma unroll
        for (int j = 0; j < kUnit; ++j)
          if (blockIdx.y == 0) largest.column_flag[column + j] = 0;
        return;
      }
    Vector<T, kUnit> sums;
#pragma unroll
    for (int j = 0; j < kUnit; ++j) sums.value[j] = values[j];
    sums.store(partial + (i64(blockIdx.y) * kSums + s) * width + column);
  };
  constexpr int kWritten = kSums + kColumnLargest;
  T unit[kUnit];
  if constexpr (kWarpsY == 1) {
#pragma unroll
    for (int s = 0; s < kWritten; ++s)
#pragma unroll
      for (int i = 0; i < kValues; i += kUnit) {
        if (!here.inside(i / kVector)) continue;
#pragma unroll
        for (int j = 0; j < kUnit; ++j) unit[j] = columns.value(s, i + j);
        put(s, here.column(i / kVector) + i % kVector, unit);
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
      for (int i = y * kUnit; i < kValues; i += kWarpsY * kUnit) {
#pragma unroll
        for (int j = 0; j < kUnit; ++j) {
          unit[j] = shared[0][i + j][x];
#pragma unroll
          for (int w = 1; w < kWarpsY; ++w)
            unit[j] = ColumnSums::joined(s, unit[j], shared[w][i + j][x]);
        }
        if (here.inside(i / kVector)) put(s, here.column(i / kVector) + i % kVector, unit);
      }
    }
  }
}
