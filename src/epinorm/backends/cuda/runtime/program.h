// A recorded pass: launches and PyTorch's products, repeated with the addresses of other tensors.
// replay.py says what and why.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#ifndef EPINORM_PROGRAM_ALONE
#include "graphs.h"
#endif

namespace epinorm {

// As cuda.h has had them since CUDA 12.0.
using LaunchKernelEx = int (*)(const void* config, void* kernel, void** arguments, void** extra);
using EncodeTiled = int (*)(void* map, int type, uint32_t rank, void* address, const uint64_t* sizes,
                            const uint64_t* strides, const uint32_t* box, const uint32_t* steps,
                            int interleave, int swizzle, int promotion, int fill);

constexpr int kStreamInConfig = 32;  // bytes
constexpr int kMapBytes = 128;
constexpr int kMostArguments = 128;
constexpr int kMapsKept = 512;
constexpr uint64_t kVectorBytes = 16;  // tensors begin at multiples of it: kernels are chosen by it

using Sizes = std::vector<int64_t>;
using Tensors = std::vector<at::Tensor>;

struct Map {
  uint64_t id, sizes[2], stride;
  uint32_t box[2];
  int32_t type, swizzle, promotion, padding;
};

// What a call decides: an address, or a map of a matrix there (map: -1 for none).
struct Place {
  uint32_t at;  // in the launch's frame
  int32_t buffer, map, padding;
  int64_t offset;
};

// A matrix in a buffer; offset: in elements.
struct Matrix {
  int64_t buffer, offset;
  Sizes sizes, strides;

  // Past the dispatcher, which takes as long for the views of a product as the product.
  at::Tensor of(const Tensors& buffers) const {
    const at::Tensor& t = buffers[buffer];
    at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(t.storage()), t.key_set(), t.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, t.storage_offset() + offset);
    return made;
  }
};

// A launch or, without a kernel, out = a b or bias + a b by PyTorch.
struct Step {
  uint64_t kernel = 0;
  std::string frame;  // a CUlaunchConfig and arguments
  std::vector<uint32_t> offsets;
  std::vector<Place> places;
  std::vector<Matrix> matrices;      // out, a, b and perhaps bias
  std::vector<int64_t> made, done;  // buffers allocated before it, and let go of behind it
};

// over: the buffer of this size and dtype that it may be written over, or -1.
struct Made {
  Sizes sizes;
  at::ScalarType dtype;
  int64_t over;
};

struct KeptMap {
  uint64_t id, address;
  alignas(64) char data[kMapBytes];
};

// Raises, or puts right what made a launch fail with this CUresult behind so many others.
using Trouble = std::function<void(int status, int launches)>;

struct Program {
  LaunchKernelEx launch;
  EncodeTiled encode;
  at::Device device = at::kCPU;
  c10::Allocator* allocator;  // PyTorch's for the device
  c10::DispatchKeySet keys;
  int64_t given;            // buffers that come with a call, those made follow, then the constants
  std::vector<int64_t> large;  // of the given: they have more than one value
  std::vector<Made> made;
  Tensors constants;
  std::vector<int64_t> results;
  std::vector<Map> maps;
  std::vector<Step> steps;
  Trouble trouble;
#ifndef EPINORM_PROGRAM_ALONE
  std::unique_ptr<Graphs> graphs;  // where the host would take longer than the launches
#endif

  // Whether these tensors begin where kernels were chosen for.
  bool fits(const Tensors& tensors) const {
    if (static_cast<int64_t>(tensors.size()) != given) return false;
    uint64_t together = 0;
    for (int64_t i : large) together |= reinterpret_cast<uint64_t>(tensors[i].const_data_ptr());
    return together % kVectorBytes == 0;
  }

  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype) const {
    return at::Tensor(at::detail::empty_generic(sizes, allocator, keys, dtype, std::nullopt));
  }

  // The results; those given are let go of when they were read last.
  Tensors run(Tensors buffers, void* stream) const {
    buffers.resize(given + made.size());
    buffers.insert(buffers.end(), constants.begin(), constants.end());
#ifndef EPINORM_PROGRAM_ALONE
    if (graphs == nullptr || !run_as_graph(buffers, stream))
#endif
      run_steps(buffers, stream);
    Tensors found;
    found.reserve(results.size());
    for (int64_t i : results) found.push_back(std::move(buffers[i]));
    return found;
  }

 private:
