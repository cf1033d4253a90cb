// Lanes in plain C++, for any compiler and CPU: loops short enough to be unrolled and vectorised.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "half.h"
#include "layout.h"
#include "power.h"

namespace xncaps::portable {

constexpr int kLanes = 8, kVecs = kBlock / kLanes;
constexpr int kAhead = 0;  // weights of a projection are asked for so many floats early, or 0
constexpr int kRowsOfOne = 2;  // of a projection of one sample at once
constexpr int kSums = kVecs / 2;  // vectors that registers can hold two sums of

struct Vec {
  float lane[kLanes];
};
struct Mask {
  bool lane[kLanes];
};

template <class Function>
inline Vec each(Function function) {
  Vec out;
  for (int k = 0; k < kLanes; ++k) out.lane[k] = function(k);
  return out;
}
template <class Function>
inline Mask each_bool(Function function) {
  Mask out;
  for (int k = 0; k < kLanes; ++k) out.lane[k] = function(k);
  return out;
}

inline Vec operator+(Vec a, Vec b) { return each([&](int k) { return a.lane[k] + b.lane[k]; }); }
inline Vec operator-(Vec a, Vec b) { return each([&](int k) { return a.lane[k] - b.lane[k]; }); }
inline Vec operator*(Vec a, Vec b) { return each([&](int k) { return a.lane[k] * b.lane[k]; }); }
inline Vec operator/(Vec a, Vec b) { return each([&](int k) { return a.lane[k] / b.lane[k]; }); }

inline Vec load(const float* p) { return each([&](int k) { return p[k]; }); }
inline void store(float* p, Vec a) { std::memcpy(p, a.lane, sizeof a.lane); }
inline Vec set(float a) { return each([&](int) { return a; }); }
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
inline Vec abs(Vec a) { return each([&](int k) { return std::fabs(a.lane[k]); }); }
inline Vec max(Vec a, Vec b) {  // b if either is NaN
  return each([&](int k) { return a.lane[k] > b.lane[k] ? a.lane[k] : b.lane[k]; });
}
inline Vec min(Vec a, Vec b) {
  return each([&](int k) { return a.lane[k] < b.lane[k] ? a.lane[k] : b.lane[k]; });
}
inline Mask greater(Vec a, Vec b) {
  return each_bool([&](int k) { return a.lane[k] > b.lane[k]; });
}
inline uint32_t mask_bits(Mask m) {
  uint32_t bits = 0;
  for (int k = 0; k < kLanes; ++k) bits |= static_cast<uint32_t>(m.lane[k]) << k;
  return bits;
}
inline Mask is_nan(Vec a) {
  return each_bool([&](int k) { return a.lane[k] != a.lane[k]; });
}
inline Vec select(Mask m, Vec a, Vec b) {
  return each([&](int k) { return m.lane[k] ? a.lane[k] : b.lane[k]; });
}

inline Vec keep(Vec a) { return a; }  // in a register

inline Vec load_half(const uint16_t* p) {
  return each([&](int k) { return half_to_float(p[k]); });
}

// bits - 2 * different, as floats.
inline Vec dots_of(const int32_t* different, int32_t bits) {
  return each([&](int k) { return static_cast<float>(bits - 2 * different[k]); });
}
inline Vec load_counts(const uint16_t* p) {
  return each([&](int k) { return static_cast<float>(p[k]); });
}
// Turns as many rows as there are lanes into columns.
inline void turn(Vec* rows) {
  for (int k = 0; k < kLanes; ++k) {
    for (int lane = 0; lane < k; ++lane) {
      const float a = rows[k].lane[lane];
      rows[k].lane[lane] = rows[lane].lane[k];
      rows[lane].lane[k] = a;
    }
  }
}

// exp(a) for a <= 0 or NaN, within 4 units in the last place; 0 where it would be subnormal. The
// loops have no calls and no branches, so that they become vector instructions.
inline Vec exp_of_nonpositive(Vec a) {
  const Vec bounded = max(set(-87.3f), a);  // a NaN stays one
  Vec n, out;
  for (int k = 0; k < kLanes; ++k) {
    // Adding and taking away 1.5 * 2^23 rounds to a whole number.
    const float shifted = bounded.lane[k] * kLog2OfE + 12582912.0f;
    n.lane[k] = shifted - 12582912.0f;
  }
  // The logarithm of 2 in two parts: without fused operations, r would lose digits.
  const Vec r = (bounded - n * set(0.693359375f) - n * set(-2.12194440e-4f)) * set(kLog2OfE);
  Vec p = set(kPowerOf2[5]);
#pragma GCC unroll 16
  for (int k = 4; k >= 0; --k) p = fma(p, r, set(kPowerOf2[k]));
  for (int k = 0; k < kLanes; ++k) {
    const float whole = n.lane[k] == n.lane[k] ? n.lane[k] : 0.0f;
    const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(whole) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    out.lane[k] = a.lane[k] < -87.3f ? 0.0f : p.lane[k] * power;
  }
  return out;
}

inline float sum_of_lanes(Vec a) {
  float part[4] = {0, 0, 0, 0};
  for (int k = 0; k < kLanes; ++k) part[k % 4] += a.lane[k];
  return (part[0] + part[1]) + (part[2] + part[3]);
}

inline void add_to_total(float* total, bool first, Vec a) {
  store(total, first ? a : a + load(total));
}
// The totals of two rows.
inline void add_to_totals(float* totals, bool first, Vec a, Vec b) {
  add_to_total(totals, first, a);
  add_to_total(totals + kLanes, first, b);
}

constexpr int kReduced = 8;  // totals at once
// sums[k] = sum of the k-th of 8 totals, or of its absolute numbers.
template <bool Absolute = false>
inline void reduce(const float* totals, float* sums) {
  for (int k = 0; k < 8; ++k) {
    float v[8];
    for (int e = 0; e < 8; ++e) {
      v[e] = Absolute ? std::fabs(totals[8 * k + e]) : totals[8 * k + e];
    }
    sums[k] = ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7]));
  }
}

