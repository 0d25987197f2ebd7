// A byte for each row that planes cannot hold (split_rows.cuh, split_gradient.cu): any value but 0 is a flag.
// Rows of x and of W, which the backward products sum over, say more: kSomeColumns or kWhole.
#pragma once
#include "common/integers.cuh"

using Flag = unsigned char;
constexpr Flag kSomeColumns = 1;  // the row's elements but for those in its ColumnList are held
constexpr Flag kWhole = 2;        // or any greater value: nothing is said of single elements

constexpr int kListed = 4;  // columns of a row that are remembered, by chance seldom more than one
using ColumnList = int4;    // each -1 or a column

// Whether any of the flags united in a word is another than kSomeColumns.
__device__ __forceinline__ bool any_whole(u32 united) { return (united & 0xfefefefeu) != 0; }

// The flags from `at`, a multiple of 4, to `at` + 3; none from `count` on. From L2: a kernel that started
// early reads them before it has waited, when nothing says yet that L1 holds nothing older.
__device__ __forceinline__ u32 four_flags(const Flag* flags, int at, int count) {
  if (at + 4 <= count) return __ldcg(reinterpret_cast<const u32*>(flags + at));
  u32 word = 0;
#pragma unroll
  for (int i = 0; i < 3; ++i)
    if (at + i < count) word |= u32{__ldcg(flags + at + i)} << (8 * i);
  return word;
}

// The same but for the last ones of a count that is no multiple of 4. Without a branch: several of these loads are on
// their way at once.
__device__ __forceinline__ u32 whole_word(const Flag* flags, int at, int count) {
  return at + 4 <= count ? __ldcg(reinterpret_cast<const u32*>(flags + at)) : 0;
}

// All flags of kWords such places, `step` apart from `first` on, united.
template <int kWords>
__device__ __forceinline__ u32 any_flag_of(const Flag* flags, int first, int step, int count) {
  u32 words[kWords], any = 0;
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] = whole_word(flags, first + i * step, count);
  const int last = count & ~3, before = last - first;
  if (last < count && before >= 0 && before % step == 0 && before / step < kWords) any = four_flags(flags, last, count);
#pragma unroll
  for (int i = 0; i < kWords; ++i) any |= words[i];
  return any;
}

// This thread's part, of a block of `threads`, of `count` flags, united: 0 where none is set. One word after the
// other: a product that asks has no register for more.
__device__ __forceinline__ u32 any_flag(const Flag* flags, int count, int threads) {
  u32 any = 0;
#pragma unroll 8
  for (int at = threadIdx.x * 4; at < count; at += threads * 4) any |= four_flags(flags, at, count);
  return any;
}
