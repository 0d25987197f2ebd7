// y = post(norm(pre(x Wᵀ + bias))) in one kernel, W fp32 as it lies in memory: each block converts what it
// multiplies (weight_fragments.cuh). Where x has few rows that costs less than making a plane of W first.
//
// Persistent blocks; a tile is kBlockN rows of W by kBlockM rows of x. W is operand A, so a thread's
// accumulators run along x's rows: at a tile's end they are turned around through x's ring, and a warp finishes
// a row of x (transposed_epilogue.cuh).
//
// Scales of W's rows are estimated, and corrected where they do not suffice (register_operand.cuh).
//
// Each of the blocks that multiply the same rows of W looks at a share of the steps: whether halves hold what
// they round, and in training it writes them as W's plane.
//
// The prelude defines kWritesPlane; what two_rings.cuh, weight_fragments.cuh and transposed_epilogue.cuh need; the
// instruction wgmma_a(float (&d)[kBlockM / 2], const u32 (&a)[4], u64 b); CHAIN_PARAMETERS, OPERAND_LIST,
// CONSTANT_LIST, AFFINE_SCALE.
#include "common/dependent.cuh"
#include "gemm/hopper/register_operand.cuh"
#include "gemm/hopper/transposed_epilogue.cuh"

// The thread, found out anew, as lane_here() does.
__device__ __forceinline__ int thread_here() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

static_assert(kBlockM * kTurnedRowBytes <= kStagesX * kStageBytesX, "the turned tile fits x's ring");

// Shared memory: the rings, the verdict, the barriers (gemm/hopper/fp32_weight.py adds them up too).
constexpr int kVerdictOffset = kRingsBytes;
constexpr int kVerdictBytes = 16;
constexpr int kBarrierOffset = kVerdictOffset + kVerdictBytes;

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

__device__ __forceinline__ void consume(const Rings& rings, const Epilogue& e, const Weight& weight,
                                        unsigned char* shared, int consumer, int k, int k_steps) {
  const int row_in_tile = consumer * 64 + threadIdx.x % kWarpgroupThreads / 32 * kWarpRows +
                          threadIdx.x % 32 / 4;
  const u32 offset = OwnRows::offset_in_box(row_in_tile);
  volatile int* again = reinterpret_cast<volatile int*>(shared + kVerdictOffset);
  const TileOrder order(e.n, e.m);
  Multiplier multiplier(rings);
  for (int index = order.first(); index < order.count(); index += order.step()) {
    const Place place = order.at(index);
    WeightRows rows(weight.scale, place.n + row_in_tile, e.n);
    float v[kAccumulators];
    multiply_tile(v, multiplier, rows, weight, offset, place.m / kBlockM, order.column_tiles, k,
                  k_steps, again);
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
  const volatile int* again = reinterpret_cast<const volatile int*>(shared + kVerdictOffset);
  const auto work = [&](int warpgroup, int k_steps) {
    const Epilogue e = {bias, gamma, beta, OPERAND_LIST, CONSTANT_LIST, AFFINE_SCALE,
                        row_scale, y, z, mean, rstd, m, n,
                        chain::drops_of<float>(CONSTANT_LIST, OPERAND_LIST)};
    const Weight weight = {w, w_stride, w_scale, w_flags, w_columns, w_plane, k_padded};
    consume(rings, e, weight, shared, warpgroup, k, k_steps);
  };
  share_work<0>(rings, again, &map_w, &map_x, n, m, k, NothingElse{}, work);
}
