// Barriers of sm_90: mbarriers in shared memory and the cluster's barrier; setmaxnreg.
// PTX ISA, "Parallel Synchronization and Communication Instructions". One instruction a function.
#pragma once
#include "common/integers.cuh"
#include "common/named_barrier.cuh"
#include "common/shared_units.cuh"

// mbarrier.init
__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// fence.mbarrier_init: the inits are seen by the cluster and by the copy engine.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// mbarrier.arrive.expect_tx: arrive, and let the phase also wait for `bytes` copied bytes.
__device__ __forceinline__ void barrier_arrive_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// mbarrier.arrive on a barrier of this block.
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// mapa + mbarrier.arrive on the same barrier of block `rank` of the cluster. Without .release.cluster:
// that would wait for all of this thread's memory (a MEMBAR.GPU, measured: 255 instead of 177 us on
// kb62), and the arrival only tells that wgmma, which has been waited for, has read its operands.
__device__ __forceinline__ void barrier_arrive_at(u32 barrier, u32 rank) {
  asm volatile(
      "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;"
      " mbarrier.arrive.shared::cluster.b64 _, [remote]; }" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// mapa: the address of the same place in block `rank` of the cluster.
__device__ __forceinline__ u32 address_in_block(u32 address, u32 rank) {
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

// st.async: two numbers into another block that counts its bytes on a barrier there. No fence is needed,
// where a release to the cluster would wait for all of this thread's stores to global memory.
__device__ __forceinline__ void store_async(u32 remote, float first, float second,
                                            u32 remote_barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(
          remote),
      "r"(__float_as_uint(first)), "r"(__float_as_uint(second)), "r"(remote_barrier)
      : "memory");
}

// The same with one number.
__device__ __forceinline__ void store_async(u32 remote, u32 value, u32 remote_barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(remote),
      "r"(value), "r"(remote_barrier)
      : "memory");
}

// mbarrier.try_wait.parity
__device__ __forceinline__ bool barrier_try_wait(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
      " selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
#ifdef EPINORM_BOUNDED_WAITS
  // For trying a new kernel: a wait that would never end gives up, and the result is wrong. (A trap
  // here would be an exit that both roles share, and ptxas then drops the roles' register counts.)
  for (u32 tries = 0; tries < EPINORM_BOUNDED_WAITS && !barrier_try_wait(barrier, parity); ++tries) {
  }
#else
  while (!barrier_try_wait(barrier, parity)) {
  }
#endif
}

// barrier.cluster: every thread of every block of the cluster.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}
// The same in two steps. This arrival orders nothing but what a fence before it has: of barriers just
// initialised, say.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// %cluster_ctarank
__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// setmaxnreg: hand registers from the producer to the consumers.
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
