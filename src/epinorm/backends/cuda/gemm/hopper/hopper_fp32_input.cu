// y = post(norm(pre(x Wᵀ + bias))) in one kernel, x fp32 as it lies in memory: each block converts what it
// multiplies (weight_fragments.cuh), W is a plane. Where W has few rows that costs less than making a plane of x
// first.
//
// Persistent blocks; a tile is 128 rows of x by kBlockM rows of W. x is operand A, so accumulators lie as every
// product's do, and the epilogue is theirs (norm_epilogue.cuh). Scales of x's rows are estimated, and corrected
// where they do not suffice (register_operand.cuh, which calls x W and W x).
//
// Each of the blocks that multiply the same rows of x looks at a share of the steps: whether halves hold what
// they round, and in training it writes them as x's plane.
//
// Tiles may be wider than one product (in halves): it is two then, of half the columns, and a step along k is half as
// long, so that fragments of two fit the registers. A group of up to twice as many columns is shared by the two blocks
// of a cluster.
//
// The prelude defines kWritesPlane; what register_operand.cuh and norm_epilogue.cuh need; HELD_PARAMETER,
// CHAIN_PARAMETERS, OPERAND_LIST, CONSTANT_LIST, AFFINE_SCALE.
#include "common/dependent.cuh"
#include "gemm/hopper/register_operand.cuh"

constexpr int kWarpColumns = kBlockM;
constexpr int kVectorColumns = kBlockM, kVectorThreads = kWarpgroupThreads;
constexpr int kParts = kClusterN, kColumnParts = 1;
constexpr int kProductM = 64;  // rows of a consumer
constexpr bool kPacksAffine = true;
constexpr int kSpareRegisters = 240 - kAccumulators - 16;  // the fragments' are free in the epilogue
#define COMBINES_PARTS
#include "gemm/hopper/lent_slots.cuh"
#include "gemm/norm_epilogue.cuh"
constexpr int kExchangeBarrier = 2 + kConsumers;  // named, after register_operand.cuh's and the vectors'
#include "gemm/hopper/part_exchange.cuh"

// Shared memory: the rings, the store buffers, the vectors, the exchange, the verdict, the barriers (hopper_tile.py
// adds them up too).
constexpr int kStoreOffset = kRingsBytes;
constexpr int kVectorOffset = kStoreOffset + kConsumerWarps * kStoreBufferBytes;
constexpr int kExchangeOffset = kVectorOffset + kConsumers * kVectorBytes;
constexpr int kVerdictOffset = kExchangeOffset + kExchangeBytes;
constexpr int kVerdictBytes = 16;
constexpr int kBarrierOffset = kVerdictOffset + kVerdictBytes;

// A consumer's thread, found out anew: what the compiler computes from it is not kept in registers while products,
// or a tile's rows, need them.
__device__ __forceinline__ int thread_here() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread % kWarpgroupThreads;
}

// Those of a tile's columns, to this consumer's part of shared memory.
__device__ __forceinline__ void share_vectors(const Epilogue& e, unsigned char* shared, int consumer,
                                              int first_column) {
  const int thread = thread_here();
  float* vectors = reinterpret_cast<float*>(shared + kVectorOffset + consumer * kVectorBytes);
  Fetched fetched;
  fetch_vectors(fetched, e, first_column, thread);
  named_barrier_sync(2 + consumer, kWarpgroupThreads);  // the last tile's are no longer read
  store_vectors(fetched, vectors, thread, e.affine_scale);
  named_barrier_sync(2 + consumer, kWarpgroupThreads);
}

