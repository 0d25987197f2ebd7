// y = post(norm(pre(x Wᵀ + bias))) in one kernel, W fp32 as it lies in memory: each block converts what it
// multiplies (weight_fragments.cuh). Where x has few rows that costs less than making a plane of W first.
//
// Persistent blocks; a tile is kBlockN rows of W by kBlockM rows of x. W is operand A, so a thread's
// accumulators run along x's rows: at a tile's end they are turned around through x's ring, and a warp finishes
// a row of x (turned_epilogue.cuh).
//
// SCALES. A row's scale must be known before the row is read: sample_rows.cuh estimates it from a part of the
// row, with room above. Where that does not suffice halves overflow: then the block reads the rows that
// overflowed, corrects their scales and multiplies once more. So the scale, and every bit of the result,
// depends on the row alone.
//
// Each of the blocks that multiply the same rows of W looks at a share of the steps: whether halves hold what
// they round, and in training it writes them as W's plane.
//
// The prelude defines kWritesPlane; what two_rings.cuh, weight_fragments.cuh and turned_epilogue.cuh need; the
// instruction wgmma_a(float (&d)[kBlockM / 2], const u32 (&a)[4], u64 b); CHAIN_PARAMETERS, OPERAND_LIST,
// CONSTANT_LIST, AFFINE_SCALE.
#include "common/dependent.cuh"
#include "fp32/plane_value.cuh"
#include "fp32/sample_rows.cuh"
#include "gemm/hopper/turned_epilogue.cuh"
#include "gemm/hopper/two_rings.cuh"

// The thread, found out anew, as lane_here() does.
__device__ __forceinline__ int thread_here() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

constexpr int kAccumulators = kBlockM / 2;
static_assert(kBlockM * kTurnedRowBytes <= kStagesX * kStageBytesX, "the turned tile fits x's ring");

// Shared memory: the rings, the verdict, the barriers (gemm/hopper/fp32_weight.py adds them up too).
constexpr int kVerdictOffset = kRingsBytes;
constexpr int kVerdictBytes = 16;
constexpr int kBarrierOffset = kVerdictOffset + kVerdictBytes;

// Of all consumers: is it true for any thread?
__device__ __forceinline__ bool any_consumer(bool value) {
  u32 any;
  asm volatile(
      "{ .reg .pred p, q; setp.ne.u32 p, %1, 0; barrier.cta.red.or.aligned.pred q, 1, %2, p;"
      " selp.u32 %0, 1, 0, q; }"
      : "=r"(any)
      : "r"(static_cast<u32>(value)), "n"(kConsumerThreads)
      : "memory");
  return any != 0;
}
__device__ __forceinline__ void consumer_sync() { named_barrier_sync(1, kConsumerThreads); }

__device__ __forceinline__ void release(u32 empty) {
  if (threadIdx.x % 32 == 0) barrier_arrive(empty);
}

// Ties the fragments to this point: the products that read them are done.
__device__ __forceinline__ void keep_fragments(Fragments& a) {
#pragma unroll
  for (int i = 0; i < kStepProducts; ++i)
#pragma unroll
    for (int word = 0; word < kFragmentWords; ++word) asm volatile("" : "+r"(a[i][word])::"memory");
}

// What a tile's rows of W are to a thread: `row` and 8 below.
struct WeightRows {
  int row, n;
  OwnRows own;

  __device__ __forceinline__ WeightRows(const float* scales, int row, int n) : row(row), n(n) {
#pragma unroll
    for (int lower = 0; lower < 2; ++lower)
      own.factor[lower] = row + lower * 8 < n ? reciprocal_power(__ldcg(scales + row + lower * 8)) : 1.0f;
  }
};

// A consumer's places in the rings, and the main loop.
struct Multiplier {
  const Rings& rings;
  SlotW slot_w;
  SlotX slot_x;

  __device__ __forceinline__ explicit Multiplier(const Rings& rings) : rings(rings) {}

  template <class Look>
  __device__ __forceinline__ void make(Fragments& a, const WeightRows& rows, u32 offset, int step,
                                       Look look) {
    barrier_wait(rings.full_w(slot_w.stage), slot_w.parity);
    const u32 at = rings.w(slot_w.stage) + offset;
    rows.own.convert<kBoxBytesW>(a, at);
    look(a, at, step);
    __syncwarp();  // lanes may have come back from it one by one
    slot_w.next();
  }

