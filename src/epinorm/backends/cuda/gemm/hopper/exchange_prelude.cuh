// What a kernel says before it includes part_exchange.cuh, for an editor; see text/source.py.
#pragma once
#if __INCLUDE_LEVEL__ < 2
constexpr int kClusterN = 1, kConsumers = 2, kColumnParts = 1, kProductM = 64, kWarpgroupThreads = 128;
constexpr int kExchangeBarrier = 4;
#endif
