// What epilogue_values.cuh says before it includes element_operands.cuh; see text/source.py.
#pragma once
#include "gemm/epilogue_prelude.cuh"

#if __INCLUDE_LEVEL__ < 2
struct Epilogue {
  const float* operands[chain::kSlots];
  int m, n;
};
#endif
