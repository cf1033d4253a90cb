// A convolution of signs whose filters were sorted beforehand: windows are columns, filters are rows.
//
// As in count_classes.h, the bits in which a window and a filter differ are the ones of both, less twice those that they
// share; and the places of four filters are sorted into classes. But filters stay what they are from call to call, so
// that their lists are made once, for images of one size (the plan). A place is a channel of a pixel of the window, and a
// slice has that place of all windows: the signs of the channel, all pixels moved by as much as the pixel lies off the
// window's corner. Slices are not even written for every place. Rows of an image lie in whole bytes, moved sideways once
// for each column of the kernel; where a slice is read from says how far it is moved up:
//
//     a channel, for column kx of the kernel      slices of its places (here three rows of windows are counted at once)
//     row -1 (padding)   00000000                 ky = 0: from row -1 on
//     row 0              01101000                 ky = 1: from row 0 on
//     row 1              11010110                 ky = 2: from row 1 on
//     row 2              00110100
//     row 3              10010010
//
// What is counted has windows side by side, as the output has them.
#pragma once

#include "image.h"
#include "places.h"

namespace xncaps::XNCAPS_ISA {

// The rows of windows that are counted at once, and where their bits lie.
struct Grid {
  int64_t pitch;   // bytes of a row of windows
  int64_t rows;    // of windows
  int64_t seen;    // rows of the image that these see
  int64_t entry;   // bytes of a channel for one column of the kernel
  int64_t zeros;   // where bytes are that stay 0

  Grid(const ConvCall& call, int64_t slice_bytes)
      : pitch(bytes_for(call.width > call.out_width ? call.width : call.out_width)),
        rows(slice_bytes / pitch < call.out_height ? slice_bytes / pitch : call.out_height),
        seen(rows + (call.kernel[0] - 1) * call.dilation[0]),
        entry(seen * pitch),
        zeros(call.channels * call.kernel[1] * entry) {}

  int64_t at(const ConvCall& call, int64_t channel, int64_t ky, int64_t kx) const {
    return (kx * call.channels + channel) * entry + ky * call.dilation[0] * pitch;
  }
};

inline int64_t places_of(const ConvCall& call) { return call.channels * call.kernel[0] * call.kernel[1]; }

// Slices as wide as registers are.
struct OnePlace {
  using Bits = Slice;
  using Base = uint8_t;
  static constexpr int kPlaces = 1;
  static constexpr bool kUnrolled = kUnroll;
  static constexpr int64_t kBytes = sizeof(Slice), kLeastPlaces = 64;
  static void load_four(const Base* bits, const uint16_t* places, Bits* to) {
    uint64_t four;  // one load; in whichever order
    std::memcpy(&four, places, sizeof four);
    for (int k = 0; k < 4; ++k) to[k] = load_anywhere(bits + (four >> 16 * k & 0xffff));
  }
  // Writes numbers window by window.
  static void write(const Numbers<OnePlace>& numbers, uint16_t* to) {
    Written<OnePlace> written(numbers);
    store_in_turn(written.low, written.high, to);
  }
};

#ifdef XNCAPS_HALF_SLICES
// Half as wide: a register has two places side by side.
struct TwoPlaces {
  using Bits = Slice;
  using Base = uint8_t;
  static constexpr int kPlaces = 2;
  static constexpr bool kUnrolled = kUnroll;
  static constexpr int64_t kBytes = sizeof(HalfSlice), kLeastPlaces = kPlacesOfHalves;
  static void load_four(const Base* bits, const uint16_t* places, Bits* to) {
    uint64_t fours[2];  // two loads
    std::memcpy(fours, places, sizeof fours);
    for (int k = 0; k < 4; ++k) {
      const uint64_t two = fours[k / 2] >> 32 * (k % 2);
      to[k] = join_bytes(bits + (two & 0xffff), bits + (two >> 16 & 0xffff));
    }
  }
  static void write(const Numbers<TwoPlaces>& numbers, uint16_t* to) {
    if (2 * numbers.most < 1 << 12) return write_digits<12>(numbers, to);
    write_digits<16>(numbers, to);
  }
  template <int Digits>
  static void write_digits(const Numbers<TwoPlaces>& numbers, uint16_t* to) {
    HalfSlice carry{}, digit[16] = {};
#pragma GCC unroll 16
    for (int k = 0; k < Digits; ++k) {
      const uint8_t* const both = reinterpret_cast<const uint8_t*>(numbers.digit + k);
      HalfSlice sum = load_bytes(both);
      carry = add(sum, load_bytes(both + sizeof(HalfSlice)), carry);
      digit[k] = sum;
    }
    // Lower digits in the lower halves of registers, upper ones in the upper halves.
    Slice both[8];
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) both[k] = join(digit[k], digit[k + 8]);
    turn_bits(both);
    store_in_turn(both, to);
  }
};
#endif

constexpr int64_t kMostOffset = 0xffff;   // places are so many bytes off at most
constexpr int64_t kLeastFilters = 8;      // fewer are not worth the lists
constexpr int64_t kLeastPercent = 60;     // of a slice's bits that have to be windows

// Whether there can be a plan, and whether it is faster than none.
template <class Kind>
inline bool can_plan(const ConvCall& call) {
  const Grid grid(call, Kind::kBytes);
  const int64_t blocks = blocks_for(call.out_channels), windows = call.out_height * call.out_width;
  if (call.stride[0] != 1 || call.stride[1] != 1 || grid.pitch > Kind::kBytes) return false;
  if (places_of(call) >= 1 << (kPlaceDigits - 1) || grid.zeros > kMostOffset) return false;
  if (kClassesFirst && by_classes(windows, blocks, places_of(call) / 8)) return false;
  const int64_t passes = (call.out_height + grid.rows - 1) / grid.rows;
  return places_of(call) >= Kind::kLeastPlaces && call.out_channels >= kLeastFilters &&
         100 * windows >= kLeastPercent * passes * Kind::kBytes * 8;
}

