// The matrix product of every GPU since Ampere: D[m, n] = sum over k of A[m, k] B[n, k], both operands as
// one or two planes of 16-bit numbers, by cp.async through a ring in shared memory into fragments in
// registers and mma.sync. All warps load and all warps multiply; a block computes one tile.
//
// The prelude (portable.py) defines, as constexpr:
//   kWarpM, kWarpN        rows and columns that a warp multiplies: multiples of 16 and of 8
//   kWarpsM, kWarpsN      warps of a block along each
//   kBlockK               elements of a step along the summed index: 32 or 64
//   kStages               slots of the ring
//   kPlanes               2 planes: three products, see multiply_planes()
//   kMajorKA, kMajorKB    the operand's rows run along the summed index
//   kCopyBytes            of which addresses, rows and strides of both operands are multiples: 16, 4 or
//                         2 (rows may also end in zeros up to the next multiple)
//   kBfloat16             the operands' type, else fp16
//   kTileGroup            row tiles that share a column tile
#pragma once
#include "gemm/portable/portable_load.cuh"

// What one product of 16 along the summed index needs of 16 rows of A, and of a warp's columns of B.
// lane: this lane's address in the slot; product: which of the step's.
struct FragmentsA {
  u32 of[kPlanes][4];

  __device__ __forceinline__ void load(u32 lane, int product, int block) {
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane)
      load_matrices<!kMajorKA>(
          of[plane], TileA::further(lane + plane * TileA::kBytes, block * 16, product * kProductK));
  }
};
struct FragmentsOfPair {
  u32 of[kPlanes][4];  // two column blocks

  __device__ __forceinline__ void load(u32 lane, int product, int pair) {
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      const u32 address =
          TileB::further(lane + plane * TileB::kBytes, pair * 16, product * kProductK);
      if (pair * 2 + 1 == kColumnBlocks)
        load_two_matrices<!kMajorKB>(of[plane], address);
      else
        load_matrices<!kMajorKB>(of[plane], address);
    }
  }
};
constexpr int kPairs = (kColumnBlocks + 1) / 2;

// 16 rows and two column blocks: one product of one plane.
__device__ __forceinline__ void multiply_pair(float (&sum)[kAccumulators], const FragmentsA& a,
                                              const FragmentsOfPair& b, int pair) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = (pair * 2 + half) * 4;
    if (at < kAccumulators)
      multiply(&sum[at], a.of[0], b.of[0][half * 2], b.of[0][half * 2 + 1], &sum[at]);
  }
}

// The same for kCount products of two planes, v = hi + lo 2^-11. Tensor cores cut sums toward zero at
// about 24 bits (MMA-Sim, arXiv 2511.10909): so hi hi of kCount times 16 starts from nothing and is added
// in full fp32, the promotion that the Hopper kernel does every kFoldSteps. lo hi and hi lo are 2^-11 of
// the result: they have sums of their own without promotion, or in a wide warp, whose registers these
// would not fit, go into each part first.
template <int kCount>
__device__ __forceinline__ void multiply_planes(float (&sum)[kAccumulators],
                                                float (&cross)[kCrossAccumulators],
                                                const FragmentsA (&a)[kCount],
                                                const FragmentsOfPair (&b)[kCount], int pair) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = (pair * 2 + half) * 4;
    if (at >= kAccumulators) break;
    constexpr float kNothing[4] = {};
    float part[4] = {};
    float* small = kHasCross ? &cross[kHasCross ? at : 0] : part;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const u32 *b_hi = &b[i].of[0][half * 2], *b_lo = &b[i].of[1][half * 2];
      multiply(small, a[i].of[1], b_hi[0], b_hi[1], kHasCross || i > 0 ? small : kNothing);
      multiply(small, a[i].of[0], b_lo[0], b_lo[1], small);
    }
    if (!kHasCross)
#pragma unroll
      for (int i = 0; i < 4; ++i) part[i] *= kLowScale;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const u32* b_hi = &b[i].of[0][half * 2];
      multiply(part, a[i].of[0], b_hi[0], b_hi[1], kHasCross && i == 0 ? kNothing : part);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[at + i] += part[i];
  }
}

