// Groups of cp.async (sm_80), whoever copies what: PTX ISA, "Asynchronous copy".
#pragma once

// cp.async.commit_group
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// cp.async.wait_group: all but the last kPending groups of this thread are there.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
