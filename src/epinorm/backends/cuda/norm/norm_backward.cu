// dy, z, mean, rstd -> dz, the gradients of element operands, and this block's share of the sums
// over rows (gamma, beta, bias, channel operands). One read of dy and z, one write of dz.
//
// Where dz goes on to be split into planes (split_gradient.cu), also the largest magnitudes that
// its scales are made from: of each row, kRowLargest, and of each column, kColumnLargest.
//
// kSumsGiven: groups too wide for a block's registers. sum(g) and sum(g*h) of each (row, group)
// come from norm_backward_sums, and a lane holds any kVector neighbouring columns.
#include "common/dependent.cuh"
#include "common/empty_rows.cuh"
#include "norm/dz_store.cuh"
#include "norm/norm_rows.cuh"

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
    for (int j = 0; j < (kRowLargest ? kVector : 0); ++j)
      column_factor.value[j] = scale_that_counts(column_factor.value[j]);
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const i64 row = first + u * kWarpsY;
      if (row >= tensors.rows || !here.inside(e)) continue;
      T dx[kVector];
      finish_vector(pass, half, here, tensors, channels, row, u, e, columns, dx);
      if (kWriteDz) store_dz<kVector>(tensors.dz, row * tensors.width, here.column(e), dx);
      if constexpr (kRowLargest) {
#pragma unroll
        for (int j = 0; j < kVector; ++j)
          row_largest[u] = max(row_largest[u], magnitude(dx[j] * column_factor.value[j]));
      }
      if constexpr (kColumnLargest) {
        const float row_factor = scale_that_counts(__ldg(tensors.largest.row_factor + row));
#pragma unroll
        for (int j = 0; j < kVector; ++j)
          columns.largest[e * kVector + j] =
              max(columns.largest[e * kVector + j], magnitude(dx[j] * row_factor));
      }
    }
  }
  if constexpr (kRowLargest) {
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const i64 row = first + u * kWarpsY;  // the same in all lanes
      const unsigned largest = __reduce_max_sync(0xffffffffu, row_largest[u]);
      if (row >= tensors.rows || threadIdx.x % 32 != 0) continue;
      tensors.largest.row[row * row_parts() + row_part()] = largest;
      if (row_part() == 0) tensors.largest.row_flag[row] = 0;
    }
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
    if constexpr (!chain::kNormalises) {
    } else if (kSumsGiven) {
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

// dz may be written over z (runtime/prepared.py), and with kOwnsDy over dy: each thread reads its part before it
// writes there.
extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocksPerSm)
norm_backward(const Y* dy, i64 dy_stride, const S* z, i64 z_stride,
              const T* __restrict__ mean, const T* __restrict__ rstd,
              const T* __restrict__ row_sums, const Z* __restrict__ bias,
              const P* __restrict__ gamma, const P* __restrict__ beta, Z* dz,
              T* __restrict__ partial, i64 rows, int groups EPINORM_CHAIN_PARAMETERS
                  EPINORM_OUTPUT_PARAMETERS EPINORM_LARGEST_PARAMETERS) {
  wait_for_previous_kernel();
#ifdef EPINORM_WANTED  // dz alone, for the range guards: where rescale_planes.cu found anything flagged
  if (!(EPINORM_WANTED)) return;
#endif
  const Sources from = {bias, gamma, beta, EPINORM_OPERAND_POINTERS, EPINORM_OPERAND_STRIDES,
                        EPINORM_CONSTANTS,
                        chain::drops_of<T>(EPINORM_CONSTANTS, EPINORM_OPERAND_POINTERS)};
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
