// One instance of the portable core, as gemm/portable/text.py writes it; see text/source.py.
#pragma once

constexpr int kWarpM = 16, kWarpN = 64, kWarpsM = 2, kWarpsN = 2;
constexpr int kBlockK = 32, kStages = 3, kPlanes = 1, kCopyBytes = 16, kTileGroup = 16;
constexpr int kParts = 1, kBlocksPerMultiprocessor = 2;
constexpr bool kMajorKA = true, kMajorKB = true, kBfloat16 = true, kAlignedRows = true;
