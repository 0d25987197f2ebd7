// One instance of the norm kernels, as norm/text.py and norm/backward_text.py write it; see text/source.py.
#pragma once
#define EPINORM_Z float
#define EPINORM_P float
#define EPINORM_Y float
#define EPINORM_S float
#define EPINORM_T float
#include "common/chain_prelude.cuh"

constexpr int kChannels = 32, kVector = 4, kLanes = 8, kVectors = 1, kRows = 1;
constexpr int kWarpsX = 1, kWarpsY = 1, kMinBlocksPerSm = 1;
constexpr int kCacheAffine = 1, kPrefetch = 0, kAddsBias = 1, kHasGamma = 1, kHasBeta = 1;
constexpr int kKeepStatistics = 1, kWritesSum = 0, kCached = 0;
constexpr int kSumsGiven = 0, kEveryGroup = 0, kRaggedRows = 0, kOwnsDy = 0;
constexpr int kFinishes = 1, kStatisticsRows = 8, kMomentRows = 64, kFromLast = 0;
constexpr int kJoinColumns = 32;
constexpr int kSumGamma = 0, kSumBeta = 1, kSumBias = 2, kSums = 3;
constexpr int kWriteDz = 1, kRowLargest = 1, kColumnLargest = 1;
constexpr int kStrips = 1, kStreams = 2, kStages = 2;
EPINORM_FUNCTION constexpr int sum_of_operand(int i) { return -1; }
EPINORM_FUNCTION constexpr bool writes_operand(int i) { return false; }
EPINORM_FUNCTION constexpr int element_stream(int i) { return 0; }
#define EPINORM_OPERAND_POINTERS {nullptr}
#define EPINORM_OPERAND_STRIDES {0}
#define EPINORM_OUTPUT_POINTERS {nullptr}
#define EPINORM_CHAIN_PARAMETERS , float constant0
#define EPINORM_CONSTANTS {{constant0}}
#define EPINORM_OUTPUT_PARAMETERS
#define EPINORM_LARGEST_PARAMETERS
#define EPINORM_LARGEST {}
#define EPINORM_SUM_PARAMETER
#define EPINORM_SUM static_cast<S*>(nullptr)
#define EPINORM_SUM_PARAMETERS , Z* sum0
#define EPINORM_SUM_STORES case 0: sum0[column] = sum; break;
