// A convolution of signs: the filters are columns, and the windows of an image are rows.
#pragma once

#include "conv_plan.h"
#include "image.h"

namespace xncaps::XNCAPS_ISA {

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
    take_filters(call, image, work.columns);
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
  if (call.plan != nullptr) return conv_planned(call);
  const int64_t bytes = call.kernel[0] * call.kernel[1] * bytes_for(call.channels);
  if (by_classes(call.out_height * call.out_width, blocks_for(call.out_channels), bytes)) {
    conv_by(InClasses(), call);
  } else {
    conv_by(Counting(), call);
  }
}

}  // namespace xncaps::XNCAPS_ISA
