// An experiment (docs/hopper.md): D[n, m] = factor * sum over k of fp16(W[n, k] scale[n]) x[m, k], W fp32 as
// it lies in memory, x an fp16 plane with its columns in the order below. W is wgmma's operand A from
// registers: a warp reads fp32 from the ring, multiplies by its row's power of two, rounds to fp16 and
// multiplies, so that no pass makes a plane of W. w_from_registers.py runs it.
//
// THE ORDER ALONG K. A lane (g = lane / 4, q = lane % 4) gives wgmma, for each 16 along k,
// A[g][2q, 2q+1, 2q+8, 2q+9] and the same of row g + 8. Operands may have any common order along k, so these
// four are neighbours in memory: one 16-byte load. In a box of W a row is 128 bytes, eight chunks of four
// floats, of which the swizzle puts chunk c of row r at place c ^ (r % 8). Such a load is served eight lanes at
// a time: two rows, 2a and 2a + 1, with q = 0 to 3, whose places must all differ. So the four chunks that a row
// gives must hold one of each pair {0,1}, {2,3}, {4,5}, {6,7}: the j-th 16 of 32 columns takes chunk 2q + j.
#include "dependent.cuh"
#include "hopper_barrier.cuh"
#include "hopper_tma.cuh"
#include "hopper_wgmma.cuh"
#include "shared_units.cuh"
#include "tile_order.cuh"

constexpr int kBlockN = 128, kBlockM = 256;  // rows of W, 64 a warpgroup, and of x
constexpr int kStagesW = 3, kStagesX = 4, kTileGroup = 16;
constexpr int kWarpgroupThreads = 128, kConsumers = 2;
constexpr int kConsumerThreads = kConsumers * kWarpgroupThreads;
constexpr int kThreads = kConsumerThreads + kWarpgroupThreads;
constexpr int kStepK = 64, kProducts = kStepK / 16;
constexpr int kAccumulators = kBlockM / 2;

constexpr int kBoxBytesW = kBlockN * 128;     // 32 floats of each row
constexpr int kStageBytesW = 2 * kBoxBytesW;  // a step
constexpr int kStageBytesX = kBlockM * 128;
constexpr int kDataX = kStagesW * kStageBytesW;
constexpr int kBarriers = kDataX + kStagesX * kStageBytesX;
constexpr int kSharedBytes = kBarriers + 16 * (kStagesW + kStagesX);

template <int kCount>
struct Slot {
  int stage = 0;
  u32 parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kCount) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ int before() const { return stage == 0 ? kCount - 1 : stage - 1; }
};
using SlotW = Slot<kStagesW>;
using SlotX = Slot<kStagesX>;

struct Rings {
  u32 data;
  __device__ __forceinline__ u32 w(int stage) const { return data + stage * kStageBytesW; }
  __device__ __forceinline__ u32 x(int stage) const { return data + kDataX + stage * kStageBytesX; }
  __device__ __forceinline__ u32 full_x(int stage) const { return data + kBarriers + stage * 16; }
  __device__ __forceinline__ u32 empty_x(int stage) const { return full_x(stage) + 8; }
  __device__ __forceinline__ u32 full_w(int stage) const {
    return data + kBarriers + (kStagesX + stage) * 16;
  }
  __device__ __forceinline__ u32 empty_w(int stage) const { return full_w(stage) + 8; }
};

struct Place {
  int n, m;
};

struct Order {
  int row_tiles, column_tiles;
  __device__ __forceinline__ Order(int n, int m)
      : row_tiles(n / kBlockN), column_tiles((m + kBlockM - 1) / kBlockM) {}
  __device__ __forceinline__ int count() const { return row_tiles * column_tiles; }
  __device__ __forceinline__ Place at(int index) const {
    const TilePlace place = grouped_tile<kTileGroup>(index, row_tiles, column_tiles);
    return {place.row * kBlockN, place.column * kBlockM};
  }
};

