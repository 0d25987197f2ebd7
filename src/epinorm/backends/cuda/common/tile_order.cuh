// Tiles in the order in which blocks take them: kGroup row tiles share a column tile, so that a wave of
// blocks reads few different rows of both operands, and most of them from L2.
#pragma once

struct TilePlace {
  int row, column;  // counted in tiles
};

template <int kGroup>
__device__ __forceinline__ TilePlace grouped_tile(int index, int row_tiles, int column_tiles) {
  const int per_group = kGroup * column_tiles;
  const int group = index / per_group, rest = index - group * per_group;
  const int first = group * kGroup;
  const int rows = min(kGroup, row_tiles - first);
  const int column = rest / rows;
  return {first + rest - column * rows, column};
}
