// As norm_backward.cu, where a cluster of blocks holds whole rows: dz leaves as the planes that dX
// and dW are computed from, and is never written in fp32.
//
// The planes are of u[i, n] = dz[i, n] column_factor[n], W's scales, in the scale of row i. That
// scale needs the row's largest magnitude, which the blocks of a cluster find together
// (row_exchange.cuh); meanwhile the row's values stay in registers, and the next row is worked on.
//
// A row counts in dW with the power of two that its scale and x's leave, and x's planes must be
// rescaled where rows differ in it. So every cluster begins with row 0, whose power the other rows
// take over if their values then fit as well. internals/training.md.
//
// The prelude gives, besides what norm_rows.cuh and row_ring.cuh need: kStrips, blocks of a
// cluster, which span a row; kPlanes; kTolerance.
#include "common/dependent.cuh"
#include "norm/norm_rows.cuh"
#include "fp32/plane_value.cuh"
#include "fp32/row_exchange.cuh"
#include "fp32/row_power.cuh"
#include "fp32/row_ring.cuh"

static_assert(kWarpsY == 1 && kRowLargest && kColumnLargest && !kSumsGiven && !kRaggedRows,
              "whole rows");

using Exchange = RowExchange<kStrips, kRowWarps>;

// In place of a column's largest magnitude: it has an element in a row out of range.
constexpr u32 kSpoilt = 0xffffffffu;

// Of what counts in dW: above it, what the planes hold does not leave fp32's range.
constexpr int kLeastPower = -100;

// A scaled value from here on is a normal number in fp16, so one plane or two hold it.
constexpr float kSurelyHeld = 0x1p-14f;

// What is written of each row: planes (M, N), their scale (M,), the power of two that the row
// counts in dW (M,); and a bit a warp, 1 where its part is not held: of the rows of a cluster in
// turn, in words (row_parts(), gridDim.y, words).
struct RowTargets {
  u16 *hi, *lo;
  float* scale;
  int* power;
  u32* spoilt;
  int words;
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

// The exponent of the scale of a row whose largest magnitude has these bits: of those that bring it
// between 2^13 and fp16's largest, the one that makes the row count most nearly as `preferred` says.
EPINORM_FUNCTION int shift_of(u32 largest, int x_power, int preferred, bool& in_range) {
  constexpr u32 kMantissa = 0x7fffff, kLargestMantissa = 0x7fe000;  // of 65504
  const int shift = plane_shift(largest, in_range);
  if (!in_range || largest == 0 || preferred == kNoPower) return shift;
  const int highest = shift + ((largest & kMantissa) <= kLargestMantissa);
  return min(max(x_power - preferred, shift - 1), highest);
}

// Has W a row of zeros, or one that split_rows.cuh could not scale? By the whole warp.
EPINORM_FUNCTION bool has_empty_row(const Tensors& tensors) {
  bool found = false;
#pragma unroll 16
  for (i64 row = threadIdx.x % 32; row < tensors.width; row += 32)
    found |= is_of_empty_row(__ldg(tensors.largest.column_factor + row));
  return __any_sync(kAllLanes, found);
}

// A row whose largest magnitude is on its way.
struct Unsplit {
  float dz[kValues];
  int x_power;  // x's scale of it
  int row;

  // The second half of a row; returns the bits of the largest magnitude of u here. own: this cluster
  // is the one whose row it is.
  EPINORM_FUNCTION u32 finish(const Pass& pass, const Halfway& half, const Columns& here,
                              const Tensors& tensors, const ChannelStore& store,
                              const ColumnFactors& factors, ColumnSums& columns, bool own) {
    float largest = 0.0f;
#pragma unroll
    for (int e = 0; e < kVectors; ++e) {
      if (!here.inside(e)) continue;
      T dx[kVector];
      finish_vector(pass, half, here, tensors, store.get(tensors.from, here, e), row, 0, e, columns,
                    dx, own);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const int i = e * kVector + j;
        dz[i] = dx[j];
        largest = larger_or_nan(largest, fabsf(dx[j] * factors.of[i]));
      }
    }
    return __float_as_uint(largest);
  }

  // Whether x's row is zero, or out of range, which has all of dW computed again: dz's row then has no
  // part in dW.
  EPINORM_FUNCTION bool x_row_is_empty() const { return x_power == -kEmptyRowShift; }

  // The power that the row counts in dW by itself, where `largest` is that of all of it.
  EPINORM_FUNCTION int own_power(u32 largest) const {
    bool in_range;
    const int power = x_power - plane_shift(largest, in_range);
    const bool counts = in_range && largest != 0 && power >= kLeastPower && !x_row_is_empty();
    return counts ? power : kNoPower;
  }

