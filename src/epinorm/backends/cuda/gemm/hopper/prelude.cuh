// One instance of the Hopper core, as gemm/hopper/text.py writes it; see text/source.py.
#pragma once

constexpr int kBlockM = 64, kBlockN = 256, kLoadM = 64, kElementBytes = 2;
constexpr int kStages = 4, kPlanes = 1, kFoldSteps = 4, kConsumers = 2, kWeightSteps = 0;
constexpr int kOperandSlots = 0;
#define HELD_PARAMETER
constexpr int kCluster = 1, kClusterN = 1, kTileGroup = 16;
constexpr bool kMajorKA = true, kMajorKB = true, kPingPong = true, kSplitColumns = false;
constexpr bool kAlignedRows = true, kRegisterA = false;
__device__ void wgmma(float (&d)[128], unsigned long long a, unsigned long long b, int accumulate);
