// A convolution of signs by a plan (plan.h). What is counted has windows side by side, as the output has them.
#pragma once

#include "plan.h"

namespace xncaps::XNCAPS_ISA {

// y of rows of windows for a filter, from the ones that they share with it, from what dot products would be if it had
// none, and from twice the ones that it has.
__attribute__((noinline)) inline void write_rows(const uint16_t* shared, int64_t row_bits, int64_t width, int64_t count,
                                                 const float* dots, const float* means, float twice, float scale,
                                                 float bias, float* y) {
  const Vec off = set(twice), scales = set(scale), biases = set(bias), four = set(4.0f);
  const auto values = [&](int64_t at, const uint16_t* ones) {
    return scaled(load(dots + at) - off + load_counts(ones) * four, load(means + at), scales, biases);
  };
  const int64_t end = count * width;
  int64_t row = 0;
  // Vectors are stored whole: what is behind a row is written later.
  if (width <= kLanes) {
    for (; row + kLanes <= end; row += width, shared += row_bits) store(y + row, values(row, shared));
  }
  for (; row < end; row += width, shared += row_bits) {
    for (int64_t k = 0; k < width; k += kLanes) {
      const Vec some = values(row + k, shared + k);
      if (row + k + kLanes <= end) {
        store(y + row + k, some);
      } else {
        alignas(64) float lanes[kLanes];
        store(lanes, some);
        copy(y + row + k, lanes, width - k < kLanes ? width - k : kLanes);
      }
    }
  }
}

inline int64_t whole_lanes(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

// What one thread works with.
template <class Kind>
struct PlanWork {
  static constexpr int kRowBytes = kLanes / 8;  // of the signs of a vector

  const ConvCall& call;
  const Grid& grid;
  int64_t plane, edge, masked;     // bytes of a channel's signs, around them, of a mask
  uint8_t* signs;                  // of all pixels, channel by channel; rows lie as those of windows do
  uint8_t *columns, *masks;        // for each column of the kernel: what of a row of windows sees the image; of them all
  uint8_t* bits;                   // as Grid has them
  float *block, *thresholds;       // pixels of a block that is not whole; of signs
  float *sums, *means;             // of abs(x): row by row, whole vectors; pixel by pixel
  float *scales, *dots;            // of windows: the mean of means; dot products with a filter without ones
  uint16_t* shared[2];             // ones of windows and a filter, and of the filter before

  PlanWork(const ConvCall& call, const Grid& grid, Parts& parts)
      : call(call),
        grid(grid),
        plane(call.height * grid.pitch),
        edge(padded((grid.seen + call.padding[0]) * grid.pitch + call.padding[1] / 8 + 1)),
        masked(padded(grid.entry)),
        signs(parts.take<uint8_t>(call.channels * plane + edge * 2 + call.kernel[1] * call.dilation[1] + 4 * kBlock)),
        columns(parts.take<uint8_t>(call.kernel[1] * grid.pitch)),
        masks(parts.take<uint8_t>(call.kernel[1] * masked)),
        bits(parts.take<uint8_t>(grid.zeros + 2 * Kind::kBytes)),
        block(parts.take<float>(call.channels * kBlock)),
        thresholds(parts.take<float>(padded(call.height * call.width) + kLanes)),
        sums(parts.take<float>(call.height * whole_lanes(call.width))),
        means(parts.take<float>(padded(call.height * call.width))),
        scales(parts.take<float>(call.out_height * call.out_width + kLanes)),
        dots(parts.take<float>(grid.rows * call.out_width + kLanes)) {
    for (uint16_t*& each : shared) each = parts.take<uint16_t>(8 * Kind::kBytes + kLanes);
  }

  void find_columns() const {
    std::memset(columns, 0, call.kernel[1] * grid.pitch);
    for (int64_t kx = 0; kx < call.kernel[1]; ++kx) {
      uint8_t* const mask = columns + kx * grid.pitch;
      for (int64_t x = 0; x < call.out_width; ++x) {
        const int64_t column = x + kx * call.dilation[1] - call.padding[1];
        const int inside = column >= 0 && column < call.width;
        mask[x / 8] = static_cast<uint8_t>(mask[x / 8] | inside << x % 8);
      }
    }
  }

  // The signs of an image, and the scales of its windows.
  void take_image(const float* x) const {
    const bool same = call.binarizer != Binarizer::midrange;
    if (!same) find_thresholds(x);
    const int64_t height = call.height, width = call.width, wide = whole_lanes(width), pixels = height * width;
    const float* const end = x + call.channels * pixels;
    std::memset(sums, 0, height * wide * sizeof(float));
    uint8_t* to = signs + edge;
    for (int64_t channel = 0; channel < call.channels; ++channel, x += pixels, to += plane) {
      const bool inside = end - x >= pixels + kLanes;  // whole vectors can be read
      if (same && inside) {
        take_channel<true, true>(x, end, to);
      } else if (same) {
        take_channel<true, false>(x, end, to);
      } else {
        take_channel<false, false>(x, end, to);
      }
    }
    const float count = static_cast<float>(call.channels);
    for (int64_t r = 0; r < height; ++r) {
      for (int64_t k = 0; k < width; ++k) means[r * width + k] = sums[r * wide + k] / count;
    }
    const int64_t windows = call.out_height * call.out_width;
    if (!call.learned) return window_means(call, means, scales);
    for (int64_t k = 0; k < windows; ++k) scales[k] = 1.0f;
  }

  static void store_bits(uint32_t above, uint8_t* to) {
    for (int k = 0; k < kRowBytes; ++k) to[k] = static_cast<uint8_t>(above >> 8 * k);
  }

  // The signs of a channel, whose numbers are added to the sums.
  template <bool Same, bool Inside>
  void take_channel(const float* x, const float* end, uint8_t* to) const {
    const int64_t height = call.height, width = call.width, pitch = grid.pitch, pixels = height * width;
    const uint32_t last = (1u << (width - (width - 1) / kLanes * kLanes)) - 1;
    float* sum = sums;
    if (Same && Inside && width <= kLanes) {
      for (int64_t row = 0; row < pixels; row += width, to += pitch, sum += kLanes) {
        const Vec some = load(x + row);
        const uint32_t above = mask_bits(greater(some, set(0.0f))) & last;
        store_bits(above, to);
        store(sum, load(sum) + abs(some));
      }
      return;
    }
    for (int64_t row = 0; row < pixels; row += width, to += pitch) {
      for (int64_t k = 0; k < width; k += kLanes, sum += kLanes) {
        const float* const from = x + row + k;
        const Vec some = Inside || end - from >= kLanes ? load(from) : load_some(from, end - from);
        const Vec threshold = Same ? set(0.0f) : load(thresholds + row + k);
        uint32_t above = mask_bits(greater(some, threshold));
        if (k + kLanes >= width) above &= last;
        store_bits(above, to + k / 8);
        store(sum, load(sum) + abs(some));
      }
    }
  }

  void find_thresholds(const float* x) const {
    each_block(call, x, block, [&](int64_t first, int64_t, const float* rows, int64_t stride) {
      Vec some[kVecs];
      thresholds_of(call.binarizer, rows, call.channels, some, stride);
      for (int q = 0; q < kVecs; ++q) store(thresholds + first + q * kLanes, some[q]);
    });
  }

  // Moves what the rows of windows from one on see. Blocks of bytes are stored whole: what is behind them is written
  // later.
  void move_rows(int64_t first) const {
    const int64_t pitch = grid.pitch, above = first - call.padding[0], entry = grid.entry;
    uint8_t* to = bits;
    for (int64_t kx = 0; kx < call.kernel[1]; ++kx) {
      const int64_t moved = kx * call.dilation[1] - call.padding[1];
      uint8_t* const mask = masks + kx * masked;
      std::memset(mask, 0, masked);
      for (int64_t r = 0; r < grid.seen; ++r) {
        const bool inside = r + above >= 0 && r + above < call.height;
        if (inside) std::memcpy(mask + r * pitch, columns + kx * pitch, pitch);
      }
      const uint8_t* from = signs + edge + above * pitch + (moved >= 0 ? moved / 8 : -((7 - moved) / 8));
      const int rest = static_cast<int>(moved & 7);
      for (int64_t channel = 0; channel < call.channels; ++channel, from += plane, to += entry) {
        for (int64_t byte = 0; byte < entry; byte += kBlock) {
          store_bytes(to + byte, move_bits(from + byte, rest, mask + byte));
        }
      }
    }
    std::memset(to, 0, Kind::kBytes);
  }

  // y of some rows of windows for one filter.
  void write(const Plan<Kind>& plan, int64_t filter, const uint16_t* ones, int64_t first, int64_t count, float* y) const {
    const int64_t at = first * call.out_width;
    const float twice = static_cast<float>(2 * plan.ones[filter]);
    const float bias = call.bias == nullptr ? 0.0f : call.bias[filter];
    write_rows(ones, grid.pitch * 8, call.out_width, count, dots, scales + at, twice, call.scale[filter], bias,
               y + filter * call.out_height * call.out_width + at);
  }

  // Counts some rows of windows for all filters.
  void count_rows(const Plan<Kind>& plan, int64_t first, int64_t count, float* y) const {
    Numbers<Kind> classes[kClasses], four[kQuad];
    count_places<Kind>(bits, plan.all, places_of(call), classes[0]);
    for (int k = classes[0].digits(); k < kPlaceDigits; ++k) classes[0].digit[k] = typename Kind::Bits{};
    Kind::write(classes[0], shared[0]);
    const float places = static_cast<float>(places_of(call));
    for (int64_t r = 0; r < count; ++r) {
      for (int64_t k = 0; k < call.out_width; ++k) {
        const int64_t bit = r * grid.pitch * 8 + k;
        dots[r * call.out_width + k] = places - 2.0f * static_cast<float>(shared[0][bit]);
      }
    }
    const uint16_t* list = plan.places;
    for (int64_t quad = 0; quad < plan.quads; ++quad) {
      for (int k = 1; k < kClasses; ++k) {
        const int64_t size = plan.sizes[quad * kClasses + k];
        count_places<Kind>(bits, list, size, classes[k]);
        list += runs_for<Kind>(size) * kPlacesOfRun<Kind>;
      }
      add_classes(classes, four);
      for (int r = 0; r < kQuad && quad * kQuad + r < call.out_channels; ++r) {
        Kind::write(four[r], shared[r % 2]);
        if (quad * kQuad + r > 0) write(plan, quad * kQuad + r - 1, shared[(r + 1) % 2], first, count, y);
      }
    }
    const int64_t last = call.out_channels - 1;
    write(plan, last, shared[last % 2], first, count, y);
  }
};

template <class Kind>
inline void conv_by_plan(const ConvCall& call) {
  const Grid grid(call, Kind::kBytes);
  Parts lists(const_cast<char*>(static_cast<const char*>(call.plan)));
  const Plan<Kind> plan(call, 0, lists);
  Parts needed(nullptr);
  PlanWork<Kind>(call, grid, needed);
  const int64_t parts_count = call.batch < call.threads ? call.batch : call.threads;
  parallel(parts_count, call.threads, needed.used(), [&](int64_t part, char* memory) {
    Parts parts(memory);
    const PlanWork<Kind> work(call, grid, parts);
    work.find_columns();
    const int64_t end = call.batch * (part + 1) / parts_count;
    for (int64_t sample = call.batch * part / parts_count; sample < end; ++sample) {
      work.take_image(call.x + sample * call.channels * call.height * call.width);
      float* y = call.y + sample * call.out_channels * call.out_height * call.out_width;
      for (int64_t first = 0; first < call.out_height; first += grid.rows) {
        const int64_t left = call.out_height - first;
        work.move_rows(first);
        work.count_rows(plan, first, left < grid.rows ? left : grid.rows, y);
      }
    }
  });
}

inline void conv_planned(const ConvCall& call) {
  with_kind(call, [&](auto kind) { conv_by_plan<decltype(kind)>(call); });
}

}  // namespace xncaps::XNCAPS_ISA
