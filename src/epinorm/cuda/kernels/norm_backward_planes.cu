// As norm_backward.cu, where a cluster of blocks holds whole rows: dz leaves as the planes that dX
// and dW are computed from, and is never written in fp32.
//
// The planes are of u[i, n] = dz[i, n] column_factor[n], W's scales, in the scale of row i. That
// scale needs the row's largest magnitude, which the blocks of a cluster find together
// (row_exchange.cuh); meanwhile the row's values stay in registers, and the next row is worked on.
// docs/training.md.
//
// The prelude gives, besides what norm_rows.cuh and row_ring.cuh need: kStrips, blocks of a
// cluster, which span a row; kPlanes; kTolerance.
#include "dependent.cuh"
#include "norm_rows.cuh"
#include "plane_value.cuh"
#include "row_exchange.cuh"
#include "row_power.cuh"
#include "row_ring.cuh"

static_assert(kWarpsY == 1 && kRowLargest && kColumnLargest && !kSumsGiven, "whole rows");

using Exchange = RowExchange<kStrips, kRowWarps>;

// In place of a column's largest magnitude: an element of it that the planes do not hold.
constexpr u32 kSpoilt = 0xffffffffu;

// Of what counts in dW: above it, whatever the planes hold stays in fp32's normal range.
constexpr int kLeastPower = -100;

// What is written of each row: planes (M, N), their scale (M,), the power of two that the row
// counts in dW (M,), and a byte a warp (row_parts(), M), not 0 where its part is not held.
struct RowTargets {
  u16 *hi, *lo;
  float* scale;
  int* power;
  unsigned char* spoilt;
};

// max.NaN.f32: NaN where one of both is.
__device__ __forceinline__ float larger_or_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

// The scales of W's planes for this thread's columns.
struct ColumnFactors {
  float of[kValues];

  EPINORM_FUNCTION ColumnFactors(const Columns& here, const float* column_factor) {
#pragma unroll
    for (int e = 0; e < kVectors; ++e) {
      Vector<float, kVector> vector;
      if (here.inside(e)) vector.load(column_factor + here.column(e));
#pragma unroll
      for (int j = 0; j < kVector; ++j) of[e * kVector + j] = vector.value[j];
    }
  }
};

// A row whose largest magnitude is on its way.
struct Unsplit {
  float dz[kValues];
  float factor;  // x's scale of it
  i64 row;

  // The second half of a row; returns the bits of the largest magnitude of u here.
  EPINORM_FUNCTION u32 finish(const Pass& pass, const Halfway& half, const Columns& here,
                              const Tensors& tensors, const ChannelStore& store,
                              const ColumnFactors& factors, ColumnSums& columns) {
    float largest = 0.0f;
#pragma unroll
    for (int e = 0; e < kVectors; ++e) {
      if (!here.inside(e)) continue;
      T dx[kVector];
      finish_vector(pass, half, here, tensors, store.get(tensors.from, here, e), row, 0, e, columns,
                    dx);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const int i = e * kVector + j;
        dz[i] = dx[j];
        largest = larger_or_nan(largest, fabsf(dx[j] * factors.of[i]));
      }
    }
    return __float_as_uint(largest);
  }

  // Writes the row, where `largest` is that of all of it, and returns the power that it counts in
  // dW.
  EPINORM_FUNCTION int split(u32 largest, const Columns& here, const Tensors& tensors,
                             const RowTargets& to, const ColumnFactors& factors,
                             ColumnSums& columns) const {
    bool in_range;
    const int shift = plane_shift(largest, in_range);
    const int power = power_of(factor) - shift;
    in_range &= power >= kLeastPower;
    const float by = plane_power_of_two(shift);
    const float counts = plane_power_of_two(max(power, kLeastPower));
    // A row out of range counts nothing in dW, where each of its columns would need it.
    const float tolerance = in_range ? kTolerance : -1.0f;
    bool spoilt = here.live && !in_range;  // a lane without a group has no x's scale either
#pragma unroll
    for (int e = 0; e < kVectors; ++e) {
      if (!here.inside(e)) continue;
      Vector<u16, kVector> hi, lo;
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const int i = e * kVector + j;
        const PlaneValue p(dz[i], factors.of[i] * by, tolerance);
        hi.value[j] = p.hi;
        lo.value[j] = p.lo;
        spoilt |= !p.held;
        columns.largest[i] =
            max(columns.largest[i], p.held ? __float_as_uint(fabsf(p.scaled) * counts) : kSpoilt);
      }
      const i64 at = row * tensors.width + here.column(e);
      hi.store(to.hi + at);
      if (kPlanes == 2) lo.store(to.lo + at);
    }
    const bool any_spoilt = __any_sync(0xffffffffu, spoilt);
    const int counted = in_range && largest != 0 ? power : kNoPower;
    if (threadIdx.x % 32 == 0) {
      to.spoilt[row_part() * tensors.rows + row] = any_spoilt;
      if (row_part() == 0) {
        to.scale[row] = plane_power_of_two(-shift);
        to.power[row] = counted;
      }
    }
    return counted;
  }
};

