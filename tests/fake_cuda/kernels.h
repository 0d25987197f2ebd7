// The kernels of exported files on the CPU, with the arguments of the real ones: what they compute is
// plain, so that a launch with a wrong address, stride or size shows as a wrong result.
//
// Planes: v = (hi + lo 2^-11) scale. A row with a value beyond fp16 is flagged, and its planes are
// garbage until a range guard computes it again.
#pragma once
#include <cmath>
#include <cstdio>
#include <type_traits>

#include "cuda.h"
#include "cuda_runtime.h"

#ifdef FP32_WEIGHT
#define PLANES 1  // of x
#endif

typedef unsigned short U16;
typedef long long I64;
typedef unsigned char Flag;

static int failures = 0;
#define EXPECT(what)                                     \
  do {                                                   \
    if (!(what)) {                                       \
      ++failures;                                        \
      std::fprintf(stderr, "not so: %s\n", #what);       \
    }                                                    \
  } while (false)

static I64 blocks_of(I64 count, I64 size) { return (count + size - 1) / size; }
static void expect_shared(int bytes) {
  EXPECT(launched.dynamicSmemBytes == size_t(bytes));
  EXPECT(bytes == 0 || allowed_shared_bytes == bytes);
}

// A range guard: on Hopper's core two blocks share a sum, and three such clusters run at once; on the
// portable one there are as many blocks as processors.
#ifdef MULTIPLY_THREADS
constexpr int kGuardSplits = 2, kGuardBlocks = 3 * kGuardSplits;
#else
constexpr int kGuardSplits = 1, kGuardBlocks = 4;
#endif
static void expect_guard() {
  EXPECT(launched.blockDim.x == 256 && launched.gridDim.x == kGuardBlocks);
  EXPECT(launched.numAttrs == (kGuardSplits > 1 ? 2 : 1));
  EXPECT(kGuardSplits == 1 || launched.attrs[1].val.clusterDim.x == kGuardSplits);
#if SPLIT
  expect_shared(RESCUE_BYTES);
#endif
}

// Of the example's chain.
static void expect_constants(float slope, float factor) { EXPECT(slope == 0.01f && factor == 2.0f); }

static double load(U16 bits) {
  _Float16 half;
  std::memcpy(&half, &bits, 2);
  return half;
}
static double load(float value) { return value; }
static void store(U16& to, double value) {
  const _Float16 half = static_cast<_Float16>(value);
  std::memcpy(&to, &half, 2);
}
static void store(float& to, double value) { to = static_cast<float>(value); }

// One number as planes; says whether they hold it.
static bool split_number(double value, U16& hi, U16* lo) {
  store(hi, value);
  if (PLANES == 2) store(*lo, (value - load(hi)) * 2048);
  return std::abs(value) < 60000;
}
// Two planes, or twice the matrix itself.
struct Matrix {
  const U16 *hi, *lo;
  I64 stride;
  double at(I64 row, I64 column) const {
    const I64 place = row * stride + column;
    return load(hi[place]) + (PLANES == 2 ? load(lo[place]) / 2048 : 0);
  }
};

struct Float32 {
  using Storage = float;
};
struct Float16 {
  using Storage = U16;
};

struct Map {
  CUtensorMap map;
};
static void expect_map(const Map& map, CUtensorMapDataType type, int box_columns, int box_rows,
                       I64 rows, I64 columns) {
  EXPECT(map.map.type == type);
  EXPECT(map.map.box_columns == cuuint32_t(box_columns) && map.map.box_rows == cuuint32_t(box_rows));
  EXPECT(map.map.rows == cuuint64_t(rows) && map.map.columns == cuuint64_t(columns));
}
static Matrix matrix_of(const Map& hi, const Map& lo) {
  EXPECT(hi.map.stride_bytes == lo.map.stride_bytes && hi.map.rows == lo.map.rows);
  return {static_cast<const U16*>(hi.map.address), static_cast<const U16*>(lo.map.address),
          static_cast<I64>(hi.map.stride_bytes / 2)};
}

#ifdef FP32_WEIGHT
namespace prepare {
using u16 = U16;
constexpr int kTeams = 2, kThreads = 256, kSampleRows = 8, kOrderedColumns = 32;

// W's scales are estimates, of which the product makes sure; of its rows nothing else is known yet.
static float estimate(const float* row, int k) { return row[k - 1] < 0 ? 2 : 8; }

static void split_and_sample(const float* x, I64 x_stride, U16* hi, U16* ordered, float* scale,
                             Flag* flag, int4* columns, const float* w, I64 w_stride,
                             float* w_scale, Flag* w_flag, int4* w_columns, int m, int n, int k,
                             int) {
  EXPECT(launched.gridDim.x == blocks_of(m, kTeams) + blocks_of(n, kSampleRows));
  EXPECT(launched.blockDim.x == kThreads && hi == nullptr);
  EXPECT(w_scale >= scale + m && w_flag >= flag + m && w_columns >= columns + m);
  const int padded = blocks_of(k, kOrderedColumns) * kOrderedColumns;
  for (int row = 0; row < m; ++row) {
    scale[row] = 1 << row % 3;
    flag[row] = 0;
    columns[row] = {-1, -1, -1, -1};
    for (int column = 0; column < padded; ++column) {
      const double value = column < k ? x[row * x_stride + column] / scale[row] : 0;
      if (!split_number(value, ordered[I64(row) * padded + column], nullptr)) flag[row] = 2;
    }
  }
  for (int row = 0; row < n; ++row) {
    w_scale[row] = estimate(w + row * w_stride, k);
    w_flag[row] = 0;
    w_columns[row] = {-1, -1, -1, -1};
  }
}
}  // namespace prepare
#elif SPLIT
namespace split_rows {
using u16 = U16;
constexpr int kTeams = 2, kThreads = 256;

static void split(const float* first, I64 first_stride, const float* second, I64 second_stride,
                  U16* hi, U16* lo, float* scale, Flag* flag, int4* columns, int first_rows,
                  int second_begin, int rows, int k, int k_padded) {
  EXPECT(launched.gridDim.x == blocks_of(rows, kTeams) && launched.blockDim.x == kThreads);
  for (int row = 0; row < rows; ++row) {
    if (row >= first_rows && row < second_begin) continue;
    const float* from = row < first_rows ? first + row * first_stride
                                         : second + (row - second_begin) * second_stride;
    scale[row] = 1 << row % 3;
    flag[row] = 0;
    columns[row] = {-1, -1, -1, -1};
    for (int column = 0; column < k_padded; ++column) {
      const I64 at = I64(row) * k_padded + column;
      const double value = column < k ? from[column] / scale[row] : 0;
      if (!split_number(value, hi[at], lo + at)) {
        flag[row] = flag[row] ? 2 : 1;
        columns[row].x = column;
      }
    }
  }
}
}  // namespace split_rows
#endif

// ---- forward: y = x W^T + bias + 10 gamma + 100 beta, mean = row, rstd = group ----

static void linear_norm_row(const Matrix& x, const Matrix& w, const float* scales[2], int row, int n,
                            int k, double* z) {
  for (int column = 0; column < n; ++column) {
    z[column] = 0;
    for (int i = 0; i < k; ++i) z[column] += x.at(row, i) * w.at(column, i);
    if (scales[0]) z[column] *= double(scales[0][row]) * scales[1][column];
  }
}

template <class Out, class Kept, class Norm>
static void finish(const double* of_row, int row, int n, Out* y, Kept* z, const Kept* bias,
                   const Norm* gamma, const Norm* beta, float* mean, float* rstd) {
  for (int column = 0; column < n; ++column) {
    const I64 at = I64(row) * n + column;
    if (z) store(z[at], of_row[column]);
    store(y[at], of_row[column] + load(bias[column]) + 10 * load(gamma[column]) +
                     100 * load(beta[column]));
  }
  for (int group = 0; mean && group < n / CHANNELS; ++group) {
    mean[row * (n / CHANNELS) + group] = row;
    rstd[row * (n / CHANNELS) + group] = group;
  }
}

#ifdef OutType
namespace multiply {
using u16 = U16;
using ::Float16;
using ::Float32;
using TensorMap = Map;
using Out = OutType::Storage;
using Kept = KeptType::Storage;
using Norm = NormType::Storage;

static void all_rows(const Matrix& x, const Matrix& w, Out* y, Kept* z, const Kept* bias,
                     const Norm* gamma, const Norm* beta, const float* row_scale,
                     const float* column_scale, float* mean, float* rstd, int m, int n, int k) {
  double* of_row = new double[n];
  const float* scales[] = {row_scale, column_scale};
  for (int row = 0; row < m; ++row) {
    linear_norm_row(x, w, scales, row, n, k, of_row);
    finish(of_row, row, n, y, z, bias, gamma, beta, mean, rstd);
  }
  delete[] of_row;
}

#ifdef WARP_M
constexpr int kBlockM = WARP_M * WARPS_M, kBlockN = WARP_N * WARPS_N;
constexpr int kThreads = 32 * WARPS_M * WARPS_N, kSharedBytes = 70000;

static void portable_linear_norm(const U16* x_hi, const U16* x_lo, const U16* w_hi, const U16* w_lo,
                                 I64 x_stride, I64 w_stride, Out* y, Kept* z, const Kept* bias,
                                 const Norm* gamma, const Norm* beta, const float* row_scale,
                                 const float* column_scale, float* mean, float* rstd, int m, int n,
                                 int k, float slope, float factor) {
  expect_constants(slope, factor);
  EXPECT(launched.gridDim.x == blocks_of(m, kBlockM) * blocks_of(n, kBlockN));
  EXPECT(launched.blockDim.x == kThreads);
  expect_shared(kSharedBytes);
  all_rows({x_hi, x_lo, x_stride}, {w_hi, w_lo, w_stride}, y, z, bias, gamma, beta, row_scale,
           column_scale, mean, rstd, m, n, k);
}
#elif defined(FP32_WEIGHT)
constexpr int kBlockM = 64, kBlockN = 128;

// W is read twice, through its map and as it is; what halves do not hold of it is flagged here.
static void linear_norm_fp32_weight(Map x, Map w, float* y, float* z, const float* bias,
                                    const float* gamma, const float* beta, const float* row_scale,
                                    float* mean, float* rstd, const float* values, I64 w_stride,
                                    float* w_scale, Flag* w_flags, int4* w_columns, U16* w_plane,
                                    int m, int n, int k, int, float slope, float factor) {
  expect_constants(slope, factor);
  const I64 tiles = blocks_of(m, kBlockM) * blocks_of(n, kBlockN);
  EXPECT(launched.gridDim.x == (tiles < 4 ? tiles : 4) && launched.blockDim.x == MULTIPLY_THREADS);
  expect_shared(SHARED_BYTES);
  expect_map(x, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 64, kBlockM, m, blocks_of(k, 32) * 32);
  expect_map(w, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 32, kBlockN, n, k);
  EXPECT(w.map.address == values && w.map.stride_bytes == 4 * cuuint64_t(w_stride));
  EXPECT(w_plane == nullptr);
  U16* const halves = new U16[I64(n) * k];
  for (int row = 0; row < n; ++row) {
    EXPECT(w_scale[row] == prepare::estimate(values + row * w_stride, k));
    EXPECT(w_flags[row] == 0 && w_columns[row].x == -1 && w_columns[row].w == -1);
    for (int column = 0; column < k; ++column) {
      const double value = values[row * w_stride + column] / w_scale[row];
      if (split_number(value, halves[I64(row) * k + column], nullptr)) continue;
      w_flags[row] = w_flags[row] ? 2 : 1;
      w_columns[row].x = column;
    }
  }
  all_rows(matrix_of(x, x), {halves, halves, k}, y, z, bias, gamma, beta, row_scale, w_scale, mean,
           rstd, m, n, k);
  delete[] halves;
}
#else
static void linear_norm(Map x_hi, Map x_lo, Map w_hi, Map w_lo, Out* y, Kept* z, const Kept* bias,
                        const Norm* gamma, const Norm* beta, const float* row_scale,
                        const float* column_scale, float* mean, float* rstd, int m, int n, int k,
                        float slope, float factor) {
  expect_constants(slope, factor);
  expect_shared(SHARED_BYTES);
  EXPECT(launched.blockDim.x == MULTIPLY_THREADS);
  expect_map(x_hi, ELEMENT_TYPE, 128 / ELEMENT_BYTES, BOX_M, m, k);
  expect_map(x_lo, ELEMENT_TYPE, 128 / ELEMENT_BYTES, BOX_M, m, k);
  expect_map(w_hi, ELEMENT_TYPE, 128 / ELEMENT_BYTES, BOX_N, n, k);
  expect_map(w_lo, ELEMENT_TYPE, 128 / ELEMENT_BYTES, BOX_N, n, k);
  all_rows(matrix_of(x_hi, x_lo), matrix_of(w_hi, w_lo), y, z, bias, gamma, beta, row_scale,
           column_scale, mean, rstd, m, n, k);
}
#endif
}  // namespace multiply

#if SPLIT
namespace rescue_rows {
constexpr int kThreads = 256, kChunk = 1024, kColumns = 128, kSlices = 8, kSplits = kGuardSplits;

static void rescue(const float* x, I64 x_stride, const float* w, I64 w_stride, const float* bias,
                   const float* gamma, const float* beta, const Flag* row_flags,
                   const Flag* column_flags, float* y, float* z, float* mean, float* rstd, int m,
                   int n, int k, float slope, float factor) {
  expect_constants(slope, factor);
  expect_guard();
  bool every_row = false;
  for (int column = 0; column < n; ++column) every_row |= column_flags[column] != 0;
  double* of_row = new double[n];
  for (int row = 0; row < m; ++row) {
    if (!every_row && !row_flags[row]) continue;
    for (int column = 0; column < n; ++column) {
      of_row[column] = 0;
      for (int i = 0; i < k; ++i)
        of_row[column] += double(x[row * x_stride + i]) * w[column * w_stride + i];
    }
    finish(of_row, row, n, y, z, bias, gamma, beta, mean, rstd);
  }
  delete[] of_row;
}
}  // namespace rescue_rows
#endif

#else  // ---- backward ----

#if SPLIT
namespace split_dz {
using u16 = U16;
constexpr int kThreads = 256, kStripColumns = 256, kStripRows = 4, kMostRows = 64;

static void split_gradient(const float* dz, const float* column_factor, const float* row_factor,
                           const unsigned* row_largest, int row_parts,
                           const unsigned* column_largest, int column_parts, U16* row_hi,
                           U16* row_lo, float* row_scale, Flag* row_flag, U16* column_hi,
                           U16* column_lo, float* column_scale, Flag* column_flag, int m, int n,
                           int rows_of_block) {
  EXPECT(launched.gridDim.x == blocks_of(m, rows_of_block) && rows_of_block <= kMostRows);
  EXPECT(launched.gridDim.y == blocks_of(n, kStripColumns) && launched.blockDim.x == kThreads);
  for (int row = 0; row < m; ++row) {
    row_scale[row] = 1 << row % 2;
    EXPECT(row_largest[row * row_parts + row_parts - 1] == 100u + row);
    EXPECT(row_flag[row] == 0);
  }
  for (int column = 0; column < n; ++column) {
    column_scale[column] = 1 << column % 3;
    EXPECT(column_largest[(column_parts - 1) * n + column] == 200u + column);
    EXPECT(column_flag[column] == 0);
  }
  for (int row = 0; row < m; ++row)
    for (int column = 0; column < n; ++column) {
      const I64 at = I64(row) * n + column;
      const double by_row = double(dz[at]) * column_factor[column] / row_scale[row];
      const double by_column = double(dz[at]) * row_factor[row] / column_scale[column];
      if (!split_number(by_row, row_hi[at], row_lo + at)) row_flag[row] = 1;
      if (!split_number(by_column, column_hi[at], column_lo + at)) column_flag[column] = 1;
    }
}
}  // namespace split_dz
#endif

// c (rows, columns) = a b; transposed: a is (length, rows). From `first` on, `count` of the sum.
template <class Value>
static void product(const Matrix& a, bool transposed, const Matrix& b, Value* c, const float* scale,
                    int rows, int columns, int first, int count) {
  EXPECT((scale != nullptr) == SPLIT);
  for (int row = 0; row < rows; ++row)
    for (int column = 0; column < columns; ++column) {
      double sum = 0;
      for (int i = first; i < first + count; ++i)
        sum += (transposed ? a.at(i, row) : a.at(row, i)) * b.at(i, column);
      store(c[I64(row) * columns + column], scale ? sum * scale[row] : sum);
    }
}

template <bool kTransposed>
static void guard(const float* a, I64 a_stride, const float* b, I64 b_stride, const Flag* row_flags,
                  const Flag* sum_flags, const int4* sum_columns, float* result, int m, int n,
                  int k) {
  for (int row = 0; row < m; ++row) {
    for (int column = 0; column < n; ++column) {
      bool spoilt = row_flags[row];
      for (int i = 0; i < k; ++i)
        spoilt |= sum_flags[i] == 2 || (sum_flags[i] == 1 && sum_columns[i].x == column);
      if (!spoilt) continue;
      double sum = 0;
      for (int i = 0; i < k; ++i)
        sum += double(a[kTransposed ? i * a_stride + row : row * a_stride + i]) *
               b[i * b_stride + column];
      result[I64(row) * n + column] = static_cast<float>(sum);
    }
  }
}

#if SPLIT
using Value = float;
#else
using Value = U16;
#endif

#ifndef DX_BYTES  // the portable products say it themselves
#define DX_BYTES 0
#define DW_BYTES 0
#endif

#define PRODUCTS(OF, TRANSPOSED, PARTS_OF_SUM, BYTES)                                              \
  namespace rescue_##OF {                                                                          \
  constexpr int kThreads = 256, kChunk = 1024, kColumns = 128, kSlices = 8,                        \
                kSplits = kGuardSplits;                                                            \
  static void rescue_gradient(const float* a, I64 a_stride, const float* b, I64 b_stride,          \
                              const Flag* row_flags, const Flag* sum_flags,                        \
                              const int4* sum_columns, float* result, int m, int n, int k) {       \
    expect_guard();                                                                                \
    guard<TRANSPOSED>(a, a_stride, b, b_stride, row_flags, sum_flags, sum_columns, result, m, n,   \
                      k);                                                                          \
  }                                                                                                \
  }                                                                                                \
  namespace product_##OF {                                                                         \
  static constexpr int kBlockM = 128, kBlockN = 64, kThreads = 256, kSharedBytes = 80000;          \
  static void portable_product(const U16* a_hi, const U16* a_lo, const U16* b_hi, const U16* b_lo, \
                               I64 a_stride, I64 b_stride, Value* c, const float* scale, int m,    \
                               int n, int k) {                                                     \
    EXPECT(launched.gridDim.x == blocks_of(m, kBlockM) * blocks_of(n, kBlockN));                   \
    expect_shared(kSharedBytes);                                                                   \
    product<Value>({a_hi, a_lo, a_stride}, TRANSPOSED, {b_hi, b_lo, b_stride}, c, scale, m, n, 0,  \
                   k);                                                                             \
  }                                                                                                \
  using Part = std::conditional<(PARTS_OF_SUM > 1), float, Value>::type;                           \
  static void hopper_product(Map a_hi, Map a_lo, Map b_hi, Map b_lo, Part* c, const float* scale,  \
                             int m, int n, int length, int parts) {                                \
    expect_shared(BYTES);                                                                          \
    EXPECT(parts == PARTS_OF_SUM);                                                                 \
    const int whole = static_cast<int>(b_hi.map.rows);                                             \
    for (int part = 0; part < parts; ++part) {                                                     \
      const int first = part * length < whole ? part * length : whole;                             \
      const int count = first + length < whole ? length : whole - first;                           \
      product(matrix_of(a_hi, a_lo), TRANSPOSED, matrix_of(b_hi, b_lo), c + I64(part) * m * n,     \
              scale, m, n, first, count);                                                          \
    }                                                                                              \
  }                                                                                                \
  }                                                                                                \
  namespace add_##OF {                                                                             \
  static void add_splits(const float* parts, Value* out, I64 count) {                              \
    for (I64 i = 0; i < count; ++i) {                                                              \
      double sum = 0;                                                                              \
      for (int part = 0; part < PARTS_OF_SUM; ++part) sum += parts[part * count + i];              \
      store(out[i], sum);                                                                          \
    }                                                                                              \
  }                                                                                                \
  }

PRODUCTS(dx, false, DX_PARTS, DX_BYTES)
PRODUCTS(dw, true, DW_PARTS, DW_BYTES)
#endif
