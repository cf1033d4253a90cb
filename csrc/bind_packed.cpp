// What is behind packed layers: functions for primary capsules, and classes. `run` gives the output for a tensor, or
// None where the layer must find another way: the tensor is not one of plain floats, or the layer is not as it was.
// Calling an object with the layer and a tensor does the same where nothing but `run` is to be done.
#include "bind.h"

#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "layout.h"
#include "tensor.h"

namespace xncaps {
namespace {

// Kernels run without the interpreter's lock, but for so few predictions that it is held for some ten microseconds:
// to give it up and to take it again is as long as a part of those.
constexpr int64_t kFew = 1 << 16;

template <class Function>
void without_lock(const Function& function) {
  const nb::gil_scoped_release unlocked;
  function();
}

// One sample takes one thread, without asking for their number.
int threads_for(int64_t samples) { return samples == 1 ? 1 : num_threads(); }

// What a call is made with: the tensor, or a contiguous copy of it.
struct Input {
  nb::object tensor;
  View view;

  const float* numbers() const { return floats(view.data); }
};

// Whether x is a tensor of so many dimensions, not empty, of which nothing but its numbers is wanted.
bool view_plain(nb::handle x, int dims, Input& input) {
  if (!view_tensor(x, input.view) || input.view.dims != dims || input.view.sizes[0] == 0 ||
      needs_gradient(x) || !is_plain_call()) {
    return false;
  }
  input.tensor = nb::borrow(x);
  if (!input.view.is_contiguous) {
    input.tensor = contiguous(x);
    input.view.data = address_of(input.tensor);
  }
  return true;
}

class Packed {
 public:
  // Dictionaries of hooks: while all are empty, calling the layer does nothing but run this.
  Packed(nb::list places, nb::list hooks) : watched_(std::move(places)), hooks_(std::move(hooks)) {}

  bool is_current() const { return hooks_.is_valid() && watched_.is_unchanged(); }

  // For the collector of garbage: a hook may hold the layer, and the layer holds this.
  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(hooks_.ptr());
    return watched_.traverse(visit, arg);
  }
  void clear() {
    hooks_.reset();
    watched_.clear();
  }

 protected:
  nb::handle tensor_at(Address address) const { return watched_.tensor_at(address); }

  // Whether x can be taken, if it has so many dimensions.
  bool serves(nb::handle x, int dims, Input& input) const {
    return enabled && is_current() && view_plain(x, dims, input);
  }

  // Whether calling the layer does nothing but run its forward, and that nothing but run this.
  bool stands_for(nb::handle layer) const {
    static const nb::handle forward = name("forward"), own_forward = name("_own_forward"),
                            compiled = name("_compiled_call_impl");
    const nb::handle kind = reinterpret_cast<PyObject*>(Py_TYPE(layer.ptr()));
    if (!has_no_hooks()) return false;
    if (!checked(attribute(kind, forward)).is(checked(attribute(kind, own_forward)))) return false;
    const nb::object own = checked(nb::steal(PyObject_GenericGetDict(layer.ptr(), nullptr)));
    for (const nb::handle key : {forward, compiled}) {
      const int has = PyDict_Contains(own.ptr(), key.ptr());
      if (has < 0) throw nb::python_error();
      if (has != 0) return false;
    }
    return true;
  }

 private:
  bool has_no_hooks() const {
    if (!hooks_.is_valid()) return false;
    const Py_ssize_t count = PyList_GET_SIZE(hooks_.ptr());
    for (Py_ssize_t k = 0; k < count; ++k) {
      if (PyDict_GET_SIZE(PyList_GET_ITEM(hooks_.ptr(), k)) != 0) return false;
    }
    return true;
  }

  Watched watched_;
  nb::list hooks_;
};

class PackedCapsules : public Packed {
 public:
  PackedCapsules(nb::list places, nb::list hooks, int64_t caps_in, int64_t dim_in, int64_t caps_out,
                 int64_t dim_out, int64_t iterations, int projection, int agreement,
                 Address floats_at, Address bits, Address scale, bool half, bool learned,
                 Address bias, Address agreement_scale)
      : Packed(std::move(places), std::move(hooks)),
        layer_(make_layer(caps_in, dim_in, caps_out, dim_out, iterations, projection, agreement,
                          true, false)),
        weights_{floats(floats_at), bytes(bits), reinterpret_cast<const void*>(scale), half,
                 learned, floats(bias), floats(agreement_scale)} {}

