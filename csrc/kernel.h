// What a kernel is: a few functions on raw pointers. reference.h says what they compute; every other
// kernel must compute the same, faster.
//
// Sizes are those of the Python layers: caps_in, dim_in, caps_out, dim_out; tensors are contiguous
// float32 in row-major order unless said otherwise. Nothing here checks its arguments: the Python
// side has done so before it calls.
#pragma once

#include <cstddef>
#include <cstdint>

namespace xncaps {

// The sign of a value is +1 where it is above a threshold, else -1 (so 0, -0.0 and NaN give -1).
// The threshold is 0, and for midrange (max + min) / 2 over the vector (NaN if one of it is NaN).
// `sign` and `approxsign` differ in their gradients only.
enum class Binarizer : int { none = 0, sign = 1, midrange = 2, approxsign = 3 };

// One capsule layer.
struct Layer {
  int64_t caps_in, dim_in, caps_out, dim_out;
  int64_t iterations;       // of the routing, at least 1
  Binarizer projection;     // none: u = x W in floats
  Binarizer agreement;      // none: the dot product
  bool detach_scale;        // mean scales are constants in the backward pass
  bool detach_routing;      // so are the predictions, but for the last weighted sum
};

// The weights of a capsule layer with the input capsules as the lanes of vectors (layout.h).
struct Weights {
  const float* floats;           // laned, rows (caps_out, dim_out, dim_in): a float projection
  const uint8_t* bits;           // laned, rows (caps_out, dim_out, bytes of dim_in): signs, 1 is +1
  const void* scale;             // laned, rows (caps_out, dim_out): float32, or float16 if `half`
  bool half;
  bool learned;                  // the scale stands for both means: no mean of abs(x)
  const float* bias;             // (caps_out, dim_out), or null
  const float* agreement_scale;  // (caps_out), learned, in place of both means; or null
};

struct ForwardCall {
  const float* x;  // (batch, caps_in, dim_in)
  int64_t batch;
  float* v;          // (batch, caps_out, dim_out)
  float* sums;       // (batch, iterations, caps_out, dim_out): what squash got; or null
  float* couplings;  // (batch, iterations - 1, caps_out, padded(caps_in)): of all iterations but the
                     // first, in which they are 1 / caps_out; or null
  int threads;
};

struct BackwardCall {
  const float* x;
  int64_t batch;
  const float* weight;  // (caps_in, caps_out, dim_in, dim_out), as the layer holds it
  const float* scale;   // (caps_in, caps_out, dim_out), learned; or null
  const float* sums;    // what the forward call left
  const float* couplings;
  const float* grad_v;  // (batch, caps_out, dim_out)
  const float* grad_couplings;  // like couplings, or null
  float* grad_x;        // like x
  float* grad_weight;   // like weight; the weights in floats may lie here as well, for a block's
                        // gradient is written when its weights have been used
  float* grad_scale;    // like scale, or null
  float* grad_bias;     // (caps_out, dim_out), or null
  float* grad_agreement_scale;  // (caps_out), or null
  int threads;
};

// y = dot(signs of x, signs of a column) * mean(abs(x)) * scale + bias. A learned scale stands for
// both means.
struct LinearCall {
  const float* x;  // (rows, in_features)
  int64_t rows, in_features, out_features;
  Binarizer binarizer;
  const uint8_t* bits;  // laned by out_features, rows (bytes of in_features), 1 is +1, unused 0
  const float* scale;   // (out_features)
  bool learned;
  const float* bias;  // (out_features), or null
  float* y;           // (rows, out_features)
  int threads;
};

// The same for every window of images: outside the image signs are -1 and means are 0; the mean of
// a window is that of its pixels' means, which run over the channels.
struct ConvCall {
  const float* x;  // (batch, channels, height, width)
  int64_t batch, channels, height, width, out_channels;
  int64_t kernel[2], stride[2], padding[2], dilation[2];
  int64_t out_height, out_width;
  Binarizer binarizer;  // midrange: over the channels of a pixel
  const uint8_t* bits;  // (out_channels, kernel[0], kernel[1], bytes of channels)
  const float* scale;   // (out_channels)
  bool learned;
  const float* bias;  // (out_channels), or null
  float* y;           // (batch, out_channels, out_height, out_width)
  int threads;
  const void* plan;  // that plan_conv made for the same filters and images of this size; or null
};

// v = s * norm(s) / (1 + norm(s)^2), vector by vector.
struct SquashCall {
  const float* s;  // (count, dim)
  int64_t count, dim;
  float* v;  // like s
  int threads;
};

// The capsules of one sample: v = squash of weight x + bias.
struct PrimaryCall {
  const float* x;  // (features)
  int64_t features, caps, dim;
  const float* weight;  // (caps * dim, features)
  const float* bias;    // (caps * dim), or null
  float* v;             // (caps, dim)
};

// Where weights go that are laid out for the calls above: those that are not wanted are null.
struct PackedWeights {
  float* floats;
  uint8_t* bits;
  float* scale;  // the mean of abs(weight), or the learned scale
};

struct Kernel {
  const char* name;
  void (*forward)(const Layer&, const Weights&, const ForwardCall&);
  void (*backward)(const Layer&, const Weights&, const BackwardCall&);
  void (*linear)(const LinearCall&);
  void (*conv)(const ConvCall&);
  // What of a convolution is the same for all images of a size: faster than without. Returns how many bytes it takes,
  // and writes it where `plan` is not null; 0 where there is none. Or null.
  size_t (*plan_conv)(const ConvCall&, void* plan);
  void (*squash)(const SquashCall&);
  void (*primary)(const PrimaryCall&);  // or null
  // weight (caps_in, caps_out, dim_in, dim_out), learned scale (caps_in, caps_out, dim_out) or null
  void (*pack_capsules)(const Layer&, const float* weight, const float* scale, PackedWeights);
  // weight (outputs, inputs); bits laned by outputs
  void (*pack_linear)(int64_t outputs, int64_t inputs, Binarizer, const float* weight,
                      PackedWeights);
  // weight (outputs, channels, places of the kernel); bits (outputs, places, bytes of channels)
  void (*pack_conv)(int64_t outputs, int64_t channels, int64_t places, Binarizer,
                    const float* weight, PackedWeights);
};

// select.cpp: the kernels that this CPU can run, from the slowest to the fastest; null past the end.
const Kernel* kernel_at(int index);
const Kernel* find_kernel(const char* name);
const Kernel* best_kernel();

// One for each file.
const Kernel* reference_kernel();
const Kernel* portable_kernel();
const Kernel* avx2_kernel();
const Kernel* avx512bw_kernel();
const Kernel* avx512_kernel();

}  // namespace xncaps
