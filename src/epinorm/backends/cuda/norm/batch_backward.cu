// dy, z, and of each column mean and rstd -> this block's share of sum(du) and sum(du * h) over rows; or,
// where these are given, dz, the gradients of element operands, and this block's share of the other sums
// over rows, as norm_backward.cu has them. With h = (v - mean) * rstd, u = gamma * h + beta and
// y = post(u), over a column of M values
//     dv = gamma * rstd * (du - sum(du) / M - h * sum(du * h) / M)
//
// kFinishes: the second of these passes. It comes from the last row, which the first one read last.
#include "common/dependent.cuh"
#include "common/empty_rows.cuh"
#include "norm/dz_store.cuh"
#include "norm/norm_rows.cuh"

// What all rows share of this thread's columns.
struct Shared {
  T mean[kVector], rstd[kVector], mean_du[kVector], mean_duh[kVector];

  EPINORM_FUNCTION Shared(const Columns& here, const Tensors& from) {
    const T inverse = T(1) / T(from.rows);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const int column = here.column(0) + j;
      mean[j] = here.live ? from.mean[column] : T(0);
      rstd[j] = here.live ? from.rstd[column] : T(0);
      mean_du[j] = kFinishes && here.live ? from.row_sums[column] * inverse : T(0);
      mean_duh[j] = kFinishes && here.live ? from.row_sums[from.width + column] * inverse : T(0);
    }
  }

  // Sums of two or three rows all but cancel: each product is rounded by itself, as they were.
  EPINORM_FUNCTION T through_norm(T h, T du, T gamma, int j) const {
    return gamma * rstd[j] * (du - mean_du[j] - product(h, mean_duh[j]));
  }
};

// One vector of one row, in its registers until it is stored.
struct Read {
  Vector<S, kVector> z;
  Vector<Y, kVector> dy;
  Elements elements;
};

EPINORM_FUNCTION void finish(const Tensors& tensors, const Columns& here, i64 row, const T (&dx)[kVector],
                             const T (&dt)[kVector][chain::kSlots]) {
  if (kWriteDz) store_dz<kVector>(tensors.dz, row * tensors.width, here.column(0), dx);
#pragma unroll
  for (int k = 0; k < chain::kOperands; ++k) {
    if (!writes_operand(k)) continue;
    T gradient[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) gradient[j] = dt[j][k];
    Vector<P, kVector> packed;
    packed.set(gradient);
    packed.store(tensors.outputs.operand[k] + row * tensors.width + here.column(0));
  }
}

// The largest magnitudes that the scales of dz's planes are made from (norm_rows.cuh); every lane of the
// warp calls it, `inside` or not.
EPINORM_FUNCTION void note_largest(const Tensors& tensors, const Columns& here, i64 row, bool inside,
                                   const T (&dx)[kVector], const float (&column_factor)[kVector],
                                   ColumnSums& columns) {
  if constexpr (kRowLargest) {
    unsigned largest = 0;
#pragma unroll
    for (int j = 0; j < kVector; ++j)
      if (inside) largest = max(largest, magnitude(dx[j] * column_factor[j]));
    largest = __reduce_max_sync(0xffffffffu, largest);
    if (row >= 0 && threadIdx.x % 32 == 0) {
      tensors.largest.row[row * row_parts() + row_part()] = largest;
      if (row_part() == 0) tensors.largest.row_flag[row] = 0;
    }
  }
  if constexpr (kColumnLargest) {
    if (!inside) return;
    const float row_factor = scale_that_counts(__ldg(tensors.largest.row_factor + row));
#pragma unroll
    for (int j = 0; j < kVector; ++j)
      columns.largest[j] = max(columns.largest[j], magnitude(dx[j] * row_factor));
  }
}

