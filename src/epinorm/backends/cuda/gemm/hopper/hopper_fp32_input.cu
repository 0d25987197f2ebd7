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
// The prelude defines kWritesPlane; what register_operand.cuh and norm_epilogue.cuh need; CHAIN_PARAMETERS,
// OPERAND_LIST, CONSTANT_LIST, AFFINE_SCALE.
#include "common/dependent.cuh"
#include "gemm/hopper/register_operand.cuh"

constexpr int kWarpColumns = kBlockM;
constexpr int kVectorColumns = kBlockM, kVectorThreads = kWarpgroupThreads;
constexpr int kParts = 1;
constexpr bool kPacksAffine = true;
constexpr int kSpareRegisters = 240 - kAccumulators - 16;  // the fragments' are free in the epilogue
#include "gemm/norm_epilogue.cuh"

// Shared memory: the rings, the store buffers, the vectors, the verdict, the barriers (hopper_tile.py adds them up
// too).
constexpr int kStoreOffset = kRingsBytes;
constexpr int kVectorOffset = kStoreOffset + kConsumerWarps * kStoreBufferBytes;
constexpr int kVerdictOffset = kVectorOffset + kConsumers * kVectorBytes;
constexpr int kVerdictBytes = 16;
constexpr int kBarrierOffset = kVerdictOffset + kVerdictBytes;

struct GroupSum {
  static constexpr int part = 0;
  __device__ __forceinline__ void operator()(float (&sums)[2]) const {
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) sums[lower] = Segment::sum(sums[lower]);
  }
};

__device__ __forceinline__ void consume(const Rings& rings, const Epilogue& e, const Weight& input,
                                        unsigned char* shared, int consumer, int k, int k_steps) {
  const int thread = threadIdx.x % kWarpgroupThreads, warp = thread / 32;
  const int warp_row_in_tile = consumer * 64 + warp * kWarpRows;
  const int row_in_tile = warp_row_in_tile + threadIdx.x % 32 / 4;
  const u32 offset = OwnRows::offset_in_box(row_in_tile);
  const u32 buffer =
      shared_address(shared + kStoreOffset + (consumer * 4 + warp) * kStoreBufferBytes);
  float* vectors = reinterpret_cast<float*>(shared + kVectorOffset + consumer * kVectorBytes);
  volatile int* again = reinterpret_cast<volatile int*>(shared + kVerdictOffset);
  const TileOrder order(e.m, e.n);
  GroupSum group_sum;
  Multiplier multiplier(rings);
  for (int index = blockIdx.x; index < order.count(); index += gridDim.x) {
    const Place place = order.at(index);  // n: x's row; m: W's, y's column
    WeightRows rows(input.scale, place.n + row_in_tile, e.m);
    prefetch_operands<64>(e, place.n + consumer * 64, place.m, thread);
    float v[kAccumulators];
    multiply_tile(v, multiplier, rows, input, offset, place.m / kBlockM, order.column_tiles, k,
                  k_steps, again);
    Fetched fetched;
    fetch_vectors(fetched, e, place.m, thread);
    named_barrier_sync(2 + consumer, kWarpgroupThreads);  // the last tile's are no longer read
    store_vectors(fetched, vectors, thread, e.affine_scale);
    named_barrier_sync(2 + consumer, kWarpgroupThreads);
    finish_row_block(v, e, {vectors, 0}, group_sum, buffer, place.n + warp_row_in_tile, place.m, HeldOperand{});
  }
}

// x: (m, k) fp32, rows x_stride apart, on 16 bytes. x_scale (m,): sample_rows.cuh's estimate, on return what was
// used; x_flags, x_columns (m,): as split_rows.cuh has them. x_plane: (m, k_padded) where kWritesPlane. map_w: W's
// plane in the order of weight_fragments.cuh, (n, k) fp16, scaled by column_scale (n,).
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    linear_norm_fp32_input(const __grid_constant__ TensorMap map_w,
                           const __grid_constant__ TensorMap map_x, float* y, float* z,
                           const float* bias, const float* gamma, const float* beta,
                           const float* column_scale, float* mean, float* rstd, const float* x,
                           i64 x_stride, float* x_scale, Flag* x_flags, ColumnList* x_columns,
                           u16* x_plane, int m, int n, int k, int k_padded CHAIN_PARAMETERS) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Rings rings = {shared_address(shared), shared_address(shared + kBarrierOffset)};
  const volatile int* again = reinterpret_cast<const volatile int*>(shared + kVerdictOffset);
  const auto work = [&](int warpgroup, int k_steps) {
    const Epilogue e = {bias, gamma, beta, OPERAND_LIST, CONSTANT_LIST, AFFINE_SCALE,
                        x_scale, column_scale, y, z, mean, rstd, m, n,
                        chain::drops_of<float>(CONSTANT_LIST, OPERAND_LIST)};
    const Weight input = {x, x_stride, x_scale, x_flags, x_columns, x_plane, k_padded};
    consume(rings, e, input, shared, warpgroup, k, k_steps);
  };
  share_work(rings, again, &map_x, &map_w, m, n, k, work);
}
