// Whether what a capture read of Python is as it was. What is looked at, and why that is enough, says
// capture/unchanged.py, which makes what is compared here:
//   ...                         anything
//   [number]                    a tensor, which is taken under this number
//   [class, key, value ...]     a dict of this class with these keys in this order
//   [class, version, [key, value ...]]  an object of this class and what its __dict__ holds
//   [class, function, code]     this function, with this code
//   whatever else               itself
// Nothing of Python's runs meanwhile.
#pragma once

#include <array>

#include "calls.h"

namespace epinorm {

// Tensors that were met, each under its number; borrowed.
constexpr Py_ssize_t kMostTensors = 128;
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

inline bool is_same_kind(PyObject* expected, PyObject* actual, Met& met) {
  PyObject* const first = PyList_GET_ITEM(expected, 0);
  if (PyLong_CheckExact(first)) {
    PyObject*& before = met[PyLong_AsSsize_t(first)];
    if (before == nullptr) before = actual;
    return before == actual;
  }
  const auto type = reinterpret_cast<PyTypeObject*>(first);
  if (Py_TYPE(actual) != type) return false;
  if (PyType_FastSubclass(type, Py_TPFLAGS_DICT_SUBCLASS))
    return has_same_items(expected, 1, actual, met);
  if (type == &PyFunction_Type)
    return actual == PyList_GET_ITEM(expected, 1) &&
           PyFunction_GET_CODE(actual) == PyList_GET_ITEM(expected, 2);
  if (PyLong_AsUnsignedLong(PyList_GET_ITEM(expected, 1)) != type->tp_version_tag) return false;
  PyObject* const dict = PyObject_GenericGetDict(actual, nullptr);
  if (dict == nullptr) {
    PyErr_Clear();
    return false;
  }
  const bool same = has_same_items(PyList_GET_ITEM(expected, 2), 0, dict, met);
  Py_DECREF(dict);
  return same;
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

// One of capture/unchanged.py's Unchanged; null where the call is not like it, or Python has to compute it.
inline PyObject* result_of(PyObject* known, PyObject* const* args, Py_ssize_t count) {
  PyObject* const arguments = PyTuple_GET_ITEM(known, 0);
  if (PyTuple_GET_SIZE(arguments) != count) return nullptr;
  Met met{};
  for (Py_ssize_t i = 0; i < count; ++i)
    if (!is_same(PyTuple_GET_ITEM(arguments, i), args[i], met)) return nullptr;
  if (!are_there(PyTuple_GET_ITEM(known, 1), met)) return nullptr;
  PyObject* const settings = PyObject_CallNoArgs(PyTuple_GET_ITEM(known, 2));
  if (settings == nullptr) throw_python_error();
  Py_DECREF(settings);
  if (settings != Py_True) return nullptr;
  PyObject *const inputs = PyTuple_GET_ITEM(known, 3), *const calls = PyTuple_GET_ITEM(known, 4);
  Met given;
  const Py_ssize_t taken = PyTuple_GET_SIZE(inputs);
  for (Py_ssize_t i = 0; i < taken; ++i) {
    PyObject* const number = PyTuple_GET_ITEM(inputs, i);
    given[i] = number == Py_None ? Py_None : met[PyLong_AsSsize_t(number)];
  }
  PyObject* const found = computed(*value_of<Calls>(calls), given.data(), taken);
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