// Bytes of the 32 lanes of a block.
struct Bytes {
  uint8_t lane[kBlock];
};

inline Bytes load_bytes(const void* p) {
  Bytes out;
  std::memcpy(out.lane, p, sizeof out.lane);
  return out;
}
inline void store_bytes(void* p, Bytes a) { std::memcpy(p, a.lane, sizeof a.lane); }

template <class Function>
inline Bytes each_byte(Function function) {
  Bytes out;
  for (int k = 0; k < kBlock; ++k) out.lane[k] = static_cast<uint8_t>(function(k));
  return out;
}

inline Bytes set_bytes(int a) { return each_byte([&](int) { return a; }); }
inline Bytes add_bytes(Bytes a, Bytes b) {
  return each_byte([&](int k) { return a.lane[k] + b.lane[k]; });
}
inline Bytes sub_bytes(Bytes a, Bytes b) {
  return each_byte([&](int k) { return a.lane[k] - b.lane[k]; });
}
// The bits of all bytes are counted side by side, which vectorises where a popcount for each byte
// does not.
inline Bytes count_different_bits(Bytes a, Bytes b) {
  return each_byte([&](int k) {
    uint8_t x = a.lane[k] ^ b.lane[k];
    x = static_cast<uint8_t>(x - ((x >> 1) & 0x55));
    x = static_cast<uint8_t>((x & 0x33) + ((x >> 2) & 0x33));
    return (x + (x >> 4)) & 0x0f;
  });
}

// The bits of 32 bytes from a bit of the first on, but for those that the mask has not.
inline Bytes move_bits(const uint8_t* from, int bit, const uint8_t* mask) {
  return each_byte([&](int k) { return ((from[k] | from[k + 1] << 8) >> bit) & mask[k]; });
}

// How many of 8 bits are the same, minus how many are not.
inline Bytes dot_of_bits(Bytes a, Bytes b) {
  const Bytes different = count_different_bits(a, b);
  return each_byte([&](int k) { return 8 - 2 * different.lane[k]; });
}

// Signed bytes as floats, in units of kByteUnit.
constexpr float kByteUnit = 1.0f;
inline void floats_of_bytes(Bytes a, Vec* out) {
  for (int q = 0; q < kVecs; ++q) {
    out[q] = each([&](int k) {
      return static_cast<float>(static_cast<int8_t>(a.lane[q * kLanes + k]));
    });
  }
}

// Bits, of which each belongs to another column: vectors of the compiler, for it makes none of loops here.
struct Slice {
  using Half = uint64_t __attribute__((vector_size(16)));
  Half half[2];
};
template <class Function>
inline Slice each_half(Function function) {
  return {{function(0), function(1)}};
}
inline Slice load_slice(const Slice* p) { return *p; }
inline void store_slice(Slice* p, Slice a) { *p = a; }
inline Slice load_anywhere(const uint8_t* p) {
  Slice out;
  std::memcpy(out.half, p, sizeof out.half);
  return out;
}
// The bytes of as many blocks as a slice takes: one.
inline Slice join_bytes(const uint8_t* one, const uint8_t*) {
  Slice out;
  std::memcpy(out.half, one, sizeof out.half);
  return out;
}

// to[8 n + m] = byte n of low[m] + 256 * that of high[m].
inline void store_in_turn(const Slice* low, const Slice* high, uint16_t* to) {
  constexpr int kSize = sizeof(Slice);
  for (int m = 0; m < 8; ++m) {
    uint8_t lower[kSize], upper[kSize];
    std::memcpy(lower, low + m, kSize);
    std::memcpy(upper, high + m, kSize);
    for (int n = 0; n < kSize; ++n) to[8 * n + m] = static_cast<uint16_t>(lower[n] | upper[n] << 8);
  }
}

