// Blocks of rows through PyTorch's matrix product and a chain's kernel, on PyTorch's threads.
//
// Every product is computed by one thread, over a part of the work that the shape alone decides, so
// the same bits come out of any number of threads.
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/mm_cpu_dispatch.h>

#include <cstring>
#include <exception>
#include <optional>
#include <string>

#include "call.h"
#include "packed.h"
#include "parts.h"

namespace epinorm {

constexpr int64_t kStrip = 16;    // rows that a kernel takes at a time
constexpr int64_t kStripsTogether = 16;
constexpr int64_t kUncut = 256;   // products that MKL adds up before it begins a new sum
constexpr int64_t kPadding = 32;  // elements between the rows of a block: one or two cache lines

struct Problem {
  EpinormCall call;
  EpinormKernel kernel;
  EpinormBlocks blocks;
  int64_t m, k;
  int32_t dtype;      // of x, weight, bias, z and their gradients
  int32_t out_dtype;    // of y and dy
  int32_t saved_dtype;  // of what backward finds as z
  void* x;
  int64_t x_stride;
  void* weight;
  int64_t weight_stride;
  void* bias;  // null for none
  void* z;     // dense (M, N), with the bias; null where it need not be kept; backward: it, or the sum
  void* y;     // forward: y, dense; backward: dy
  int64_t y_stride;
  // Backward only; a null pointer is a result that is not wanted.
  void* dz;             // dense (M, N); null where a block's dz need not outlive it
  void* dx;             // dense (M, K)
  void* dweight;        // dense (N, K)
  void* dweight_parts;  // (chunks, N, K), where each chunk of rows sums its own
  int32_t norm_dtype;        // of all column sums but the first
  void* const* column_sums;  // for each of the kernel's totals (N,), or null

