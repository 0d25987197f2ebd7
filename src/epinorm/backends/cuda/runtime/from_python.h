// Objects of Python's that hold values of C++, and values from Python's; whatever is of another kind
// raises.
#pragma once

#include "call.h"

namespace epinorm {

template <typename T>
struct Object {
  PyObject_HEAD
  std::shared_ptr<T> value;
};

template <typename T>
std::shared_ptr<T>& value_of(PyObject* object) {
  return reinterpret_cast<Object<T>*>(object)->value;
}

template <typename T>
void dealloc(PyObject* object) {
  PyTypeObject* const type = Py_TYPE(object);
  value_of<T>(object).~shared_ptr<T>();
  type->tp_free(object);
  Py_DECREF(type);
}

template <typename T>
PyObject* wrap(PyTypeObject* type, std::shared_ptr<T> value) {
  PyObject* object = type->tp_alloc(type, 0);
  if (object != nullptr) new (&value_of<T>(object)) std::shared_ptr<T>(std::move(value));
  return object;
}

template <typename Body>
PyObject* guarded(const Body& body) {
  HANDLE_TH_ERRORS
  return body();
  END_HANDLE_TH_ERRORS
}

inline int64_t number(PyObject* object) {
  const int64_t found = PyLong_AsLongLong(object);
  if (found == -1 && PyErr_Occurred()) throw_python_error();
  return found;
}

template <typename Each>
void for_each(PyObject* sequence, const Each& each) {
  PyObject* const fast = PySequence_Fast(sequence, "a sequence is expected");
  if (fast == nullptr) throw_python_error();
  const Held held(fast);
  Py_DECREF(fast);
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(fast); ++i)
    each(PySequence_Fast_GET_ITEM(fast, i));
}

inline Sizes numbers(PyObject* sequence) {
  Sizes found;
  for_each(sequence, [&](PyObject* each) { found.push_back(number(each)); });
  return found;
}

inline at::Tensor tensor(PyObject* object) {
  if (object == Py_None) return {};
  TORCH_CHECK_TYPE(THPVariable_Check(object), "a tensor or None is expected");
  return THPVariable_Unpack(object);
}

inline Tensors tensors(PyObject* sequence) {
  Tensors found;
  for_each(sequence, [&](PyObject* each) { found.push_back(tensor(each)); });
  return found;
}

inline std::string bytes(PyObject* object) {
  char* data;
  Py_ssize_t size;
  if (PyBytes_AsStringAndSize(object, &data, &size)) throw_python_error();
  return {data, static_cast<size_t>(size)};
}

template <typename T>
std::vector<T> table(PyObject* object) {
  const std::string data = bytes(object);
  std::vector<T> found(data.size() / sizeof(T));
  std::memcpy(found.data(), data.data(), found.size() * sizeof(T));
  return found;
}

inline at::ScalarType dtype(PyObject* object) { return reinterpret_cast<THPDtype*>(object)->scalar_type; }

inline void* stream_of(PyObject* function, const at::Device& device) {
  PyObject* const found = PyObject_CallFunction(function, "i", std::max<int>(device.index(), 0));
  if (found == nullptr) throw_python_error();
  void* const stream = PyLong_AsVoidPtr(found);
  Py_DECREF(found);
  return stream;
}

inline bool is_current(const at::Device& device) {
  PyObject* const found = PyObject_CallNoArgs(current_device);
  if (found == nullptr) throw_python_error();
  const int64_t current = PyLong_AsLongLong(found);
  Py_DECREF(found);
  return current == std::max<int>(device.index(), 0);
}

}  // namespace epinorm