__device__ __forceinline__ void produce(const Rings& rings, const TensorMap* w, const TensorMap* x,
                                        const Order& order, int k_steps) {
  SlotW slot_w;
  SlotX slot_x;
  for (int index = blockIdx.x; index < order.count(); index += gridDim.x) {
    const Place place = order.at(index);
    for (int step = 0; step < k_steps; ++step) {
      const int k = step * kStepK;
      const u32 full_w = rings.full_w(slot_w.stage);
      barrier_wait(rings.empty_w(slot_w.stage), slot_w.parity ^ 1);
      barrier_arrive_expect(full_w, kStageBytesW);
#pragma unroll
      for (int box = 0; box < 2; ++box)
        tma_load(rings.w(slot_w.stage) + box * kBoxBytesW, w, full_w, k + box * 32, place.n);
      slot_w.next();
      const u32 full_x = rings.full_x(slot_x.stage);
      barrier_wait(rings.empty_x(slot_x.stage), slot_x.parity ^ 1);
      barrier_arrive_expect(full_x, kStageBytesX);
      tma_load(rings.x(slot_x.stage), x, full_x, k, place.m);
      slot_x.next();
    }
  }
}

// Two floats as two halves, the first below.
__device__ __forceinline__ u32 halves(float low, float high) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ float bits(u32 v) { return __uint_as_float(v); }

// Raw values of one 16 along k: of row g and of row g + 8.
struct Raw {
  uint4 upper, lower;
};

using Fragment = u32[4];

__device__ __forceinline__ void convert(Fragment& a, const Raw& raw, float scale_upper,
                                        float scale_lower) {
  a[0] = halves(bits(raw.upper.x) * scale_upper, bits(raw.upper.y) * scale_upper);
  a[1] = halves(bits(raw.lower.x) * scale_lower, bits(raw.lower.y) * scale_lower);
  a[2] = halves(bits(raw.upper.z) * scale_upper, bits(raw.upper.w) * scale_upper);
  a[3] = halves(bits(raw.lower.z) * scale_lower, bits(raw.lower.w) * scale_lower);
}

// What a range guard would have to see of each element: the smallest magnitude but zero, as bits, and the
// largest half.
struct Seen {
  u32 least = ~0u, most = 0;

  __device__ __forceinline__ void add(const uint4& v) {
    least = min(least, (v.x << 1) - 1);
    least = min(least, (v.y << 1) - 1);
    least = min(least, (v.z << 1) - 1);
    least = min(least, (v.w << 1) - 1);
  }
  __device__ __forceinline__ void add(const Fragment& a) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      asm("max.xorsign.abs.f16x2 %0, %0, %1;" : "+r"(most) : "r"(a[i]));
  }
};

__device__ __forceinline__ void keep_fragments(Fragment (&a)[kProducts]) {
#pragma unroll
  for (int i = 0; i < kProducts; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(a[i][j])::"memory");
}

__device__ __forceinline__ void release(u32 empty) {
  if (threadIdx.x % 32 == 0) barrier_arrive(empty);
}

__device__ __forceinline__ void store(float* d, float (&v)[kAccumulators], float factor, int row,
                                      int first_column, int m) {
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) {
    const i64 start = static_cast<i64>(row + lower * 8) * m;
#pragma unroll
    for (int chunk = 0; chunk < kBlockM / 8; ++chunk) {
      const int column = first_column + chunk * 8 + 2 * (threadIdx.x % 4);
      const float a = v[chunk * 4 + lower * 2] * factor, b = v[chunk * 4 + lower * 2 + 1] * factor;
      if (column < m) *reinterpret_cast<float2*>(d + start + column) = make_float2(a, b);
    }
  }
}