// The filters, four at a time, sorted.
template <class Kind>
struct Plan {
  int64_t quads;
  int32_t* ones;     // of every filter
  int32_t* sizes;    // of the lists, [quad][class]
  uint16_t* all;     // every place: where its slice lies
  uint16_t* places;  // the lists of all quads, one after the other

  Plan(const ConvCall& call, int64_t listed, Parts& parts)
      : quads((call.out_channels + kQuad - 1) / kQuad),
        ones(parts.take<int32_t>(quads * kQuad)),
        sizes(parts.take<int32_t>(quads * kClasses)),
        all(parts.take<uint16_t>(runs_for<Kind>(places_of(call)) * kPlacesOfRun<Kind>)),
        places(parts.take<uint16_t>(listed)) {}
};

// Calls function(place, class) for all places of four filters.
template <class Function>
inline void each_place(const ConvCall& call, int64_t quad, const Function& function) {
  const int64_t bytes = bytes_for(call.channels), area = call.kernel[0] * call.kernel[1];
  for (int64_t tap = 0; tap < area; ++tap) {
    for (int64_t n = 0; n < bytes; ++n) {
      uint32_t classes = 0;
      for (int64_t r = 0; r < kQuad && quad * kQuad + r < call.out_channels; ++r) {
        classes |= kSpread.of[call.bits[((quad * kQuad + r) * area + tap) * bytes + n]] << r;
      }
      for (int64_t k = 0; k < 8 && n * 8 + k < call.channels; ++k) {
        function(n * 8 + k, tap, classes >> kQuad * k & (kClasses - 1));
      }
    }
  }
}

// Fills up a list to whole runs.
template <class Kind>
inline uint16_t* fill_up(uint16_t* list, int64_t count, int64_t zeros) {
  const int64_t whole = runs_for<Kind>(count) * kPlacesOfRun<Kind>;
  for (int64_t k = count; k < whole; ++k) list[k] = static_cast<uint16_t>(zeros);
  return list + whole;
}

// Writes the plan of a convolution; returns how many bytes it takes. Without memory it counts.
template <class Kind>
inline size_t write_plan(const ConvCall& call, char* memory) {
  int64_t listed = 0;
  const auto count = [&](int64_t quad, int32_t* sizes) {
    for (int k = 0; k < kClasses; ++k) sizes[k] = 0;
    each_place(call, quad, [&](int64_t, int64_t, uint32_t k) { ++sizes[k]; });
  };
  const int64_t quads = (call.out_channels + kQuad - 1) / kQuad;
  for (int64_t quad = 0; quad < quads; ++quad) {
    int32_t sizes[kClasses];
    count(quad, sizes);
    for (int k = 1; k < kClasses; ++k) listed += runs_for<Kind>(sizes[k]) * kPlacesOfRun<Kind>;
  }
  Parts parts(memory);
  const Plan<Kind> plan(call, listed, parts);
  if (memory == nullptr) return parts.used();
  const Grid grid(call, Kind::kBytes);
  const auto place = [&](int64_t channel, int64_t tap) {
    return static_cast<uint16_t>(grid.at(call, channel, tap / call.kernel[1], tap % call.kernel[1]));
  };
  uint16_t* list = plan.places;
  for (int64_t quad = 0; quad < quads; ++quad) {
    int32_t* const sizes = plan.sizes + quad * kClasses;
    count(quad, sizes);
    uint16_t* ends[kClasses] = {};
    for (int k = 1; k < kClasses; ++k) {
      ends[k] = list;
      list = fill_up<Kind>(list, sizes[k], grid.zeros);
    }
    each_place(call, quad, [&](int64_t channel, int64_t tap, uint32_t k) {
      if (k != 0) *ends[k]++ = place(channel, tap);
    });
    for (int r = 0; r < kQuad; ++r) {
      int32_t& ones = plan.ones[quad * kQuad + r] = 0;
      for (int k = 1; k < kClasses; ++k) ones += k >> r & 1 ? sizes[k] : 0;
    }
  }
  int64_t k = 0;
  each_place(call, 0, [&](int64_t channel, int64_t tap, uint32_t) { plan.all[k++] = place(channel, tap); });
  fill_up<Kind>(plan.all, k, grid.zeros);
  return parts.used();
}

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

// Calls function(kind) with the kind of lists for so many windows.
template <class Function>
inline auto with_kind([[maybe_unused]] const ConvCall& call, const Function& function) {
#ifdef XNCAPS_HALF_SLICES
  if (Grid(call, 1).pitch * call.out_height <= TwoPlaces::kBytes) return function(TwoPlaces());
#endif
  return function(OnePlace());
}

inline size_t plan_conv(const ConvCall& call, void* plan) {
  return with_kind(call, [&](auto kind) -> size_t {
    using Kind = decltype(kind);
    return can_plan<Kind>(call) ? write_plan<Kind>(call, static_cast<char*>(plan)) : 0;
  });
}

inline void conv_planned(const ConvCall& call) {
  with_kind(call, [&](auto kind) { conv_by_plan<decltype(kind)>(call); });
}

}  // namespace xncaps::XNCAPS_ISA