#ifndef EPINORM_PROGRAM_ALONE
  // All memory is held to the end: what is freed before its launches could be another thread's.
  bool run_as_graph(Tensors& buffers, void* stream) const {
    for (const Step& step : steps)
      for (int64_t i : step.made) buffers[i] = make(made[i - given], buffers);
    Addresses addresses;
    addresses.reserve(buffers.size());
    for (const at::Tensor& t : buffers)
      addresses.push_back(reinterpret_cast<uint64_t>(t.const_data_ptr()));
    return graphs->launch(addresses, stream, [&](void* to) {
      int status = 0;
      for (const Step& step : steps)
        if (status == 0) status = launch_once(step, buffers, to);
      return status;
    });
  }
#endif

  void run_steps(Tensors& buffers, void* stream) const {
    int launches = 0;
    for (const Step& step : steps) {
      for (int64_t i : step.made)
        if (!buffers[i].defined()) buffers[i] = make(made[i - given], buffers);
      if (step.kernel == 0)
        multiply(step, buffers);
      else
        start(step, buffers, stream, launches++);
      for (int64_t i : step.done) buffers[i].reset();
    }
  }

  at::Tensor make(const Made& one, const Tensors& buffers) const {
    if (one.over >= 0) {
      const at::Tensor& old = buffers[one.over];
      if (old.use_count() == 1 && old.storage().use_count() == 1) return old;  // nobody else's
    }
    return empty(one.sizes, one.dtype);
  }

  static void multiply(const Step& step, const Tensors& buffers) {
    at::Tensor out = step.matrices[0].of(buffers);
    const at::Tensor a = step.matrices[1].of(buffers), b = step.matrices[2].of(buffers);
    if (step.matrices.size() == 3)
      at::mm_out(out, a, b);
    else
      at::addmm_out(out, step.matrices[3].of(buffers), a, b);
  }

  void start(const Step& step, const Tensors& buffers, void* stream, int launches) const {
    if (int status = launch_once(step, buffers, stream)) {
      trouble(status, launches);
      if (int again = launch_once(step, buffers, stream)) trouble(again, launches + 1);
    }
  }

  // To a CUresult.
  int launch_once(const Step& step, const Tensors& buffers, void* stream) const {
    alignas(64) char frame[4096];
    std::memcpy(frame, step.frame.data(), step.frame.size());
    std::memcpy(frame + kStreamInConfig, &stream, sizeof stream);
    for (const Place& place : step.places) {
      const uint64_t address =
          reinterpret_cast<uint64_t>(buffers[place.buffer].const_data_ptr()) + place.offset;
      if (place.map < 0)
        std::memcpy(frame + place.at, &address, sizeof address);
      else
        write_map(maps[place.map], address, frame + place.at);
    }
    void* arguments[kMostArguments];
    for (size_t i = 0; i < step.offsets.size(); ++i) arguments[i] = frame + step.offsets[i];
    return launch(frame, reinterpret_cast<void*>(step.kernel), arguments, nullptr);
  }

  void write_map(const Map& map, uint64_t address, char* at) const {
    thread_local KeptMap kept[kMapsKept];  // ids begin with 1
    KeptMap& found = kept[((address >> 8) * 31 + map.id) % kMapsKept];
    if (found.id != map.id || found.address != address) {
      const uint32_t ones[2] = {1, 1};
      found.id = 0;
      const int status =
          encode(found.data, map.type, 2, reinterpret_cast<void*>(address), map.sizes, &map.stride,
                 map.box, ones, 0, map.swizzle, map.promotion, 0);
      // No streams: where libstdc++ is linked into an extension, its own are not those of the process.
      TORCH_CHECK(status == 0, "encoding a tensor map failed: CUresult " + std::to_string(status));
      found.id = map.id;
      found.address = address;
    }
    std::memcpy(at, found.data, kMapBytes);
  }
};

}  // namespace epinorm
