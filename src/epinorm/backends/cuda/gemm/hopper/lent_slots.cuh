// The chain's one element operand, (m, n) fp32 as y is, through the ring of the fp32 matrix: behind a tile's last
// step, a slot for 32 columns, each given back when it has been read.
#pragma once
#include "gemm/hopper/register_operand.cuh"
#include "gemm/row_store.cuh"

#ifdef HOLDS_OPERAND
constexpr bool kHoldsOperand = true;

constexpr int kOperandBoxes = kBlockM / kBoxColumns;  // each a line of each of the tile's rows
static_assert(kStepBoxes == 1 && kBlockM % kBoxColumns == 0, "");

// The producer's side.
struct LentSlots {
  const TensorMap* map;

  // Into L2 already, a few boxes at each step.
  __device__ __forceinline__ void ahead(const Place& place, int step, int k_steps) const {
    for (int box = step * kOperandBoxes / k_steps; box < (step + 1) * kOperandBoxes / k_steps; ++box)
      tma_prefetch_box(map, place.m + box * kBoxColumns, place.n);
  }
  __device__ __forceinline__ void load(const Rings& rings, SlotW& slot, const Place& place) const {
    for (int box = 0; box < kOperandBoxes; ++box, slot.next()) {
      const u32 full = rings.full_w(slot.stage);
      barrier_wait(rings.empty_w(slot.stage), slot.parity ^ 1);
      barrier_arrive_expect(full, kBoxBytesW);
      tma_load(rings.w(slot.stage), map, full, place.m + box * kBoxColumns, place.n);
    }
  }
};

struct HeldOperand {
  const Rings& rings;
  SlotW& slot;
  int row;  // of the tile, the warp's first

  // As in held_operand.cuh.
  struct Lines {
    u32 upper, in_line;

    __device__ __forceinline__ u32 at(int chunk, int lower) const {
      return upper + lower * kAtomBytes + (chunk * 8 * 4 ^ in_line);
    }
  };
  // From the part before, whose slot goes back, to this one's, as soon as it is there.
  __device__ __forceinline__ void reach(Lines& lines, int part) const {
    if (part > 0) release();
    barrier_wait(rings.full_w(slot.stage), slot.parity);
    const int lane = lane_here();
    lines.upper = rings.w(slot.stage) + (row + lane / 4) * kSwizzleRowBytes;
    lines.in_line = lane % 4 * 2 * 4 ^ lane / 4 * kUnitBytes;
  }
  __device__ __forceinline__ void release() const {
    __syncwarp();
    ::release(rings.empty_w(slot.stage));
    slot.next();
  }
};
#else
constexpr bool kHoldsOperand = false;
#endif
