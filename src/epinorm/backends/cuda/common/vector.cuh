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
    return to<T>(value[i]);
  }

  template <typename T>
  EPINORM_FUNCTION void set(const T (&x)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) value[i] = Rounded<S>::from(x[i]);
  }
};

template <typename S, int kCount>
EPINORM_FUNCTION Vector<S, kCount> loaded(const S* from) {
  Vector<S, kCount> vector;
  vector.load(from);
  return vector;
}