__device__ __forceinline__ void consume(const Rings& rings, const Epilogue& e, const Weight& input,
                                        unsigned char* shared, int consumer, int k, int k_steps) {
  volatile int* again = reinterpret_cast<volatile int*>(shared + kVerdictOffset);
  const TileOrder order(e.m, e.n);
  GroupSum group_sum = {
      {shared_address(shared + kExchangeOffset + consumer * 2 * kExchangeBufferBytes),
       rings.barriers + kBarrierBytes + consumer * 2 * 8, order.rank}};
  Multiplier multiplier(rings);
  for (int index = order.first(); index < order.count(); index += order.step()) {
    const Place place = order.at(index);  // n: x's row; m: W's, y's column
    if (kVectors > 0 && (index == order.first() || order.column_tiles > 1))
      share_vectors(e, shared, consumer, place.m);
    float v[kAccumulators];
    OwnScales scales;
    {
      const int thread = thread_here(), warp = thread / 32;
      const int row_in_tile = consumer * kProductM + warp * kWarpRows + thread % 32 / 4;
      WeightRows rows(input.scale, place.n + row_in_tile, e.m);
      if (!kHoldsOperand) prefetch_operands<kProductM>(e, place.n + consumer * kProductM, place.m, thread);
      multiply_tile(v, multiplier, rows, input, OwnRows::offset_in_box(row_in_tile), place.m / kBlockM,
                    order.column_tiles * kClusterN, k, k_steps, again);
#pragma unroll
      for (int lower = 0; lower < 2; ++lower) scales.of[lower] = reciprocal_power(rows.own.factor[lower]);
    }
    const int warp = thread_here() / 32;
    const float* vectors = reinterpret_cast<const float*>(shared + kVectorOffset + consumer * kVectorBytes);
    const u32 buffer = shared_address(shared + kStoreOffset + (consumer * 4 + warp) * kStoreBufferBytes);
    const int warp_row_in_tile = consumer * kProductM + warp * kWarpRows;
#ifdef HOLDS_OPERAND
    const HeldOperand held = {rings, multiplier.slot_w, warp_row_in_tile};
#else
    const HeldOperand held{};
#endif
    finish_row_block(v, e, {vectors, 0}, group_sum, buffer, place.n + warp_row_in_tile, place.m, held,
                     scales);
  }
}

// x: (m, k) fp32, rows x_stride apart, on 16 bytes. x_scale (m,): sample_rows.cuh's estimate, in halves none, on
// return what was used; x_flags, x_columns (m,): as split_rows.cuh has them. x_plane: (m, k_padded) where
// kWritesPlane. map_w: W's plane in the order of weight_fragments.cuh, (n, k) fp16, scaled by column_scale (n,).
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    linear_norm_fp32_input(HELD_PARAMETER const __grid_constant__ TensorMap map_w,
                           const __grid_constant__ TensorMap map_x, float* y, float* z,
                           const float* bias, const float* gamma, const float* beta,
                           const float* column_scale, float* mean, float* rstd, const float* x,
                           i64 x_stride, float* x_scale, Flag* x_flags, ColumnList* x_columns,
                           u16* x_plane, int m, int n, int k, int k_padded CHAIN_PARAMETERS) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 barriers = shared_address(shared + kBarrierOffset);
  const Rings rings = {barriers - kBarrierOffset, barriers};
  const volatile int* again = reinterpret_cast<const volatile int*>(shared + kVerdictOffset);
  const auto work = [&](int warpgroup, int k_steps) {
    const Epilogue e = {bias, gamma, beta, OPERAND_LIST, CONSTANT_LIST, AFFINE_SCALE,
                        x_scale, column_scale, y, z, mean, rstd, m, n,
                        chain::drops_of<float>(CONSTANT_LIST, OPERAND_LIST)};
    const Weight input = {x, x_stride, x_scale, x_flags, x_columns, x_plane, k_padded};
    consume(rings, e, input, shared, warpgroup, k, k_steps);
  };
#ifdef HOLDS_OPERAND
  const LentSlots what_else = {&element};
#else
  const NothingElse what_else;
#endif
  share_work<kExchanges>(rings, again, &map_x, &map_w, m, n, k, what_else, work);
}