  int64_t n() const { return call.n; }
  Matrix matrix(void* data, int64_t stride) const {
    return {static_cast<char*>(data), stride, dtype};
  }
};

// out = a b, or out += a b.
static void multiply(at::Tensor out, const at::Tensor& a, const at::Tensor& b, bool accumulate) {
  if (accumulate)
    at::cpu::addmm_out(out, out, a, b);
  else
    at::cpu::mm_out(out, a, b);
}

// The weight (N, K) packed for blocks of rows, or nothing where the plan or MKL would not have it.
static std::optional<PackedWeight> pack_weight(const Problem& p, bool transposed) {
  const bool packs = p.blocks.packed != 0 && p.dtype == kFloat && can_pack() &&
                     PackedWeight::fits({p.x_stride, p.weight_stride, p.n() + kPadding, p.k});
  if (!packs) return std::nullopt;
  return std::make_optional<PackedWeight>(p.matrix(p.weight, p.weight_stride), transposed,
                                          p.blocks.rows, transposed ? p.k : p.n(),
                                          transposed ? p.n() : p.k);
}

// Rows [row, row + count) and columns [column, column + width) of x weight^T + bias. The product adds
// to the bias, as eager's does: in 16 bit z is rounded once; but in 64 the bias is added to the sum, since
// one far larger than the products would round each of them. In 32, a short K is cut in halves, which
// a library does with a long one: rounding z is most of the error of a gradient, and a sum of two
// short chains rounds less than one long one. `packed`: all columns, whole blocks.
static void linear(const Problem& p, const Matrix& z, int64_t z_row, int64_t row, int64_t count,
                   int64_t column, int64_t width, const PackedWeight* packed = nullptr) {
  const int64_t size = size_of(p.dtype);
  const bool added = p.bias != nullptr && p.dtype == kDouble && p.k > 0;
  const bool first = p.bias != nullptr && !added;
  if (first)
    for (int64_t r = 0; r < count; ++r)
      std::memcpy(z.at(z_row + r, column), static_cast<char*>(p.bias) + column * size, width * size);
  if (packed != nullptr && count == p.blocks.rows)
    return packed->multiply(p.matrix(p.x, p.x_stride).at(row, 0), p.x_stride, z.at(z_row, 0),
                            z.stride, first);
  int64_t depth = p.k;
  if (p.dtype == kFloat && p.k <= kUncut)
    depth = halved(p.k);
  else if (p.dtype == kFloat && width < p.n())
    depth = kUncut;  // in a narrow tile MKL does not cut a long K itself
  for (int64_t inner = 0; inner < p.k; inner += depth) {
    const int64_t deep = std::min(depth, p.k - inner);
    multiply(z.part(z_row, count, column, width),
             p.matrix(p.x, p.x_stride).part(row, count, inner, deep),
             p.matrix(p.weight, p.weight_stride).part(column, width, inner, deep).t(),
             inner > 0 || first);
  }
  for (int64_t r = 0; added && r < count; ++r) {
    double* const to = reinterpret_cast<double*>(z.at(z_row + r, column));
    for (int64_t c = 0; c < width; ++c) to[c] += static_cast<double*>(p.bias)[column + c];
  }
}

// A block of rows goes from x to y while it stays in cache.
static void forward_by_blocks(const Problem& p, const Matrix& y) {
  const int64_t rows = p.blocks.rows, n = p.n();
  const bool own = p.z == nullptr;
  const int64_t kernel_bytes = round_up(p.kernel.scratch_bytes);
  // Rows a power of two apart would fall into the same few sets of the cache.
  const int64_t stride = own ? n + kPadding : n;
  const int64_t block_bytes = own ? rows * stride * size_of(p.dtype) : 0;
  const std::optional<PackedWeight> packed = pack_weight(p, true);
  for_each_part(parts(p.m, rows), kernel_bytes + block_bytes, [&](int64_t part, char* scratch) {
    const int64_t row = part * rows, count = std::min(rows, p.m - row);
    const Matrix z = p.matrix(own ? scratch + kernel_bytes : p.z, stride);
    const int64_t z_row = own ? 0 : row;
    linear(p, z, z_row, row, count, 0, n, packed ? &*packed : nullptr);
    p.kernel.forward(&p.call, row, count, z.at(z_row, 0), stride, y.at(row, 0), y.stride, scratch);
  });
}

// Few rows, long products: tiles of the product first, so that every thread has work, then the rest.
static void forward_by_tiles(const Problem& p, const Matrix& y) {
  const int64_t rows = p.blocks.rows, columns = p.blocks.columns, n = p.n();
  Memory own;
  if (p.z == nullptr) own = allocate(p.m * n * size_of(p.dtype));
  const Matrix z = p.matrix(p.z == nullptr ? own.get() : p.z, n);
  const int64_t across = parts(n, columns);
  for_each_part(parts(p.m, rows) * across, 0, [&](int64_t part, char*) {
    const int64_t row = part / across * rows, column = part % across * columns;
    const int64_t count = std::min(rows, p.m - row), width = std::min(columns, n - column);
    linear(p, z, row, row, count, column, width);
  });
  for_each_part(parts(p.m, kStrip), p.kernel.scratch_bytes, [&](int64_t part, char* scratch) {
    const int64_t row = part * kStrip, count = std::min(kStrip, p.m - row);
    p.kernel.forward(&p.call, row, count, z.at(row, 0), n, y.at(row, 0), y.stride, scratch);
  });
}

// Chunk by chunk: dz of a block of rows, and at once what it gives to dx and to the weight's
// gradient of this chunk, where the plan asks for that.
static void backward_by_chunks(const Problem& p, const Matrix& dy, double* total_parts) {
  const bool own = p.dz == nullptr, with_products = p.blocks.dx_rows == 0;
  const int64_t rows = with_products ? p.blocks.rows : kStrip, chunks = p.blocks.chunks;
  const int64_t together = with_products ? 1 : kStripsTogether;  // blocks of one call of the kernel
  const int64_t all_blocks = parts(p.m, rows), n = p.n(), k = p.k;
  const int64_t kernel_bytes = round_up(p.kernel.scratch_bytes);
  const int64_t sums_bytes = round_up(p.kernel.sums_bytes);
  const int64_t block_bytes = own ? together * rows * n * size_of(p.dtype) : 0;
  const int64_t count_totals = p.kernel.totals * n;
  const Matrix z{static_cast<char*>(p.z), n, p.saved_dtype};
  const bool dx_by_blocks = with_products && p.dx != nullptr;
  std::optional<PackedWeight> packed;
  if (dx_by_blocks) packed = pack_weight(p, false);

  for_each_part(chunks, kernel_bytes + sums_bytes + block_bytes, [&](int64_t chunk, char* scratch) {
    char* const sums = scratch + kernel_bytes;
    std::memset(sums, 0, p.kernel.sums_bytes);
    double* const totals = total_parts + chunk * count_totals;
    std::fill(totals, totals + count_totals, 0.0);
    const int64_t begin = chunk * all_blocks / chunks, end = (chunk + 1) * all_blocks / chunks;
    for (int64_t block = begin; block < end; block += together) {
      const int64_t row = block * rows;
      const int64_t count = std::min(std::min(block + together, end) * rows, p.m) - row;
      const Matrix dz = p.matrix(own ? sums + sums_bytes : p.dz, n);
      const int64_t dz_row = own ? 0 : row;
      p.kernel.backward(&p.call, row, count, z.at(row, 0), n, dy.at(row, 0), dy.stride,
                        dz.at(dz_row, 0), n, sums, scratch);
      p.kernel.fold(&p.call, sums, totals);
      const at::Tensor dz_block = dz.part(dz_row, count, 0, n);
      if (dx_by_blocks && packed && count == rows)
        packed->multiply(dz.at(dz_row, 0), n, p.matrix(p.dx, k).at(row, 0), k, false);
      else if (dx_by_blocks)
        multiply(p.matrix(p.dx, k).part(row, count, 0, k), dz_block,
                 p.matrix(p.weight, p.weight_stride).part(0, n, 0, k), false);
      if (p.dweight_parts != nullptr)
        multiply(p.matrix(p.dweight_parts, k).part(chunk * n, n, 0, k), dz_block.t(),
                 p.matrix(p.x, p.x_stride).part(row, count, 0, k), block > begin);
    }
  });
}

// Tiles of dx = dz weight and of dweight = dz^T x, where dz is complete.
static void backward_by_tiles(const Problem& p) {
  const int64_t rows = p.blocks.dx_rows, inner = p.blocks.inner, n = p.n(), k = p.k;
  const int64_t across = parts(k, inner), outer = p.blocks.outer;
  const Matrix dz = p.matrix(p.dz, n);
  const bool want_dx = rows > 0 && p.dx != nullptr;
  const bool want_dweight = p.dweight_parts == nullptr && p.dweight != nullptr;
  const int64_t dx_parts = want_dx ? parts(p.m, rows) * across : 0;
  const int64_t dweight_tiles = want_dweight ? parts(n, outer) * across : 0;
  if (dx_parts + dweight_tiles == 0) return;
  for_each_part(dx_parts + dweight_tiles, 0, [&](int64_t part, char*) {
    const bool is_dx = part < dx_parts;
    if (!is_dx) part -= dx_parts;
    const int64_t column = part % across * inner, width = std::min(inner, k - column);
    if (is_dx) {
      const int64_t row = part / across * rows, count = std::min(rows, p.m - row);
      multiply(p.matrix(p.dx, k).part(row, count, column, width), dz.part(row, count, 0, n),
               p.matrix(p.weight, p.weight_stride).part(0, n, column, width), false);
    } else {
      const int64_t row = part / across * outer, count = std::min(outer, n - row);
      multiply(p.matrix(p.dweight, k).part(row, count, column, width),
               dz.part(0, p.m, row, count).t(),
               p.matrix(p.x, p.x_stride).part(0, p.m, column, width), false);
    }
  });
}

// Runs add(first, size) over all of `count` values; on several threads where that is much work.
template <class Add>
static void over_values(int64_t count, int64_t chunks, const Add& add) {
  constexpr int64_t kPart = 4096, kAlone = int64_t(1) << 15;
  if (count * chunks <= kAlone) return add(0, count);
  for_each_part(parts(count, kPart), 0, [&](int64_t part, char*) {
    add(part * kPart, std::min(kPart, count - part * kPart));
  });
}

// to[i] = the sum over chunks of from[chunk * stride + i], in the order of the chunks.
template <typename Out, typename T>
static void add_chunks(const T* from, int64_t chunks, int64_t stride, int64_t count, void* to) {
  over_values(count, chunks, [&](int64_t first, int64_t size) {
    constexpr int64_t kRun = 256;
    T sum[kRun];
    for (int64_t begin = first; begin < first + size; begin += kRun) {
      const int64_t run = std::min(kRun, first + size - begin);
      std::fill(sum, sum + run, T(0));
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const T* const values = from + chunk * stride + begin;
        for (int64_t i = 0; i < run; ++i) sum[i] += values[i];
      }
      Out* const out = static_cast<Out*>(to) + begin;
      for (int64_t i = 0; i < run; ++i) out[i] = Out(sum[i]);
    }
  });
}

