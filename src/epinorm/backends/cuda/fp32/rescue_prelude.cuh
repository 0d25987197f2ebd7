// One instance of the range guards, as fp32/rescue.py and fp32/rescue_gradient.py write it; see text/source.py.
#pragma once
#include "common/chain_prelude.cuh"

constexpr int kRows = 128, kColumns = 128, kWidth = 128;
constexpr int kBlockK = 32, kStages = 3, kSplitK = 2;
constexpr int kGroup = 32, kGroupParts = 1, kAligned = 1, kFlagsLate = 0;
constexpr int kHasBias = 1, kHasGamma = 1, kHasBeta = 1;
constexpr int kSaveForBackward = 1, kKeepsSum = 0, kKeepStatistics = 1, kProduct = 1, kMomentRows = 0;
constexpr int kTransposedA = 1, kAdds = 0, kPlanes = 2;
#define CHAIN_PARAMETERS , float constant0
#define OPERAND_LIST {nullptr}
#define STRIDE_LIST {0}
#define CONSTANT_LIST {{constant0}}
