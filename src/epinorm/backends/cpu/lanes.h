// One lane is one row. Sixteen rows are turned so that a channel's sixteen values lie side by side:
// every sum of a norm is then a vertical add, exact to the order of its channels, and any group
// size fills the vector units.
//
// The kernels have the compiler's own functions and traits for the standard library's: of a kernel's
// compilation, reading <cmath>, <utility> and <type_traits> was a third.
#pragma once
#include <cstdint>
#include <cstring>

#define EPINORM_INLINE static inline __attribute__((always_inline))
#define EPINORM_LANES _Pragma("omp simd") for (int l = 0; l < kLanes; ++l)

namespace epinorm {

constexpr int kLanes = 16;

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

// bf16 is the upper half of a float.
struct bf16 {
  uint16_t bits;
};

template <typename T>
struct Vector {
  static constexpr int kWidth = kVectorBytes / sizeof(T);
  typedef T Type __attribute__((vector_size(kVectorBytes)));
  static constexpr int kCount = kLanes / kWidth;
};

template <typename T>
using Vec = typename Vector<T>::Type;

template <typename T>
EPINORM_INLINE Vec<T> load(const T* from) {
  Vec<T> v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <typename T>
EPINORM_INLINE void store(T* to, const Vec<T>& v) {
  std::memcpy(to, &v, sizeof v);
}

typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));
typedef uint16_t Halves __attribute__((vector_size(kVectorBytes / 2)));

// A vector of T from values kept as S.
template <typename T, typename S>
EPINORM_INLINE Vec<T> load_as(const S* from) {
  if constexpr (__is_same(S, bf16)) {
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    return (Vec<T>)(__builtin_convertvector(halves, Words) << 16);
  } else {
    return load<T>(from);
  }
}

// To the nearest, ties to even. A NaN keeps its sign and becomes quiet: rounding its bits up could
// carry it into an infinity.
EPINORM_INLINE Halves round_to_bf16(Words bits) {
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Words quiet = (bits >> 16) | 0x40u;
  const Words is_nan = (Words)((bits & 0x7fffffffu) > 0x7f800000u);
  return __builtin_convertvector((rounded & ~is_nan) | (quiet & is_nan), Halves);
}

template <typename T, typename S>
EPINORM_INLINE void store_as(S* to, const Vec<T>& v) {
  if constexpr (__is_same(S, bf16)) {
    const Halves halves = round_to_bf16((Words)v);
    std::memcpy(to, &halves, sizeof halves);
  } else {
    store<T>(to, v);
  }
}

// One value, for (N,) tensors.
template <typename T, typename S>
EPINORM_INLINE T value_as(const S& from) {
  if constexpr (__is_same(S, bf16)) {
    const uint32_t bits = uint32_t(from.bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  } else {
    return from;
  }
}

// 0, 1, ... w - 1, as Places<__integer_pack(w)...>.
template <int... I>
struct Places {};

template <typename T, int... I>
EPINORM_INLINE void interleave(const Vec<T>& a, const Vec<T>& b, Vec<T>& low, Vec<T>& high,
                               Places<I...>) {
  constexpr int w = sizeof...(I);
  low = __builtin_shufflevector(a, b, (I / 2 + (I % 2 ? w : 0))...);
  high = __builtin_shufflevector(a, b, (w / 2 + I / 2 + (I % 2 ? w : 0))...);
}

// Transposes a square of vectors in place: log2(width) rounds of interleaving rows half a square
// apart.
template <typename T>
EPINORM_INLINE void transpose(Vec<T>* v) {
  constexpr int w = Vector<T>::kWidth;
  Vec<T> other[w];
#pragma GCC unroll 4
  for (int step = 1; step < w; step *= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < w / 2; ++i)
      interleave<T>(v[i], v[i + w / 2], other[2 * i], other[2 * i + 1],
                    Places<__integer_pack(w)...>());
#pragma GCC unroll 16
    for (int i = 0; i < w; ++i) v[i] = other[i];
  }
}

// rows x width, row by row -> to[width][kLanes]. Lanes past `rows` repeat the last row, so that they
// never hold garbage.
template <typename T, typename S>
static void load_lanes(const S* from, int64_t stride, int rows, int64_t width, T* to) {
  constexpr int w = Vector<T>::kWidth;
  const S* row[kLanes];
  for (int l = 0; l < kLanes; ++l) row[l] = from + (l < rows ? l : rows - 1) * stride;
  int64_t c = 0;
  for (; c + w <= width; c += w)
    for (int part = 0; part < kLanes; part += w) {
      Vec<T> v[w];
#pragma GCC unroll 16
      for (int i = 0; i < w; ++i) v[i] = load_as<T>(row[part + i] + c);
      transpose<T>(v);
#pragma GCC unroll 16
      for (int i = 0; i < w; ++i) store<T>(to + (c + i) * kLanes + part, v[i]);
    }
  for (; c < width; ++c)
    for (int l = 0; l < kLanes; ++l) to[c * kLanes + l] = value_as<T>(row[l][c]);
}

// from[width][kLanes] -> rows x width, row by row.
template <typename T, typename S>
static void store_lanes(const T* from, int rows, int64_t width, S* to, int64_t stride) {
  constexpr int w = Vector<T>::kWidth;
  for (int64_t c = 0; c < width; c += w) {
    const int64_t columns = width - c < w ? width - c : w;
    for (int part = 0; part < kLanes && part < rows; part += w) {
      Vec<T> v[w];
#pragma GCC unroll 16
      for (int i = 0; i < w; ++i) v[i] = load<T>(from + (c + (i < columns ? i : 0)) * kLanes + part);
      transpose<T>(v);
      if (columns == w && part + w <= rows) {
#pragma GCC unroll 16
        for (int i = 0; i < w; ++i) store_as<T>(to + (part + i) * stride + c, v[i]);
      } else {
        for (int i = 0; i < w && part + i < rows; ++i) {
          S values[w];
          store_as<T>(values, v[i]);
          std::memcpy(to + (part + i) * stride + c, values, columns * sizeof(S));
        }
      }
    }
  }
}

}  // namespace epinorm
