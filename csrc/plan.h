// The plan of a convolution of signs, whose filters are sorted beforehand: windows are columns, filters are rows.
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
  struct Four {
    uint64_t places;  // in whichever order
    explicit Four(const uint16_t* from) { std::memcpy(&places, from, sizeof places); }
    Bits at(const Base* bits, int k) const { return load_anywhere(bits + (places >> 16 * k & 0xffff)); }
  };
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
  struct Four {
    uint64_t places[2];
    explicit Four(const uint16_t* from) { std::memcpy(places, from, sizeof places); }
    Bits at(const Base* bits, int k) const {
      const uint64_t two = places[k / 2] >> 32 * (k % 2);
      return join_bytes(bits + (two & 0xffff), bits + (two >> 16 & 0xffff));
    }
  };
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
  if (places_of(call) > kMostPlanned && by_classes(windows, blocks, places_of(call) / 8)) return false;
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

}  // namespace xncaps::XNCAPS_ISA