__device__ __forceinline__ void consume(const Rings& rings, const float* scale, float* d,
                                        float factor, const Order& order, int m, int k_steps,
                                        int consumer) {
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int own_row = consumer * 64 + threadIdx.x % kWarpgroupThreads / 32 * 16 + g;
  const u32 own_offset = own_row * 128 + ((2 * q) ^ g) * 16;  // in a box of W; own_row % 8 == g
  SlotW slot_w;
  SlotX slot_x;
  for (int index = blockIdx.x; index < order.count(); index += gridDim.x) {
    const Place place = order.at(index);
    const int row = place.n + own_row;
    const float upper = __ldg(scale + row), lower = __ldg(scale + row + 8);
    Seen seen;
    float v[kAccumulators];
    Fragment a[2][kProducts];  // one is multiplied while the other is made

    const auto make = [&](Fragment (&next)[kProducts]) {
      barrier_wait(rings.full_w(slot_w.stage), slot_w.parity);
      const u32 at = rings.w(slot_w.stage) + own_offset;
      Raw raw[kProducts];
#pragma unroll
      for (int i = 0; i < kProducts; ++i) {
        const u32 address = (i % 2 ? at ^ 16 : at) + i / 2 * kBoxBytesW;
        raw[i].upper = load_unit(address);
        raw[i].lower = load_unit(address + 8 * 128);
      }
#pragma unroll
      for (int i = 0; i < kProducts; ++i) {
        convert(next[i], raw[i], upper, lower);
        if (kChecked) {
          seen.add(raw[i].upper);
          seen.add(raw[i].lower);
          seen.add(next[i]);
        }
      }
      slot_w.next();
    };

    make(a[0]);
    for (int first = 0; first < k_steps; first += 2) {
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        barrier_wait(rings.full_x(slot_x.stage), slot_x.parity);
        const u64 b = descriptor<true, 0>(rings.x(slot_x.stage));
        wgmma_fence();  // the fragments were written by ordinary instructions
#pragma unroll
        for (int i = 0; i < kProducts; ++i)
          wgmma_a(v, a[u][i], b + i * (step_bytes<true>() >> 4), first > 0 || u > 0 || i > 0);
        wgmma_commit();
        // Only now: an arrival right behind the loads of make() overtakes them, and the copy engine
        // overwrites what has not been read (measured).
        __syncwarp();
        release(rings.empty_w(slot_w.before()));
        wgmma_wait<1>();  // the step before is done: its slot of x, and its registers
        keep_fragments(a[(u + 1) % 2]);
        if (u > 0 || first > 0) release(rings.empty_x(slot_x.before()));
        slot_x.next();
        if (u == 0 || first + 2 < k_steps) make(a[(u + 1) % 2]);
      }
    }
    wgmma_wait<0>();
    keep_after_wait(v);
    keep_fragments(a[1]);
    release(rings.empty_x(slot_x.before()));
    if (kChecked && (seen.least < 3 || (seen.most & 0x7fff7fff) == 0x7c007c00))
      v[0] = __uint_as_float(0x7fc00000);
    store(d, v, factor, row, place.m, m);
  }
}

// n a multiple of kBlockN, k of two steps, m of 2: beyond m, TMA fills with zeros.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    w_from_registers(const __grid_constant__ TensorMap map_w, const __grid_constant__ TensorMap map_x,
                     const float* scale, float* d, int n, int m, int k, float factor) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Rings rings = {shared_address(shared)};
  const int warpgroup = threadIdx.x / kWarpgroupThreads;
  if (threadIdx.x == kConsumerThreads) {
    constexpr int kWarps = kConsumerThreads / 32;
#pragma unroll
    for (int stage = 0; stage < kStagesW; ++stage) {
      barrier_init(rings.full_w(stage), 1);
      barrier_init(rings.empty_w(stage), kWarps);
    }
#pragma unroll
    for (int stage = 0; stage < kStagesX; ++stage) {
      barrier_init(rings.full_x(stage), 1);
      barrier_init(rings.empty_x(stage), kWarps);
    }
    barrier_init_fence();
  }
  __syncthreads();
  wait_for_previous_kernel();
  let_next_kernel_start();

  const Order order(n, m);
  if (warpgroup == kConsumers) {
    give_registers<24>();
    if (threadIdx.x == kConsumerThreads) produce(rings, &map_w, &map_x, order, k / kStepK);
  } else {
    take_registers<240>();
    consume(rings, scale, d, factor, order, m, k / kStepK, warpgroup);
  }
}
