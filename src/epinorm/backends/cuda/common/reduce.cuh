// Sums over a team: kLanes neighbouring lanes of a warp, or, above 32, the whole block.
// Every lane of the team gets the same bits, since each step adds the same two numbers in both lanes.
#pragma once
#include "common/chain.cuh"

constexpr unsigned kAllLanes = 0xffffffffu;

EPINORM_FUNCTION constexpr int power_of_two_from(int value) {
  int power = 1;
  while (power < value) power *= 2;
  return power;
}

// Every lane of the warp must call it. kCount independent sums hide the shuffles' latency.
template <int kLanes, typename T, int kCount>
EPINORM_FUNCTION void warp_sum(T (&x)[kCount]) {
#pragma unroll
  for (int offset = 1; offset < kLanes; offset *= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] += __shfl_xor_sync(kAllLanes, x[i], offset);
  }
}

// One barrier a sum: two buffers take turns, so that a warp that is ahead writes where no other
// one can still be reading. kMost is the largest number of sums in one call.
template <int kLanes, typename T, int kMost>
struct Team {
  static constexpr int kWarps = kLanes > 32 ? kLanes / 32 : 1;
  static constexpr int kSpan = power_of_two_from(kWarps);

  T (*scratch)[kMost][kWarps];  // [2][kMost][kWarps] in shared memory
  int turn = 0;

  EPINORM_FUNCTION explicit Team(T (*shared)[kMost][kWarps]) : scratch(shared) {}

  template <int kCount>
  EPINORM_FUNCTION void sum(T (&x)[kCount]) {
    const int lane = threadIdx.x % 32;
    warp_sum<32>(x);
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) scratch[turn][i][threadIdx.x / 32] = x[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      x[i] = lane % kSpan < kWarps ? scratch[turn][i][lane % kSpan] : T(0);
    warp_sum<kSpan>(x);
    turn ^= 1;
  }
};

template <int kLanes, typename T>
struct WarpTeam {
  template <int kCount>
  EPINORM_FUNCTION void sum(T (&x)[kCount]) {
    warp_sum<kLanes>(x);
  }
};
