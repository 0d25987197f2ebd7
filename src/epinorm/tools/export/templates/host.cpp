// Repeats tables of launches. Not torch/extension.h, of which a build would spend most of its time.
#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

// Nobody else's: what other libraries of a process define under the same names is not meant here.
namespace {

using i64 = long long;
using Word = unsigned long long;

// The CUDA driver's functions and structures as they have been since CUDA 12.0: no header of CUDA's
// is needed. A CUresult of 0 is success.
struct Attribute {
  int what, padding = 0;
  unsigned value[16] = {};
};
struct Config {
  unsigned grid[3], block[3], shared;
  void* stream;
  Attribute* attributes;
  unsigned attribute_count;
};
constexpr int kClusterDimension = 4, kProgrammaticStreamSerialization = 6;
constexpr int kInvalidContext = 201;

struct Driver {
  int (*launch)(const Config*, void*, void**, void**);
  int (*encode)(void*, int, unsigned, void*, const Word*, const Word*, const unsigned*,
                const unsigned*, int, int, int, int);
  int (*make_current)(void*);
  void* context;

  // Addresses of cuLaunchKernelEx, cuTensorMapEncodeTiled, cuCtxSetCurrent, a context.
  explicit Driver(const std::array<Word, 4>& at)
      : launch(reinterpret_cast<decltype(launch)>(at[0])),
        encode(reinterpret_cast<decltype(encode)>(at[1])),
        make_current(reinterpret_cast<decltype(make_current)>(at[2])),
        context(reinterpret_cast<void*>(at[3])) {}
};

// Messages are one string each: where an extension has libstdc++ linked into it, its streams are not
// those of the process, and a number written to one ends the process.
void check(int status, const char* doing) {
  TORCH_CHECK(status == 0, std::string(doing) + " failed with CUDA error " + std::to_string(status));
}

struct Map {
  int type, swizzle, l2;
  Word sizes[2], stride;
  unsigned box[2];
  void* address = nullptr;  // that `encoded` is of
  alignas(64) char encoded[128];

  void encode(const Driver& driver, void* at) {
    if (at == address) return;
    const unsigned ones[2] = {1, 1};
    check(driver.encode(encoded, type, 2, at, sizes, &stride, box, ones, 0, swizzle, l2, 0),
          "encoding a tensor map");
    address = at;
  }
};

// An argument that is no plain number: the address of a tensor, or a map of it.
struct Place {
  size_t argument;
  int tensor;
  i64 offset;
  int map;  // -1: none
};

struct View {
  int tensor;
  i64 offset;
  std::vector<int64_t> sizes, strides;
};

struct Step {
  std::string what;
  int tensor = -1;
  at::ScalarType dtype{};
  std::vector<int64_t> sizes;
  void* kernel = nullptr;
  Config config{};
  std::vector<Attribute> attributes;
  std::vector<Word> arguments;
  std::vector<Place> places;
  std::vector<View> views;
  std::vector<int> last;  // tensors that nothing needs behind this step
};

// Kernels read rows that are contiguous and begin on 16 bytes.
at::Tensor readable(const at::Tensor& t) {
  at::Tensor rows = t.resolve_neg().contiguous();
  return reinterpret_cast<size_t>(rows.data_ptr()) % 16 ? rows.clone() : rows;
}

// Tensors go by numbers; last: those that nothing needs behind the step.
class Program {
 public:
  using Where = std::tuple<size_t, int, i64, std::vector<Word>>;
  using Part = std::tuple<int, i64, std::vector<int64_t>, std::vector<int64_t>>;

  Program(const std::array<Word, 4>& driver, int tensors, std::vector<int> taken,
          std::vector<int> given_back)
      : driver_(driver), kept_(tensors), taken_(std::move(taken)),
        given_back_(std::move(given_back)) {}

  // what: "new", "zeros" or, once for all calls, "keep".
  void allocate(const std::string& what, int tensor, at::ScalarType dtype,
                std::vector<int64_t> sizes, std::vector<int> last) {
    Step& step = added(what, tensor, std::move(last));
    step.dtype = dtype;
    step.sizes = std::move(sizes);
  }

  // shape: grid, block, bytes of shared memory, cluster, is it a programmatic dependent.
  void launch(Word kernel, const std::array<unsigned, 11>& shape, std::vector<Word> arguments,
              const std::vector<Where>& places, std::vector<int> last) {
    Step& step = added("run", -1, std::move(last));
    step.kernel = reinterpret_cast<void*>(kernel);
    std::copy_n(shape.begin(), 3, step.config.grid);
    std::copy_n(shape.begin() + 3, 3, step.config.block);
    step.config.shared = shape[6];
    if (shape[7] * shape[8] * shape[9] > 1) {
      step.attributes.push_back({kClusterDimension});
      std::copy_n(shape.begin() + 7, 3, step.attributes.back().value);
    }
    if (shape[10]) {
      step.attributes.push_back({kProgrammaticStreamSerialization});
      step.attributes.back().value[0] = 1;
    }
    TORCH_CHECK(arguments.size() <= kMostArguments,
                "a kernel takes " + std::to_string(arguments.size()) + " arguments");
    step.arguments = std::move(arguments);
    for (const auto& [argument, tensor, offset, map] : places)
      step.places.push_back({argument, tensor, offset, map.empty() ? -1 : mapped(map)});
  }

