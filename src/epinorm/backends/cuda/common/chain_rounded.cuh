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
