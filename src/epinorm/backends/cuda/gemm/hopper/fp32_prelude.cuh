// One instance of the kernels that convert on the way, as gemm/hopper/fp32_weight.py writes it; see text/source.py.
#pragma once
#include "fp32/planes_prelude.cuh"
#include "gemm/epilogue_prelude.cuh"

constexpr int kBlockM = 64, kBlockN = 128, kStagesW = 3, kStagesX = 4, kTileGroup = 16, kClusterN = 1, kStepBoxes = 2;
#define HELD_PARAMETER
constexpr bool kLendsRing = true, kWritesPlane = false, kAlignedRows = true;
__device__ void wgmma_a(float (&d)[32], const unsigned (&a)[4], unsigned long long b);
