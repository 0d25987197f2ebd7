// A chain's forward pass with its place in autograd's graph, both without Python: for calls like one
// that Python has computed and recorded. Whatever differs is Python's (operator/autograd.py).
#pragma once

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <type_traits>

#include "call.h"
#include "waiting.h"

namespace torch::autograd {
void deleteNode(Node*);  // before PyTorch 2.12, whose nodes have shared pointers
}

namespace epinorm {

namespace ag = torch::autograd;

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
      const auto program = backward ? backward->find(known) : nullptr;
      if (program) {
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
    if (c10::GradMode::is_enabled() || *call->accumulating || !undisturbed()) return false;
    if (torch::profiler::impl::profilerEnabled()) return false;
    if (!dy.defined() || !y.fits(dy) || (dsum.defined() && !sum.fits(dsum))) return false;
    // Called by itself, not by the engine: anything may be current.
    const c10::impl::VirtualGuardImpl guard(y.device.type());
    if (guard.getStream(y.device) != current || guard.getDevice() != y.device) return false;
    for (size_t i = 0; i < call->saved.size(); ++i)
      if (!call->saved[i].fits(tensors[kKept + i])) return false;
    if (!call->takes_tf32) return true;
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

// y, and the sum or the batch's statistics where they are a result, of tensors of which the call fits;
// nothing where Python has to compute them all the same. The GIL is held.
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
  if (call->waits && !call->waits->make_room()) return {};
  {
    WithoutGil others;
    at::AutoDispatchBelowADInplaceOrView below;
    made = call->forward->run(std::move(given), stream);
  }
  Tensors results{made[0]};
  if (call->sum >= 0) results.push_back(made[call->sum]);
  for (const at::Tensor& t : results)
    t.unsafeGetTensorImpl()->set_sizes_contiguous(call->y_sizes);
  const auto with_statistics = [&]() -> Tensors {
    if (call->statistics >= 0) results.push_back(made[call->statistics]);
    return std::move(results);
  };
  if (!call->training) return with_statistics();
  auto node = new_node<decltype(ag::Edge::function)>();
  node->set_next_edges(ag::collect_next_edges(tensors));
  node->call = call;
  node->stream = stream;
  node->current = c10::impl::VirtualGuardImpl(kind).getStream(made[0].device());
  node->y = Kind(made[0]);
  if (call->sum >= 0) node->sum = Kind(made[call->sum]);
  if (call->waits) {
    node->left = call->waits->leave(made);
    node->weight_at = tensors[1].const_data_ptr();
  }
  ag::set_history(results, node);
  for (const auto& [result, constant] : call->kept)
    node->saved.emplace_back(result < 0 ? constant : made[result],
                             result == 0 || (result > 0 && result == call->sum));
  for (size_t i = 0; i < tensors.size(); ++i) {
    const bool is_sum = static_cast<int>(i) == call->residual;
    node->saved.emplace_back(is_sum ? made[call->sum] : tensors[i], is_sum);
  }
  return with_statistics();
}

}  // namespace epinorm
