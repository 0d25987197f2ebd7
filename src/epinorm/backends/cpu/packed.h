// A weight that MKL has arranged for its product once, for all blocks of rows.
//
// A plain product arranges the weight anew in each call: for a block of 128 rows that is a seventh of
// the time. The functions are MKL's own, which PyTorch's library exports where it is built with MKL;
// elsewhere they are null and every block is a plain product.
#pragma once
#include <cstdint>
#include <limits>

#include "parts.h"

extern "C" {
__attribute__((weak)) size_t cblas_sgemm_pack_get_size(int which, int m, int n, int k);
__attribute__((weak)) void cblas_sgemm_pack(int layout, int which, int transposed, int m, int n,
                                            int k, float alpha, const float* from, int stride,
                                            float* to);
__attribute__((weak)) void cblas_sgemm_compute(int layout, int a_kind, int b_kind, int m, int n,
                                               int k, const float* a, int a_stride, const float* b,
                                               int b_stride, float beta, float* c, int c_stride);
}

namespace epinorm {

// Names of cblas.h.
enum : int { kRowMajor = 101, kAsItIs = 111, kTransposed = 112, kPacked = 151, kMatrixB = 162 };

inline bool can_pack() {
  return &cblas_sgemm_pack_get_size && &cblas_sgemm_pack && &cblas_sgemm_compute;
}

// b (inner, columns) of out = a b, for blocks of `rows` rows of a; MKL wants that number for packing
// and product alike. Two parts, for two threads to pack, cut across `inner`: a is then arranged once
// and not for each part. MKL asks for about 8 MB of addresses beyond each part's values, and never
// writes there.
class PackedWeight {
 public:
  static constexpr int64_t kParts = 2;

  // `weight`: (columns, inner) where transposed, else (inner, columns); fp32.
  PackedWeight(const Matrix& weight, bool transposed, int64_t rows, int64_t inner, int64_t columns)
      : rows_(int(rows)), inner_(int(inner)), columns_(int(columns)),
        depth_(int(halved(inner))) {
    part_bytes_ = round_up(int64_t(cblas_sgemm_pack_get_size(kMatrixB, rows_, columns_, depth_)));
    memory_ = allocate(kParts * part_bytes_);
    large_pages(memory_.get(), kParts * part_bytes_);
    for_each_part(kParts, 0, [&](int64_t part, char*) {
      const int64_t first = part * depth_;
      const char* const from = transposed ? weight.at(0, first) : weight.at(first, 0);
      cblas_sgemm_pack(kRowMajor, kMatrixB, transposed ? kTransposed : kAsItIs, rows_, columns_,
                       depth_of(part), 1.0f, reinterpret_cast<const float*>(from),
                       int(weight.stride), data(part));
    });
  }

  // out (rows, columns) = a b, or out += a b.
  void multiply(const char* a, int64_t a_stride, char* out, int64_t out_stride,
                bool accumulate) const {
    for (int64_t part = 0; part < kParts; ++part)
      cblas_sgemm_compute(kRowMajor, kAsItIs, kPacked, rows_, columns_, depth_of(part),
                          reinterpret_cast<const float*>(a) + part * depth_, int(a_stride),
                          data(part), columns_, part > 0 || accumulate ? 1.0f : 0.0f,
                          reinterpret_cast<float*>(out), int(out_stride));
  }

  // MKL counts in 32 bits here.
  static bool fits(std::initializer_list<int64_t> sizes) {
    return std::all_of(sizes.begin(), sizes.end(),
                       [](int64_t size) { return size <= std::numeric_limits<int>::max(); });
  }

 private:
  int depth_of(int64_t part) const { return part == 0 ? depth_ : inner_ - depth_; }
  float* data(int64_t part) const {
    return reinterpret_cast<float*>(memory_.get() + part * part_bytes_);
  }

  int rows_, inner_, columns_, depth_;
  int64_t part_bytes_;
  Memory memory_;
};

}  // namespace epinorm
