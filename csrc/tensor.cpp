#include "tensor.h"

#include <nanobind/ndarray.h>

#include <utility>

namespace xncaps {
namespace {

// Never freed: the interpreter may be gone when static objects are.
Torch& torch = *new Torch;

nb::object call(nb::handle function) { return nb::steal(PyObject_CallNoArgs(function.ptr())); }

nb::object call_method(nb::handle object, nb::handle name) {
  return nb::steal(PyObject_CallMethodNoArgs(object.ptr(), name.ptr()));
}

bool is_true(const nb::object& object) { return checked(object).is(Py_True); }

// The table of functions that DLPack 1 knows, up to the one that is used here: it fills in the view of
// a tensor that stays with its owner, and returns 0.
struct Exchange {
  uint32_t major, minor;
  const Exchange* older;
  void* others[3];
  int (*view)(void* tensor, nb::dlpack::dltensor* view);
};
const Exchange* exchange = nullptr;

const Exchange* find_exchange(nb::handle capsule) {
  if (capsule.is_none()) return nullptr;
  const void* table = PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api");
  if (table == nullptr) PyErr_Clear();  // a table of another kind
  for (auto* at = static_cast<const Exchange*>(table); at != nullptr; at = at->older) {
    if (at->major == 1) return at->view == nullptr ? nullptr : at;
  }
  return nullptr;
}

bool view_by_table(nb::handle object, View& view) {
  nb::dlpack::dltensor tensor;
  if (exchange->view(object.ptr(), &tensor) != 0) {  // one without memory, or without strides
    PyErr_Clear();
    return false;
  }
  const bool is_float32 = tensor.dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Float) &&
                          tensor.dtype.bits == 32 && tensor.dtype.lanes == 1;
  if (!is_float32 || tensor.device.device_type != nb::device::cpu::value) return false;
  view.data = reinterpret_cast<uintptr_t>(tensor.data) + tensor.byte_offset;
  view.dims = tensor.ndim;
  view.is_contiguous = true;
  int64_t count = 1;  // of the numbers from one index to the next, if nothing lies between them
  for (int k = tensor.ndim - 1; k >= 0; --k) {
    const int64_t size = tensor.shape[k];
    if (k < View::kMost) view.sizes[k] = size;
    if (size != 1 && tensor.strides != nullptr && tensor.strides[k] != count) {
      view.is_contiguous = false;
    }
    count *= size;
  }
  if (count == 0) view.is_contiguous = true;
  return tensor.data != nullptr || count == 0;  // zeros that take no memory have no address
}

bool view_by_names(nb::handle object, View& view) {
  static const nb::handle dtype = name("dtype"), layout = name("layout"), is_cpu = name("is_cpu"),
                          is_nested = name("is_nested"), is_zero = name("_is_zerotensor"),
                          shape = name("shape"), is_contiguous = name("is_contiguous");
  if (!attribute(object, dtype).is(torch.float32) || !is_true(attribute(object, is_cpu)) ||
      !attribute(object, layout).is(torch.strided) || is_true(attribute(object, is_nested)) ||
      is_true(call_method(object, is_zero))) {
    return false;
  }
  const nb::object sizes = checked(attribute(object, shape));
  view.data = address_of(object);
  view.dims = static_cast<int>(PyTuple_GET_SIZE(sizes.ptr()));
  view.is_contiguous = is_true(call_method(object, is_contiguous));
  for (int k = 0; k < view.dims && k < View::kMost; ++k) {
    view.sizes[k] = PyLong_AsLongLong(PyTuple_GET_ITEM(sizes.ptr(), k));
  }
  return true;
}

}  // namespace

nb::handle name(const char* text) { return PyUnicode_InternFromString(text); }

nb::object attribute(nb::handle object, nb::handle name) {
  return nb::steal(PyObject_GetAttr(object.ptr(), name.ptr()));
}

nb::object checked(nb::object object) {
  if (!object.is_valid()) throw nb::python_error();
  return object;
}

void set_torch(Torch given) {
  torch = std::move(given);
  exchange = find_exchange(torch.exchange);
}

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

