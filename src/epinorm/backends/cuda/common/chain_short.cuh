// Functions for operations whose result is stored in a type of 16 bits, or made of TF32's products, in fewer
// instructions than CUDA's own to the last bit of fp32. They are off by at most 2^-18 of themselves (tanh_pdf: of 1)
// where the result is a normal number of fp16, so that of all 2^16 results few more than with CUDA's own are not the
// nearest (tests/gpu/test_rounding.py). NaN and infinities come out where PyTorch has them.
#define EPINORM_FOR(function, type) EPINORM_FOR_TYPE(function, type)
#define EPINORM_FOR_TYPE(function, type) function##_for_##type

// What PyTorch keeps in fp32 takes none of these.
#define EPINORM_SAME_FOR_FLOAT(function)                     \
  template <typename... T>                                   \
  EPINORM_FUNCTION auto function##_for_float(T... x) {       \
    return function(x...);                                   \
  }
EPINORM_SAME_FOR_FLOAT(exp)
EPINORM_SAME_FOR_FLOAT(quotient)
EPINORM_SAME_FOR_FLOAT(gated)
EPINORM_SAME_FOR_FLOAT(normal_cdf)
EPINORM_SAME_FOR_FLOAT(normal_pdf)
EPINORM_SAME_FOR_FLOAT(tanh_cdf)
EPINORM_SAME_FOR_FLOAT(tanh_pdf)

constexpr float kLog2E = 1.4426950408889634f;

// Zero below fp32's normal numbers: fp16 has none there.
EPINORM_FUNCTION float exp2_to_normal(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
EPINORM_FUNCTION float reciprocal_to_normal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// bf16's numbers below those come by the square.
EPINORM_FUNCTION float exp_for_fp16(float x) { return exp2_to_normal(x * kLog2E); }
EPINORM_FUNCTION float exp_for_bf16(float x) {
  const float root = exp2_to_normal(x * (0.5f * kLog2E));
  return root * root;
}

EPINORM_FUNCTION float quotient_for_fp16(float a, float b) { return a * reciprocal_to_normal(b); }
EPINORM_FUNCTION float quotient_for_bf16(float a, float b) { return quotient_for_fp16(a, b); }

EPINORM_FUNCTION float gated_for_fp16(float a, float x) { return quotient_for_fp16(a, 1.0f + exp_for_fp16(-x)); }
// 1 + exp(-x) of 2^-8 its size, whose reciprocal is normal wherever the quotient is a number of bf16; infinite where
// exp(-x) is in fp32, as PyTorch's.
EPINORM_FUNCTION float gated_for_bf16(float a, float x) {
  constexpr float kSmaller = 1.0f / 256.0f;
  const float sum = fmaf(exp2_to_normal(-kLog2E * x), kSmaller, kSmaller);
  return a * (reciprocal_to_normal(sum) * kSmaller);
}

// Phi(-t) = 2^p(t) for t >= 0: p is fitted to log2(Phi(-t)) up to 7 (minimax, by iteratively reweighted least
// squares in double; 2^-18 of Phi up to 4, 2^-11 up to 7), and falls from there on to minus infinity. Without the
// cancellation of 1 + erf the lower tail keeps its digits.
EPINORM_FUNCTION float normal_cdf_for_fp16(float x) {
  const float t = fabsf(x);
  float p = -1.59671981e-06f;
  p = fmaf(p, t, 5.72461977e-05f);
  p = fmaf(p, t, -0.000900159124f);
  p = fmaf(p, t, 0.00840464979f);
  p = fmaf(p, t, -0.0537805855f);
  p = fmaf(p, t, -0.458616197f);
  p = fmaf(p, t, -1.15119827f);
  const float tail = exp2_to_normal(fmaf(p, t, -1.0f));
  return x > 0.0f ? 1.0f - tail : tail;
}
EPINORM_FUNCTION float normal_cdf_for_bf16(float x) { return normal_cdf_for_fp16(x); }

// The density's factor 1 / sqrt(2 pi) is 2^-1.3257.
EPINORM_FUNCTION float normal_pdf_for_fp16(float x) {
  return exp2_to_normal(fmaf(x * x, -0.5f * kLog2E, -1.3257480647361593f));
}
EPINORM_FUNCTION float normal_pdf_for_bf16(float x) { return normal_pdf_for_fp16(x); }

// (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)), of which tanh's square is made, too.
EPINORM_FUNCTION float tanh_cdf_for_fp16(float x) {
  constexpr float kScale = -2.0f * kLog2E * 0.7978845608028654f;
  const float inner = fmaf(x * x, kScale * 0.044715f, kScale);
  return reciprocal_to_normal(1.0f + exp2_to_normal(x * inner));
}
EPINORM_FUNCTION float tanh_cdf_for_bf16(float x) { return tanh_cdf_for_fp16(x); }
EPINORM_FUNCTION float tanh_pdf_for_fp16(float x) {
  constexpr float kScale = 2.0f * 0.7978845608028654f;
  const float cdf = tanh_cdf_for_fp16(x);
  return (cdf - cdf * cdf) * fmaf(x * x, kScale * 0.134145f, kScale);
}
EPINORM_FUNCTION float tanh_pdf_for_bf16(float x) { return tanh_pdf_for_fp16(x); }
