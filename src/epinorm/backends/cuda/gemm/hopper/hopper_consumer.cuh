// What a warpgroup that multiplies has: its part of a tile, its accumulators, and the ring's slots, which it frees.
#pragma once
#include "gemm/hopper/hopper_ring.cuh"

// Which part of a tile a consumer multiplies: its row blocks and its first column.
struct Share {
  int consumer, first_block, first_column;

  __device__ __forceinline__ explicit Share(int consumer)
      : consumer(consumer),
        first_block(kPingPong || kSplitColumns ? 0 : consumer * kRowBlocks),
        first_column(kSplitColumns ? consumer * kConsumerN : 0) {}
};

// The slot is free as soon as every consumer warp of every block that it was loaded into says so.
__device__ __forceinline__ void release(const Ring& ring, int stage, int part = 0) {
  const int lane = threadIdx.x % 32;
  if (kCluster == 1) {
    if (lane == 0) barrier_arrive(ring.empty_barrier(stage, part));
  } else if (lane < kCluster) {
    barrier_arrive_at(ring.empty_barrier(stage, part), lane);
  }
}

using Accumulators = float[kRowBlocks][kAccumulators];

__device__ __forceinline__ void keep_after_wait(Accumulators& values) {
#pragma unroll
  for (int block = 0; block < kRowBlocks; ++block) keep_after_wait(values[block]);
}

__device__ __forceinline__ void set_to_zero(Accumulators& values) {
#pragma unroll
  for (int block = 0; block < kRowBlocks; ++block)
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) values[block][i] = 0.0f;
}

// The first product reads no sum. The ptxas of CUDA 12 defines the registers all the same, behind the
// fence, and so makes each product wait for the one before it (its C7515); not if they have a value here.
__device__ __forceinline__ void define(Accumulators& values) {
#if __CUDACC_VER_MAJOR__ < 13
  set_to_zero(values);
#endif
}

constexpr int kStepProducts = kBlockK / kProductK;