  // Writes the row and returns the power that it counts in dW; spoilt: whether a part of it that is
  // this warp's is not held.
  EPINORM_FUNCTION int split(u32 largest, int preferred, const Columns& here, const Tensors& tensors,
                             const RowTargets& to, const ColumnFactors& factors, ColumnSums& columns,
                             bool& spoilt) const {
    bool in_range;
    const int shift = shift_of(largest, x_power, preferred, in_range);
    const int power = x_power - shift;
    in_range &= power >= kLeastPower || x_row_is_empty();
    const float by = plane_power_of_two(shift);
    const int width = static_cast<int>(tensors.width);
    const float counts = x_row_is_empty() ? 0.0f : plane_power_of_two(max(power, kLeastPower));
    float smallest = static_cast<float>(EPINORM_INFINITY);
#pragma unroll
    for (int e = 0; e < kVectors; ++e) {
      if (!here.inside(e)) continue;
      Vector<u16, kVector> hi, lo;
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const int i = e * kVector + j;
        const PlaneValue p(dz[i], factors.of[i] * by);
        hi.value[j] = p.hi;
        lo.value[j] = p.lo;
        const float magnitude = fabsf(p.scaled);
        if (dz[i] != 0.0f) smallest = fminf(smallest, magnitude);
        columns.largest[i] = max(columns.largest[i], __float_as_uint(magnitude * counts));
      }
      const int at = row * width + here.column(e);
      hi.store(to.hi + at);
      if (kPlanes == 2) lo.store(to.lo + at);
    }
    // A lane without a group has no x's scale either.
    const bool doubtful = here.live && (!in_range || smallest < kSurelyHeld);
    spoilt = __any_sync(kAllLanes, doubtful) && find_unheld(here, in_range, by, tensors, factors, columns);
    const int counted = in_range && largest != 0 && !x_row_is_empty() ? power : kNoPower;
    if (row_part() == 0 && threadIdx.x == 0) {
      to.scale[row] = plane_power_of_two(-shift);
      to.power[row] = counted;
    }
    return counted;
  }

  // Looks at each value by itself, by the whole warp. What planes lose of values in range is too little for
  // dX unless the row's largest may stand beside a row of zeros in W, and for dW, or all of the column is flagged
  // by its largest (rescale_planes.cu).
  EPINORM_FUNCTION bool find_unheld(const Columns& here, bool in_range, float by,
                                    const Tensors& tensors, const ColumnFactors& factors,
                                    ColumnSums& columns) const {
    // A row out of range is left out of dW's planes, so its columns that are not zero are marked: no
    // element passes a negative tolerance.
    const float tolerance = in_range ? kTolerance : -1.0f;
    bool unheld = false;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (!here.inside(i / kVector)) continue;
      if (PlaneValue(dz[i], factors.of[i] * by).held(tolerance)) continue;
      if (!in_range) columns.largest[i] = kSpoilt;
      unheld = true;
    }
    if (__any_sync(kAllLanes, here.live && !in_range)) return true;
    return __any_sync(kAllLanes, unheld) && has_empty_row(tensors);
  }
};

// A row's numbers that a thread reads besides its vectors.
struct RowScalars {
  float mean = 0.0f, rstd = 0.0f, factor = 0.0f;

  // Rows beyond the last one, and lanes beyond the last group, keep what is there.
  EPINORM_FUNCTION void load(const Columns& here, const Tensors& from, int row, int rows) {
    if (!here.live || row >= rows) return;
    const int group = row * from.groups + here.group;
    if (chain::kCentred) mean = __ldg(from.mean + group);
    if (chain::kNormalises) rstd = __ldg(from.rstd + group);
    factor = __ldg(from.largest.row_factor + row);
  }
};

// The rows of one block, one after the other; row 0 is the first of every block.
template <typename TeamType>
struct Rows {
  TeamType team;
  const Exchange& exchange;
  const Columns& here;
  const Tensors& tensors;
  const RowTargets& to;
  const ChannelStore store;
  const ColumnFactors factors;
  const int rows, step = gridDim.y;
  RowRing ring;
  RowScalars scalars;  // of the next row
  u32 index = 0;       // of the next row among this block's
  int stage = 0;

  EPINORM_FUNCTION Rows(TeamType team, const Exchange& exchange, RowRing::Stage* stages,
                        const Columns& here, const Tensors& tensors, const RowTargets& to)
      : team(team), exchange(exchange), here(here), tensors(tensors), to(to),
        store(tensors.from, here), factors(here, tensors.largest.column_factor),
        rows(static_cast<int>(tensors.rows)), ring(stages, here, tensors) {
    scalars.load(here, tensors, 0, rows);
    if (threadIdx.x % 32 == 0)
      for (int word = 0; word < to.words; ++word) spoilt_words()[word] = 0;
  }

