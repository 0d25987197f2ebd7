// A chain's forward pass with its place in autograd's graph, both without Python: for calls like one
// that Python has computed and recorded. Whatever differs is Python's (operator/autograd.py). What is
// not defined with EPINORM_PROGRAM_ALONE is not part of exported files (tools/export/text.py).
#pragma once

#include <Python.h>

#include <ATen/core/LegacyTypeDispatch.h>
#ifndef EPINORM_PROGRAM_ALONE
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/profiler/orchestration/observer.h>
#endif
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <mutex>
#include <optional>
#include <type_traits>
#include <utility>

#include "program.h"

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
}  // namespace epinorm

namespace torch::autograd {
void deleteNode(Node*);  // before PyTorch 2.12, whose nodes have shared pointers
}

namespace epinorm {

namespace ag = torch::autograd;

// Whether no mode, transform, profile or trace may want a call; autocast is no such thing.
inline bool undisturbed() {
  const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  return (keys.included_ - c10::default_included_set).empty() &&
         at::impl::PythonTorchFunctionTLS::stack_len() == 0 &&
         ag::ForwardADLevel::try_get_by_idx(0) == nullptr &&
         !torch::profiler::impl::profilerEnabled();
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

// What calls of one kind share. Tensors are in the order of problem.Inputs, operands one by one.
struct Call {
  std::vector<Kind> kinds;
  bool grad_mode = false, training = false;
  std::optional<at::ScalarType> autocast;                // its dtype, where it is on
  std::vector<std::optional<at::ScalarType>> casts;      // what autocast makes of each tensor
  std::shared_ptr<const Held> setting;                   // PyTorch's for fp32 products; or none
  std::shared_ptr<const Program> forward;
  Sizes y_sizes;
  std::vector<std::pair<int, at::Tensor>> kept;  // z, mean, rstd: which result, or a constant
  int sum = -1, planes = -1;                     // which result; the first of them
  std::shared_ptr<const Held> has_room, leave;   // for planes: () -> bool, (results) -> KeptPlanes
  std::shared_ptr<const Backward> backward, backward_with_sum;
  std::shared_ptr<const Held> in_python;  // (saved, dy, wanted, dsum, left) -> gradients
  const int* accumulating = nullptr;      // gradients may be added to what is there: Python's
  std::vector<Kind> saved;                // the inputs as the backward pass finds them
  int residual = -1;                      // the input in whose place the sum is saved
};

inline bool has_setting(const Call& call) {
  if (!call.setting) return true;
  PyObject* now = PyObject_CallNoArgs(current_setting);
  if (now == nullptr) throw_python_error();
  const int same = PyObject_RichCompareBool(now, call.setting->get(), Py_EQ);
  Py_DECREF(now);
  return same == 1;
}

constexpr size_t kKept = 3;  // z, mean and rstd stand before the inputs among what is saved

struct ChainNode : ag::Node {
  std::shared_ptr<const Call> call;
  std::vector<ag::SavedVariable> saved;
  std::shared_ptr<const Held> left;  // the planes that wait for this, of kept_planes.py
  const void* weight_at = nullptr;   // what W's are of
  void* stream = nullptr;  // of the forward pass: the engine makes it current for this node too
  c10::Stream current{c10::Stream::DEFAULT, at::kCPU};  // the same, as PyTorch names it
  Kind y, sum;

  std::string name() const override { return "LinearNormBackward"; }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (ag::SavedVariable& each : saved) each.reset_data();
  }

  ag::variable_list apply(ag::variable_list&& grads) override {
    at::Tensor dy = std::move(grads[0]), dsum;
    if (grads.size() > 1) dsum = std::move(grads[1]);
    ag::variable_list found(num_outputs());
    if (!dy.defined() && !dsum.defined()) return found;
    Tensors tensors;
    std::shared_ptr<const Held> waiting;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (const ag::SavedVariable& each : saved) tensors.push_back(each.unpack(getptr()));
      waiting.swap(left);
    }
    if (waiting && tensors[kKept + 1].const_data_ptr() != weight_at)
      tell(waiting, "weight_moved", nullptr);
    uint64_t wanted = 0;
    for (size_t i = 0; i < found.size(); ++i)
      if (task_should_compute_output(i)) wanted |= uint64_t{1} << i;
    // Without a retained graph z is free once it was read: before dW, where memory peaks.
    if (!ag::get_current_graph_task_keep_graph()) release_variables();
    if (usable(dy, dsum, tensors)) {
      Tensors planes;
      const uint64_t known = wanted | look(waiting, planes);
      const auto& backward = dsum.defined() ? call->backward_with_sum : call->backward;
      if (const std::shared_ptr<const Program> program = backward->find(known)) {
        Tensors given = order(dy, dsum, tensors, planes);
        if (program->fits(given)) {
          tensors.clear();
          planes.clear();
          dy.reset();
          dsum.reset();
          tell(waiting, "restrict", "OO", Py_False, Py_False);
          at::AutoDispatchBelowADInplaceOrView below;
          Tensors made = program->run(std::move(given), stream);
          size_t next = 0;
          for (size_t i = 0; i < found.size(); ++i) {
            if (!(wanted >> i & 1)) continue;
            found[i] = std::move(made[next++]);
            found[i].unsafeGetTensorImpl()->set_sizes_contiguous(call->saved[i].sizes);
          }
          return found;
        }
      }
    }
    by_python(std::move(tensors), std::move(dy), std::move(dsum), wanted, std::move(waiting), found);
    return found;
  }

