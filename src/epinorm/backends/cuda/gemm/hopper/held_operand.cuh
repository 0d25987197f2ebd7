// The chain's one element operand, (m, n) as y is, through the ring: kOperandSlots slots behind a tile's last step,
// which the copy engine fills as the last steps free them. The epilogue then finds it in shared memory; in halves,
// where it may take all slots, each as it is needed.
#pragma once
#include "common/storage.cuh"
#include "gemm/row_store.cuh"
#include "gemm/hopper/hopper_ring.cuh"

#ifdef HOLDS_OPERAND

constexpr int kNumberBytes = sizeof(typename NormType::Storage);
constexpr int kBoxColumns = kSwizzleRowBytes / kNumberBytes;  // a box is a line of each of the tile's rows
constexpr int kOperandBoxBytes = kBlockM * kSwizzleRowBytes;
constexpr int kOperandBoxes = kBlockN / kBoxColumns;
constexpr int kSlotBoxes = (kOperandBoxes + kOperandSlots - 1) / kOperandSlots;
static_assert(kSlotBoxes * kOperandBoxBytes <= kStageBytes && kConsumerN % kBoxColumns == 0, "");
static_assert(kOperandSlots == 1 || !kSplitColumns, "a consumer's first box is in the first slot");

// A tile's.
__device__ __forceinline__ void load_operand(const Ring& ring, Slot& slot, const TensorMap* map, Tile tile) {
#pragma unroll
  for (int i = 0; i < kOperandSlots; ++i, slot.next()) {
    const int first = i * kSlotBoxes, boxes = min(kSlotBoxes, kOperandBoxes - first);
    const u32 full = ring.full_barrier(slot.stage);
#pragma unroll
    for (int part = 0; part < kSlotParts; ++part)
      barrier_wait(ring.empty_barrier(slot.stage, part), slot.parity ^ 1);
    barrier_arrive_expect(full, boxes * kOperandBoxBytes);
    if (kInHalves) barrier_arrive(ring.full_barrier(slot.stage, 1));  // a phase of both parts' each time round
    for (int box = 0; box < boxes; ++box)
      tma_load(ring.slot(slot.stage) + box * kOperandBoxBytes, map, full,
               tile.n + (first + box) * kBoxColumns, tile.m);
  }
}

// Into L2 already, a few boxes at each step: all of them at once would be in the way of the steps.
struct OperandAhead {
  const TensorMap* map;
  Tile tile;
  int k_steps;

  __device__ __forceinline__ void operator()(int step) const {
    for (int box = step * kOperandBoxes / k_steps; box < (step + 1) * kOperandBoxes / k_steps; ++box)
      tma_prefetch_box(map, tile.n + box * kBoxColumns, tile.m);
  }
};

struct HeldOperand {
  const Ring& ring;
  Slot slot;
  int row, column;  // of the tile, the warp's first
  bool last;        // of a warp's row blocks

  // What a lane reads of a part, which is one box: two numbers of two rows a chunk, as its accumulators lie. The
  // copy engine has exchanged 16-byte units within a line by the row's number.
  struct Lines {
    u32 upper, in_line;  // its upper row's, and its numbers of a line's first chunk

    __device__ __forceinline__ u32 at(int chunk, int lower) const {
      return upper + lower * kAtomBytes + (chunk * 8 * kNumberBytes ^ in_line);
    }
  };
  // From those of the part before to this one's. A slot's first are found anew, which leaves registers to what
  // comes before.
  __device__ __forceinline__ void reach(Lines& lines, int part) const {
    if (part % kSlotBoxes != 0) {
      lines.upper += kOperandBoxBytes;
      return;
    }
    Slot at = slot;
    at.skip(part / kSlotBoxes);
    if constexpr (kInHalves) {  // else all slots have been waited for: of two planes registers would spill here
#pragma unroll
      for (int half = 0; half < kSlotParts; ++half)
        barrier_wait(ring.full_barrier(at.stage, half), at.parity);
    }
    const int lane = lane_here();
    lines.upper = ring.slot(at.stage) + column / kBoxColumns * kOperandBoxBytes +
                  (row + lane / 4) * kSwizzleRowBytes;
    lines.in_line = lane % 4 * 2 * kNumberBytes ^ lane / 4 * kUnitBytes;
  }
  // The slots are the producer's again.
  __device__ __forceinline__ void release() const {
    __syncwarp();
    if (!last || threadIdx.x % 32 != 0) return;
    Slot at = slot;
#pragma unroll
    for (int i = 0; i < kOperandSlots; ++i, at.next()) {
#pragma unroll
      for (int part = 0; part < kSlotParts; ++part) barrier_arrive(ring.empty_barrier(at.stage, part));
    }
  }
};
#endif
