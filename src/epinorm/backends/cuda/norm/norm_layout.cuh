// Which thread holds what, the same for the forward and the backward norm kernel.
//
// A team of kLanes lanes holds one (row, group): kVectors vectors of kVector neighbouring channels a
// lane, the lanes' vectors interleaved so that a warp reads whole sectors. Teams of up to 32 lanes
// lie in a warp side by side, on neighbouring groups; above, the whole block is one team. A thread
// keeps its columns and walks over rows, kRows of them in flight at a time, so that bias, gamma and
// beta are read once (kCacheAffine) and column sums stay in registers.
//
// The prelude gives the types; kChannels in a group, kVector, kLanes, kVectors, kRows, kWarpsX,
// kWarpsY, kCacheAffine, kPrefetch, kMinBlocksPerSm; kAddsBias (z lacks it), kHasGamma, kHasBeta; the text of the chain. See norm/text.py.
#pragma once
#include "norm/norm_types.cuh"
#include "common/reduce.cuh"
#include "common/vector.cuh"

constexpr bool kBlockTeam = kLanes > 32;
constexpr int kThreads = kBlockTeam ? kLanes : 32 * kWarpsX * kWarpsY;
constexpr bool kExact = kLanes * kVectors * kVector == kChannels;
constexpr int kValues = kVectors * kVector;
// A thread has its next row on the way, all of its vectors or none. Then addresses are one and constants, and raw
// registers are not set where nothing is read: two of 32 instructions a value, and a block more on a multiprocessor
// (LayerNorm of 4096). In other tiles the compiler has more loads in flight so, and fewer blocks.
constexpr bool kAhead = kPrefetch && kBlockTeam && kExact && kVectors == 4;
constexpr int kRowsPerPass = kRows * kWarpsY;
static_assert(!kBlockTeam || (kWarpsX == 1 && kWarpsY == 1), "a team of a block is alone in it");
static_assert(kChannels % kVector == 0, "a vector lies in one group");

struct Position {
  int group;
  int lane;  // in the team
  int row;   // in a pass over kRowsPerPass rows
  bool live;

  EPINORM_FUNCTION explicit Position(int groups) {
    if (kBlockTeam) {
      group = blockIdx.x;
      lane = threadIdx.x;
      row = 0;
    } else {
      constexpr int kTeams = kBlockTeam ? 1 : 32 / kLanes;
      const int warp = threadIdx.x / 32, warp_lane = threadIdx.x % 32;
      group = (blockIdx.x * kWarpsX + warp % kWarpsX) * kTeams + warp_lane / kLanes;
      lane = warp_lane % kLanes;
      row = warp / kWarpsX;
    }
    live = group < groups;
  }

  // First channel of this lane's vector e, counted in the group.
  EPINORM_FUNCTION int channel(int e) const { return (e * kLanes + lane) * kVector; }
  EPINORM_FUNCTION bool in_group(int e) const { return kExact || channel(e) < kChannels; }
  EPINORM_FUNCTION bool inside(int e) const { return live && in_group(e); }
  EPINORM_FUNCTION i64 column(int e) const {
    if (!kAhead) return group * kChannels + channel(e);
    return i64(group * kChannels + lane * kVector) + e * (kLanes * kVector);
  }
};

// Everything that is read besides z: vectors over channels, operands and the chain's constants.
struct Sources {
  const Z* bias;
  const P* gamma;
  const P* beta;
  const P* operand[chain::kSlots];
  i64 stride[chain::kSlots];
  chain::Constants<T> constants;
  chain::Drops<T> drops;
};

// The channels' values of one vector. What is never used is never loaded: the loads are pure.
struct Channels {
  Vector<Z, kVector> bias;
  Vector<P, kVector> gamma, beta, operand[chain::kSlots];

  EPINORM_FUNCTION void load(const Sources& from, i64 column) {
    if (kAddsBias) bias.load(from.bias + column);
    if (kHasGamma) gamma.load(from.gamma + column);
    if (kHasBeta) beta.load(from.beta + column);
#pragma unroll
    for (int i = 0; i < chain::kOperands; ++i)
      if (chain::is_channel(i)) operand[i].load(from.operand[i] + column);
  }

