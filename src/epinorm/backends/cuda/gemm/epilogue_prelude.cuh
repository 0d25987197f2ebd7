// One instance of a product's epilogue, as text/instance.py writes it; see text/source.py.
#pragma once
#include "common/chain_prelude.cuh"

constexpr int kGroupColumns = 32, kChannelOperands = 0;
constexpr bool kHasBias = true, kHasGamma = true, kHasBeta = true, kScaled = false;
constexpr bool kSaveForBackward = true, kKeepsSum = false, kKeepStatistics = true;
constexpr bool kAffineScaled = false, kBiasInZ = false;
#define OutType Float32
#define LinearType Float32
#define KeptType Float32
#define NormType Float32
#define CHAIN_PARAMETERS , float constant0
#define OPERAND_LIST {nullptr}
#define CONSTANT_LIST {{constant0}}
#define AFFINE_SCALE 1.0f

#if __INCLUDE_LEVEL__ < 2  // what the kernel says, where none is being read
constexpr int kWarpColumns = 64, kAccumulators = 32, kVectorColumns = 64, kVectorThreads = 128;
constexpr int kParts = 1, kPlanes = 1, kSpareRegisters = 128;
constexpr bool kAlignedRows = true, kPacksAffine = false;
#endif
