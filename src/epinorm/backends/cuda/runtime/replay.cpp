// What Python sees of program.h, calls.h and unchanged.h.
#include "from_python.h"
#ifndef EPINORM_PROGRAM_ALONE
#include "unchanged.h"
#endif

namespace epinorm {
namespace {

// ---- Program ----

PyTypeObject* program_type;

Step step(PyObject* object) {
  Step made;
  PyObject *frame, *offsets, *places, *matrices, *before, *behind;
  if (!PyArg_ParseTuple(object, "KOOOOOO", &made.kernel, &frame, &offsets, &places, &matrices,
                        &before, &behind))
    throw_python_error();
  made.frame = bytes(frame);
  made.offsets = table<uint32_t>(offsets);
  made.places = table<Place>(places);
  for_each(matrices, [&](PyObject* each) {
    PyObject *buffer, *offset, *sizes, *strides;
    if (!PyArg_ParseTuple(each, "OOOO", &buffer, &offset, &sizes, &strides)) throw_python_error();
    made.matrices.push_back({number(buffer), number(offset), numbers(sizes), numbers(strides)});
  });
  made.made = numbers(before);
  made.done = numbers(behind);
  return made;
}

PyObject* new_program(PyTypeObject* type, PyObject* args, PyObject*) {
  return guarded([&]() -> PyObject* {
    auto made = std::make_shared<Program>();
    PyObject *functions, *device_like, *large, *buffers, *constants, *results, *maps, *steps, *trouble;
    if (!PyArg_ParseTuple(args, "OOLOOOOOOO", &functions, &device_like, &made->given, &large, &buffers,
                          &constants, &results, &maps, &steps, &trouble))
      return nullptr;
    const Sizes addresses = numbers(functions);
    made->launch = reinterpret_cast<LaunchKernelEx>(addresses.at(0));
    made->encode = reinterpret_cast<EncodeTiled>(addresses.at(1));
#ifndef EPINORM_PROGRAM_ALONE
    if (addresses.size() > 2) {
      GraphFunctions cuda;
      TORCH_CHECK(addresses.size() == 2 + sizeof cuda / sizeof(void*), "not all functions of graphs");
      std::memcpy(&cuda, &addresses[2], sizeof cuda);
      made->graphs = std::make_unique<Graphs>(cuda);
    }
#endif
    const at::Tensor like = tensor(device_like);
    made->device = like.device();
    made->allocator = like.storage().allocator();
    made->keys = like.key_set();
    made->large = numbers(large);
    for_each(buffers, [&](PyObject* each) {
      PyObject *sizes, *type_of, *over;
      if (!PyArg_ParseTuple(each, "OOO", &sizes, &type_of, &over)) throw_python_error();
      made->made.push_back({numbers(sizes), dtype(type_of), number(over)});
    });
    made->constants = tensors(constants);
    made->results = numbers(results);
    made->maps = table<Map>(maps);
    for_each(steps, [&](PyObject* each) { made->steps.push_back(step(each)); });
    auto held = std::make_shared<Held>(trouble);
    made->trouble = [held](int status, int launches) {
      WithGil gil;
      PyObject* done = PyObject_CallFunction(held->get(), "ii", status, launches);
      if (done == nullptr) throw_python_error();
      Py_DECREF(done);
    };
    return wrap<Program>(type, made);
  });
}

// (tensors) -> whether they are like those of the recorded run.
PyObject* program_fits(PyObject* self, PyObject* sequence) {
  return guarded([&] {
    const Program& program = *value_of<Program>(self);
    return PyBool_FromLong(program.fits(tensors(sequence)) && is_current(program.device));
  });
}

// (list of tensors, which fit) -> results. The list is emptied, so that what is given is freed
// behind its last use.
PyObject* call_program(PyObject* self, PyObject* args, PyObject*) {
  return guarded([&]() -> PyObject* {
    PyObject* list;
    if (!PyArg_ParseTuple(args, "O!", &PyList_Type, &list)) return nullptr;
    const Program& program = *value_of<Program>(self);
    Tensors given = tensors(list), made;
    TORCH_CHECK(program.fits(given), "the tensors are not like those of the recorded run");
    if (PyList_SetSlice(list, 0, PyList_GET_SIZE(list), nullptr)) return nullptr;
    {
      void* const stream = stream_of(current_stream, program.device);
      WithoutGil others;
      at::AutoDispatchBelowADInplaceOrView below;
      made = program.run(std::move(given), stream);
    }
    return THPVariable_WrapList(made);
  });
}

#ifndef EPINORM_PROGRAM_ALONE
// ---- Backward ----

PyTypeObject *backward_type, *calls_type;

PyObject* new_backward(PyTypeObject* type, PyObject*, PyObject*) {
  return wrap(type, std::make_shared<Backward>());
}

PyObject* add_program(PyObject* self, PyObject* args) {
  return guarded([&]() -> PyObject* {
    unsigned long long wanted;
    PyObject* program;
    if (!PyArg_ParseTuple(args, "KO!", &wanted, program_type, &program)) return nullptr;
    value_of<Backward>(self)->add(wanted, value_of<Program>(program));
    Py_RETURN_NONE;
  });
}

// ---- Calls ----

constexpr size_t kMostCalls = 64;

PyObject* new_calls(PyTypeObject* type, PyObject*, PyObject*) {
  return wrap(type, std::make_shared<Calls>());
}

PyObject* clear_calls(PyObject* self, PyObject*) {
  Calls gone;
  gone.swap(*value_of<Calls>(self));  // freeing them may run anything
  Py_RETURN_NONE;
}

std::shared_ptr<const Backward> backward(PyObject* object) {
  return object == Py_None ? nullptr : value_of<Backward>(object);
}

// Of tensors like these, as PyTorch's modes are now; null where one is there, which an address or a
// mode kept from being found.
std::shared_ptr<Call> new_call(const Calls& calls, PyObject* given, PyObject* setting,
                               PyObject* program) {
  const Tensors like = tensors(given);
  if (find(calls, like)) return nullptr;
  auto made = std::make_shared<Call>();
  for (const at::Tensor& t : like) made->kinds.emplace_back(t);
  made->saved = made->kinds;
  made->grad_mode = autograd_records();
  if (setting != Py_None)
    made->takes_tf32 = PyUnicode_CompareWithASCIIString(setting, "high") == 0;
  if (program != nullptr) made->forward = value_of<Program>(program);
  return made;
}

PyObject* add(PyObject* self, std::shared_ptr<const Call> made) {
  Calls& calls = *value_of<Calls>(self);
  if (calls.size() >= kMostCalls) clear_calls(self, nullptr);
  calls.push_back(std::move(made));
  Py_RETURN_NONE;
}

// Each the number of a result, or a tensor.
std::vector<std::pair<int, at::Tensor>> fields(PyObject* sequence) {
  std::vector<std::pair<int, at::Tensor>> found;
  for_each(sequence, [&](PyObject* each) {
    const bool is_result = PyLong_Check(each);
    found.emplace_back(is_result ? number(each) : -1, is_result ? at::Tensor() : tensor(each));
  });
  return found;
}

// (tensors, setting, a function of them)
PyObject* add_layers(PyObject* self, PyObject* args) {
  return guarded([&]() -> PyObject* {
    PyObject *given, *setting, *layers;
    if (!PyArg_ParseTuple(args, "OOO", &given, &setting, &layers)) return nullptr;
    const auto made = new_call(*value_of<Calls>(self), given, setting, nullptr);
    if (!made) Py_RETURN_NONE;
    made->layers = std::make_shared<Held>(layers);
    return add(self, made);
  });
}

// (an operator's name, tensors, how many of them it takes, setting, program, what it returns)
PyObject* add_operator(PyObject* self, PyObject* args) {
  return guarded([&]() -> PyObject* {
    const char* name;
    Py_ssize_t taken;
    PyObject *given, *setting, *program, *outputs;
    if (!PyArg_ParseTuple(args, "sOnOO!O", &name, &given, &taken, &setting, program_type, &program,
                          &outputs))
      return nullptr;
    const auto made = new_call(*value_of<Calls>(self), given, setting, program);
    if (!made) Py_RETURN_NONE;
    made->name = name;
    made->taken = taken;
    made->outputs = fields(outputs);
    return add(self, made);
  });
}

// (tensors, casts, setting, y's size, program, kept, sum, statistics, waits, two backwards, in_python,
// accumulating, residual)
PyObject* add_call(PyObject* self, PyObject* args) {
  return guarded([&]() -> PyObject* {
    PyObject *given, *casts, *setting, *size, *program, *kept, *waits, *first, *second;
    PyObject* in_python;
    int sum, statistics, residual;
    unsigned long long accumulating;
    if (!PyArg_ParseTuple(args, "OOOOO!OiiOOOOKi", &given, &casts, &setting, &size, program_type,
                          &program, &kept, &sum, &statistics, &waits, &first, &second, &in_python,
                          &accumulating, &residual))
      return nullptr;
    const auto made = new_call(*value_of<Calls>(self), given, setting, program);
    if (!made) Py_RETURN_NONE;
    if (casts != Py_None) {
      made->autocast = at::autocast::get_autocast_dtype(made->kinds[0].device.type());
      for_each(casts, [&](PyObject* each) {
        std::optional<at::ScalarType> to;
        const size_t i = made->casts.size();
        if (each != Py_None) made->saved[i].dtype = *(to = dtype(each));
        made->casts.push_back(to);
      });
    }
    made->y_sizes = numbers(size);
    made->sum = sum;
    made->statistics = statistics;
    made->residual = residual;
    made->training = first != Py_None;
    if (made->training) {
      made->kept = fields(kept);
      if (waits != Py_None) made->waits = std::make_shared<Waits>(waits);
      made->backward = backward(first);
      made->backward_with_sum = backward(second);
      made->in_python = std::make_shared<Held>(in_python);
      made->accumulating = reinterpret_cast<const int*>(accumulating);
    }
    return add(self, made);
  });
}

// (*tensors) -> as ``computed``.
PyObject* call_calls(PyObject* self, PyObject* args, PyObject*) {
  return guarded([&] {
    return computed(*value_of<Calls>(self), &PyTuple_GET_ITEM(args, 0), PyTuple_GET_SIZE(args));
  });
}

// (*tensors) -> those among these that such a call is like: one or, as None, none.
PyObject* calls_like(PyObject* self, PyObject* args) {
  return guarded([&]() -> PyObject* {
    const auto found = find(*value_of<Calls>(self), tensors(args));
    if (!found) Py_RETURN_NONE;
    return wrap(calls_type, std::make_shared<Calls>(1, found));
  });
}

PyMethodDef of_backward[] = {{"add", add_program, METH_VARARGS, nullptr}, {}};
PyMethodDef of_calls[] = {{"add", add_call, METH_VARARGS, nullptr},
                          {"add_operator", add_operator, METH_VARARGS, nullptr},
                          {"add_layers", add_layers, METH_VARARGS, nullptr},
                          {"clear", clear_calls, METH_NOARGS, nullptr},
                          {"like", calls_like, METH_VARARGS, nullptr},
                          {}};
#endif

// ---- the module ----

// (current device, current stream, fp32 setting)
PyObject* ask(PyObject*, PyObject* args) {
  if (!PyArg_ParseTuple(args, "OOO", &current_device, &current_stream, &current_setting))
    return nullptr;
  for (PyObject* each : {current_device, current_stream, current_setting}) Py_INCREF(each);
  Py_RETURN_NONE;
}

template <typename T>
PyTypeObject* new_type(const char* name, newfunc make, ternaryfunc call, PyMethodDef* methods) {
  PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(make)},
                         {Py_tp_dealloc, reinterpret_cast<void*>(dealloc<T>)},
                         {Py_tp_methods, methods},
                         {call ? Py_tp_call : 0, reinterpret_cast<void*>(call)},
                         {0, nullptr}};
  PyType_Spec spec{name, sizeof(Object<T>), 0, Py_TPFLAGS_DEFAULT, slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

PyMethodDef functions[] = {
    {"ask", ask, METH_VARARGS, nullptr},
#ifndef EPINORM_PROGRAM_ALONE
    {"as_before", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(as_before)),
     METH_FASTCALL | METH_KEYWORDS, nullptr},
#endif
    {}};
PyMethodDef of_program[] = {{"fits", program_fits, METH_O, nullptr}, {}};
PyModuleDef module_definition{PyModuleDef_HEAD_INIT, "epinorm_replay", nullptr, -1, functions};

}  // namespace
}  // namespace epinorm

extern "C" __attribute__((visibility("default"))) PyObject* PyInit_epinorm_replay() {
  using namespace epinorm;
  PyObject* const made = PyModule_Create(&module_definition);
  const auto add = [&](const char* name, PyTypeObject* type) {
    if (made && type) PyModule_AddObject(made, name, reinterpret_cast<PyObject*>(type));
    return made && type;
  };
  program_type = new_type<Program>("epinorm_replay.Program", new_program, call_program, of_program);
  bool there = add("Program", program_type);
#ifndef EPINORM_PROGRAM_ALONE
  backward_type = new_type<Backward>("epinorm_replay.Backward", new_backward, nullptr, of_backward);
  calls_type = new_type<Calls>("epinorm_replay.Calls", new_calls, call_calls, of_calls);
  there = there && add("Backward", backward_type) && add("Calls", calls_type);
#endif
  return there ? made : nullptr;
}