 private:
  bool usable(const at::Tensor& dy, const at::Tensor& dsum, const Tensors& tensors) const {
    if (at::GradMode::is_enabled() || *call->accumulating || !undisturbed()) return false;
    if (!dy.defined() || !y.fits(dy) || (dsum.defined() && !sum.fits(dsum))) return false;
    // Called by itself, not by the engine: anything may be current.
    const c10::impl::VirtualGuardImpl guard(y.device.type());
    if (guard.getStream(y.device) != current || guard.getDevice() != y.device) return false;
    for (size_t i = 0; i < call->saved.size(); ++i)
      if (!call->saved[i].fits(tensors[kKept + i])) return false;
    if (!call->setting) return true;
    WithGil gil;
    return has_setting(*call);
  }

  // The planes that are still there, looked at once: another thread may free them to make room.
  static uint64_t look(const std::shared_ptr<const Held>& waiting, Tensors& planes) {
    if (!waiting) return 0;
    WithGil gil;
    uint64_t there = 0;
    for (auto [name, bit] : {std::pair("x", kXPlanes), std::pair("weight", kWeightPlanes)}) {
      PyObject* const found = PyObject_GetAttrString(waiting->get(), name);
      if (found == nullptr) throw_python_error();
      if (found != Py_None) {
        planes.push_back(THPVariable_Unpack(found));
        there |= bit;
      }
      Py_DECREF(found);
    }
    return there;
  }

  template <typename... Arguments>
  static void tell(const std::shared_ptr<const Held>& waiting, const char* what, const char* format,
                   Arguments... arguments) {
    if (!waiting) return;
    WithGil gil;
    PyObject* const done = PyObject_CallMethod(waiting->get(), what, format, arguments...);
    if (done == nullptr) throw_python_error();
    Py_DECREF(done);
  }

  // As replayed.py gives them to a recorded pass.
  static Tensors order(const at::Tensor& dy, const at::Tensor& dsum, const Tensors& tensors,
                       const Tensors& planes) {
    Tensors given{dy};
    for (size_t i = kKept; i < tensors.size(); ++i) add(given, tensors[i]);
    add(given, dsum);
    for (size_t i = 0; i < kKept; ++i) add(given, tensors[i]);
    for (const at::Tensor& each : planes) add(given, each);
    return given;
  }

  static void add(Tensors& given, const at::Tensor& t) {
    if (t.defined() && t.numel()) given.push_back(t);
  }

