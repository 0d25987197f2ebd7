// Calls that were recorded at one place: the one that tensors are like, and what it gives.
#pragma once

#include "chain_node.h"
#include "from_python.h"

namespace epinorm {

using Calls = std::vector<std::shared_ptr<const Call>>;

// Asking for PyTorch's setting may let other threads run, which add and clear.
inline std::shared_ptr<const Call> find(const Calls& calls, const Tensors& given) {
  for (size_t i = 0; i < calls.size(); ++i) {
    const std::shared_ptr<const Call> call = calls[i];
    if (fits(*call, given)) return call;
  }
  return nullptr;
}

// y, or y and a second result, and all that an operator returns; None for a call that is like none that was
// added.
inline PyObject* computed(const Calls& calls, PyObject* const* items, Py_ssize_t count) {
  Tensors given;
  given.reserve(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const each = items[i];
    const auto type = reinterpret_cast<PyObject*>(Py_TYPE(each));
    if (each != Py_None && type != THPVariableClass && type != ParameterClass) Py_RETURN_NONE;
    given.push_back(each == Py_None ? at::Tensor() : THPVariable_Unpack(each));
  }
  if (!undisturbed()) Py_RETURN_NONE;
  const std::shared_ptr<const Call> call = find(calls, given);
  if (!call) Py_RETURN_NONE;
  if (call->layers) return PyObject_Vectorcall(call->layers->get(), items, count, nullptr);
  if (!is_current(call->forward->device)) Py_RETURN_NONE;
  const bool is_operator = !call->outputs.empty();
  if (!is_operator && watched()) Py_RETURN_NONE;
  void* const stream = stream_of(current_stream, call->forward->device);
  Tensors made = is_operator ? operate(*call, given, stream)
                             : compute(call, std::move(given), stream);
  if (made.empty()) Py_RETURN_NONE;
  if (made.size() == 1 && !is_operator) return THPVariable_Wrap(std::move(made[0]));
  PyObject* const found = PyTuple_New(made.size());
  for (size_t i = 0; found && i < made.size(); ++i)
    PyTuple_SET_ITEM(found, i, THPVariable_Wrap(std::move(made[i])));
  return found;
}

}  // namespace epinorm