EPINORM_FUNCTION void backward_rows(const Columns& here, const Tensors& tensors, ColumnSums& columns) {
  const Shared shared(here, tensors);
  const ChannelStore store(tensors.from, here);
  float column_factor[kVector] = {};
  if constexpr (kRowLargest) {
#pragma unroll
    for (int j = 0; j < kVector; ++j)
      if (here.live)
        column_factor[j] =
            scale_that_counts(__ldg(tensors.largest.column_factor + here.column(0) + j));
  }

  const i64 step = i64(gridDim.y) * kRowsPerPass;
  for (i64 first = i64(blockIdx.y) * kRowsPerPass + here.at.row; first < tensors.rows; first += step) {
    // The same in all lanes of a warp; beyond the last row, -1.
    const auto row = [&](int u) {
      const i64 at = first + u * kWarpsY;
      return at >= tensors.rows ? -1 : kFinishes ? tensors.rows - 1 - at : at;
    };
    Read read[kRows];
#pragma unroll
    for (int u = 0; u < kRows; ++u)
      if (row(u) >= 0 && here.live) {
        read[u].z.load_own(tensors.z + row(u) * tensors.z_stride + here.column(0));
        read[u].dy.load(tensors.dy + row(u) * tensors.dy_stride + here.column(0));
        read[u].elements.load(tensors.from, row(u), here.column(0));
      }
    const Channels channels = store.get(tensors.from, here, 0);
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const bool inside = row(u) >= 0 && here.live;
      T dx[kVector] = {}, dt[kVector][chain::kSlots] = {};
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        T t[chain::kSlots];
        operands_at(tensors.from, channels, read[u].elements, j, t);
        const T x = channels.with_bias(read[u].z.template get<T>(j), j);
        const ElementGradient one = through_post(tensors.from.constants, read[u].dy.template get<T>(j), x,
                                                 shared.mean[j], shared.rstd[j], channels, j, t);
        if (!inside) continue;
        columns.add(kSumGamma, j, one.du * one.h);
        columns.add(kSumBeta, j, one.du);
        if (!kFinishes) continue;
        const T dv = shared.through_norm(one.h, one.du, channels.scale(j), j);
#pragma unroll
        for (int k = 0; k < chain::kOperands; ++k) dt[j][k] = one.operand[k];
        dx[j] = chain::pre_backward<T>(tensors.from.constants, dv, x, t, dt[j]);
        columns.add(kSumBias, j, dx[j]);
#pragma unroll
        for (int k = 0; k < chain::kOperands; ++k) columns.add(sum_of_operand(k), j, dt[j][k]);
      }
      if (inside && kFinishes) finish(tensors, here, row(u), dx, dt);
      note_largest(tensors, here, row(u), inside, dx, column_factor, columns);
    }
  }
}

// dz may be written over z (runtime/prepared.py): each thread reads its part of z before it writes there.
extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocksPerSm)
batch_backward(const Y* __restrict__ dy, i64 dy_stride, const S* z, i64 z_stride,
               const T* __restrict__ mean, const T* __restrict__ rstd, const T* __restrict__ sums,
               const Z* __restrict__ bias, const P* __restrict__ gamma, const P* __restrict__ beta,
               Z* __restrict__ dz, T* __restrict__ partial, i64 rows, int groups EPINORM_CHAIN_PARAMETERS
                   EPINORM_OUTPUT_PARAMETERS EPINORM_LARGEST_PARAMETERS) {
  wait_for_previous_kernel();
  const Sources from = {bias, gamma, beta, EPINORM_OPERAND_POINTERS, EPINORM_OPERAND_STRIDES,
                        EPINORM_CONSTANTS,
                        chain::drops_of<T>(EPINORM_CONSTANTS, EPINORM_OPERAND_POINTERS)};
  const i64 width = i64(groups) * kChannels;
  const Tensors tensors = {dy,   z,    dy_stride, z_stride, mean,
                           rstd, sums, from,      dz,       {EPINORM_OUTPUT_POINTERS},
                           rows, width, groups,   EPINORM_LARGEST};
  const Columns here(groups);
  ColumnSums columns;
  backward_rows(here, tensors, columns);
  let_next_kernel_start();
  if (kSums + kColumnLargest > 0) write_partial(here, columns, partial, tensors.largest, width);
}
