// exp, expm1, log1p, tanh and erf without branches, so that a loop over lanes becomes vectors.
//
// The float versions are within about two units in the last place. Polynomials are minimax fits
// (iteratively reweighted least squares in double); reductions are Cody and Waite's (Software Manual
// for the Elementary Functions, 1980). Comparisons are ordered so that a NaN goes through. The
// double versions are the C library's. Why not <cmath>: lanes.h.
#pragma once
#include <cstdint>
#include <cstring>

#include "lanes.h"

namespace epinorm {

template <typename T>
EPINORM_INLINE T quotient(T a, T b) {
  return a / b;
}

// x, but the bound where it is beyond that; NaN where x is.
template <typename T>
EPINORM_INLINE T at_least(T x, T low) {
  return x < low ? low : x;
}
template <typename T>
EPINORM_INLINE T at_most(T x, T high) {
  return x > high ? high : x;
}

EPINORM_INLINE float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
EPINORM_INLINE uint32_t as_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// By Horner's rule: the highest power's coefficient comes first.
template <typename... C>
EPINORM_INLINE float polynomial(float x, float sum, C... coefficients) {
  ((sum = sum * x + coefficients), ...);
  return sum;
}

// x rounded to a type by the name that lanes.h has for it; see round_to_bf16 there.
EPINORM_INLINE float rounded_float(float x) { return x; }
EPINORM_INLINE float rounded_bf16(float x) {
  const uint32_t bits = as_bits(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return as_float(is_nan ? bits | 0x400000u : rounded);
}

// 2^n for -126 <= n <= 127.
EPINORM_INLINE float power_of_two(int32_t n) { return as_float(uint32_t(n + 127) << 23); }

// x = n ln 2 + r with |r| <= ln 2 / 2; returns exp(r) - 1. Needs |x| < 2^20.
EPINORM_INLINE float reduced_expm1(float x, int32_t& n) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest whole number
  const float shifted = x * 1.44269504f + kRound;
  n = int32_t(as_bits(shifted) - as_bits(kRound));
  const float whole = shifted - kRound;
  const float r = (x - whole * 0.693145752f) - whole * 1.42860677e-6f;
  const float p = polynomial(r, 0.000199193799f, 0.00139472249f, 0.00833326264f, 0.0416662538f,
                                0.166666669f, 0.500000008f);
  return p * (r * r) + r;
}

EPINORM_INLINE float exp(float x) {
  x = x > 89.0f ? 89.0f : x;     // overflows to infinity from 88.8 on
  x = x < -104.0f ? -104.0f : x; // underflows to zero from -103.98 on
  int32_t n;
  const float q = reduced_expm1(x, n);
  // In two steps, so that results below the smallest normal number round once and correctly.
  const int32_t half = n >> 1;
  return (q + 1.0f) * power_of_two(half) * power_of_two(n - half);
}

EPINORM_INLINE float expm1(float x) {
  const float small = x;
  x = x > 89.0f ? 89.0f : x;
  x = x < -25.0f ? -25.0f : x;
  int32_t n;
  const float q = reduced_expm1(x, n);
  const float scale = power_of_two(n - 1);  // halved: 2^128 is infinite
  const float result = (scale * q + (scale - 0.5f)) * 2.0f;
  return small == 0.0f ? small : result;  // keeps the sign of zero
}

// For x >= 0, as the operations need it.
EPINORM_INLINE float log1p(float x) {
  const float u = 1.0f + x;
  // u = 2^n * m with m in [sqrt(1/2), sqrt(2))
  const uint32_t shifted = as_bits(u) - 0x3f3504f3u;
  const int32_t n = int32_t(shifted) >> 23;
  const float f = as_float((shifted & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
  const float p = polynomial(f, 0.0695488227f, -0.118355432f, 0.118791075f, -0.12377732f,
                                0.142173055f, -0.166695494f, 0.200022786f, -0.249999823f,
                                0.333333102f);
  const float whole = float(n);
  const float rest = (x - (u - 1.0f)) / u;  // what rounding 1 + x lost
  const float low = f * f * (p * f - 0.5f) + (whole * 1.42860677e-6f + rest);
  const float result = whole * 0.693145752f + (f + low);
  return x <= 3.4028234e38f ? result : x;  // infinity and NaN as they are
}

EPINORM_INLINE float tanh(float x) {
  const float s = x * x;
  const float p = polynomial(s, -0.000771286037f, 0.00318760065f, -0.00873088338f, 0.021845045f,
                                -0.0539658083f, 0.133333217f, -0.333333331f);
  const float near = (p * s) * x + x;
  const float magnitude = __builtin_fabsf(x);
  const float far = __builtin_copysignf(1.0f - 2.0f / (exp(2.0f * magnitude) + 1.0f), x);
  return magnitude <= 0.625f ? near : far;
}

EPINORM_INLINE float erf(float x) {
  const float s = x * x;
  // The last is 2 / sqrt(pi) - 1: adding x behind it keeps its bits.
  const float p = polynomial(s, -9.641516e-06f, 0.000112569478f, -0.000848282883f, 0.00522094543f,
                                -0.0268654f, 0.11283782f, -0.376126384f, 0.128379166f);
  const float near = p * x + x;
  float t = __builtin_fabsf(x);
  t = t > 4.0f ? 4.0f : t;  // from 3.93 on the result rounds to one
  // -log(erfc(t)) on [1, 4].
  const float q = polynomial(t, 2.16868129e-05f, -0.00044133589f, 0.00420455918f, -0.0252082486f,
                                0.108418563f, 0.633219908f, 1.12957842f, -0.000188038166f);
  const float far = __builtin_copysignf(1.0f - exp(-q), x);
  return __builtin_fabsf(x) <= 1.0f ? near : far;
}

EPINORM_INLINE float root(float x) { return __builtin_sqrtf(x); }
EPINORM_INLINE double root(double x) { return __builtin_sqrt(x); }
EPINORM_INLINE double exp(double x) { return __builtin_exp(x); }
EPINORM_INLINE double expm1(double x) { return __builtin_expm1(x); }
EPINORM_INLINE double log1p(double x) { return __builtin_log1p(x); }
EPINORM_INLINE double tanh(double x) { return __builtin_tanh(x); }
EPINORM_INLINE double erf(double x) { return __builtin_erf(x); }

}  // namespace epinorm
