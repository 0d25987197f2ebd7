// rescue.cu where x's planes lie over x (split_over.cu): x in fp32 again, as far as its rows are read.
//
// A row that is flagged is there as it was. Of another one planes hold each element to 2^-22 of itself, the
// smallest to 2^-20 (one plane: 2^-11, 2^-8).
#include "fp32/rescue_lines.cuh"
#include "common/storage.cuh"

struct SpentRows {
  const float* x;  // (m, k), rows `stride` apart
  i64 stride;
  const Flag* flags;
  const float* scale;
  int k, first;  // of a row; the column that is counted from

  EPINORM_FUNCTION SpentRows operator+(int more) const {
    SpentRows moved = *this;
    moved.first += more;
    return moved;
  }

  // Of columns `at` to `at` + 3 of a row, `at` a multiple of 4: halves of hi and of lo, or two values and two.
  struct Words {
    uint2 first, second;
  };
  EPINORM_FUNCTION Words load(int row, int at) const {
    const float* const whole = x + row * stride;
    const bool split = flags[row] == 0;
    const u16* const words = reinterpret_cast<const u16*>(whole) + (split ? at + first : 2 * (at + first));
    return {*reinterpret_cast<const uint2*>(words),
            *reinterpret_cast<const uint2*>(words + (split ? k : 4))};
  }
  EPINORM_FUNCTION float4 values(const Words& words, int row) const {
    const uint2 a = words.first, b = words.second;
    if (flags[row] != 0)
      return {__uint_as_float(a.x), __uint_as_float(a.y), __uint_as_float(b.x), __uint_as_float(b.y)};
    const float factor = scale[row];
    const auto value = [&](u32 high, u32 low) {  // exact: together they have no more bits than fp32
      const float rest = kPlanes == 2 ? Float16::load(low & 0xffff) * 0x1p-11f : 0.0f;
      return (Float16::load(high & 0xffff) + rest) * factor;
    };
    return {value(a.x, b.x), value(a.x >> 16, b.x >> 16), value(a.y, b.y), value(a.y >> 16, b.y >> 16)};
  }
};

// As Lines, and stored at once: the barrier before a stage is multiplied orders that too.
template <int kLines>
struct SpentLines {
  using Plain = Lines<kLines, false>;
  const SpentRows from;
  const int* const selected;
  const int rows;

  EPINORM_FUNCTION void copy(u32 target, int first_k, int k) const {
    const int line = threadIdx.x / Plain::kVectors, column = threadIdx.x % Plain::kVectors * kVector;
    const bool inside = first_k + column < k;
    SpentRows::Words words[Plain::kParts];
#pragma unroll
    for (int part = 0; part < Plain::kParts; ++part)  // all at once, as one waits for memory
      words[part] = from.load(row(part * Plain::kStep + line), inside ? first_k + column : 0);
#pragma unroll
    for (int part = 0; part < Plain::kParts; ++part) {
      const int at = part * Plain::kStep + line;
      if (kLines % Plain::kStep != 0 && at >= kLines) break;
      float4 v = {};
      if (inside) v = from.values(words[part], row(at));
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(target + (at * kPitch + column) * 4),
                   "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                   : "memory");
    }
  }
  EPINORM_FUNCTION int row(int line) const { return selected[min(line, rows - 1)]; }
};

template <int kLines, bool kAcross>
EPINORM_FUNCTION SpentLines<kLines> lines_of(const SpentRows& x, i64, const int* selected, int rows) {
  static_assert(!kAcross && kAligned, "");
  return {x, selected, rows};
}

#define X_ROWS SpentRows{x, x_stride, row_flags, x_scale, k, 0}
#include "fp32/rescue.cu"