template <typename TeamType>
EPINORM_FUNCTION PowerRange planes_of_rows(TeamType team, const Exchange& exchange,
                                           RowRing& ring, const Columns& here,
                                           const Tensors& tensors, const RowTargets& to,
                                           ColumnSums& columns) {
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) ring.fill(stage, here);
  const ChannelStore store(tensors.from, here);
  const ColumnFactors factors(here, tensors.largest.column_factor);

  PowerRange powers;
  Unsplit before;
  u32 index = 0;
  int stage = 0;
  const auto split_before = [&] {
    return before.split(exchange.receive(index - 1), here, tensors, to, factors, columns);
  };
  for (i64 row = blockIdx.y; row < tensors.rows; row += gridDim.y, ++index) {
    Unsplit now;
    now.row = row;
    const Pass pass = ring.take(stage, here, now.factor);
    Halfway half(pass, here, tensors, store, row, columns);
    team.sum(half.sums);
    ring.fill(stage, here);
    stage = stage + 1 < kStages ? stage + 1 : 0;
    exchange.send(index, now.finish(pass, half, here, tensors, store, factors, columns));
    if (index > 0) powers.add(split_before());
    before = now;
  }
  if (index > 0) powers.add(split_before());
  return powers;
}

// any: a word that rescale_planes.cu sets where something is flagged; 0 until then.
extern "C" __global__ void __launch_bounds__(kThreads, kResident)
norm_backward_planes(const float* __restrict__ dy, i64 dy_stride, const float* __restrict__ z,
                     i64 z_stride, const float* __restrict__ mean, const float* __restrict__ rstd,
                     const float* __restrict__ bias, const float* __restrict__ gamma,
                     const float* __restrict__ beta, const float* __restrict__ column_factor,
                     const float* __restrict__ row_factor, u16* __restrict__ hi,
                     u16* __restrict__ lo, float* __restrict__ scale, int* __restrict__ power,
                     unsigned char* __restrict__ spoilt, PowerRange* __restrict__ ranges,
                     unsigned* __restrict__ column_largest, unsigned char* __restrict__ column_flag,
                     unsigned* __restrict__ any, float* __restrict__ partial, i64 rows,
                     int groups EPINORM_OPERAND_PARAMETERS EPINORM_OUTPUT_PARAMETERS) {
  __shared__ Exchange::Shared shared_maxima;
  __shared__ __align__(16) RowRing::Stage stages[kStages];
  const Exchange exchange(shared_maxima);
  wait_for_previous_kernel();
  const Sources from = {bias, gamma, beta, EPINORM_OPERAND_POINTERS, EPINORM_OPERAND_STRIDES};
  const i64 width = i64(groups) * kChannels;
  const Largest largest = {column_factor, row_factor, nullptr,
                           column_largest, nullptr, column_flag};
  const Tensors tensors = {dy,   z,       dy_stride, z_stride, mean,
                           rstd, nullptr, from,      nullptr,  {EPINORM_OUTPUT_POINTERS},
                           rows, width,   groups,    largest};
  const RowTargets to = {hi, lo, scale, power, spoilt};
  const Columns here(groups);
  RowRing ring(stages, here, tensors);
  ColumnSums columns;
  PowerRange powers;
  if constexpr (kBlockTeam) {
    using BlockTeam = Team<kLanes, T, 2>;
    __shared__ T scratch[2][2][BlockTeam::kWarps];
    powers = planes_of_rows(BlockTeam(scratch), exchange, ring, here, tensors, to, columns);
  } else {
    powers = planes_of_rows(WarpTeam<kLanes, T>(), exchange, ring, here, tensors, to, columns);
  }
  let_next_kernel_start();
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    ranges[blockIdx.y] = powers;
    if (blockIdx.y == 0) *any = 0;
  }
  write_partial(here, columns, partial, tensors.largest, width);
}
