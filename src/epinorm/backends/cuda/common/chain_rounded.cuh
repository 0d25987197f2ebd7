// Functions for operations whose result is rounded to a type of 16 bits, in two or three instructions instead of
// five and eight: exp(x) is off by at most 2^-21 and |x| 2^-24 of itself, so that of all 2^16 results about as many
// as with CUDA's own lie across a tie from PyTorch's (tests/gpu/test_rounding.py counts them).
#define EPINORM_FOR(function, type) EPINORM_FOR_TYPE(function, type)
#define EPINORM_FOR_TYPE(function, type) function##_for_##type

template <typename T>
EPINORM_FUNCTION T exp_for_float(T x) {
  return exp(x);
}
template <typename T>
EPINORM_FUNCTION T quotient_for_float(T a, T b) {
  return quotient(a, b);
}
// Zero below fp32's normal numbers: fp16 has none there, bf16 gets them by the square.
EPINORM_FUNCTION float exp2_to_normal(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
EPINORM_FUNCTION float exp_for_fp16(float x) { return exp2_to_normal(x * 1.4426950408889634f); }
EPINORM_FUNCTION float exp_for_bf16(float x) {
  const float root = exp2_to_normal(x * 0.7213475204444817f);
  return root * root;
}
EPINORM_FUNCTION float quotient_for_fp16(float a, float b) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(b));
  return a * reciprocal;
}
EPINORM_FUNCTION float quotient_for_bf16(float a, float b) { return quotient_for_fp16(a, b); }

// Two numbers at once. bf16 has nothing to gain: a pair would have to be taken apart by two instructions more.
#define EPINORM_ROUND_PAIR(type, a, b) EPINORM_ROUND_PAIR_TO(type, a, b)
#define EPINORM_ROUND_PAIR_TO(type, a, b) round_pair_##type(a, b)

template <typename T>
EPINORM_FUNCTION void round_pair_float(T&, T&) {}
EPINORM_FUNCTION void round_pair_bf16(float& a, float& b) {
  a = rounded_bf16(a);
  b = rounded_bf16(b);
}
EPINORM_FUNCTION void round_pair_fp16(float& a, float& b) {
  asm("{ .reg .b32 pair; .reg .b16 low, high; cvt.rn.f16x2.f32 pair, %1, %0; mov.b32 {low, high}, pair;"
      " cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
      : "+f"(a), "+f"(b));
}

#ifdef EPINORM_STATISTICS
EPINORM_FUNCTION void round_statistics(float& mean, float& rstd) {
  EPINORM_ROUND_PAIR(EPINORM_STATISTICS, mean, rstd);
}
#endif
