// The classes behind packed layers. Called with a tensor they give the output, or None where the layer
// must find another way: the tensor is not one of plain floats, or the layer is not as it was.
#include "bind.h"
#include "tensor.h"

namespace xncaps {
namespace {

// Kernels run without the interpreter's lock.
template <class Function>
void without_lock(const Function& function) {
  const nb::gil_scoped_release unlocked;
  function();
}

// One sample takes one thread, without asking for their number.
int threads_for(int64_t samples) { return samples == 1 ? 1 : num_threads(); }

class Packed {
 public:
  explicit Packed(nb::list places) : watched_(std::move(places)) {}

  bool is_current() const { return watched_.is_unchanged(); }

 protected:
  bool serves(nb::handle x) const {
    return enabled && is_plain_tensor(x) && !needs_gradient(x) && is_plain_call() &&
           is_current();
  }

 private:
  Watched watched_;
};

class PackedCapsules : public Packed {
 public:
  PackedCapsules(nb::list places, int64_t caps_in, int64_t dim_in, int64_t caps_out,
                 int64_t dim_out, int64_t iterations, int projection, int agreement,
                 Address floats_at, Address bits, Address scale, bool half, bool learned,
                 Address bias, Address agreement_scale)
      : Packed(std::move(places)),
        layer_(make_layer(caps_in, dim_in, caps_out, dim_out, iterations, projection, agreement,
                          true, false)),
        weights_{floats(floats_at), bytes(bits), reinterpret_cast<const void*>(scale), half,
                 learned, floats(bias), floats(agreement_scale)} {}

  // With couplings, an address for those of all iterations is given.
  nb::object call(nb::handle given, Address couplings) const {
    int64_t sizes[3];
    if (!serves(given) || !read_shape(given, sizes, 3) || sizes[0] == 0 ||
        sizes[1] != layer_.caps_in || sizes[2] != layer_.dim_in) {
      return nb::none();
    }
    const nb::object x = contiguous(given),
                     v = new_empty(x, {sizes[0], layer_.caps_out, layer_.dim_out});
    const ForwardCall forward{floats(address_of(x)), sizes[0],           writable(address_of(v)),
                              nullptr,               writable(couplings), threads_for(sizes[0])};
    without_lock([&] { selected->forward(layer_, weights_, forward); });
    return v;
  }

 private:
  Layer layer_;
  Weights weights_;
};

class PackedLinear : public Packed {
 public:
  PackedLinear(nb::list places, int64_t inputs, int64_t outputs, int binarizer, Address bits,
               Address scale, bool learned, Address bias)
      : Packed(std::move(places)),
        base_(make_linear(inputs, outputs, binarizer, bits, scale, learned, bias)) {}

  // x is (rows, in_features).
  nb::object call(nb::handle given) const {
    int64_t sizes[2];
    if (!serves(given) || !read_shape(given, sizes, 2) || sizes[0] == 0 ||
        sizes[1] != base_.in_features) {
      return nb::none();
    }
    const nb::object x = contiguous(given), y = new_empty(x, {sizes[0], base_.out_features});
    LinearCall linear = base_;
    linear.x = floats(address_of(x));
    linear.rows = sizes[0];
    linear.y = writable(address_of(y));
    linear.threads = threads_for(sizes[0]);
    without_lock([&] { selected->linear(linear); });
    return y;
  }

 private:
  LinearCall base_;
};

class PackedConv : public Packed {
 public:
  PackedConv(nb::list places, int64_t channels, int64_t outputs, int64_t kernel_h,
             int64_t kernel_w, int64_t stride_h, int64_t stride_w, int64_t padding_h,
             int64_t padding_w, int64_t dilation_h, int64_t dilation_w, int binarizer, Address bits,
             Address scale, bool learned, Address bias)
      : Packed(std::move(places)),
        base_(make_conv(channels, outputs, kernel_h, kernel_w, stride_h, stride_w, padding_h,
                        padding_w, dilation_h, dilation_w, binarizer, bits, scale, learned, bias)) {}

  nb::object call(nb::handle given) const {
    int64_t sizes[4];
    ConvCall conv = base_;
    if (!serves(given) || !read_shape(given, sizes, 4) || sizes[0] == 0 ||
        sizes[1] != conv.channels || !set_images(conv, sizes[0], sizes[2], sizes[3])) {
      return nb::none();
    }
    const nb::object x = contiguous(given),
                     y = new_empty(x, {sizes[0], conv.out_channels, conv.out_height, conv.out_width});
    conv.x = floats(address_of(x));
    conv.y = writable(address_of(y));
    conv.threads = threads_for(sizes[0]);
    without_lock([&] { selected->conv(conv); });
    return y;
  }

 private:
  ConvCall base_;
};

}  // namespace

void bind_packed(nb::module_& m) {
  nb::class_<PackedCapsules>(m, "PackedCapsules")
      .def(nb::init<nb::list, int64_t, int64_t, int64_t, int64_t, int64_t, int, int, Address, Address,
                    Address, bool, bool, Address, Address>())
      .def("is_current", &PackedCapsules::is_current)
      .def("__call__", &PackedCapsules::call);
  nb::class_<PackedLinear>(m, "PackedLinear")
      .def(nb::init<nb::list, int64_t, int64_t, int, Address, Address, bool, Address>())
      .def("is_current", &PackedLinear::is_current)
      .def("__call__", &PackedLinear::call);
  nb::class_<PackedConv>(m, "PackedConv")
      .def(nb::init<nb::list, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                    int64_t, int64_t, int, Address, Address, bool, Address>())
      .def("is_current", &PackedConv::is_current)
      .def("__call__", &PackedConv::call);
}

}  // namespace xncaps
