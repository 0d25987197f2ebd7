// What operations are made of besides CUDA's own functions; in the namespace of each chain.
EPINORM_FUNCTION float rounded_float(float x) { return x; }
EPINORM_FUNCTION double rounded_double(double x) { return x; }
// A pair of bf16 whose lower half is zero is the float. It is no integer outside the assembly: else the
// compiler keeps accumulators as integers, and moves them between the products.
EPINORM_FUNCTION float rounded_bf16(float x) {
  asm("{ .reg .b32 pair; cvt.rn.bf16x2.f32 pair, %0, %1; mov.b32 %0, pair; }" : "+f"(x) : "f"(0.0f));
  return x;
}
EPINORM_FUNCTION float rounded_fp16(float x) {
  asm("{ .reg .b16 h; cvt.rn.f16.f32 h, %0; cvt.f32.f16 %0, h; }" : "+f"(x));
  return x;
}

// What PyTorch's norm keeps mean and rstd in before it applies them, where that is less than it computes in.
#ifdef EPINORM_STATISTICS
constexpr bool kRoundsStatistics = true;
EPINORM_FUNCTION float statistic(float x) { return EPINORM_ROUNDED(EPINORM_STATISTICS, x); }
EPINORM_FUNCTION void round_statistics(float& mean, float& rstd);
#else
constexpr bool kRoundsStatistics = false;
template <typename T>
EPINORM_FUNCTION T statistic(T x) {
  return x;
}
EPINORM_FUNCTION void round_statistics(float&, float&) {}
#endif

// PyTorch's layer_norm of whole units of four columns adds up parts of a row in 128 threads. In rows of less than
// 512 it joins parts with threads that have none, by delta * delta * 0: NaN where the square of a part's mean
// overflows, however little the row varies. The whole row's mean stands for its parts' here.
template <int kColumns>
EPINORM_FUNCTION float eagers_rstd(float rstd, float mean) {
  constexpr bool kJoinsEmptyParts = kLayerNorm && kColumns % 4 == 0 && kColumns < 512;
  return kJoinsEmptyParts && !(mean * mean < float(EPINORM_INFINITY)) ? float(EPINORM_INFINITY) * 0.0f : rstd;
}
template <int kColumns>
EPINORM_FUNCTION double eagers_rstd(double rstd, double) {
  return rstd;
}

// a / b within two ulp, without the branch that a division has for what lies outside 1e-38 to 1e37.
EPINORM_FUNCTION float quotient(float a, float b) { return __fdividef(a, b); }
EPINORM_FUNCTION double quotient(double a, double b) { return a / b; }

// x, but the bound where it is beyond that; NaN where x is.
template <typename T>
EPINORM_FUNCTION T at_least(T x, T low) {
  return x < low ? low : x;
}
template <typename T>
EPINORM_FUNCTION T at_most(T x, T high) {
  return x > high ? high : x;
}
#ifndef EPINORM_BACKWARD  // there the compiler keeps what follows for its second use, but not behind asm
EPINORM_FUNCTION float at_least(float x, float low) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(low));
  return x;
}
EPINORM_FUNCTION float at_most(float x, float high) {
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(high));
  return x;
}
#endif