  // With couplings, an address for those of all iterations is given.
  nb::object run(nb::handle given, Address couplings) const {
    Input x;
    if (!serves(given, 3, x) || x.view.sizes[1] != layer_.caps_in ||
        x.view.sizes[2] != layer_.dim_in) {
      return nb::none();
    }
    const int64_t batch = x.view.sizes[0];
    const nb::object v = new_empty(x.tensor, shape_for(batch));
    const ForwardCall forward{x.numbers(), batch,    writable(address_of(v)), nullptr,
                              writable(couplings), threads_for(batch)};
    const auto compute = [&] { selected->forward(layer_, weights_, forward); };
    if (batch * layer_.caps_in * layer_.caps_out * layer_.dim_out <= kFew) {
      compute();
    } else {
      without_lock(compute);
    }
    return v;
  }

  nb::object call(nb::handle layer, nb::handle given) const {
    return stands_for(layer) ? run(given, 0) : nb::none();
  }

 private:
  // That of the outputs, kept: batches are mostly as large as the one before.
  const Shape& shape_for(int64_t batch) const {
    if (batch != shape_batch_) {
      shape_ = shape_of({batch, layer_.caps_out, layer_.dim_out});
      shape_batch_ = batch;
    }
    return shape_;
  }

  Layer layer_;
  Weights weights_;
  mutable Shape shape_;
  mutable int64_t shape_batch_ = 0;
};

class PackedLinear : public Packed {
 public:
  PackedLinear(nb::list places, nb::list hooks, int64_t inputs, int64_t outputs, int binarizer,
               Address bits, Address scale, bool learned, Address bias)
      : Packed(std::move(places), std::move(hooks)),
        base_(make_linear(inputs, outputs, binarizer, bits, scale, learned, bias)) {}

  // x is (rows, in_features).
  nb::object run(nb::handle given) const {
    Input x;
    if (!serves(given, 2, x) || x.view.sizes[1] != base_.in_features) return nb::none();
    LinearCall linear = base_;
    linear.rows = x.view.sizes[0];
    const nb::object y = new_empty(x.tensor, shape_of({linear.rows, base_.out_features}));
    linear.x = x.numbers();
    linear.y = writable(address_of(y));
    linear.threads = threads_for(linear.rows);
    without_lock([&] { selected->linear(linear); });
    return y;
  }

  nb::object call(nb::handle layer, nb::handle given) const {
    return stands_for(layer) ? run(given) : nb::none();
  }

 private:
  LinearCall base_;
};

// The plan of a convolution for images of one size (kernel.h), and what tells whether it is still that of the bits: how
// often torch had written to them, or themselves where torch does not count.
struct Plan {
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  const Kernel* kernel;
  int64_t height, width;
  size_t size;  // of the lists
  std::unique_ptr<void, Free> lists;
  int64_t writes;
  std::vector<uint8_t> bits;

  static int64_t bytes_of(const ConvCall& conv) {
    return conv.out_channels * conv.kernel[0] * conv.kernel[1] * bytes_for(conv.channels);
  }

  // Null where there is none. The bits are copied first: they may be written to meanwhile.
  static std::shared_ptr<const Plan> of(const ConvCall& conv, const Kernel& kernel, int64_t writes) {
    std::vector<uint8_t> bits(conv.bits, conv.bits + bytes_of(conv));
    ConvCall with = conv;
    with.bits = bits.data();
    const size_t size = kernel.plan_conv(with, nullptr);
    if (size == 0) return nullptr;
    const auto plan = std::make_shared<Plan>();
    plan->kernel = &kernel;
    plan->height = conv.height;
    plan->width = conv.width;
    plan->size = size;
    plan->writes = writes;
    plan->lists.reset(std::aligned_alloc(64, (size + 63) / 64 * 64));
    if (plan->lists == nullptr) return nullptr;  // it goes without
    kernel.plan_conv(with, plan->lists.get());
    if (writes < 0) plan->bits = std::move(bits);
    return plan;
  }

