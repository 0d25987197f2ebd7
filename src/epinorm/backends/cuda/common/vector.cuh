// kCount neighbouring values of storage type S, moved in pieces of up to 16 bytes.
#pragma once
#include "common/numeric.cuh"

template <int kBytes>
struct Piece {
  using type = uint4;
};
template <>
struct Piece<8> {
  using type = uint2;
};
template <>
struct Piece<4> {
  using type = unsigned;
};
template <>
struct Piece<2> {
  using type = unsigned short;
};

template <typename S, int kCount>
struct Vector {
  static constexpr int kBytes = kCount * int(sizeof(S));
  using Unit = typename Piece<(kBytes < 16 ? kBytes : 16)>::type;
  static constexpr int kUnits = kBytes / int(sizeof(Unit));

  union {
    Unit unit[kUnits];
    S value[kCount];
    unsigned word[kBytes < 4 ? 1 : kBytes / 4];
  };

  EPINORM_FUNCTION Vector() {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) unit[i] = Unit{};
  }

  // What no thread of this grid writes: the read-only path.
  EPINORM_FUNCTION void load(const S* from) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) unit[i] = __ldg(reinterpret_cast<const Unit*>(from) + i);
  }

  // What this thread itself may write later.
  EPINORM_FUNCTION void load_own(const S* from) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) unit[i] = reinterpret_cast<const Unit*>(from)[i];
  }

  EPINORM_FUNCTION void store(S* target) const {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) reinterpret_cast<Unit*>(target)[i] = unit[i];
  }

  template <typename T>
  EPINORM_FUNCTION T get(int i) const {
    // One instruction for either half of a word; taken out as 16 bits first, the upper one takes two.
    if constexpr (kIsBf16<S> && kCount % 2 == 0)
      return T(__uint_as_float(i % 2 ? word[i / 2] & 0xffff0000u : word[i / 2] << 16));
    return to<T>(value[i]);
  }

  template <typename T>
  EPINORM_FUNCTION void set(const T (&x)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) value[i] = Rounded<S>::from(x[i]);
  }
};

// A vector that is not zero until it is loaded: of registers that may not be read, none are set.
template <typename V>
union Unset {
  V it;
  EPINORM_FUNCTION Unset() {}
};

template <typename S, int kCount>
EPINORM_FUNCTION Vector<S, kCount> loaded(const S* from) {
  Vector<S, kCount> vector;
  vector.load(from);
  return vector;
}