bool view_tensor(nb::handle object, View& view) {
  static const nb::handle is_neg = name("is_neg");
  const auto is_type = [&](Py_ssize_t k) {
    return reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())) ==
           PyTuple_GET_ITEM(torch.types.ptr(), k);
  };
  const Py_ssize_t types = PyTuple_GET_SIZE(torch.types.ptr());
  bool is_known = false;
  for (Py_ssize_t k = 0; k < types; ++k) is_known = is_known || is_type(k);
  if (!is_known) return false;
  const auto look = exchange != nullptr ? &view_by_table : &view_by_names;
  return look(object, view) && !is_true(call_method(object, is_neg));
}

bool needs_gradient(nb::handle tensor) {
  static const nb::handle requires_grad = name("requires_grad");
  return is_true(call(torch.is_grad_enabled)) && is_true(attribute(tensor, requires_grad));
}

nb::object contiguous(nb::handle tensor) {
  static const nb::handle method = name("contiguous");
  return checked(call_method(tensor, method));
}

Shape shape_of(std::initializer_list<int64_t> sizes) {
  Py_ssize_t k = static_cast<Py_ssize_t>(sizes.size());
  const Shape shape{checked(nb::steal(PyTuple_New(k))), checked(nb::steal(PyTuple_New(k)))};
  const auto put = [&k](const nb::object& tuple, int64_t number) {
    PyTuple_SET_ITEM(tuple.ptr(), k, checked(nb::steal(PyLong_FromLongLong(number))).release().ptr());
  };
  int64_t stride = 1;
  for (const int64_t* size = sizes.end(); k-- > 0; stride *= *size) {
    put(shape.sizes, *--size);
    put(shape.strides, stride);
  }
  return shape;
}

nb::object new_empty(nb::handle like, const Shape& shape) {
  if (torch.empty_strided.is_none()) {
    static const nb::handle method = name("new_empty");
    PyObject* arguments[] = {like.ptr(), shape.sizes.ptr()};
    return checked(nb::steal(PyObject_VectorcallMethod(method.ptr(), arguments, 2, nullptr)));
  }
  PyObject* arguments[] = {shape.sizes.ptr(), shape.strides.ptr(), torch.float32.ptr()};
  return checked(nb::steal(PyObject_Vectorcall(torch.empty_strided.ptr(), arguments, 3, nullptr)));
}

int64_t writes_to(nb::handle tensor) {
  static const nb::handle version = name("_version"), is_inference = name("is_inference");
  if (nb::cast<bool>(checked(attribute(tensor, is_inference))())) return -1;
  return nb::cast<int64_t>(checked(attribute(tensor, version)));
}

uintptr_t address_of(nb::handle tensor) {
  nb::dlpack::dltensor view;
  if (exchange != nullptr && exchange->view(tensor.ptr(), &view) == 0) {
    return reinterpret_cast<uintptr_t>(view.data) + view.byte_offset;
  }
  PyErr_Clear();
  static const nb::handle data_ptr = name("data_ptr");
  const nb::object address = checked(call_method(tensor, data_ptr));
  return static_cast<uintptr_t>(PyLong_AsUnsignedLongLong(address.ptr()));
}

int num_threads() {
  return static_cast<int>(PyLong_AsLong(checked(call(torch.num_threads)).ptr()));
}

Watched::Watched(nb::list places) {
  for (nb::handle place : places) {
    const nb::tuple parts = nb::cast<nb::tuple>(place);
    places_.push_back(
        {nb::cast<nb::dict>(parts[0]), parts[1], parts[2], nb::cast<uintptr_t>(parts[3])});
  }
}

int Watched::traverse(visitproc visit, void* arg) const {
  for (const Place& place : places_) {
    Py_VISIT(place.dictionary.ptr());
    Py_VISIT(place.key.ptr());
    Py_VISIT(place.value.ptr());
  }
  return 0;
}

nb::handle Watched::tensor_at(uintptr_t address) const {
  for (const Place& place : places_) {
    if (place.address == address) return place.value;
  }
  return nb::handle();
}
bool Watched::is_unchanged() const {
  for (const Place& place : places_) {
    PyObject* now = PyDict_GetItemWithError(place.dictionary.ptr(), place.key.ptr());
    if (now == nullptr || now != place.value.ptr()) return false;
    if (place.address != 0 && place.address != address_of(now)) return false;
  }
  return true;
}

}  // namespace xncaps