  bool is_of(const ConvCall& conv, const Kernel& with, int64_t writes_now) const {
    return kernel == &with && height == conv.height && width == conv.width && writes == writes_now &&
           (bits.empty() || std::memcmp(bits.data(), conv.bits, bits.size()) == 0);
  }
};

class PackedConv : public Packed {
 public:
  PackedConv(nb::list places, nb::list hooks, int64_t channels, int64_t outputs, int64_t kernel_h,
             int64_t kernel_w, int64_t stride_h, int64_t stride_w, int64_t padding_h,
             int64_t padding_w, int64_t dilation_h, int64_t dilation_w, int binarizer, Address bits,
             Address scale, bool learned, Address bias)
      : Packed(std::move(places), std::move(hooks)),
        base_(make_conv(channels, outputs, kernel_h, kernel_w, stride_h, stride_w, padding_h,
                        padding_w, dilation_h, dilation_w, binarizer, bits, scale, learned, bias)) {}

  nb::object run(nb::handle given) const {
    Input x;
    ConvCall conv = base_;
    if (!serves(given, 4, x) || x.view.sizes[1] != conv.channels ||
        !set_images(conv, x.view.sizes[0], x.view.sizes[2], x.view.sizes[3])) {
      return nb::none();
    }
    const nb::object y = new_empty(
        x.tensor, shape_of({conv.batch, conv.out_channels, conv.out_height, conv.out_width}));
    conv.x = x.numbers();
    conv.y = writable(address_of(y));
    conv.threads = threads_for(conv.batch);
    const Kernel& kernel = *selected;
    const std::shared_ptr<const Plan> plan = plan_for(conv, kernel);
    conv.plan = plan == nullptr ? nullptr : plan->lists.get();
    without_lock([&] { kernel.conv(conv); });
    return y;
  }

  nb::object call(nb::handle layer, nb::handle given) const {
    return stands_for(layer) ? run(given) : nb::none();
  }

  size_t plan_bytes() const { return plan_ == nullptr ? 0 : plan_->size + plan_->bits.size(); }

 private:
  // The plan for images of this size, once there were some of them in a row: to make one takes as long as some twenty
  // images.
  std::shared_ptr<const Plan> plan_for(const ConvCall& conv, const Kernel& with) const {
    const nb::handle bits = tensor_at(reinterpret_cast<Address>(conv.bits));
    if (!bits.is_valid()) return nullptr;
    const int64_t writes = writes_to(bits);
    if (plan_ != nullptr && plan_->is_of(conv, with, writes)) return plan_;
    if (plan_ != nullptr || &with != kernel_ || conv.height != height_ || conv.width != width_) images_ = 0;
    plan_ = nullptr;
    kernel_ = &with;
    height_ = conv.height;
    width_ = conv.width;
    if (with.plan_conv == nullptr || images_ >= kPatience) return nullptr;
    images_ += conv.batch;
    if (images_ < kPatience) return nullptr;
    std::shared_ptr<const Plan> plan;
    without_lock([&] { plan = Plan::of(conv, with, writes); });
    plan_ = plan;
    return plan;
  }

  static constexpr int64_t kPatience = 8;

