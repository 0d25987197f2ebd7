// rescue.cu where x's planes lie over x (split_over.cu): x in fp32 again, as far as its rows are read.
//
// A row flagged by kWhole is there as it was. Of another one planes hold each element to 2^-22 of itself
// (one plane: 2^-11), but for those that are listed, whose values were kept.
#include "fp32/rescue_lines.cuh"
#include "common/storage.cuh"

struct SpentRows {
  const float* x;  // (m, k), rows `stride` apart
  i64 stride;
  const Flag* flags;
  const float* scale;
  const ColumnList* columns;
  const float4* exact;
  int k, first;  // the column that `four` counts from

  EPINORM_FUNCTION SpentRows operator+(int more) const {
    SpentRows moved = *this;
    moved.first += more;
    return moved;
  }

  // Columns `at` to `at` + 3, `at` a multiple of 4, of a row.
  EPINORM_FUNCTION float4 four(int row, int at) const {
    at += first;
    const float* const whole = x + row * stride;
    const Flag flag = flags[row];
    if (flag > kSomeColumns) return *reinterpret_cast<const float4*>(whole + at);
    const u16* const hi = reinterpret_cast<const u16*>(whole) + at;
    const float factor = scale[row];
    const uint2 highs = *reinterpret_cast<const uint2*>(hi);
    const uint2 lows = kPlanes == 2 ? *reinterpret_cast<const uint2*>(hi + k) : uint2{0, 0};
    const auto value = [&](u32 high, u32 low) {  // exact: together they have no more bits than fp32
      return (Float16::load(high & 0xffff) + Float16::load(low & 0xffff) * 0x1p-11f) * factor;
    };
    float4 made = {value(highs.x, lows.x), value(highs.x >> 16, lows.x >> 16), value(highs.y, lows.y),
                   value(highs.y >> 16, lows.y >> 16)};
    if (flag == kSomeColumns) {
      const ColumnList list = columns[row];
      const float4 values = exact[row];
      const auto put = [&](int column, float kept) {
        if (column == at) made.x = kept;
        if (column == at + 1) made.y = kept;
        if (column == at + 2) made.z = kept;
        if (column == at + 3) made.w = kept;
      };
      put(list.x, values.x), put(list.y, values.y), put(list.z, values.z), put(list.w, values.w);
    }
    return made;
  }
};

// As Lines, and stored at once: the barrier before a stage is multiplied orders that too.
template <int kLines>
struct SpentLines {
  const SpentRows from;
  const int* const selected;
  const int rows;

  EPINORM_FUNCTION void copy(u32 target, int first_k, int k) const {
    using Plain = Lines<kLines, false>;
    const int line = threadIdx.x / Plain::kVectors, column = threadIdx.x % Plain::kVectors * kVector;
#pragma unroll
    for (int part = 0; part < Plain::kParts; ++part) {
      const int at = part * Plain::kStep + line;
      if (kLines % Plain::kStep != 0 && at >= kLines) break;
      float4 v = {};
      if (first_k + column < k) v = from.four(selected[min(at, rows - 1)], first_k + column);
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(target + (at * kPitch + column) * 4),
                   "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                   : "memory");
    }
  }
};

template <int kLines, bool kAcross>
EPINORM_FUNCTION SpentLines<kLines> lines_of(const SpentRows& x, i64, const int* selected, int rows) {
  static_assert(!kAcross && kAligned, "");
  return {x, selected, rows};
}

#define SPENT_PARAMETERS , const ColumnList *columns, const float4 *exact
#define X_ROWS SpentRows{x, x_stride, row_flags, x_scale, columns, exact, k, 0}
#include "fp32/rescue.cu"
