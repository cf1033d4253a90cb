// What the files of the Python module share. Addresses are integers; src/xncaps/kernels and
// src/xncaps/deploy check everything before they hand one over.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "kernel.h"

namespace xncaps {

using Address = uintptr_t;

inline const float* floats(Address at) { return reinterpret_cast<const float*>(at); }
inline const uint8_t* bytes(Address at) { return reinterpret_cast<const uint8_t*>(at); }
inline float* writable(Address at) { return reinterpret_cast<float*>(at); }

// The kernel in use, and whether packed layers may use it.
extern const Kernel* selected;
extern bool enabled;

Layer make_layer(int64_t caps_in, int64_t dim_in, int64_t caps_out, int64_t dim_out,
                 int64_t iterations, int projection, int agreement, bool detach_scale,
                 bool detach_routing);
LinearCall make_linear(int64_t inputs, int64_t outputs, int binarizer, Address bits, Address scale,
                       bool learned, Address bias);
ConvCall make_conv(int64_t channels, int64_t outputs, int64_t kernel_h, int64_t kernel_w,
                   int64_t stride_h, int64_t stride_w, int64_t padding_h, int64_t padding_w,
                   int64_t dilation_h, int64_t dilation_w, int binarizer, Address bits,
                   Address scale, bool learned, Address bias);
// Sets the images of a convolution and how many windows there are; false if there are none.
bool set_images(ConvCall& conv, int64_t batch, int64_t height, int64_t width);

// bind_packed.cpp: the classes behind packed layers.
void bind_packed(nanobind::module_& m);

}  // namespace xncaps
