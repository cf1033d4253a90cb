// A convolution of signs: the filters are columns, and the windows of an image are rows.
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

// Fills the codes of an image, and the mean of abs(x) over the channels of every pixel. The padding is
// there already.
inline void encode_image(const ConvCall& call, const Image& image, const float* x, float* block,
                         uint8_t* packed, uint8_t* pixels, uint8_t* codes, float* means) {
  const int64_t count = call.height * call.width;
  for (int64_t first = 0; first < count; first += kBlock) {
    const int64_t width = width_at(first, count);
    const float* rows = x + first;
    int64_t stride = count;
    if (width < kBlock) {
      std::memset(block, 0, call.channels * kBlock * sizeof(float));
      for (int64_t c = 0; c < call.channels; ++c) {
        copy(block + c * kBlock, rows + c * count, width);
      }
      rows = block;
      stride = kBlock;
    }
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
  }
}

// The codes of a window, place by place.
inline void copy_window(const ConvCall& call, const Image& image, const uint8_t* codes, int64_t window,
                        uint8_t* to) {
  const int64_t row = window / call.out_width * call.stride[0];
  const int64_t column = window % call.out_width * call.stride[1];
  const bool together = call.dilation[1] == 1;
  const int64_t runs = together ? 1 : call.kernel[1];
  const int64_t size = together ? call.kernel[1] * image.bytes : image.bytes;
  for (int64_t ky = 0; ky < call.kernel[0]; ++ky) {
    for (int64_t run = 0; run < runs; ++run, to += size) {
      const uint8_t* from = codes + image.at(row + ky * call.dilation[0], column + run * call.dilation[1]);
      std::memcpy(to, from, size);
    }
  }
}

// The scale of every window: the mean of the means of its pixels, 0 outside the image.
inline void window_means(const ConvCall& call, const float* means, float* windows) {
  const float share = 1.0f / static_cast<float>(call.kernel[0] * call.kernel[1]);
  for (int64_t y = 0; y < call.out_height; ++y) {
    float* row_of = windows + y * call.out_width;
    std::memset(row_of, 0, call.out_width * sizeof(float));
    for (int64_t ky = 0; ky < call.kernel[0]; ++ky) {
      const int64_t row = y * call.stride[0] + ky * call.dilation[0] - call.padding[0];
      if (row < 0 || row >= call.height) continue;
      for (int64_t kx = 0; kx < call.kernel[1]; ++kx) {
        for (int64_t x = 0; x < call.out_width; ++x) {
          const int64_t column = x * call.stride[1] + kx * call.dilation[1] - call.padding[1];
          if (column < 0 || column >= call.width) continue;
          row_of[x] += means[row * call.width + column] * share;
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
        values[k] = dots_of(counts + row * blocks * kBlock + f, bits) * (mean * scale) + bias;
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

template <class Core>
inline void conv_by(Core core, const ConvCall& call) {
  const Image image(call);
  const int64_t pixels = call.height * call.width, windows = call.out_height * call.out_width;
  const int64_t bytes = call.kernel[0] * call.kernel[1] * image.bytes;
  const int64_t blocks = blocks_for(call.out_channels), stride = code_stride(core, bytes, blocks);
  const int64_t group = group_for(core, windows);
  struct Memory {
    uint8_t *columns, *packed, *pixels;
    uint8_t *image, *rows;
    float *block, *means, *windows;
    Counts counts;
    Memory(const ConvCall& call, const Image& image, int64_t bytes, int64_t blocks, int64_t group, Parts& parts)
        : columns(parts.take<uint8_t>(blocks * bytes * kBlock)),
          packed(parts.take<uint8_t>(image.bytes * kBlock)),
          pixels(parts.take<uint8_t>(image.bytes * kBlock)),
          image(parts.take<uint8_t>(image.size())),
          rows(parts.take<uint8_t>(group * code_stride(Core(), bytes, blocks))),
          block(parts.take<float>(call.channels * kBlock)),
          means(parts.take<float>(padded(call.height * call.width))),
          windows(parts.take<float>(call.out_height * call.out_width)),
          counts(Core(), group, bytes, parts) {}
  };
  Parts count(nullptr);
  Memory(call, image, bytes, blocks, group, count);
  const int64_t parts_count = call.batch < call.threads ? call.batch : call.threads;
  parallel(parts_count, call.threads, count.used(), [&](int64_t part, char* memory) {
    Parts parts(memory);
    const Memory work(call, image, bytes, blocks, group, parts);
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t first = block * kBlock, width = width_at(first, call.out_channels);
      uint8_t* columns = work.columns + first * bytes;
      if (width < kBlock) std::memset(columns, 0, bytes * kBlock);
      transpose_bytes(call.bits + first * bytes, width, bytes, bytes, columns, kBlock);
    }
    std::memset(work.image, 0, image.size());
    const int64_t end = call.batch * (part + 1) / parts_count;
    for (int64_t sample = call.batch * part / parts_count; sample < end; ++sample) {
      encode_image(call, image, call.x + sample * call.channels * pixels, work.block, work.packed,
                   work.pixels, work.image, work.means);
      if (!call.learned) window_means(call, work.means, work.windows);
      float* y = call.y + sample * call.out_channels * windows;
      for (int64_t first = 0; first < windows; first += group) {
        const int64_t rows = windows - first < group ? windows - first : group;
        for (int64_t r = 0; r < rows; ++r) {
          copy_window(call, image, work.image, first + r, work.rows + r * stride);
        }
        prepare(core, rows, blocks, work.rows, stride, bytes, work.counts.work);
        const int64_t together = blocks_of_tile(core, rows);
        for (int64_t block = 0; block < blocks; block += together) {
          const int64_t left = blocks - block, some = left < together ? left : together;
          count_any(core, rows, some, work.rows, stride, bytes,
                    work.columns + block * kBlock * bytes, work.counts.counts, work.counts.work);
          write_windows(call, work.counts.counts, work.windows, first, rows, block * kBlock, some, y);
        }
      }
    }
  });
}

inline void conv(const ConvCall& call) {
  const int64_t bytes = call.kernel[0] * call.kernel[1] * bytes_for(call.channels);
  if (by_classes(call.out_height * call.out_width, blocks_for(call.out_channels), bytes)) {
    conv_by(InClasses(), call);
  } else {
    conv_by(Counting(), call);
  }
}

}  // namespace xncaps::XNCAPS_ISA