  // k_steps: even. look(fragments, where they come from, step) is called for each.
  template <class Look>
  __device__ __forceinline__ void multiply(float (&v)[kAccumulators], const WeightRows& rows,
                                           u32 offset, int k_steps, Look look) {
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) v[i] = 0.0f;  // else they live through the epilogue
    Fragments a[2];  // one is multiplied while the other is made
    make(a[0], rows, offset, 0, look);
    for (int first = 0; first < k_steps; first += 2) {
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        barrier_wait(rings.full_x(slot_x.stage), slot_x.parity);
        const u64 b = descriptor<true, 0>(rings.x(slot_x.stage));
        wgmma_fence();  // the fragments were written by ordinary instructions
#pragma unroll
        for (int i = 0; i < kStepProducts; ++i)
          wgmma_a(v, a[u][i], b + i * (step_bytes<true>() >> 4));
        wgmma_commit();
        wgmma_wait<1>();  // the step before is done: its slot of x, and its registers
        keep_fragments(a[(u + 1) % 2]);
        // Only now: an arrival right behind the loads of make() overtakes them, and the copy engine
        // overwrites what has not been read (measured).
        __syncwarp();
        release(rings.empty_w(slot_w.before()));
        if (u > 0 || first > 0) release(rings.empty_x(slot_x.before()));
        slot_x.next();
        if (u == 0 || first + 2 < k_steps) make(a[(u + 1) % 2], rows, offset, first + u + 1, look);
      }
    }
    wgmma_wait<0>();
    keep_after_wait(v);
    keep_fragments(a[1]);
    release(rings.empty_x(slot_x.before()));
  }
};

struct Weight {
  const float* values;
  i64 stride;
  float* scale;
  Flag* flags;
  ColumnList* columns;
  u16* plane;
  int k_padded;
};

// Which of the 32 values that a lane converted, of the step from column k on, are too small for halves? They are
// read from the ring once more: few steps come here, but of a matrix full of zeros. What is too large has its
// row's scale corrected, and does not count.
__device__ __forceinline__ void note_step(const Weight& weight, const WeightRows& rows, u32 at, int k) {
#pragma unroll
  for (int lower = 0; lower < 2; ++lower)
#pragma unroll 1
    for (int i = 0; i < kStepProducts; ++i) {
      const uint4 unit = load_unit(OwnRows::chunk<kBoxBytesW>(at, i, lower));
      const u32 bits[4] = {unit.x, unit.y, unit.z, unit.w};
      u32 bad = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float value = __uint_as_float(bits[j]), factor = rows.own.factor[lower];
        const bool held = PlaneValue(value, factor, kTolerance).held;
        bad |= u32{!held && fabsf(value * factor) < 1.0f} << j;
      }
      const int column = k + i / 2 * kBoxColumns + threadIdx.x % 4 * 8 + i % 2 * 4;
      for (; bad != 0; bad &= bad - 1)
        note_spoilt(weight.flags, weight.columns, rows.row + lower * 8, column + __ffs(bad) - 1);
    }
}

// Of this warp's rows that may have overflowed, reads all of each, and gives those that did the scale that
// split_rows.cuh would, but for what row_shift excepts. Whether any of them can be multiplied with it; one that cannot is flagged.
__device__ __forceinline__ bool correct_scales(WeightRows& rows, const bool (&infinite)[2],
                                               const Weight& weight, int k) {
  constexpr float kOverflow = 65520.0f;  // rounds to infinity
  const int g = threadIdx.x % 32 / 4;
  bool any = false;
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) {
    u32 lanes = __ballot_sync(0xffffffffu, infinite[lower] && rows.row + lower * 8 < rows.n);
    while (lanes != 0) {
      const int i = (__ffs(lanes) - 1) / 4, row = rows.row - g + i + lower * 8;
      lanes &= ~(15u << i * 4);  // four lanes have the row
      const u32 largest = largest_of_row(weight.values + row * weight.stride, k);
      const float factor = __shfl_sync(0xffffffffu, rows.own.factor[lower], i * 4);
      if (__uint_as_float(largest) * factor < kOverflow) continue;  // false for NaN
      bool in_range;
      const int shift = plane_shift(largest, in_range);
      any |= in_range;
      if (g == i) rows.own.factor[lower] = plane_power_of_two(shift);
      if (threadIdx.x % 32 == 0) {
        weight.scale[row] = plane_power_of_two(-shift);
        if (!in_range) raise_flag(weight.flags, row, kWhole);
      }
      __syncwarp();
    }
  }
  return any;
}

// The tile's accumulators, W's scales undone, a row of x after the other.
__device__ __forceinline__ void turn(u32 tile, const float (&v)[kAccumulators],
                                     const WeightRows& rows, int row_in_tile) {
  const int q = lane_here() % 4;
  const float scale[2] = {reciprocal_power(rows.own.factor[0]), reciprocal_power(rows.own.factor[1])};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 2 * q + i;
    const u32 at = tile + row * kTurnedRowBytes + (row_in_tile ^ turned_places(row) * 8) * 4;
#pragma unroll
    for (int chunk = 0; chunk < kBlockM / 8; ++chunk)
#pragma unroll
      for (int lower = 0; lower < 2; ++lower)
        store_shared((lower ? at ^ 32 : at) + chunk * 8 * kTurnedRowBytes,
                     v[accumulator(chunk, lower, i)] * scale[lower]);
  }
}

