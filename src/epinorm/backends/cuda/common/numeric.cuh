// The 16-bit types as bits, and conversions between storage types and the type computed in.
// PTX conversions instead of cuda_fp16.h: no header to find, and NVRTC is faster without it.
#pragma once
#include "common/chain.cuh"

struct bf16 {
  unsigned short bits;
};

struct fp16 {
  unsigned short bits;
};

template <typename S>
constexpr bool kIsBf16 = false;
template <>
constexpr bool kIsBf16<bf16> = true;

template <typename T>
EPINORM_FUNCTION T to(float x) {
  return T(x);
}

template <typename T>
EPINORM_FUNCTION T to(double x) {
  return T(x);
}

template <typename T>
EPINORM_FUNCTION T to(bf16 x) {
  return T(__uint_as_float(unsigned(x.bits) << 16));
}

template <typename T>
EPINORM_FUNCTION T to(fp16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return T(y);
}

// Round to nearest even, as PyTorch does.
template <typename S>
struct Rounded {
  template <typename T>
  EPINORM_FUNCTION static S from(T x) {
    return S(x);
  }
};

template <>
struct Rounded<bf16> {
  EPINORM_FUNCTION static bf16 from(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
  }
};

template <>
struct Rounded<fp16> {
  EPINORM_FUNCTION static fp16 from(float x) {
    fp16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
  }
};

// 1/sqrt(x). The hardware's estimate is within two ulp and shared by a whole group, so one Newton
// step follows; it is left out where it would turn 1/inf = 0 or 1/0 = inf into NaN.
EPINORM_FUNCTION float reciprocal_sqrt(float x) {
  const float y = rsqrtf(x);
  const float e = fmaf(-x * y, y, 1.0f);
  return fabsf(e) < 1.0f ? fmaf(0.5f * y, e, y) : y;
}

EPINORM_FUNCTION double reciprocal_sqrt(double x) { return 1.0 / sqrt(x); }
