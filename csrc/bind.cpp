// The Python module: raw pointers as integers. src/xncaps/kernels checks everything before it calls.
#include "bind.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "layout.h"
#include "machine.h"
#include "parallel.h"
#include "tensor.h"

namespace xncaps {

const Kernel* selected = best_kernel();
bool enabled = true;

Layer make_layer(int64_t caps_in, int64_t dim_in, int64_t caps_out, int64_t dim_out,
                 int64_t iterations, int projection, int agreement, bool detach_scale,
                 bool detach_routing) {
  return {caps_in,      dim_in,        caps_out, dim_out, iterations, Binarizer(projection),
          Binarizer(agreement), detach_scale, detach_routing};
}

LinearCall make_linear(int64_t inputs, int64_t outputs, int binarizer, Address bits, Address scale,
                       bool learned, Address bias) {
  LinearCall call{};
  call.in_features = inputs;
  call.out_features = outputs;
  call.binarizer = Binarizer(binarizer);
  call.bits = bytes(bits);
  call.scale = floats(scale);
  call.learned = learned;
  call.bias = floats(bias);
  return call;
}

ConvCall make_conv(int64_t channels, int64_t outputs, int64_t kernel_h, int64_t kernel_w,
                   int64_t stride_h, int64_t stride_w, int64_t padding_h, int64_t padding_w,
                   int64_t dilation_h, int64_t dilation_w, int binarizer, Address bits,
                   Address scale, bool learned, Address bias) {
  ConvCall call{};
  call.channels = channels;
  call.out_channels = outputs;
  const int64_t pairs[4][2] = {{kernel_h, kernel_w},
                               {stride_h, stride_w},
                               {padding_h, padding_w},
                               {dilation_h, dilation_w}};
  for (int axis = 0; axis < 2; ++axis) {
    call.kernel[axis] = pairs[0][axis];
    call.stride[axis] = pairs[1][axis];
    call.padding[axis] = pairs[2][axis];
    call.dilation[axis] = pairs[3][axis];
  }
  call.binarizer = Binarizer(binarizer);
  call.bits = bytes(bits);
  call.scale = floats(scale);
  call.learned = learned;
  call.bias = floats(bias);
  return call;
}

bool set_images(ConvCall& conv, int64_t batch, int64_t height, int64_t width) {
  conv.batch = batch;
  conv.height = height;
  conv.width = width;
  const int64_t sides[2] = {height, width};
  int64_t out[2];
  for (int axis = 0; axis < 2; ++axis) {
    const int64_t window = conv.dilation[axis] * (conv.kernel[axis] - 1) + 1;
    const int64_t room = sides[axis] + 2 * conv.padding[axis] - window;
    if (room < 0 || sides[axis] == 0) return false;
    out[axis] = room / conv.stride[axis] + 1;
  }
  conv.out_height = out[0];
  conv.out_width = out[1];
  return true;
}

namespace {

// Weights laid out for one call; those in floats at a given place, if there is one.
class CallWeights {
 public:
  CallWeights(const Layer& layer, const float* weight, const float* scale, const float* bias,
              const float* agreement_scale, float* place = nullptr)
      : buffer_(sizes(layer, place, nullptr, nullptr)) {
    PackedWeights packed{};
    sizes(layer, place, buffer_.data(), &packed);
    selected->pack_capsules(layer, weight, scale, packed);
    weights = {packed.floats, packed.bits, packed.scale, false, scale != nullptr, bias,
               agreement_scale};
  }

  Weights weights;

 private:
  static size_t sizes(const Layer& layer, float* place, char* memory, PackedWeights* packed) {
    Parts parts(memory);
    PackedWeights out{};
    const int64_t values = layer.caps_in * layer.caps_out * layer.dim_out;
    if (layer.projection == Binarizer::none) {
      out.floats = place != nullptr ? place : parts.take<float>(values * layer.dim_in);
    } else {
      out.bits = parts.take<uint8_t>(values * bytes_for(layer.dim_in));
      out.scale = parts.take<float>(values);
    }
    if (packed != nullptr) *packed = out;
    return parts.used();
  }

  Buffer buffer_;
};

void capsules_forward(int64_t batch, int64_t caps_in, int64_t dim_in, int64_t caps_out,
                      int64_t dim_out, int64_t iterations, int projection, int agreement, Address x,
                      Address weight, Address scale, Address bias, Address agreement_scale, Address v,
                      Address sums, Address couplings, int threads) {
  const Layer layer = make_layer(caps_in, dim_in, caps_out, dim_out, iterations, projection,
                                 agreement, true, false);
  const CallWeights packed(layer, floats(weight), floats(scale), floats(bias),
                           floats(agreement_scale));
  selected->forward(layer, packed.weights,
                    {floats(x), batch, writable(v), writable(sums), writable(couplings), threads});
}

void capsules_backward(int64_t batch, int64_t caps_in, int64_t dim_in, int64_t caps_out,
                       int64_t dim_out, int64_t iterations, int projection, int agreement,
                       bool detach_scale, bool detach_routing, Address x, Address weight,
                       Address scale, Address bias, Address agreement_scale, Address sums,
                       Address couplings, Address grad_v, Address grad_couplings, Address grad_x,
                       Address grad_weight, Address grad_scale, Address grad_bias,
                       Address grad_agreement_scale, int threads) {
  const Layer layer = make_layer(caps_in, dim_in, caps_out, dim_out, iterations, projection,
                                 agreement, detach_scale, detach_routing);
  const CallWeights packed(layer, floats(weight), floats(scale), floats(bias),
                           floats(agreement_scale), writable(grad_weight));
  selected->backward(layer, packed.weights,
                     {floats(x), batch, floats(weight), floats(scale), floats(sums),
                      floats(couplings), floats(grad_v), floats(grad_couplings), writable(grad_x),
                      writable(grad_weight),
                      writable(grad_scale), writable(grad_bias), writable(grad_agreement_scale),
                      threads});
}

// Bits and, without learned scales, means of the weights of a linear layer or a convolution.
class SignBuffer {
 public:
  SignBuffer(int64_t bits, int64_t outputs) : buffer_(padded(bits) * 2 + outputs * sizeof(float)) {
    Parts parts(buffer_.data());
    packed.bits = parts.take<uint8_t>(bits);
    packed.scale = parts.take<float>(outputs);
  }

