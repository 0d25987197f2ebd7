// Which columns of a backward product flagged indices of its sum spoilt: an element that planes do not
// hold takes part in one column alone.
#pragma once
#include "fp32/rescue_items.cuh"

constexpr int kMostSpoilt = 64;  // with more of them all columns are computed

struct SpoiltColumns {
  int count;  // with columns that several indices spoilt as often as they did
  int columns[kMostSpoilt];
};

// Fills `spoilt` from the lists of flagged indices, all of which are flagged by kSomeColumns; by the
// whole block. Says whether there was room for all of them. Ascending, since blocks share them out.
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
  const int found = spoilt.count;
  if (found > kMostSpoilt) return false;
  const int own = threadIdx.x < found ? spoilt.columns[threadIdx.x] : 0;
  int place = 0;
  for (int i = 0; i < found; ++i) {
    const int other = spoilt.columns[i];
    place += other < own || (other == own && i < threadIdx.x);
  }
  __syncthreads();
  if (threadIdx.x < found) spoilt.columns[place] = own;
  __syncthreads();
  return true;
}
