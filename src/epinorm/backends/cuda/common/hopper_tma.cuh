// The tensor memory accelerator: boxes of a matrix to and from shared memory, asynchronously.
// PTX ISA, "Data Movement and Conversion Instructions: Tensor copy". One instruction a function.
#pragma once
#include "common/integers.cuh"

struct alignas(64) TensorMap {
  u64 words[16];
};

// cp.async.bulk.tensor.2d, global to this block's shared memory; counts its bytes on `barrier`.
__device__ __forceinline__ void tma_load(u32 to, const TensorMap* map, u32 barrier, int column,
                                         int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row)
      : "memory");
}

// The same of what nobody reads again: it leaves the L2 cache before what was there. The number is what
// createpolicy.fractional.L2::evict_first.b64 gives.
__device__ __forceinline__ void tma_load_once(u32 to, const TensorMap* map, u32 barrier, int column,
                                              int row) {
  constexpr u64 kEvictFirst = 0x12f0000000000000;
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "l"(kEvictFirst)
      : "memory");
}

// The same into every block of the cluster whose bit is set in `blocks`, at the same offsets.
__device__ __forceinline__ void tma_load_multicast(u32 to, const TensorMap* map, u32 barrier,
                                                   int column, int row, u16 blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "h"(blocks)
      : "memory");
}

// cp.async.bulk.prefetch.tensor: a box into the L2 cache.
__device__ __forceinline__ void tma_prefetch_box(const TensorMap* map, int column, int row) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map),
               "r"(column), "r"(row)
               : "memory");
}

// prefetch.tensormap
__device__ __forceinline__ void tma_prefetch(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// fence.proxy.async: this thread's ordinary writes to shared memory are seen by wgmma and the copy
// engine.
__device__ __forceinline__ void fence_for_async_reads() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