  PackedWeights packed{};

 private:
  Buffer buffer_;
};

void xnor_linear(int64_t rows, int64_t inputs, int64_t outputs, int binarizer, Address x,
                 Address weight, Address scale, Address bias, Address y, int threads) {
  const SignBuffer signs(outputs * bytes_for(inputs), outputs);
  selected->pack_linear(outputs, inputs, Binarizer(binarizer), floats(weight), signs.packed);
  const Address used = scale != 0 ? scale : reinterpret_cast<Address>(signs.packed.scale);
  LinearCall linear = make_linear(inputs, outputs, binarizer,
                                  reinterpret_cast<Address>(signs.packed.bits), used, scale != 0, bias);
  linear.x = floats(x);
  linear.rows = rows;
  linear.y = writable(y);
  linear.threads = threads;
  selected->linear(linear);
}

void xnor_conv2d(int64_t batch, int64_t channels, int64_t height, int64_t width, int64_t outputs,
                 int64_t kernel_h, int64_t kernel_w, int64_t stride_h, int64_t stride_w,
                 int64_t padding_h, int64_t padding_w, int64_t dilation_h, int64_t dilation_w,
                 int binarizer, Address x, Address weight, Address scale, Address bias, Address y,
                 int threads) {
  const int64_t places = kernel_h * kernel_w;
  const SignBuffer signs(outputs * places * bytes_for(channels), outputs);
  selected->pack_conv(outputs, channels, places, Binarizer(binarizer), floats(weight), signs.packed);
  const Address used = scale != 0 ? scale : reinterpret_cast<Address>(signs.packed.scale);
  ConvCall conv = make_conv(channels, outputs, kernel_h, kernel_w, stride_h, stride_w, padding_h,
                            padding_w, dilation_h, dilation_w, binarizer,
                            reinterpret_cast<Address>(signs.packed.bits), used, scale != 0, bias);
  set_images(conv, batch, height, width);
  conv.x = floats(x);
  conv.y = writable(y);
  conv.threads = threads;
  selected->conv(conv);
}

std::vector<std::string> available() {
  std::vector<std::string> names;
  for (int k = 0; const Kernel* kernel = kernel_at(k); ++k) names.emplace_back(kernel->name);
  return names;
}

bool select_kernel(const std::string& name) {
  const Kernel* kernel = find_kernel(name.c_str());
  if (kernel != nullptr) selected = kernel;
  return kernel != nullptr;
}

// Whether native code can take these tensors (or None) as they are.
bool are_plain(nb::args tensors) {
  View view;
  for (nb::handle tensor : tensors) {
    if (!tensor.is_none() && !view_tensor(tensor, view)) return false;
  }
  return is_plain_call();
}

}  // namespace
}  // namespace xncaps

using namespace xncaps;

NB_MODULE(_native, m) {
  // The kernels run without the interpreter's lock.
  const nb::call_guard<nb::gil_scoped_release> unlocked;
  m.def("available", &available);
  m.def("selected", [] { return std::string(selected->name); });
  m.def("select", &select_kernel);
  m.def("enable", [](bool on) { enabled = on; });
  m.def(
      "set_torch",
      [](nb::tuple types, nb::object float32, nb::object strided, nb::object is_grad_enabled,
         nb::object num_threads, nb::tuple modes, nb::dict forward_ad, nb::object exchange,
         nb::object empty_strided) {
        set_torch({types, float32, strided, is_grad_enabled, num_threads, modes, forward_ad, exchange,
                   empty_strided});
      },
      nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
      nb::arg().none(), nb::arg().none());
  m.def("are_plain", &are_plain);
  m.def("capsules_forward", &capsules_forward, unlocked);
  m.def("capsules_backward", &capsules_backward, unlocked);
  m.def("xnor_linear", &xnor_linear, unlocked);
  m.def("xnor_conv2d", &xnor_conv2d, unlocked);
  m.def("fma_rate", &fma_rate, unlocked);
  m.def("read_rate", &read_rate, unlocked);
  m.def("scratch_bytes", &scratch_peak);
  m.def("reset_scratch_peak", &reset_scratch_peak);

  bind_packed(m);
}