// The first row and column of this block's tile. To be asked again after the product, which leaves no
// registers to keep them in: volatile, so that the compiler does not.
struct TileOrigin {
  int row, column;

  __device__ __forceinline__ TileOrigin(int m, int n) {
    int block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    const TilePlace place = grouped_tile<kTileGroup>(block, (m + kBlockM - 1) / kBlockM,
                                                     (n + kBlockN - 1) / kBlockN);
    row = place.row * kBlockM;
    column = place.column * kBlockN;
  }
};

// The product of one tile, which begins at row `first_row` of A and `first_column` of B. Made before
// anything else of a tile is done, so that the first copies are on their way meanwhile.
struct Product {
  const Operand &a, &b;
  Loader<TileA, kMajorKA> a_loader;
  Loader<TileB, kMajorKB> b_loader;
  u32 a_lane, b_lane;
  int first_column, steps, loaded = 0;  // this warp's column; the block's steps

  __device__ __forceinline__ Product(u32 ring, const Operand& a, const Operand& b, int first_row,
                                     int first_column)
      : a(a),
        b(b),
        a_loader(a, ring, first_row),
        b_loader(b, ring + kPlanes * TileA::kBytes, first_column),
        steps((a.k + kBlockK - 1) / kBlockK) {
    const int warp = threadIdx.x / 32, warp_column = warp % kWarpsN * kWarpN;
    this->first_column = first_column + warp_column;
    a_lane = ring + TileA::lane_offset(warp / kWarpsN * kWarpM, true);
    b_lane = ring + kPlanes * TileA::kBytes + TileB::lane_offset(warp_column, false);
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) {
      load_share(stage * kStageBytes, 0, 1);
      next_load();
    }
  }

  // Every kShares-th unit of this thread, from `share` on.
  __device__ __forceinline__ void load_share(u32 slot, int share, int shares) const {
    if (loaded >= steps) return;
#pragma unroll
    for (int part = 0; part < a_loader.kParts; ++part)
      if (part % shares == share) a_loader.load(a, slot, part);
#pragma unroll
    for (int part = 0; part < b_loader.kParts; ++part)
      if (part % shares == share) b_loader.load(b, slot, part);
  }

  __device__ __forceinline__ void next_load() {
    a_loader.next(a);
    b_loader.next(b);
    ++loaded;
    commit_copies();
  }

  // All threads of the block; on return nobody reads the ring and nothing is copied into it.
  __device__ __forceinline__ void compute(Accumulators& sum) {
    CrossAccumulators cross;
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < kAccumulators; ++i) sum[block][i] = 0.0f;
#pragma unroll
      for (int i = 0; i < kCrossAccumulators; ++i) cross[block][i] = 0.0f;
    }
    wait_for_copies<kStages - 2>();
    __syncthreads();
    if constexpr (kWide)
      multiply_wide(sum, cross);
    else if constexpr (kPlanes == 2)
      multiply_two_planes(sum, cross);
    else
      multiply_one_plane(sum);
    if (kHasCross)
#pragma unroll
      for (int block = 0; block < kRowBlocks; ++block)