// Where a row of W overflowed as halves, all its products are infinite or NaN: does this thread see that of
// the upper or the lower row?
__device__ __forceinline__ bool row_infinite(const float (&v)[kAccumulators], int lower) {
  float smallest = __int_as_float(0x7f800000);  // fminf passes NaN over
#pragma unroll
  for (int chunk = 0; chunk < kBlockM / 8; ++chunk)
    smallest = fminf(smallest, fminf(fabsf(v[accumulator(chunk, lower, 0)]),
                                     fabsf(v[accumulator(chunk, lower, 1)])));
  return smallest == __int_as_float(0x7f800000);
}

__device__ __forceinline__ void consume(const Rings& rings, const Epilogue& e, const Weight& weight,
                                        unsigned char* shared, int consumer, int k, int k_steps) {
  const int row_in_tile = consumer * 64 + threadIdx.x % kWarpgroupThreads / 32 * kWarpRows +
                          threadIdx.x % 32 / 4;
  const u32 offset = OwnRows::offset_in_box(row_in_tile);
  volatile int* again = reinterpret_cast<volatile int*>(shared + kVerdictOffset);
  const TileOrder order(e.n, e.m);
  Multiplier multiplier(rings);
  for (int index = blockIdx.x; index < order.count(); index += gridDim.x) {
    const Place place = order.at(index);
    WeightRows rows(weight.scale, place.n + row_in_tile, e.n);
    float v[kAccumulators];
    bool first_time = true, repeat;
    do {
      int next = place.m / kBlockM;  // step that this block looks at
      multiplier.multiply(v, rows, offset, k_steps, [&](const Fragments& a, u32 at, int step) {
        if (step != next) return;
        next += order.column_tiles;
        if (kWritesPlane)
          write_pieces(weight.plane, a, rows.row, step * kStepK, e.n, weight.k_padded);
        if (any_small(a)) note_step(weight, rows, at, step * kStepK);
      });
      // All products of the block are done when this is known, and x's ring is read no more.
      const bool infinite[2] = {row_infinite(v, 0), row_infinite(v, 1)};
      repeat = any_consumer(infinite[0] || infinite[1]) && first_time;
      if (repeat) repeat = any_consumer(correct_scales(rows, infinite, weight, k));
      first_time = false;
      if (threadIdx.x == 0) {
        *again = repeat;
        barrier_arrive(rings.judged());
      }
    } while (repeat);
    const int lane = lane_here(), column = place.n + lane * kLaneColumns;
    const LaneChannels channels(e, column);
    turn(rings.x(0), v, rows, row_in_tile);
    consumer_sync();
    finish_rows(e, channels, rings.x(0), place.m, thread_here() / 32 * kWarpRowsX, column, lane);
    fence_for_async_reads();
    __syncwarp();
    release(rings.returned());
  }
}

// x: its plane in the order of weight_fragments.cuh, (m, k) fp16, scaled by row_scale (m,). w: (n, k) fp32,
// rows w_stride apart, on 16 bytes. w_scale (n,): sample_rows.cuh's estimate, on return what was used;
// w_flags, w_columns (n,): as split_rows.cuh has them. w_plane: (n, k_padded) where kWritesPlane.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    linear_norm_fp32_weight(const __grid_constant__ TensorMap map_x,
                            const __grid_constant__ TensorMap map_w, float* y, float* z,
                            const float* bias, const float* gamma, const float* beta,
                            const float* row_scale, float* mean, float* rstd, const float* w,
                            i64 w_stride, float* w_scale,
                            Flag* w_flags, ColumnList* w_columns, u16* w_plane, int m, int n, int k,
                            int k_padded CHAIN_PARAMETERS) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Rings rings = {shared_address(shared), shared_address(shared + kBarrierOffset)};
  const int warpgroup = threadIdx.x / kWarpgroupThreads;
  const volatile int* again = reinterpret_cast<const volatile int*>(shared + kVerdictOffset);
  if (threadIdx.x == kConsumerThreads) rings_init(rings);
  __syncthreads();
  wait_for_previous_kernel();
  let_next_kernel_start();

  const int k_steps = (k + 2 * kStepK - 1) / (2 * kStepK) * 2;
  if (warpgroup == kConsumers) {
    give_registers<24>();
    const TileOrder order(n, m);
    if (threadIdx.x == kConsumerThreads)
      load_w(rings, &map_w, order, k_steps, again);
    else if (threadIdx.x == kConsumerThreads + 32)
      load_x(rings, &map_x, order, k_steps, again);
  } else {
    take_registers<240>();
    const Epilogue e = {bias, gamma, beta, OPERAND_LIST, CONSTANT_LIST, AFFINE_SCALE,
                        row_scale, y, z, mean, rstd, m, n,
                        chain::drops_of<float>(CONSTANT_LIST, OPERAND_LIST)};
    const Weight weight = {w, w_stride, w_scale, w_flags, w_columns, w_plane, k_padded};
    consume(rings, e, weight, shared, warpgroup, k, k_steps);
  }
}