  EPINORM_FUNCTION T with_bias(T z, int j) const { return kAddsBias ? z + bias.get<T>(j) : z; }
  EPINORM_FUNCTION T scale(int j) const { return kHasGamma ? gamma.get<T>(j) : T(1); }
  // gamma * (distance - shift) * rstd + beta in two instructions, each of one rounding: the offset is a row's.
  EPINORM_FUNCTION T normalized(T distance, T shift, T rstd, int j) const {
    const T offset = -shift * rstd;
    return affine(chain::kCentred ? distance * rstd + offset : distance * rstd, j);
  }
  EPINORM_FUNCTION T affine(T normalized, int j) const {
    const T scaled = kHasGamma ? normalized * gamma.get<T>(j) : normalized;
    return kHasBeta ? scaled + beta.get<T>(j) : scaled;
  }
};

// The element operands' values of one vector of one row, and the row's own; of a seed, a bit for each
// value that is kept.
struct Elements {
  Vector<P, kVector> operand[chain::kSlots];
  T of_row[chain::kSlots];
  unsigned kept[chain::kSlots];

  EPINORM_FUNCTION void load(const Sources& from, i64 row, i64 column) {
#pragma unroll
    for (int i = 0; i < chain::kOperands; ++i)
      if (chain::is_element(i)) operand[i].load(from.operand[i] + row * from.stride[i] + column);
    draw(from, row, int(column));
  }

  EPINORM_FUNCTION void draw(const Sources& from, i64 row, int column) {
#pragma unroll
    for (int i = 0; i < chain::kOperands; ++i) {
      if (chain::is_row(i)) of_row[i] = to<T>(from.operand[i][row * from.stride[i]]);
      if (!chain::is_seed(i)) continue;
      const chain::Seed seed = from.drops.of[i].seed;
      const unsigned last = from.drops.of[i].last;
      kept[i] = 0;
#pragma unroll
      for (int j = 0; j < kVector; j += 2) {
        const chain::RandomPair words = chain::random_words(seed, row, (column + j) / 2);
        const unsigned first = kVector == 1 && column % 2 ? words.odd : words.even;
        kept[i] |= unsigned(first <= last) << j;
        if (kVector > 1) kept[i] |= unsigned(words.odd <= last) << (j + 1);
      }
    }
  }
};

// rstd and shift as they are applied to what lies `distance` from `mean`, the values' mean being mean +
// shift: as PyTorch's norm has them.
struct Applied {
  T shift, rstd;

  EPINORM_FUNCTION Applied(T mean, T shift, T rstd) : shift(shift), rstd(chain::statistic(rstd)) {
    if (chain::kRoundsStatistics) this->shift = chain::statistic(mean + shift) - mean;
  }
};

// All operands of value j, as the chain's functions take them.
EPINORM_FUNCTION void operands_at(const Sources& from, const Channels& channels,
                                  const Elements& elements, int j, T (&t)[chain::kSlots]) {
#pragma unroll
  for (int i = 0; i < chain::kOperands; ++i) {
    if (chain::is_channel(i))
      t[i] = channels.operand[i].get<T>(j);
    else if (chain::is_element(i))
      t[i] = elements.operand[i].get<T>(j);
    else if (chain::is_row(i))
      t[i] = elements.of_row[i];
    else
      t[i] = elements.kept[i] >> j & 1 ? from.drops.of[i].scale : T(0);
  }
}

// The channels' values of vector e: kept in registers over all rows where there are few of them,
// else read again (from L1) for each pass. Place is Position, or whatever has inside and column.
struct ChannelStore {
  Channels kept[kCacheAffine ? kVectors : 1];

  template <typename Place>
  EPINORM_FUNCTION ChannelStore(const Sources& from, const Place& at) {
    if (!kCacheAffine) return;
#pragma unroll
    for (int e = 0; e < kVectors; ++e)
      if (at.inside(e)) kept[e].load(from, at.column(e));
  }

  template <typename Place>
  EPINORM_FUNCTION Channels get(const Sources& from, const Place& at, int e) const {
    if (kCacheAffine) return kept[e];
    Channels channels;
    if (at.inside(e)) channels.load(from, at.column(e));
    return channels;
  }
};