  void product(const std::string& what, int tensor, const std::vector<Part>& views,
               std::vector<int> last) {
    Step& step = added(what, tensor, std::move(last));
    for (const auto& [of, offset, sizes, strides] : views)
      step.views.push_back({of, offset, sizes, strides});
  }

  // What the table gives back. Takes the tensors over: what nobody else holds is free once used.
  std::vector<std::optional<at::Tensor>> run(std::vector<at::Tensor> given, Word stream) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    TORCH_CHECK(given.size() == taken_.size(), "expected " + std::to_string(taken_.size()) +
                                                   " tensors, got " + std::to_string(given.size()));
    const at::Device device = given[0].device();
    const c10::DeviceGuard guard(device);
    std::vector<at::Tensor> tensors = kept_;
    for (size_t i = 0; i < given.size(); ++i) tensors[taken_[i]] = readable(given[i]);
    given.clear();
    for (Step& step : steps_) {
      const auto options = at::TensorOptions(step.dtype).device(device);
      if (step.what == "run") {
        start(step, tensors, reinterpret_cast<void*>(stream));
      } else if (step.what == "new") {
        tensors[step.tensor] = at::empty(step.sizes, options);
      } else if (step.what == "zeros") {
        tensors[step.tensor] = at::zeros(step.sizes, options);
      } else if (step.what == "keep") {
        at::Tensor& kept = kept_[step.tensor];
        if (!kept.defined()) kept = at::zeros(step.sizes, options);
        tensors[step.tensor] = kept;
      } else {
        tensors[step.tensor] = multiplied(step, tensors);
      }
      for (int tensor : step.last) tensors[tensor].reset();
    }
    std::vector<std::optional<at::Tensor>> back;
    for (int tensor : given_back_)
      back.push_back(tensor < 0 ? std::nullopt : std::optional<at::Tensor>(tensors[tensor]));
    return back;
  }

 private:
  static constexpr size_t kMostArguments = 128;
  Driver driver_;
  std::vector<at::Tensor> kept_;  // one for each tensor; most are undefined
  std::vector<int> taken_, given_back_;
  std::vector<Step> steps_;
  std::vector<Map> maps_;

  Step& added(const std::string& what, int tensor, std::vector<int> last) {
    Step step;
    step.what = what;
    step.tensor = tensor;
    step.last = std::move(last);
    steps_.push_back(std::move(step));
    return steps_.back();
  }

  // Of the driver's numbers: type, rows, columns, bytes of a row, rows and columns of the box,
  // swizzle, L2 promotion.
  int mapped(const std::vector<Word>& of) {
    Map map{static_cast<int>(of.at(0)), static_cast<int>(of.at(6)), static_cast<int>(of.at(7)),
            {of[2], of[1]}, of[3], {static_cast<unsigned>(of[5]), static_cast<unsigned>(of[4])}};
    maps_.push_back(map);
    return static_cast<int>(maps_.size()) - 1;
  }

  void start(Step& step, const std::vector<at::Tensor>& tensors, void* stream) {
    Word values[kMostArguments];
    void* pointers[kMostArguments];
    std::copy(step.arguments.begin(), step.arguments.end(), values);
    for (size_t i = 0; i < step.arguments.size(); ++i) pointers[i] = values + i;
    for (const Place& place : step.places) {
      char* const at = static_cast<char*>(tensors[place.tensor].data_ptr()) + place.offset;
      values[place.argument] = reinterpret_cast<Word>(at);
      if (place.map < 0) continue;
      maps_[place.map].encode(driver_, at);
      pointers[place.argument] = maps_[place.map].encoded;
    }
    Config config = step.config;
    config.stream = stream;
    config.attributes = step.attributes.data();
    config.attribute_count = static_cast<unsigned>(step.attributes.size());
    int status = driver_.launch(&config, step.kernel, pointers, nullptr);
    if (status == kInvalidContext) {  // a thread that has not used CUDA before
      check(driver_.make_current(driver_.context), "making the context current");
      status = driver_.launch(&config, step.kernel, pointers, nullptr);
    }
    check(status, "launching a kernel");
  }

  static at::Tensor multiplied(const Step& step, const std::vector<at::Tensor>& tensors) {
    std::vector<at::Tensor> given;
    for (const View& view : step.views) {
      const at::Tensor& of = tensors[view.tensor];
      given.push_back(of.as_strided(view.sizes, view.strides, view.offset));
    }
    if (step.what == "mm") return at::mm(given[0], given[1]);
    if (step.what == "addmm") return at::addmm(given[0], given[1], given[2]);
    TORCH_CHECK(step.what == "linear", "unknown step " + step.what);
    if (given.size() == 2) return at::linear(given[0], given[1]);
    return at::linear(given[0], given[1], given[2]);
  }
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::class_<Program>(module, "Program")
      .def(py::init<const std::array<Word, 4>&, int, std::vector<int>, std::vector<int>>())
      .def("allocate", &Program::allocate)
      .def("launch", &Program::launch)
      .def("product", &Program::product)
      .def("run", [](Program& program, py::list given, Word stream) {
        auto tensors = given.cast<std::vector<at::Tensor>>();
        given.attr("clear")();  // so that nothing but the program holds them
        return program.run(std::move(tensors), stream);
      });
}