  void by_python(Tensors tensors, at::Tensor dy, at::Tensor dsum, uint64_t wanted,
                 std::shared_ptr<const Held> waiting, ag::variable_list& found) const {
    WithGil gil;
    PyObject* const list = THPVariable_WrapList(tensors);
    tensors.clear();
    PyObject* const flags = PyTuple_New(found.size());
    for (size_t i = 0; i < found.size(); ++i)
      PyTuple_SET_ITEM(flags, i, PyBool_FromLong(wanted >> i & 1));
    PyObject* const made =
        PyObject_CallFunction(call->in_python->get(), "NNNNO", list, THPVariable_Wrap(std::move(dy)),
                              flags, THPVariable_Wrap(std::move(dsum)),
                              waiting ? waiting->get() : Py_None);
    if (made == nullptr) throw_python_error();
    for (size_t i = 0; i < found.size(); ++i) {
      PyObject* const one = PyList_GET_ITEM(made, i);
      if (one != Py_None) found[i] = THPVariable_Unpack(one);
    }
    Py_DECREF(made);
  }
};

template <typename Pointer>
auto new_node() {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<ag::Node>>)
    return std::shared_ptr<ChainNode>(new ChainNode, ag::deleteNode);
  else
    return c10::make_intrusive<ChainNode>();
}

// y, and the sum where it is a result, of tensors of which the call fits; nothing where Python has to
// compute them all the same. The GIL is held.
inline Tensors compute(const std::shared_ptr<const Call>& call, Tensors tensors, void* stream) {
  const at::DeviceType kind = tensors[0].device().type();
  for (size_t i = 0; i < call->casts.size(); ++i)
    if (call->casts[i]) {
      tensors[i] = at::autocast::cached_cast(*call->casts[i], tensors[i], kind);
      if (tensors[i].scalar_type() != *call->casts[i]) return {};  // fp64, which autocast leaves
    }
  Tensors given, made;
  for (const at::Tensor& t : tensors)
    if (t.defined() && t.numel()) given.push_back(t);
  if (!call->forward->fits(given)) return {};
  if (call->has_room) {
    PyObject* const room = PyObject_CallNoArgs(call->has_room->get());
    if (room == nullptr) throw_python_error();
    Py_DECREF(room);
    if (room != Py_True) return {};
  }
  {
    WithoutGil others;
    at::AutoDispatchBelowADInplaceOrView below;
    made = call->forward->run(std::move(given), stream);
  }
  Tensors results{made[0]};
  if (call->sum >= 0) results.push_back(made[call->sum]);
  for (const at::Tensor& t : results)
    t.unsafeGetTensorImpl()->set_sizes_contiguous(call->y_sizes);
  if (!call->training) return results;
  auto node = new_node<decltype(ag::Edge::function)>();
  node->set_next_edges(ag::collect_next_edges(tensors));
  node->call = call;
  node->stream = stream;
  node->current = c10::impl::VirtualGuardImpl(kind).getStream(made[0].device());
  node->y = Kind(made[0]);
  if (call->sum >= 0) node->sum = Kind(made[call->sum]);
  if (call->leave) {
    PyObject* const planes = THPVariable_WrapList({made.begin() + call->planes, made.end()});
    PyObject* const left = PyObject_CallOneArg(call->leave->get(), planes);
    Py_DECREF(planes);
    if (left == nullptr) throw_python_error();
    node->left = std::make_shared<Held>(left);
    node->weight_at = tensors[1].const_data_ptr();
    Py_DECREF(left);
  }
  ag::set_history(results, node);
  for (const auto& [result, constant] : call->kept)
    node->saved.emplace_back(result < 0 ? constant : made[result],
                             result == 0 || (result > 0 && result == call->sum));
  for (size_t i = 0; i < tensors.size(); ++i) {
    const bool is_sum = static_cast<int>(i) == call->residual;
    node->saved.emplace_back(is_sum ? made[call->sum] : tensors[i], is_sum);
  }
  return results;
}

// Whether the tensors are of a kind that the call was recorded for, and all else is as it was then.
inline bool fits(const Call& call, const Tensors& tensors) {
  if (call.kinds.size() != tensors.size() || call.grad_mode != at::GradMode::is_enabled())
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

#endif

}  // namespace epinorm