// The column sums of all chunks: dbias, dgamma, dbeta and those of the chain's channel operands.
static void add_column_sums(const Problem& p, const double* total_parts) {
  const int64_t n = p.n(), stride = p.kernel.totals * n, chunks = p.blocks.chunks;
  for (int64_t i = 0; i < p.kernel.totals; ++i) {
    if (p.column_sums[i] == nullptr) continue;
    const int32_t dtype = i == 0 ? p.dtype : p.norm_dtype;
    const auto add = dtype == kFloat    ? add_chunks<float, double>
                     : dtype == kDouble ? add_chunks<double, double>
                                        : add_chunks<c10::BFloat16, double>;
    add(total_parts + i * n, chunks, stride, n, p.column_sums[i]);
  }
}

// dweight from those of the chunks.
static void add_weight_parts(const Problem& p) {
  const int64_t count = p.n() * p.k;
  const auto add = [&](auto value) {
    using T = decltype(value);
    add_chunks<T, T>(static_cast<const T*>(p.dweight_parts), p.blocks.chunks, count, count,
                     p.dweight);
  };
  p.dtype == kDouble ? add(double()) : add(float());
}

static thread_local std::string message;  // of this thread's last call that failed

template <class Body>
static int guarded(const Body& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& caught) {
    message = caught.what();
  } catch (...) {
    message = "unknown error in the CPU kernel";
  }
  return 1;
}

}  // namespace epinorm

