// A call that Python has computed and recorded: what it was like, and as an operator's kernel, below
// autograd. What is not defined with EPINORM_PROGRAM_ALONE is not part of exported files
// (tools/export/text.py).
#pragma once

#include <Python.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#ifndef EPINORM_PROGRAM_ALONE
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/profiler/orchestration/observer.h>
#endif
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "program.h"
#ifndef EPINORM_PROGRAM_ALONE
// Of ATen/autocast_mode.h, which includes all of PyTorch's operators: compiling takes longer by a
// fourth with them.
namespace at::autocast {
TORCH_API bool is_autocast_enabled(at::DeviceType);
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType);
TORCH_API Tensor cached_cast(at::ScalarType, const Tensor&, at::DeviceType);
}  // namespace at::autocast
#endif

namespace epinorm {

class WithGil {
 public:
  WithGil() : state_(PyGILState_Ensure()) {}
  ~WithGil() { PyGILState_Release(state_); }
  WithGil(const WithGil&) = delete;

 private:
  PyGILState_STATE state_;
};

// PyTorch's own operations let other threads of Python's run as well: a launch may wait for the GPU.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }
  WithoutGil(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// A reference to a Python object, given back whichever thread is last.
class Held {
 public:
  explicit Held(PyObject* object) : object_(object) { Py_INCREF(object); }
  ~Held() {
    if (!Py_IsInitialized()) return;
    WithGil gil;
    Py_DECREF(object_);
  }
  Held(const Held&) = delete;
  PyObject* get() const { return object_; }

 private:
  PyObject* object_;
};

[[noreturn]] inline void throw_python_error() {
  python_error error;
  error.persist();
  throw error;
}

// Functions of Python's that each call asks.
inline PyObject *current_device = nullptr, *current_stream = nullptr, *current_setting = nullptr;

#ifndef EPINORM_PROGRAM_ALONE
// Whether no mode, transform or trace may want a call; autocast and a profile are no such things.
inline bool undisturbed() {
  const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  return (keys.included_ - c10::default_included_set).empty() &&
         at::impl::PythonTorchFunctionTLS::stack_len() == 0 &&
         torch::autograd::ForwardADLevel::try_get_by_idx(0) == nullptr;
}

// Whether autograd's graph may be watched while it is made.
inline bool watched() {
  return torch::profiler::impl::profilerEnabled() ||
         !at::SavedTensorDefaultHooks::get_tls_state().stack.empty();
}

// All of a tensor that a pass was recorded for, but for its values and address.
struct Kind {
  bool there = false, requires_grad = false;
  c10::DispatchKeySet keys;
  at::ScalarType dtype;
  at::Device device = at::kCPU;
  Sizes sizes;

  Kind() = default;
  explicit Kind(const at::Tensor& t) : there(t.defined()) {
    if (!there) return;
    requires_grad = t.requires_grad();
    keys = t.key_set();
    dtype = t.scalar_type();
    device = t.device();
    sizes = t.sizes().vec();
  }

  bool fits(const at::Tensor& t) const {
    if (!there || !t.defined()) return there == t.defined();
    return t.key_set() == keys && t.scalar_type() == dtype && t.device() == device &&
           t.sizes() == at::IntArrayRef(sizes) && t.is_contiguous();
  }
};

// The backward passes that were recorded of one executable, by a bit for each gradient that is wanted
// and for each of x's and W's planes that are there.
constexpr uint64_t kXPlanes = uint64_t{1} << 62, kWeightPlanes = uint64_t{1} << 63;

class Backward {
 public:
  void add(uint64_t wanted, std::shared_ptr<const Program> program) {
    std::lock_guard<std::mutex> lock(mutex_);
    programs_.emplace_back(wanted, std::move(program));
  }
  std::shared_ptr<const Program> find(uint64_t wanted) const {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [known, program] : programs_)
      if (known == wanted) return program;
    return nullptr;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::pair<uint64_t, std::shared_ptr<const Program>>> programs_;
};

class Waits;  // waiting.h

// What calls of one kind share. Tensors are in the order of problem.Inputs, operands one by one.
struct Call {
  std::vector<Kind> kinds;
  bool grad_mode = false, training = false;
  std::optional<at::ScalarType> autocast;                // its dtype, where it is on
  std::vector<std::optional<at::ScalarType>> casts;      // what autocast makes of each tensor
  std::optional<bool> takes_tf32;                        // PyTorch's setting for fp32 products; or none
  std::shared_ptr<const Program> forward;
  Sizes y_sizes;
  std::vector<std::pair<int, at::Tensor>> kept;  // z, mean, rstd: which result, or a constant
  int sum = -1;                                  // which result
  int statistics = -1;                           // which result, of no gradient and not y's size
  std::shared_ptr<const Waits> waits;            // for planes that are left
  std::shared_ptr<const Backward> backward, backward_with_sum;
  std::shared_ptr<const Held> in_python;  // (saved, dy, wanted, dsum, left) -> gradients
  const int* accumulating = nullptr;      // gradients may be added to what is there: Python's
  std::vector<Kind> saved;                // the inputs as the backward pass finds them
  int residual = -1;                      // the input in whose place the sum is saved
  std::shared_ptr<const Held> layers;     // (tensors) -> what PyTorch's own layers give; or none
  std::string name;                       // of an operator, which takes so many of the tensors; what
  size_t taken = 0;                       // it returns, each as ``kept`` has it:
  std::vector<std::pair<int, at::Tensor>> outputs;
};

// Whether autograd records: never within inference mode, whoever enables gradients there.
inline bool autograd_records() {
  return c10::GradMode::is_enabled() && !c10::InferenceMode::is_enabled();
}

inline bool has_setting(const Call& call) {
  if (!call.takes_tf32) return true;
  PyObject* const now = PyObject_CallNoArgs(current_setting);
  if (now == nullptr) throw_python_error();
  const bool takes_tf32 = PyUnicode_CompareWithASCIIString(now, "tf32") == 0;
  Py_DECREF(now);
  return takes_tf32 == *call.takes_tf32;
}

// Whether the tensors are of a kind that the call was recorded for, and all else is as it was then.
inline bool fits(const Call& call, const Tensors& tensors) {
  if (call.kinds.size() != tensors.size() || call.grad_mode != autograd_records())
    return false;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!call.kinds[i].fits(tensors[i])) return false;
    if (tensors[i].defined() && call.kinds[i].requires_grad != tensors[i].requires_grad())
      return false;
  }
  const at::DeviceType kind = tensors[0].device().type();
  const bool autocast = at::autocast::is_autocast_enabled(kind);
  if (autocast != call.autocast.has_value()) return false;
  if (autocast && at::autocast::get_autocast_dtype(kind) != *call.autocast) return false;
  return has_setting(call);
}

// All that an operator returns of tensors of which the call fits; nothing where Python has to compute
// it. The GIL is held. Profilers are told what the dispatcher would tell them.
inline Tensors operate(const Call& call, const Tensors& tensors, void* stream) {
  Tensors given, made, found;
  for (const at::Tensor& t : tensors)
    if (t.defined() && t.numel()) given.push_back(t);
  if (!call.forward->fits(given)) return {};
  WithoutGil others;
  const std::vector<c10::IValue> inputs(tensors.begin(), tensors.begin() + call.taken);
  RECORD_FUNCTION(call.name, inputs);
  at::AutoDispatchBelowADInplaceOrView below;
  made = call.forward->run(std::move(given), stream);
  for (const auto& [result, like] : call.outputs)
    found.push_back(result < 0 ? call.forward->empty(like.sizes(), like.scalar_type())
                               : made[result]);
  return found;
}

#endif

}  // namespace epinorm
