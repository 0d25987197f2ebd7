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
