// Planes that wait for a backward pass: fp32/kept_planes.py's objects and lists, which this fills as that does,
// but without a function of Python's. The GIL is held.
#pragma once

#include <Python.h>

#include <memory>

#include "call.h"

namespace epinorm {

// Of one kind of call, as ``Waits`` of native_passes.py has it.
class Waits {
 public:
  explicit Waits(PyObject* tuple) : held_(tuple) {
    if (!PyArg_ParseTuple(tuple, "OO!OOiip", &of_class_, &PyDict_Type, &waiting_, &device_, &make_room_,
                          &x_, &weight_, &scales_alone_))
      throw_python_error();
    for (const char* name : {"x", "weight", "scales_alone"}) {
      PyObject* const made = checked(PyUnicode_InternFromString(name));
      names_.push_back(std::make_unique<Held>(made));
      Py_DECREF(made);
    }
  }

  // As ``make_room``, which is asked where more than one layer's may wait.
  bool make_room() const {
    if (make_room_ != Py_None) {
      PyObject* const room = checked(PyObject_CallNoArgs(make_room_));
      Py_DECREF(room);
      return room == Py_True;
    }
    PyObject* const list = PyDict_GetItemWithError(waiting_, device_);
    if (list == nullptr) return true;
    const Held before(list);
    if (PyDict_DelItem(waiting_, device_)) PyErr_Clear();
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
      PyObject* const kept = checked(PyObject_CallNoArgs(PyList_GET_ITEM(list, i)));
      const Held held(kept);
      Py_DECREF(kept);
      if (kept == Py_None) continue;
      set(kept, kX, Py_None);
      set(kept, kWeight, Py_None);
    }
    return true;
  }

  // A KeptPlanes of what a pass has made.
  std::shared_ptr<const Held> leave(const Tensors& made) const {
    const auto type = reinterpret_cast<PyTypeObject*>(of_class_);
    PyObject* const kept = checked(type->tp_alloc(type, 0));
    const auto held = std::make_shared<const Held>(kept);
    Py_DECREF(kept);
    fill(kept, kX, made, x_);
    fill(kept, kWeight, made, weight_);
    set(kept, kScalesAlone, scales_alone_ ? Py_True : Py_False);
    if (x_ < 0 && weight_ < 0) return held;
    PyObject* const reference = checked(PyWeakref_NewRef(kept, nullptr));
    const Held until_it_waits(reference);
    Py_DECREF(reference);
    PyObject* list = PyDict_GetItemWithError(waiting_, device_);
    if (list == nullptr) {
      list = checked(PyList_New(0));  // the last that may let other threads run
      const int status = PyDict_SetItem(waiting_, device_, list);
      Py_DECREF(list);
      if (status) throw_python_error();
    }
    if (PyList_Append(list, reference)) throw_python_error();
    return held;
  }

 private:
  enum { kX, kWeight, kScalesAlone };

  static PyObject* checked(PyObject* object) {
    if (object == nullptr) throw_python_error();
    return object;
  }

  void set(PyObject* kept, int name, PyObject* value) const {
    if (PyObject_SetAttr(kept, names_[name]->get(), value)) throw_python_error();
  }

  void fill(PyObject* kept, int name, const Tensors& made, int which) const {
    if (which < 0) return set(kept, name, Py_None);
    PyObject* const tensor = checked(THPVariable_Wrap(made[which]));
    set(kept, name, tensor);
    Py_DECREF(tensor);
  }

  const Held held_;  // what follows but for the numbers
  std::vector<std::unique_ptr<const Held>> names_;
  PyObject *of_class_, *waiting_, *device_, *make_room_;
  int x_, weight_, scales_alone_;
};

}  // namespace epinorm
