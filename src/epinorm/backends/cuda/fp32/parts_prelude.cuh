// What rescue.cu says before it includes rescue_parts.cuh; see text/source.py.
#pragma once
#include "fp32/rescue_prelude.cuh"

#if __INCLUDE_LEVEL__ < 2
struct Epilogue {
  const float *bias, *gamma, *beta;
  chain::Constants<float> constants;
  float *y, *z, *mean, *rstd;
  int n;
};
__device__ void load_operands(float (&t)[chain::kSlots], const Epilogue& e, int row, int column);
#endif
