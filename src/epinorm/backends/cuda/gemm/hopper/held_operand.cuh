// The chain's one element operand, (m, n) as y is, through the ring: kOperandSlots slots behind a tile's last step,
// which the copy engine fills while the last steps are multiplied. The epilogue finds in shared memory what it
// would wait for.
#pragma once
#include "common/storage.cuh"
#include "gemm/hopper/hopper_ring.cuh"

#ifdef HOLDS_OPERAND

constexpr int kNumberBytes = sizeof(typename NormType::Storage);
constexpr int kBoxColumns = kSwizzleRowBytes / kNumberBytes;
constexpr int kOperandRows = kBlockM / kOperandSlots;  // of a slot
constexpr int kOperandBoxBytes = kOperandRows * kSwizzleRowBytes;
constexpr int kOperandBytes = kBlockN / kBoxColumns * kOperandBoxBytes;
static_assert(kOperandBytes <= kStageBytes && kOperandRows % 16 == 0 && kConsumerN % kBoxColumns == 0, "");

// A tile's.
__device__ __forceinline__ void load_operand(const Ring& ring, Slot& slot, const TensorMap* map, Tile tile) {
#pragma unroll
  for (int i = 0; i < kOperandSlots; ++i, slot.next()) {
    const u32 full = ring.full_barrier(slot.stage);
    barrier_wait(ring.empty_barrier(slot.stage), slot.parity ^ 1);
    barrier_arrive_expect(full, kOperandBytes);
    for (int box = 0; box < kBlockN / kBoxColumns; ++box)
      tma_load(ring.slot(slot.stage) + box * kOperandBoxBytes, map, full, tile.n + box * kBoxColumns,
               tile.m + i * kOperandRows);
  }
}

// What a lane reads of it: two numbers of two rows a chunk, as its accumulators lie. The copy engine has
// exchanged 16-byte units within a line by the row's number.
struct HeldOperand {
  u32 lines;    // the first box's of this lane's upper row
  u32 in_line;  // this lane's numbers of a line's first chunk
  const Ring& ring;
  Slot slot;
  bool last;  // of a warp's row blocks

  __device__ __forceinline__ HeldOperand(const Ring& ring, Slot slot, int row, int column, bool last)
      : ring(ring), slot(slot), last(last) {
    const int lane = threadIdx.x % 32, skipped = row / kOperandRows;
    Slot own = slot;
    own.skip(skipped);
    lines = ring.slot(own.stage) + column / kBoxColumns * kOperandBoxBytes +
            (row - skipped * kOperandRows + lane / 4) * kSwizzleRowBytes;
    in_line = lane % 4 * 2 * kNumberBytes ^ lane / 4 * kUnitBytes;
  }
  __device__ __forceinline__ u32 address(int chunk, int lower) const {
    const int at = chunk * 8 * kNumberBytes;
    return lines + at / kSwizzleRowBytes * kOperandBoxBytes + lower * kAtomBytes +
           (at % kSwizzleRowBytes ^ in_line);
  }
  // The slots are the producer's again.
  __device__ __forceinline__ void release() const {
    __syncwarp();
    if (!last || threadIdx.x % 32 != 0) return;
    Slot at = slot;
#pragma unroll
    for (int i = 0; i < kOperandSlots; ++i, at.next()) barrier_arrive(ring.empty_barrier(at.stage));
  }
};
#endif
