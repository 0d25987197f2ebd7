// Barriers of some of a block's threads.
#pragma once

// bar.sync: all `threads` threads that name barrier `id`.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
