// y = post(norm(pre(x Wᵀ + bias))) in one kernel on every GPU since Ampere: load, multiply, normalise,
// activate, store. A block computes one tile; see portable_pipeline.cuh.
//
// The prelude defines what portable_pipeline.cuh and norm_epilogue.cuh need, kParts, kAlignedRows,
// kBlocksPerMultiprocessor, CHAIN_PARAMETERS, OPERAND_LIST, CONSTANT_LIST and AFFINE_SCALE.
#include "common/dependent.cuh"
#include "common/named_barrier.cuh"
#include "gemm/portable/portable_pipeline.cuh"

constexpr int kWarpColumns = kWarpN;
constexpr int kVectorColumns = kBlockN, kVectorThreads = kThreads;
constexpr bool kPacksAffine = false;
constexpr int kSpareRegisters = 128;  // no tile was seen to spill
#include "gemm/norm_epilogue.cuh"

static_assert(kWarpsN % kParts == 0, "a group's warps are in one block");
constexpr int kExchanges = kSharedGroup ? 2 : 0;  // buffers in turn
constexpr int kExchangeBytes = kWarps * kExchanges * 16 * 4;

// Shared memory: the vectors; then the ring, and where it was the store buffers and the exchange
// (portable.py adds them up too).
constexpr int kVectorSpace = (kVectorBytes + 127) / 128 * 128;
constexpr int kStoreOffset = kVectorSpace;
constexpr int kExchangeOffset = kStoreOffset + kWarps * kStoreBufferBytes;
constexpr int kFinishBytes = kWarps * kStoreBufferBytes + kExchangeBytes;
constexpr int kSharedBytes = kVectorSpace + (kRingBytes > kFinishBytes ? kRingBytes : kFinishBytes);

// The sums of two rows over a group's lanes, and over all warps where they share it. Two buffers in
// turn: who fills one again has waited for the exchange after it, and a warp takes part in that only
// after reading the buffer.
struct GroupSum {
  u32 buffers;  // [2][kParts][16] of this group's warps, a shared address
  int part, barrier;
  u32 uses = 0;

  __device__ __forceinline__ GroupSum(u32 exchange, int warp)
      : buffers(exchange + warp / kParts * kParts * kExchanges * 16 * 4),
        part(warp % kParts),
        barrier(1 + warp / kParts) {}

  __device__ __forceinline__ void operator()(float (&sums)[2]) {
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) sums[lower] = Segment::sum(sums[lower]);
    if constexpr (kSharedGroup) exchange(sums);
  }

  __device__ __forceinline__ void exchange(float (&sums)[2]) {
    constexpr u32 kPartBytes = 16 * 4;
    const int lane = threadIdx.x % 32;
    const u32 rows = buffers + uses % 2 * kParts * kPartBytes + lane / 4 * 4;
    ++uses;
    if (lane % 4 == 0)
#pragma unroll
      for (int lower = 0; lower < 2; ++lower)
        store_shared(rows + part * kPartBytes + lower * 8 * 4, sums[lower]);
    named_barrier_sync(barrier, kParts * 32);
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      sums[lower] = 0.0f;
#pragma unroll
      for (int other = 0; other < kParts; ++other)
        sums[lower] += load_shared(rows + other * kPartBytes + lower * 8 * 4);
    }
  }
};

// x: (m, k), w: (n, k), as planes hi and lo where there are two; strides in numbers. The rest as in
// hopper_linear_norm.cu.
extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    portable_linear_norm(const u16* x_hi, const u16* x_lo, const u16* w_hi, const u16* w_lo,
                         i64 x_stride, i64 w_stride, typename OutType::Storage* y,
                         typename KeptType::Storage* z, const typename LinearType::Storage* bias,
                         const typename NormType::Storage* gamma,
                         const typename NormType::Storage* beta, const float* row_scale,
                         const float* column_scale, float* mean, float* rstd, int m, int n,
                         int k CHAIN_PARAMETERS) {
  extern __shared__ __align__(1024) unsigned char shared[];
  float* vectors = reinterpret_cast<float*>(shared);
  const u32 base = shared_address(shared);
  wait_for_previous_kernel();

  const TileOrigin origin(m, n);
  const Operand x(x_hi, x_lo, x_stride, m, k), w(w_hi, w_lo, w_stride, n, k);
  const Epilogue e = {bias, gamma, beta, OPERAND_LIST, CONSTANT_LIST, AFFINE_SCALE, row_scale,
                      column_scale, y, z, mean, rstd, m, n,
                      chain::drops_of<float>(CONSTANT_LIST, OPERAND_LIST)};
  Product product(base + kVectorSpace, x, w, origin.row, origin.column);
  {
    Fetched fetched;
    fetch_vectors(fetched, e, origin.column, threadIdx.x);
    store_vectors(fetched, vectors, threadIdx.x, e.affine_scale);  // read after compute()'s barriers
  }
  Accumulators sum;
  product.compute(sum);

  const TileOrigin tile(m, n);
  const int warp = threadIdx.x / 32, warp_column = warp % kWarpsN * kWarpN;
  const u32 buffer = base + kStoreOffset + warp * kStoreBufferBytes;
  GroupSum group_sum(base + kExchangeOffset, warp);
#pragma unroll
  for (int block = 0; block < kRowBlocks; ++block)
    finish_row_block(sum[block], e, {vectors, static_cast<u32>(warp_column)}, group_sum, buffer,
                     tile.row + warp / kWarpsN * kWarpM + block * 16, tile.column + warp_column, HeldOperand{});
}