// A full adder: the sum comes in place of a, the carry is returned.
inline Slice add(Slice& a, Slice b, Slice c) {
  const Slice odd = each_half([&](int k) { return b.half[k] ^ c.half[k]; });
  const Slice carry = each_half([&](int k) { return (b.half[k] & c.half[k]) | (odd.half[k] & a.half[k]); });
  a = each_half([&](int k) { return a.half[k] ^ odd.half[k]; });
  return carry;
}

// Of two bits: the sum comes in place of a, the carry is returned.
inline Slice half_add(Slice& a, Slice b) {
  const Slice carry = each_half([&](int k) { return a.half[k] & b.half[k]; });
  a = each_half([&](int k) { return a.half[k] ^ b.half[k]; });
  return carry;
}

// Exchanges the upper bits of a's groups of 2 * Shift bits with the lower ones of b's.
template <int Shift>
inline void exchange(Slice& a, Slice& b) {
  const uint64_t lower = lower_halves(Shift) * uint64_t{0x0101010101010101};
  const Slice one = a, other = b;
  a = each_half([&](int k) { return (one.half[k] & lower) | ((other.half[k] & lower) << Shift); });
  b = each_half([&](int k) { return ((one.half[k] >> Shift) & lower) | (other.half[k] & ~lower); });
}

constexpr bool kUnroll = false;  // lists of places are added up in loops
constexpr int64_t kMostPlanned = 2048;  // of more places, classes of windows are faster than a plan of filters

// From so many rows, blocks of columns, and bytes of each on, classes of places are what counts fastest, up to as many
// bytes as have their slices in the second cache.
constexpr int64_t kClassRows = 8, kClassBlocks = 4, kClassBytes = 64, kClassMostBytes = 2048;

// The core of the XNOR product: how many bits of each lane differ from those of a row's byte.
struct InBytes {};
using Counting = InBytes;
constexpr int kGroup = 48;  // rows whose counts stay in the smallest cache
constexpr int kTileRows = 2, kTileBlocks = 1, kRowBlocks = 1;
constexpr int kCodeParts = 1, kByteRows = 2;
inline Bytes part_of(Bytes column, int) { return column; }
inline Bytes part_of(uint8_t code, int) { return set_bytes(code); }
inline void add_different(Bytes& sum, Bytes column, Bytes code) {
  sum = add_bytes(sum, count_different_bits(column, code));
}

// to[k] = from[k] for so many.
inline void copy(float* to, const float* from, int64_t count) {
  for (; count >= kLanes; count -= kLanes, to += kLanes, from += kLanes) store(to, load(from));
  for (int64_t k = 0; k < count; ++k) to[k] = from[k];
}

inline void add_to_counts(uint16_t* counts, Bytes a) {
  for (int k = 0; k < kBlock; ++k) counts[k] = static_cast<uint16_t>(counts[k] + a.lane[k]);
}

// Four bytes: bit k is whether p[k] is above the threshold.
inline void positive_bits(const float* p, float threshold, uint8_t* bits) {
  for (int byte = 0; byte < 4; ++byte, p += 8) {
    unsigned value = 0;
    for (int k = 0; k < 8; ++k) value |= static_cast<unsigned>(p[k] > threshold) << k;
    bits[byte] = static_cast<uint8_t>(value);
  }
}

// Signs of the 32 lanes of a block: 0 or 255.
using Signs = Bytes;

inline Signs signs_of(const Vec* a, const Vec* thresholds) {
  Signs out;
  for (int q = 0; q < kVecs; ++q) {
    for (int k = 0; k < kLanes; ++k) {
      out.lane[q * kLanes + k] = a[q].lane[k] > thresholds[q].lane[k] ? 255 : 0;
    }
  }
  return out;
}
// Bytes that were added up by signs, as bytes of lanes in order.
inline Bytes in_order(Bytes a) { return a; }
// Adds `value` to the bytes of the lanes whose sign is +1.
inline Bytes add_where(Bytes a, Signs positive, Bytes value) {
  return each_byte([&](int k) { return a.lane[k] + (positive.lane[k] & value.lane[k]); });
}

// Moves 8 rows of 8 floats to 8 columns.
inline void transpose8(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  for (int row = 0; row < 8; ++row) {
    for (int k = 0; k < 8; ++k) to[k * to_stride + row] = from[row * from_stride + k];
  }
}

// Moves 16 rows of 16 bytes to 16 columns.
inline void transpose16(const uint8_t* from, int64_t from_stride, uint8_t* to, int64_t to_stride) {
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 16; ++k) to[k * to_stride + row] = from[row * from_stride + k];
  }
}

}  // namespace xncaps::portable