  ConvCall base_;
  mutable const Kernel* kernel_ = nullptr;
  mutable int64_t height_ = 0, width_ = 0, images_ = 0;  // so many images of this size came in a row
  mutable std::shared_ptr<const Plan> plan_;
};

// Rows of numbers cut into squashed capsules, (rows, caps * dim) -> (rows, caps, dim).
nb::object squash(nb::handle given, int64_t caps, int64_t dim) {
  Input x;
  if (!enabled || !view_plain(given, 2, x) || x.view.sizes[1] != caps * dim) return nb::none();
  const int64_t rows = x.view.sizes[0];
  const nb::object v = new_empty(x.tensor, shape_of({rows, caps, dim}));
  const SquashCall call{x.numbers(), rows * caps, dim, writable(address_of(v)), threads_for(rows)};
  without_lock([&] { selected->squash(call); });
  return v;
}

// The capsules of one row of features: cut out of weight x + bias, and squashed.
nb::object primary(nb::handle given, nb::handle weight, nb::handle bias, int64_t caps, int64_t dim) {
  Input x;
  View w, b{};
  if (!enabled || selected->primary == nullptr || !view_plain(given, 2, x) ||
      x.view.sizes[0] != 1) {
    return nb::none();
  }
  const int64_t features = x.view.sizes[1];
  if (!view_tensor(weight, w) || w.dims != 2 || w.sizes[0] != caps * dim ||
      w.sizes[1] != features || !w.is_contiguous || needs_gradient(weight)) {
    return nb::none();
  }
  if (!bias.is_none() && (!view_tensor(bias, b) || b.dims != 1 || b.sizes[0] != caps * dim ||
                          !b.is_contiguous || needs_gradient(bias))) {
    return nb::none();
  }
  const nb::object v = new_empty(x.tensor, shape_of({1, caps, dim}));
  const PrimaryCall call{x.numbers(), features,       caps, dim, floats(w.data),
                         floats(b.data), writable(address_of(v))};
  without_lock([&] { selected->primary(call); });
  return v;
}

template <class Object>
int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<Object>(self)->traverse(visit, arg) : 0;
}

template <class Object>
int clear(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<Object>(self)->clear();
  return 0;
}

// Calls an object with its two arguments, faster than a function of the class would be.
template <class Object>
PyObject* call(PyObject* self, PyObject* arguments, PyObject* options) noexcept {
  const bool has_options = options != nullptr && PyDict_GET_SIZE(options) != 0;
  if (PyTuple_GET_SIZE(arguments) != 2 || has_options || !nb::inst_ready(self)) {
    PyErr_SetString(PyExc_TypeError, "a packed layer is called with itself and one tensor");
    return nullptr;
  }
  try {
    const Object& object = *nb::inst_ptr<Object>(self);
    return object.call(PyTuple_GET_ITEM(arguments, 0), PyTuple_GET_ITEM(arguments, 1)).release().ptr();
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

template <class Object>
PyType_Slot slots[] = {{Py_tp_call, reinterpret_cast<void*>(call<Object>)},
                       {Py_tp_traverse, reinterpret_cast<void*>(traverse<Object>)},
                       {Py_tp_clear, reinterpret_cast<void*>(clear<Object>)},
                       {0, nullptr}};

}  // namespace

void bind_packed(nb::module_& m) {
  m.def("squash", &squash, nb::arg().none(), nb::arg(), nb::arg());
  m.def("primary", &primary, nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg());
  nb::class_<PackedCapsules>(m, "PackedCapsules", nb::type_slots(slots<PackedCapsules>))
      .def(nb::init<nb::list, nb::list, int64_t, int64_t, int64_t, int64_t, int64_t, int, int, Address,
                    Address, Address, bool, bool, Address, Address>())
      .def("is_current", &PackedCapsules::is_current)
      .def("run", &PackedCapsules::run, nb::arg().none(), nb::arg());
  nb::class_<PackedLinear>(m, "PackedLinear", nb::type_slots(slots<PackedLinear>))
      .def(nb::init<nb::list, nb::list, int64_t, int64_t, int, Address, Address, bool, Address>())
      .def("is_current", &PackedLinear::is_current)
      .def("run", &PackedLinear::run, nb::arg().none());
  nb::class_<PackedConv>(m, "PackedConv", nb::type_slots(slots<PackedConv>))
      .def(nb::init<nb::list, nb::list, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                    int64_t, int64_t, int64_t, int, Address, Address, bool, Address>())
      .def("is_current", &PackedConv::is_current)
      .def("plan_bytes", &PackedConv::plan_bytes)
      .def("run", &PackedConv::run, nb::arg().none());
}

}  // namespace xncaps
