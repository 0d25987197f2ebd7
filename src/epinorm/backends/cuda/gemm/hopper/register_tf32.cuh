// fp32 multiplied as TF32 with A out of registers, where it is rounded on its way; B comes rounded
// (fp32/round_weight.cu). So a slot is written once and read as it is, by as many warpgroups as there are.
//
// THE ORDER ALONG K. Of each 8 along k a lane (g = lane / 4, q = lane % 4) gives A[g][q], A[g + 8][q], A[g][q + 4]
// and A[g + 8][q + 4] (PTX ISA, wgmma .m64nNk8). A may have any order along k that B has too: product i of a step
// takes for them floats 2 (i % 2) and 2 (i % 2) + 1 of chunk 2q + i / 2 of the row, so that two products' values are
// one 16-byte load. Why these chunks meet no bank twice: weight_fragments.cuh.
#pragma once
#include "common/tf32.cuh"
#include "gemm/hopper/hopper_consumer.cuh"

constexpr int kFragmentWords = 4;
static_assert(!kRegisterA || (kElementBytes == 4 && kRowBlocks == 1 && !kWeightInSmem && kCluster == 1),
              "TF32, 64 rows a warpgroup");

// Of a step, rounded. at: the lane's first chunk, of the upper row.
template <int kProducts>
__device__ __forceinline__ void load_fragments(u32 (&a)[kProducts][kFragmentWords], u32 at) {
#pragma unroll
  for (int j = 0; j < kProducts / 2; ++j)
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const uint4 unit =
          rounded_tf32(load_unit((at ^ j * kUnitBytes) + lower * 8 * kSwizzleRowBytes));
      a[2 * j][lower] = unit.x;
      a[2 * j][lower + 2] = unit.y;
      a[2 * j + 1][lower] = unit.z;
      a[2 * j + 1][lower + 2] = unit.w;
    }
}

// Ties the fragments to this point: the products that read them are done.
template <int kProducts>
__device__ __forceinline__ void keep_fragments(u32 (&a)[kProducts][kFragmentWords]) {
#pragma unroll
  for (int i = 0; i < kProducts; ++i)
#pragma unroll
    for (int word = 0; word < kFragmentWords; ++word) asm volatile("" : "+r"(a[i][word])::"memory");
}

// All of a tile's steps into `result`. While one step's products run, the next one's rows are fetched.
template <class Issued, int kProducts = kStepProducts>
__device__ __forceinline__ void multiply_from_registers(Accumulators& result, const Ring& ring, Slot& slot,
                                                        const Share& share, int k_steps, Issued issued) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroupThreads / 32, g = lane / 4;
  const u32 own = (share.first_block * kProductM + warp * 16 + g) * kSwizzleRowBytes +
                  ((2 * (lane % 4)) ^ g) * kUnitBytes;
  u32 a[2][kProducts][kFragmentWords];  // one is multiplied while the other is fetched
  const auto fetch = [&](u32 (&to)[kProducts][kFragmentWords], const Slot& from) {
    barrier_wait(ring.full_barrier(from.stage), from.parity);
    load_fragments(to, ring.a(from.stage, 0) + own);
  };
  fetch(a[0], slot);
  for (int first = 0; first < k_steps; first += 2) {
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int step = first + u;
      if (u == 1 && step == k_steps) break;
      const u64 b = descriptor<true, kBoxBytes>(ring.b(slot.stage, step, 0) +
                                                share.first_column * kSwizzleRowBytes);
      wgmma_fence();  // the fragments were written by ordinary instructions
#pragma unroll
      for (int i = 0; i < kProducts; ++i)
        wgmma_a(result[0], a[u][i], b + i * (step_bytes<true>() >> 4), u > 0 || first > 0 || i > 0);
      wgmma_commit();
      if (u > 0 || first > 0) {
        wgmma_wait<1>();
        keep_fragments(a[1 - u]);
        release(ring, slot.before());
      }
      slot.next();
      if (step + 1 < k_steps)
        fetch(a[1 - u], slot);
      else
        issued(step);
    }
  }
  wgmma_wait<0>();
  keep_after_wait(result);
  keep_fragments(a[0]);
  keep_fragments(a[1]);
  release(ring, slot.before());
}