EPINORM_EXPORT const char* epinorm_message() { return epinorm::message.c_str(); }

EPINORM_EXPORT int epinorm_can_pack() { return epinorm::can_pack(); }

EPINORM_EXPORT int epinorm_forward(const epinorm::Problem* p) {
  return epinorm::guarded([p] {
    const epinorm::Matrix y{static_cast<char*>(p->y), p->y_stride, p->out_dtype};
    epinorm::large_pages(p->y, p->m * p->n() * epinorm::size_of(p->out_dtype));
    epinorm::large_pages(p->z, p->m * p->n() * epinorm::size_of(p->dtype));
    epinorm::large_pages(p->call.sum, p->m * p->n() * epinorm::size_of(p->saved_dtype));
    if (p->blocks.columns >= p->n())
      epinorm::forward_by_blocks(*p, y);
    else
      epinorm::forward_by_tiles(*p, y);
  });
}

EPINORM_EXPORT int epinorm_backward(const epinorm::Problem* p) {
  return epinorm::guarded([p] {
    const epinorm::Matrix dy{static_cast<char*>(p->y), p->y_stride, p->out_dtype};
    epinorm::large_pages(p->dz, p->m * p->n() * epinorm::size_of(p->dtype));
    epinorm::large_pages(p->dx, p->m * p->k * epinorm::size_of(p->dtype));
    const int64_t bytes = p->blocks.chunks * p->kernel.totals * p->n() * sizeof(double);
    const epinorm::Memory total_parts = epinorm::allocate(bytes);
    double* const totals = reinterpret_cast<double*>(total_parts.get());
    epinorm::backward_by_chunks(*p, dy, totals);
    epinorm::backward_by_tiles(*p);
    epinorm::add_column_sums(*p, totals);
    if (p->dweight_parts != nullptr) epinorm::add_weight_parts(*p);
  });
}
