// Sums over k that the kSplitK blocks of a cluster share: each multiplies its part of k into its own tile
// (rescue_product.cuh), and adds up the tiles of all for its part of the rows.
#pragma once
#include "common/hopper_barrier.cuh"
#include "fp32/rescue_product.cuh"

struct Range {
  int first, end;
};

constexpr int kClusterBlocks = kSplitK * kGroupParts;
static_assert(kSplitK == 1 || kGroupParts == 1, "a cluster has one purpose");

// This block's number in its cluster: clusters are whole runs of blocks.
EPINORM_FUNCTION int rank_in_cluster() { return blockIdx.x % kClusterBlocks; }

// This block's part of `count`, in whole units; the last parts may be empty. (A single
// block takes all: ptxas cannot know that the count is not negative, and the general case costs it a
// register that a portable export for sm_100 lacks.)
template <int kUnit>
EPINORM_FUNCTION Range own_part(int count) {
  if constexpr (kSplitK == 1) {
    return {0, count};
  } else {
    constexpr int kUnits = kUnit * kSplitK;
    const int part = (count + kUnits - 1) / kUnits * kUnit;
    const int first = min(rank_in_cluster() * part, count);
    return {first, min(first + part, count)};
  }
}

// Whole stages of the ring: rows that begin at a multiple of 16 bytes do so in each part.
EPINORM_FUNCTION Range own_k(int k) { return own_part<kBlockK>(k); }
EPINORM_FUNCTION Range own_rows(int rows) { return own_part<1>(rows); }

// ld.shared::cluster of the float at `address` in block `rank`.
EPINORM_FUNCTION float read_remote(u32 address, u32 rank) {
  float value;
  asm volatile("ld.shared::cluster.f32 %0, [%1];"
               : "=f"(value)
               : "r"(address_in_block(address, rank))
               : "memory");
  return value;
}

// The sum over all of k at this place of the tile: of what the blocks have there, in the order of k.
EPINORM_FUNCTION float sum_of_blocks(const float* place) {
  if constexpr (kSplitK > 1) {
    const u32 local = static_cast<u32>(__cvta_generic_to_shared(place));
    float sum = 0.0f;
#pragma unroll
    for (u32 rank = 0; rank < kSplitK; ++rank) sum += read_remote(local, rank);
    return sum;
  } else {
    return *place;
  }
}
