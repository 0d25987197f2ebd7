// Which columns of a backward product flagged indices of its sum spoilt: an element that planes do not
// hold takes part in one column alone.
#pragma once
#include "fp32/rescue_items.cuh"

// More of them than this, and hardly a strip is without: then all are computed.
constexpr int kMostSpoilt = 64;

struct SpoiltColumns {
  int count;  // with columns that several indices spoilt as often as they did, so in any order the same
  int columns[kMostSpoilt];

  EPINORM_FUNCTION bool has(int column) const {
    bool found = false;
    for (int i = 0; i < count; ++i) found |= columns[i] == column;
    return found;
  }
};

// Fills `spoilt` from the lists of flagged indices, all of which are flagged by kSomeColumns; by the
// whole block. Says whether there was room for all of them.
EPINORM_FUNCTION bool gather(SpoiltColumns& spoilt, const Flag* flags, const ColumnList* lists,
                             int count) {
  if (threadIdx.x == 0) spoilt.count = 0;
  __syncthreads();
  for (int at = threadIdx.x * 4; at < count; at += kThreads * 4) {
    const u32 four = four_flags(flags, at, count);
    if (four == 0) continue;
    for (int i = 0; i < 4; ++i) {
      if ((four >> 8 * i & 0xff) == 0) continue;
      const ColumnList list = __ldcg(lists + at + i);
      const int columns[kListed] = {list.x, list.y, list.z, list.w};
      for (const int column : columns) {
        if (column < 0) continue;
        const int place = atomicAdd(&spoilt.count, 1);
        if (place < kMostSpoilt) spoilt.columns[place] = column;
      }
    }
  }
  __syncthreads();
  return spoilt.count <= kMostSpoilt;
}
