// Warpgroup matrix products of sm_90a on operands in shared memory, in swizzles of 128 or 64 bytes.
// PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions"; the descriptor is its section
// "Matrix Descriptor Format". The product itself, wgmma(), is generated: 64 to 128 operands.
#pragma once
#include "common/integers.cuh"

constexpr int kSwizzleRowBytes = 128;
constexpr int kAtomBytes = 8 * kSwizzleRowBytes;  // the pattern repeats every 8 rows

__device__ __forceinline__ constexpr u64 descriptor_field(u32 bytes, int shift) {
  return static_cast<u64>(bytes >> 4) << shift;
}

// An operand stored as rows of kRowBytes, 64 or 32 elements. K-major: a row runs along the summed index, the tile's
// rows follow each other. Otherwise a row runs along the tile's own index and the 64 summed rows
// follow each other; the next 64 of the tile lie kBlockBytes further.
template <bool kMajorK, int kBlockBytes, int kRowBytes = kSwizzleRowBytes>
__device__ __forceinline__ u64 descriptor(u32 address) {
  static_assert(kRowBytes == 128 || (kRowBytes == 64 && kMajorK), "");
  constexpr u64 kSwizzle = u64{kRowBytes == 128 ? 1 : 2} << 62;
  constexpr u64 kLeading = kMajorK ? (u64{1} << 16) : descriptor_field(kBlockBytes, 16);
  return kSwizzle | descriptor_field(8 * kRowBytes, 32) | kLeading |
         static_cast<u64>((address & 0x3FFFF) >> 4);
}

// The descriptor of what lies so many units of 16 bytes further. Its upper half is a constant, and stays one.
__device__ __forceinline__ u64 further(u64 descriptor, u32 units) {
  return (descriptor >> 32 << 32) | (static_cast<u32>(descriptor) + units);
}

// From one step of 16 along the summed index to the next.
template <bool kMajorK>
__device__ __forceinline__ constexpr u32 step_bytes() {
  return kMajorK ? 16 * 2 : 16 * kSwizzleRowBytes;
}

// wgmma.fence: registers written before are seen by the products after.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// wgmma.commit_group
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// wgmma.wait_group: all but the last kPending groups are done.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Ties the accumulators to this point of the program: the compiler may not read them earlier.
template <int kCount>
__device__ __forceinline__ void keep_after_wait(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}