  // This warp's part of what is not held; all of it is written by its first lane.
  EPINORM_FUNCTION u32* spoilt_words() const {
    return to.spoilt + (row_part() * gridDim.y + blockIdx.y) * to.words;
  }

  // A row up to its largest magnitude, which is sent; next: the row after it.
  EPINORM_FUNCTION void begin(Unsplit& now, int next, ColumnSums& columns, bool own) {
    now.x_power = power_of(scalars.factor);
    const Pass pass =
        ring.take(stage, here, tensors.from, now.row, scalars.mean, scalars.rstd);
    scalars.load(here, tensors, next, rows);
    Halfway half(pass, here, tensors, store, now.row, columns);
    if constexpr (chain::kNormalises) team.sum(half.sums);
    ring.fill(stage, here);
    stage = stage + 1 < kStages ? stage + 1 : 0;
    exchange.send(index, now.finish(pass, half, here, tensors, store, factors, columns, own));
    ++index;
  }

  // The rest of a row; place: among this block's, from 1.
  EPINORM_FUNCTION void split(const Unsplit& before, u32 place, int preferred, ColumnSums& columns,
                              PowerRange& powers) {
    bool spoilt;
    powers.add(before.split(exchange.receive(place), preferred, here, tensors, to, factors, columns,
                            spoilt));
    if (spoilt && threadIdx.x % 32 == 0) spoilt_words()[(place - 1) / 32] |= 1u << (place - 1) % 32;
  }

  EPINORM_FUNCTION PowerRange run(ColumnSums& columns) {
    PowerRange powers;
    Unsplit before;
    before.row = 0;
    {
      ColumnSums unused;
      begin(before, blockIdx.y, unused, false);
    }
    int preferred = kNoPower;
    for (int row = blockIdx.y; row < rows; row += step) {
      Unsplit now;
      now.row = row;
      begin(now, row + step, columns, true);
      if (index == 2)
        preferred = before.own_power(exchange.receive(0));
      else
        split(before, index - 2, preferred, columns, powers);
      before = now;
    }
    split(before, index - 1, preferred, columns, powers);
    powers.common = preferred;
    return powers;
  }
};

// any: a word that rescale_planes.cu sets where something is flagged; 0 until then.
extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocksPerSm)
norm_backward_planes(const float* __restrict__ dy, i64 dy_stride, const float* __restrict__ z,
                     i64 z_stride, const float* __restrict__ mean, const float* __restrict__ rstd,
                     const float* __restrict__ bias, const float* __restrict__ gamma,
                     const float* __restrict__ beta, const float* __restrict__ column_factor,
                     const float* __restrict__ row_factor, u16* __restrict__ hi,
                     u16* __restrict__ lo, float* __restrict__ scale, int* __restrict__ power,
                     u32* __restrict__ spoilt, int spoilt_words, PowerRange* __restrict__ ranges,
                     unsigned* __restrict__ column_largest, unsigned char* __restrict__ column_flag,
                     unsigned* __restrict__ any, float* __restrict__ partial, i64 rows,
                     int groups EPINORM_CHAIN_PARAMETERS EPINORM_OUTPUT_PARAMETERS) {
  __shared__ Exchange::Shared shared_maxima;
  __shared__ __align__(16) RowRing::Stage stages[kStages];
  const Exchange exchange(shared_maxima);
  wait_for_previous_kernel();
  const Sources from = {bias, gamma, beta, EPINORM_OPERAND_POINTERS, EPINORM_OPERAND_STRIDES,
                        EPINORM_CONSTANTS,
                        chain::drops_of<T>(EPINORM_CONSTANTS, EPINORM_OPERAND_POINTERS)};
  const i64 width = i64(groups) * kChannels;
  const Largest largest = {column_factor, row_factor, nullptr,
                           column_largest, nullptr, column_flag};
  const Tensors tensors = {dy,   z,       dy_stride, z_stride, mean,
                           rstd, nullptr, from,      nullptr,  {EPINORM_OUTPUT_POINTERS},
                           rows, width,   groups,    largest};
  const RowTargets to = {hi, lo, scale, power, spoilt, spoilt_words};
  const Columns here(groups);
  ColumnSums columns;
  PowerRange powers;
  if constexpr (kBlockTeam) {
    using BlockTeam = Team<kLanes, T, 2>;
    __shared__ T scratch[2][2][BlockTeam::kWarps];
    powers = Rows<BlockTeam>(BlockTeam(scratch), exchange, stages, here, tensors, to).run(columns);
  } else {
    using OwnTeam = WarpTeam<kLanes, T>;
    powers = Rows<OwnTeam>(OwnTeam(), exchange, stages, here, tensors, to).run(columns);
  }
  let_next_kernel_start();
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    ranges[blockIdx.y] = powers;
    if (blockIdx.y == 0) *any = 0;
  }
  write_partial(here, columns, partial, tensors.largest, width);
}
