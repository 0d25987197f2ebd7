// Whether what a capture read of Python is as it was. Why that is enough says capture/unchanged.py;
// capture/looking.py makes what is compared here:
//   ...                           anything
//   [number, class]               a tensor of this class, which is taken under this number
//   [class, key, value ...]       a dict of this class with these keys in this order
//   [reference, version, [key, value ...]]  this object, of a class of this version, and its __dict__
//   [reference, code]             this function, with this code
//   [reference]                   this class
//   whatever else                 itself
// Nothing of Python's runs meanwhile.
#pragma once

#include <array>

#include "calls.h"

namespace epinorm {

// Tensors that were met, each under its number; borrowed.
constexpr Py_ssize_t kMostTensors = 64;
using Met = std::array<PyObject*, kMostTensors>;

inline bool is_same(PyObject* expected, PyObject* actual, Met& met);

// From the item `at` of a list on: keys and values of a dict.
inline bool has_same_items(PyObject* expected, Py_ssize_t at, PyObject* dict, Met& met) {
  const Py_ssize_t end = PyList_GET_SIZE(expected);
  if (PyDict_GET_SIZE(dict) * 2 != end - at) return false;
  PyObject *key, *value;
  for (Py_ssize_t place = 0; PyDict_Next(dict, &place, &key, &value); at += 2)
    if (at >= end || key != PyList_GET_ITEM(expected, at) ||
        !is_same(PyList_GET_ITEM(expected, at + 1), value, met))
      return false;
  return at == end;
}

inline bool is_referent(PyObject* reference, PyObject* actual) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* found = nullptr;
  PyWeakref_GetRef(reference, &found);
  Py_XDECREF(found);
  return found == actual;
#else
  return actual != Py_None && PyWeakref_GetObject(reference) == actual;  // before 3.13 a dead one gives None
#endif
}

inline bool has_same_dict(PyObject* items, PyObject* actual, Met& met) {
  PyObject* const dict = PyObject_GenericGetDict(actual, nullptr);
  if (dict == nullptr) {
    PyErr_Clear();
    return false;
  }
  const bool same = has_same_items(items, 0, dict, met);
  Py_DECREF(dict);
  return same;
}

inline bool is_same_kind(PyObject* expected, PyObject* actual, Met& met) {
  PyObject* const first = PyList_GET_ITEM(expected, 0);
  if (PyLong_CheckExact(first)) {
    PyObject*& before = met[PyLong_AsSsize_t(first)];
    if (before == nullptr) before = actual;
    return before == actual &&
           reinterpret_cast<PyObject*>(Py_TYPE(actual)) == PyList_GET_ITEM(expected, 1);
  }
  if (!PyWeakref_CheckRefExact(first))
    return reinterpret_cast<PyObject*>(Py_TYPE(actual)) == first && has_same_items(expected, 1, actual, met);
  if (!is_referent(first, actual)) return false;
  if (PyList_GET_SIZE(expected) == 1) return true;
  PyObject* const second = PyList_GET_ITEM(expected, 1);
  if (PyList_GET_SIZE(expected) == 2) return PyFunction_GET_CODE(actual) == second;
  return PyLong_AsUnsignedLong(second) == Py_TYPE(actual)->tp_version_tag &&
         has_same_dict(PyList_GET_ITEM(expected, 2), actual, met);
}

inline bool is_same(PyObject* expected, PyObject* actual, Met& met) {
  if (expected == Py_Ellipsis) return true;
  if (PyList_CheckExact(expected)) return is_same_kind(expected, actual, met);
  return expected == actual;
}

// Whether each dict, key, value of a flat tuple is so.
inline bool are_there(PyObject* triples, Met& met) {
  for (Py_ssize_t i = 0; i + 2 < PyTuple_GET_SIZE(triples); i += 3) {
    PyObject* const found =
        PyDict_GetItemWithError(PyTuple_GET_ITEM(triples, i), PyTuple_GET_ITEM(triples, i + 1));
    if (found == nullptr || !is_same(PyTuple_GET_ITEM(triples, i + 2), found, met)) {
      PyErr_Clear();
      return false;
    }
  }
  return true;
}

// Whether each tensor is another one than the others, with strides as a new one has them (is_dense).
inline bool are_apart_and_dense(const Met& met) {
  for (Py_ssize_t i = 0; i < kMostTensors && met[i]; ++i) {
    for (Py_ssize_t j = 0; j < i; ++j)
      if (met[j] == met[i]) return false;
    const at::Tensor& tensor = THPVariable_Unpack(met[i]);
    if (tensor.layout() != at::kStrided) return false;
    const auto sizes = tensor.sizes(), strides = tensor.strides();
    int64_t step = 1;
    for (int64_t axis = tensor.dim() - 1; axis >= 0; --axis) {
      if (strides[axis] != step) return false;
      step *= std::max<int64_t>(sizes[axis], 1);
    }
  }
  return true;
}

// One of capture/unchanged.py's Unchanged; null where the call is not like it, or Python has to compute it.
inline PyObject* result_of(PyObject* known, PyObject* const* args, Py_ssize_t count) {
  PyObject* const arguments = PyTuple_GET_ITEM(known, 0);
  if (PyTuple_GET_SIZE(arguments) != count) return nullptr;
  Met met{};
  for (Py_ssize_t i = 0; i < count; ++i)
    if (!is_same(PyTuple_GET_ITEM(arguments, i), args[i], met)) return nullptr;
  if (!are_there(PyTuple_GET_ITEM(known, 1), met) || !are_apart_and_dense(met)) return nullptr;
  PyObject* const settings = PyObject_CallNoArgs(PyTuple_GET_ITEM(known, 2));
  Py_XDECREF(settings);
  if (settings != Py_True) {
    PyErr_Clear();  // what Dynamo says of such settings, it says itself
    return nullptr;
  }
  PyObject *const inputs = PyTuple_GET_ITEM(known, 3), *const calls = PyTuple_GET_ITEM(known, 4);
  Met given;
  const Py_ssize_t taken = PyTuple_GET_SIZE(inputs);
  for (Py_ssize_t i = 0; i < taken; ++i) {
    PyObject* const number = PyTuple_GET_ITEM(inputs, i);
    given[i] = number == Py_None ? Py_None : met[PyLong_AsSsize_t(number)];
  }
  PyObject* const found = computed(*value_of<Calls>(calls), given.data(), taken);
  if (found == nullptr) throw_python_error();
  if (PyTuple_CheckExact(found)) {  // with a sum that is kept for its gradient alone
    PyObject* const y = PyTuple_GET_ITEM(found, 0);
    Py_INCREF(y);
    Py_DECREF(found);
    return y;
  }
  if (found != Py_None) return found;
  Py_DECREF(found);
  return nullptr;
}

// (a list of Unchanged, what else to call, *args, **kwargs) -> the result
inline PyObject* as_before(PyObject*, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  return guarded([&]() -> PyObject* {
    if (count < 2 || !PyList_Check(args[0])) {
      PyErr_SetString(PyExc_TypeError, "a list and a function are expected");
      return nullptr;
    }
    if (names == nullptr || PyTuple_GET_SIZE(names) == 0)
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[0]); ++i) {
        PyObject* const known = PyList_GET_ITEM(args[0], i);
        const Held held(known);
        if (PyObject* const found = result_of(known, args + 2, count - 2)) return found;
      }
    return PyObject_Vectorcall(args[1], args + 2, count - 2, names);
  });
}

}  // namespace epinorm
