// What the runner stands on: matrices in borrowed memory, scratch memory, and parts of the work
// handed to PyTorch's threads.
#pragma once
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>

#if defined(__linux__)
#include <sys/mman.h>
#endif

// Null where PyTorch is built without MKL.
extern "C" __attribute__((weak)) int MKL_Set_Num_Threads_Local(int threads);

namespace epinorm {

enum DType : int32_t { kFloat, kDouble, kBFloat16 };

inline at::ScalarType scalar_type(int32_t dtype) {
  return dtype == kFloat ? at::kFloat : dtype == kDouble ? at::kDouble : at::kBFloat16;
}
inline int64_t size_of(int32_t dtype) { return dtype == kFloat ? 4 : dtype == kDouble ? 8 : 2; }

// A matrix in memory that someone else owns; the last dimension is contiguous.
struct Matrix {
  char* data;
  int64_t stride;
  int32_t dtype;

  char* at(int64_t row, int64_t column) const {
    return data + (row * stride + column) * size_of(dtype);
  }
  at::Tensor part(int64_t row, int64_t rows, int64_t column, int64_t columns) const {
    return at::from_blob(at(row, column), {rows, columns}, {stride, 1}, scalar_type(dtype));
  }
};

constexpr int64_t kAlignment = 64;

inline int64_t round_up(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

struct Free {
  void operator()(char* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<char, Free>;

inline Memory allocate(int64_t bytes) {
  const int64_t rounded = round_up(std::max<int64_t>(bytes, 1));
  Memory memory(static_cast<char*>(std::aligned_alloc(kAlignment, rounded)));
  TORCH_CHECK(memory != nullptr, "epinorm: cannot allocate ", rounded, " bytes");
  return memory;
}

// The first of two halves of a product's inner dimension, in whole vectors.
inline int64_t halved(int64_t inner) { return std::max<int64_t>(1, (inner / 2 + 15) / 16) * 16; }

inline int64_t parts(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

// Fresh memory in large pages where the system hands them out on request: writing 32 MB of small
// pages for the first time costs more than the product of such a result.
inline void large_pages(void* data, int64_t bytes) {
  if (data == nullptr) return;
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = uintptr_t(2) << 20;
  const uintptr_t begin = (uintptr_t(data) + kPage - 1) & ~(kPage - 1);
  const uintptr_t end = (uintptr_t(data) + bytes) & ~(kPage - 1);
  if (end >= begin + 4 * kPage) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// A library that asks how many threads there are is told one: oneDNN and MKL would otherwise choose
// the parts of a product, and with them the order of its sums, by that number. oneDNN asks OpenMP.
// MKL remembers what PyTorch told it, also inside a parallel region.
class SingleThread {
 public:
  SingleThread() : openmp_(omp_get_max_threads()) {
    omp_set_num_threads(1);
    if (&MKL_Set_Num_Threads_Local) mkl_ = MKL_Set_Num_Threads_Local(1);
  }
  ~SingleThread() {
    if (&MKL_Set_Num_Threads_Local) MKL_Set_Num_Threads_Local(mkl_);
    omp_set_num_threads(openmp_);
  }
  SingleThread(const SingleThread&) = delete;

 private:
  int openmp_;
  int mkl_ = 0;
};

// Runs work(part, scratch) for each part. Each task begins with a share of its own, neighbours that are
// the same from call to call: a weight's part then lies in the cache of the core that reads it again.
// Then it helps with the shares of the others, since threads need not run at the same speed. At least
// two tasks are made, because a parallel region of one task would leave the product inside it free to
// use all threads, and to sum in another order.
template <class Work>
void for_each_part(int64_t count, int64_t scratch_bytes, const Work& work) {
  struct alignas(kAlignment) Share {
    std::atomic<int64_t> next;
  };
  const int64_t tasks = std::max(2, at::get_num_threads());
  const std::unique_ptr<Share[]> shares(new Share[tasks]);
  for (int64_t i = 0; i < tasks; ++i) shares[i].next = i * count / tasks;
  at::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
    Memory scratch;
    const SingleThread guard;
    for (int64_t i = 0; i < tasks; ++i) {
      const int64_t share = (begin + i) % tasks, last = (share + 1) * count / tasks;
      for (int64_t part; (part = shares[share].next.fetch_add(1, std::memory_order_relaxed)) < last;) {
        if (scratch == nullptr) scratch = allocate(scratch_bytes);
        work(part, scratch.get());
      }
    }
  });
}

}  // namespace epinorm
