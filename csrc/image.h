// The images of a convolution of signs: packed with their padding, and what is written of their windows.
#pragma once

#include "xnor.h"

namespace xncaps::XNCAPS_ISA {

// to[column][row] = from[row][column], byte by byte.
inline void transpose_bytes(const uint8_t* from, int64_t rows, int64_t columns, int64_t from_stride,
                            uint8_t* to, int64_t to_stride) {
  const int64_t rows16 = rows / 16 * 16, columns16 = columns / 16 * 16;
  for (int64_t row = 0; row < rows16; row += 16) {
    for (int64_t column = 0; column < columns16; column += 16) {
      transpose16(from + row * from_stride + column, from_stride, to + column * to_stride + row,
                  to_stride);
    }
  }
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = row < rows16 ? columns16 : 0; column < columns; ++column) {
      to[column * to_stride + row] = from[row * from_stride + column];
    }
  }
}

// An image with its padding, the signs of every pixel as codes of its channels.
struct Image {
  int64_t bytes;          // of a pixel
  int64_t height, width;  // padding included

  explicit Image(const ConvCall& call)
      : bytes(bytes_for(call.channels)),
        height(call.height + 2 * call.padding[0]),
        width(call.width + 2 * call.padding[1]) {}

  int64_t size() const { return height * width * bytes; }
  int64_t at(int64_t row, int64_t column) const { return (row * width + column) * bytes; }
};

// Calls take(first, width, rows, stride) for each block of pixels, of which the channels are rows; zeros fill up the last.
template <class Function>
inline void each_block(const ConvCall& call, const float* x, float* block, const Function& take) {
  const int64_t count = call.height * call.width;
  for (int64_t first = 0; first < count; first += kBlock) {
    const int64_t width = width_at(first, count);
    if (width == kBlock) {
      take(first, width, x + first, count);
      continue;
    }
    std::memset(block, 0, call.channels * kBlock * sizeof(float));
    for (int64_t c = 0; c < call.channels; ++c) copy(block + c * kBlock, x + first + c * count, width);
    take(first, width, block, kBlock);
  }
}

// Fills the codes of an image, and the mean of abs(x) over the channels of every pixel. The padding is
// there already.
inline void encode_image(const ConvCall& call, const Image& image, const float* x, float* block,
                         uint8_t* packed, uint8_t* pixels, uint8_t* codes, float* means) {
  each_block(call, x, block, [&](int64_t first, int64_t width, const float* rows, int64_t stride) {
    Vec mean[kVecs];
    pack_signs(call.binarizer, rows, call.channels, packed, mean, stride);
#pragma GCC unroll 16
    for (int q = 0; q < kVecs; ++q) store(means + first + q * kLanes, mean[q]);
    transpose_bytes(packed, image.bytes, kBlock, kBlock, pixels, image.bytes);
    // Runs of pixels that are in one row.
    for (int64_t k = 0; k < width;) {
      const int64_t row = (first + k) / call.width, column = (first + k) % call.width;
      const int64_t rest = call.width - column, run = rest < width - k ? rest : width - k;
      std::memcpy(codes + image.at(row + call.padding[0], column + call.padding[1]),
                  pixels + k * image.bytes, run * image.bytes);
      k += run;
    }
  });
}

// The filters as columns of bytes; lanes that are not there have zeros.
inline void take_filters(const ConvCall& call, const Image& image, uint8_t* columns) {
  const int64_t bytes = call.kernel[0] * call.kernel[1] * image.bytes;
  for (int64_t first = 0; first < call.out_channels; first += kBlock) {
    const int64_t width = width_at(first, call.out_channels);
    uint8_t* to = columns + first * bytes;
    if (width < kBlock) std::memset(to, 0, bytes * kBlock);
    transpose_bytes(call.bits + first * bytes, width, bytes, bytes, to, kBlock);
  }
}

// The scale of every window: the mean of the means of its pixels, 0 outside the image.
inline void window_means(const ConvCall& call, const float* means, float* windows) {
  const float share = 1.0f / static_cast<float>(call.kernel[0] * call.kernel[1]);
  for (int64_t y = 0; y < call.out_height; ++y) {
    float* __restrict row_of = windows + y * call.out_width;
    std::memset(row_of, 0, call.out_width * sizeof(float));
    for (int64_t ky = 0; ky < call.kernel[0]; ++ky) {
      const int64_t row = y * call.stride[0] + ky * call.dilation[0] - call.padding[0];
      if (row < 0 || row >= call.height) continue;
      for (int64_t kx = 0; kx < call.kernel[1]; ++kx) {
        const int64_t moved = kx * call.dilation[1] - call.padding[1], step = call.stride[1];
        int64_t first = moved >= 0 ? 0 : (step - 1 - moved) / step, end = call.out_width;
        const int64_t last = call.width - 1 - moved;  // of the steps
        if (last < 0) continue;
        if (last / step + 1 < end) end = last / step + 1;
        const float* __restrict from = means + row * call.width + moved;
        if (step == 1) {
          for (int64_t x = first; x < end; ++x) row_of[x] += from[x] * share;
        } else {
          for (int64_t x = first; x < end; ++x) row_of[x] += from[x * step] * share;
        }
      }
    }
  }
}

// So many numbers, and zeros behind them.
inline Vec load_some(const float* from, int64_t count) {
  if (count >= kLanes) return load(from);
  alignas(64) float some[kLanes] = {};
  std::memcpy(some, from, count * sizeof(float));
  return load(some);
}

// y of windows and a filter, or of a window and filters.
inline Vec scaled(Vec dots, Vec mean, Vec scale, Vec bias) { return dots * (mean * scale) + bias; }

// y of the windows of a group, from `first` on, for the filters of some blocks. Counts have filters side by side, y
// has windows side by side: as many of both as there are lanes are turned at once.
inline void write_windows(const ConvCall& call, const int32_t* counts, const float* windows,
                          int64_t first, int64_t rows, int64_t filter, int64_t blocks, float* y) {
  const int64_t all = call.out_height * call.out_width, left = call.out_channels - filter;
  const int64_t filters = left < blocks * kBlock ? left : blocks * kBlock;
  const int32_t bits = static_cast<int32_t>(call.channels * call.kernel[0] * call.kernel[1]);
  for (int64_t r = 0; r < rows; r += kLanes) {
    const int64_t height = rows - r < kLanes ? rows - r : kLanes;
    for (int64_t f = 0; f < filters; f += kLanes) {
      const int64_t width = filters - f < kLanes ? filters - f : kLanes;
      const Vec scale = load_some(call.scale + filter + f, width);
      const Vec bias = call.bias == nullptr ? set(0.0f) : load_some(call.bias + filter + f, width);
      Vec values[kLanes];
#pragma GCC unroll 16
      for (int k = 0; k < kLanes; ++k) {
        const int64_t row = k < height ? r + k : r;  // past the last one anything will do
        const Vec mean = set(call.learned ? 1.0f : windows[first + row]);
        values[k] = scaled(dots_of(counts + row * blocks * kBlock + f, bits), mean, scale, bias);
      }
      turn(values);
      float* to = y + (filter + f) * all + first + r;
      for (int64_t n = 0; n < width; ++n, to += all) {
        if (height == kLanes) {
          store(to, values[n]);
        } else {
          alignas(64) float some[kLanes];
          store(some, values[n]);
          copy(to, some, height);
        }
      }
    }
  }
}

}  // namespace xncaps::XNCAPS_ISA