#pragma unroll
        for (int i = 0; i < kCrossAccumulators; ++i) sum[block][i] += cross[block][i] * kLowScale;
    wait_for_copies<0>();
    __syncthreads();
  }

  // Frees the slot that all have read, and waits for the next; returns where that begins.
  __device__ __forceinline__ u32 next_slot(u32 read) {
    next_load();
    wait_for_copies<kStages - 2>();
    __syncthreads();
    return read == (kStages - 1) * kStageBytes ? 0 : read + kStageBytes;
  }

  // The next product's fragments come from shared memory while one is multiplied.
  __device__ __forceinline__ void multiply_one_plane(Accumulators& sum) {
    constexpr int kShares = kProducts - 1;  // the last product of a step needs the next slot
    FragmentsA a_fragments[2][kRowBlocks];
    FragmentsOfPair b_fragments[2][kPairs];
    u32 read = 0, write = (kStages - 1) * kStageBytes;
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) a_fragments[0][block].load(a_lane, 0, block);
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) b_fragments[0][pair].load(b_lane, 0, pair);
    for (int step = 0; step < steps; ++step) {
#pragma unroll
      for (int product = 0; product < kProducts; ++product) {
        const int here = product % 2, ahead = 1 - here, next = (product + 1) % kProducts;
        if (product < kShares) {
          load_share(write, product, kShares);
        } else {  // all fragments of this step have been read
          write = read;
          read = next_slot(read);
        }
#pragma unroll
        for (int block = 0; block < kRowBlocks; ++block) {
          a_fragments[ahead][block].load(a_lane + read, next, block);
#pragma unroll
          for (int pair = 0; pair < kPairs; ++pair)
            if (pair * kRowBlocks / kPairs == block)
              b_fragments[ahead][pair].load(b_lane + read, next, pair);
#pragma unroll
          for (int pair = 0; pair < kPairs; ++pair)
            multiply_pair(sum[block], a_fragments[here][block], b_fragments[here][pair], pair);
        }
      }
    }
  }

  // Two products at once, which halves the additions. Their sums leave registers for A's fragments of
  // 16 rows, and those of the next 16, and for B's once.
  __device__ __forceinline__ void multiply_two_planes(Accumulators& sum, CrossAccumulators& cross) {
    constexpr int kAtOnce = 2, kParts = kProducts / kAtOnce;
    constexpr int kBuffers = kParts * kRowBlocks % 2 == 0 ? 2 : 1;  // each step begins with the first
    FragmentsA a_fragments[kBuffers][kAtOnce];
    FragmentsOfPair b_fragments[kPairs][kAtOnce];
    u32 read = 0, write = (kStages - 1) * kStageBytes;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      a_fragments[0][i].load(a_lane, i, 0);
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) b_fragments[pair][i].load(b_lane, i, pair);
    }
    for (int step = 0; step < steps; ++step) {
      load_share(write, 0, 1);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int product = part * kAtOnce, next = (product + kAtOnce) % kProducts;
#pragma unroll
        for (int block = 0; block < kRowBlocks; ++block) {
          const int here = (part * kRowBlocks + block) % kBuffers, ahead = kBuffers - 1 - here;
          const bool last = block == kRowBlocks - 1;
          const auto load_a = [&] {
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
              a_fragments[ahead][i].load(a_lane + read, (last ? next : product) + i,
                                         last ? 0 : block + 1);
          };
          if (last && part == kParts - 1) {  // all fragments of this step have been read
            write = read;
            read = next_slot(read);
          }
          if (kBuffers == 2) load_a();
#pragma unroll
          for (int pair = 0; pair < kPairs; ++pair) {
            multiply_planes(sum[block], cross[block], a_fragments[here], b_fragments[pair], pair);
            if (last)
#pragma unroll
              for (int i = 0; i < kAtOnce; ++i)
                b_fragments[pair][i].load(b_lane + read, next + i, pair);
          }
          if (kBuffers == 1) load_a();
        }
      }
    }
  }

  // Two columns at a time, where a whole group is so wide that B's fragments would fill the registers.
  __device__ __forceinline__ void multiply_wide(Accumulators& sum, CrossAccumulators& cross) {
    const int columns = b.lines - first_column;  // of the matrix from this warp's first on
    u32 read = 0, write = (kStages - 1) * kStageBytes;
    for (int step = 0; step < steps; ++step) {
      load_share(write, 0, 1);
#pragma unroll 1
      for (int product = 0; product < kProducts; ++product)
#pragma unroll
        for (int block = 0; block < kRowBlocks; ++block) {
          FragmentsA a_fragments[1];
          a_fragments[0].load(a_lane + read, product, block);
#pragma unroll
          for (int pair = 0; pair < kPairs; ++pair) {
            // The branch also ends a block of the compiler's schedule, which else loads more ahead
            // than the registers hold.
            if (pair * 16 >= columns) break;
            FragmentsOfPair b_fragments[1];
            b_fragments[0].load(b_lane + read, product, pair);
            if constexpr (kPlanes == 2)
              multiply_planes(sum[block], cross[block], a_fragments, b_fragments, pair);
            else
              multiply_pair(sum[block], a_fragments[0], b_fragments[0], pair);
          }
        }
      write = read;
      read = next_slot(read);
    }
  }
};
