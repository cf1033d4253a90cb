#include "tensor.h"

#include <utility>

namespace xncaps {
namespace {

// Never freed: the interpreter may be gone when static objects are.
Torch& torch = *new Torch;

// A name of an attribute, made once.
nb::handle name(const char* text) { return PyUnicode_InternFromString(text); }

nb::object attribute(nb::handle object, nb::handle name) {
  return nb::steal(PyObject_GetAttr(object.ptr(), name.ptr()));
}

nb::object call(nb::handle function) { return nb::steal(PyObject_CallNoArgs(function.ptr())); }

nb::object call_method(nb::handle object, nb::handle name) {
  return nb::steal(PyObject_CallMethodNoArgs(object.ptr(), name.ptr()));
}

// Throws the error that Python has set.
nb::object checked(nb::object object) {
  if (!object.is_valid()) throw nb::python_error();
  return object;
}

bool is_true(const nb::object& object) { return checked(object).is(Py_True); }

}  // namespace

void set_torch(Torch given) { torch = std::move(given); }

bool is_plain_call() {
  static const nb::handle level = name("_current_level");
  const Py_ssize_t count = PyTuple_GET_SIZE(torch.modes.ptr());
  for (Py_ssize_t k = 0; k < count; ++k) {
    const nb::object answer = checked(call(PyTuple_GET_ITEM(torch.modes.ptr(), k)));
    if (PyObject_IsTrue(answer.ptr()) != 0) return false;
  }
  PyObject* now = PyDict_GetItemWithError(torch.forward_ad.ptr(), level.ptr());
  return now != nullptr && PyLong_AsLong(now) < 0;
}

bool is_plain_tensor(nb::handle object) {
  static const nb::handle dtype = name("dtype"), layout = name("layout"), is_cpu = name("is_cpu"),
                          is_nested = name("is_nested"), is_neg = name("is_neg"),
                          is_zero = name("_is_zerotensor");
  const auto is_type = [&](Py_ssize_t k) {
    return reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())) ==
           PyTuple_GET_ITEM(torch.types.ptr(), k);
  };
  const Py_ssize_t types = PyTuple_GET_SIZE(torch.types.ptr());
  bool is_known = false;
  for (Py_ssize_t k = 0; k < types; ++k) is_known = is_known || is_type(k);
  return is_known && attribute(object, dtype).is(torch.float32) &&
         is_true(attribute(object, is_cpu)) && attribute(object, layout).is(torch.strided) &&
         !is_true(attribute(object, is_nested)) && !is_true(call_method(object, is_neg)) && !is_true(call_method(object, is_zero));
}

bool needs_gradient(nb::handle tensor) {
  static const nb::handle requires_grad = name("requires_grad");
  return is_true(attribute(tensor, requires_grad)) && is_true(call(torch.is_grad_enabled));
}

bool read_shape(nb::handle tensor, int64_t* sizes, int count) {
  static const nb::handle shape = name("shape");
  const nb::object all = checked(attribute(tensor, shape));
  if (!PyTuple_Check(all.ptr()) || PyTuple_GET_SIZE(all.ptr()) != count) return false;
  for (int k = 0; k < count; ++k) sizes[k] = PyLong_AsLongLong(PyTuple_GET_ITEM(all.ptr(), k));
  return true;
}

nb::object contiguous(nb::handle tensor) {
  static const nb::handle method = name("contiguous");
  return checked(call_method(tensor, method));
}

nb::object new_empty(nb::handle like, std::initializer_list<int64_t> sizes) {
  static const nb::handle method = name("new_empty");
  constexpr size_t kMost = 4;
  nb::object numbers[kMost];
  PyObject* arguments[kMost + 1] = {like.ptr()};
  size_t count = 0;
  for (int64_t size : sizes) {
    numbers[count] = checked(nb::steal(PyLong_FromLongLong(size)));
    arguments[count + 1] = numbers[count].ptr();
    ++count;
  }
  return checked(nb::steal(PyObject_VectorcallMethod(method.ptr(), arguments, count + 1, nullptr)));
}

uintptr_t address_of(nb::handle tensor) {
  static const nb::handle data_ptr = name("data_ptr");
  const nb::object address = checked(call_method(tensor, data_ptr));
  return static_cast<uintptr_t>(PyLong_AsUnsignedLongLong(address.ptr()));
}

int num_threads() {
  return static_cast<int>(PyLong_AsLong(checked(call(torch.num_threads)).ptr()));
}

bool Watched::is_unchanged() const {
  const Py_ssize_t count = PyList_GET_SIZE(places_.ptr());
  for (Py_ssize_t k = 0; k < count; ++k) {
    PyObject* place = PyList_GET_ITEM(places_.ptr(), k);
    PyObject* now = PyDict_GetItemWithError(PyTuple_GET_ITEM(place, 0), PyTuple_GET_ITEM(place, 1));
    if (now == nullptr || now != PyTuple_GET_ITEM(place, 2)) return false;
    const uintptr_t address = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(place, 3));
    if (address != 0 && address != address_of(now)) return false;
  }
  return true;
}

}  // namespace xncaps
