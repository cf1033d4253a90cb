// The lanes of AVX-512 (F, BW, DQ, VL): 16 floats; bytes in halves of a register. With XNCAPS_BITALG also those of
// BITALG, which counts the bits of bytes, and of VBMI, which moves bytes; processors have both or neither.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#ifndef XNCAPS_BITALG
#include "half_bytes.h"
#endif
#include "layout.h"
#include "lanes_x86.h"

namespace xncaps::XNCAPS_ISA {

using Vec = __m512;
using Mask = __mmask16;
constexpr int kLanes = 16, kVecs = kBlock / kLanes;
constexpr int kAhead = 1024;  // weights of a projection are asked for so many floats early, or 0
constexpr int kRowsOfOne = 8;  // of a projection of one sample at once
constexpr int kSums = kVecs;  // vectors that registers can hold two sums of

#ifdef XNCAPS_BITALG

inline Bytes count_different_bits(Bytes a, Bytes b) {
  return _mm256_popcnt_epi8(_mm256_xor_si256(a, b));
}
// How many of 8 bits are the same, minus how many are not.
inline Bytes dot_of_bits(Bytes a, Bytes b) {
  const Bytes different = count_different_bits(a, b);
  return sub_bytes(set_bytes(8), add_bytes(different, different));
}

// The core of the XNOR product: how many bits of each lane differ from those of a row's byte. That is for one row;
// several are counted in pairs of bytes.
struct InBytes {};
struct InPairs : InBytes {};
using Counting = InPairs;
constexpr int kGroup = 128;  // rows for which columns are taken apart once
constexpr int kTileRows = 4, kTileBlocks = 4, kRowBlocks = 4;
constexpr int kCodeParts = 1, kByteRows = 1;
inline Bytes part_of(Bytes column, int) { return column; }
inline Bytes part_of(uint8_t code, int) { return set_bytes(code); }
inline void add_different(Bytes& sum, Bytes column, Bytes code) {
  sum = add_bytes(sum, count_different_bits(column, code));
}

#else

// Products of signs are counted in slices where there are columns enough to fill them, else two rows at a time.
struct InSlices : InTwoRows {};
using Counting = InSlices;
constexpr int kGroup = 256;  // rows for which tables of columns are made once
constexpr int kTileRows = 8, kTileBlocks = 16, kRowBlocks = 4;  // a tile is a slice

#endif

// A register full of bits, of which each belongs to another column.
using Slice = __m512i;
inline Slice load_slice(const Slice* p) { return _mm512_load_si512(p); }
inline void store_slice(Slice* p, Slice a) { _mm512_store_si512(p, a); }
inline Slice load_anywhere(const uint8_t* p) { return _mm512_loadu_si512(p); }
// The bytes of as many blocks as a slice takes.
inline Slice join_bytes(const uint8_t* one, const uint8_t* other) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(load_bytes(one)), load_bytes(other), 1);
}

// A function of three bits: bit 4 a + 2 b + c of the truth table.
template <int Truth>
inline Slice of_three(Slice a, Slice b, Slice c) {
  return _mm512_ternarylogic_epi64(a, b, c, Truth);
}
constexpr int kOdd = 0x96, kMajority = 0xe8, kSelect = 0xe4;  // kSelect: c ? a : b

// A full adder: the sum comes in place of a, the carry is returned. Where b and c are the same it is they, else the
// opposite of the sum.
inline Slice add(Slice& a, Slice b, Slice c) {
  a = of_three<kOdd>(a, b, c);
  return of_three<0xd4>(b, c, a);
}

// Of two bits: the sum comes in place of a, the carry is returned.
inline Slice half_add(Slice& a, Slice b) {
  const Slice carry = _mm512_and_si512(a, b);
  a = _mm512_xor_si512(a, b);
  return carry;
}

// Exchanges the upper bits of a's groups of 2 * Shift bits with the lower ones of b's.
template <int Shift>
inline void exchange(Slice& a, Slice& b) {
  const Slice lower = _mm512_set1_epi8(lower_halves(Shift));
  const Slice up = _mm512_slli_epi16(b, Shift), down = _mm512_srli_epi16(a, Shift);
  a = of_three<kSelect>(a, up, lower);
  b = of_three<kSelect>(down, b, lower);
}

// Two of the bytes of two in turns, quarter by quarter.
inline void zip(Slice& one, Slice& two) {
  const Slice first = _mm512_unpacklo_epi8(one, two);
  two = _mm512_unpackhi_epi8(one, two);
  one = first;
}

// to[8 n + m] = byte n of low[m] + 256 * that of high[m].
inline void store_in_turn(Slice* low, Slice* high, uint16_t* to) {
  const auto in_turn = [](Slice& one, Slice& two) { zip(one, two); };
  zip_eight(low, in_turn);
  zip_eight(high, in_turn);
#pragma GCC unroll 8
  for (int k = 0; k < 8; ++k) {
    zip(low[k], high[k]);
    const auto at = [&](int quarter) { return reinterpret_cast<__m128i*>(to + 128 * quarter + 16 * k); };
    _mm_storeu_si128(at(0), _mm512_castsi512_si128(low[k]));
    _mm_storeu_si128(at(0) + 1, _mm512_castsi512_si128(high[k]));
    _mm_storeu_si128(at(1), _mm512_extracti32x4_epi32(low[k], 1));
    _mm_storeu_si128(at(1) + 1, _mm512_extracti32x4_epi32(high[k], 1));
    _mm_storeu_si128(at(2), _mm512_extracti32x4_epi32(low[k], 2));
    _mm_storeu_si128(at(2) + 1, _mm512_extracti32x4_epi32(high[k], 2));
    _mm_storeu_si128(at(3), _mm512_extracti32x4_epi32(low[k], 3));
    _mm_storeu_si128(at(3) + 1, _mm512_extracti32x4_epi32(high[k], 3));
  }
}
// The same of bytes that lie in the lower and in the upper halves of registers.
inline void store_in_turn(Slice* both, uint16_t* to) {
  zip_eight(both, [](Slice& one, Slice& two) { zip(one, two); });
#pragma GCC unroll 8
  for (int k = 0; k < 8; ++k) {
    const Bytes low = _mm512_castsi512_si256(both[k]), high = _mm512_extracti64x4_epi64(both[k], 1);
    const Bytes one = _mm256_unpacklo_epi8(low, high), two = _mm256_unpackhi_epi8(low, high);
    store_bytes(to + 16 * k, _mm256_permute2x128_si256(one, two, 0x20));
    store_bytes(to + 128 + 16 * k, _mm256_permute2x128_si256(one, two, 0x31));
  }
}

// Half a slice. Plans have so many places at least where it takes one.
#ifdef XNCAPS_BITALG
constexpr int64_t kPlacesOfHalves = 2048;
#else
constexpr int64_t kPlacesOfHalves = 64;
#endif
#define XNCAPS_HALF_SLICES
using HalfSlice = __m256i;
inline Slice join(HalfSlice low, HalfSlice high) { return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1); }
template <int Truth>
inline HalfSlice of_three(HalfSlice a, HalfSlice b, HalfSlice c) {
  return _mm256_ternarylogic_epi64(a, b, c, Truth);
}
// Here carries wait for each other, and not for sums.
inline HalfSlice add(HalfSlice& a, HalfSlice b, HalfSlice c) {
  const HalfSlice carry = of_three<kMajority>(a, b, c);
  a = of_three<kOdd>(a, b, c);
  return carry;
}
template <int Shift>
inline void exchange(HalfSlice& a, HalfSlice& b) {
  const HalfSlice lower = _mm256_set1_epi8(lower_halves(Shift));
  const HalfSlice up = _mm256_slli_epi16(b, Shift), down = _mm256_srli_epi16(a, Shift);
  a = of_three<kSelect>(a, up, lower);
  b = of_three<kSelect>(down, b, lower);
}

constexpr bool kUnroll = true;  // lists of places are added up without loops
constexpr int64_t kMostPlanned = 1 << 15;  // of more places, classes of windows are faster than a plan of filters

// From so many rows, blocks of columns, and bytes of each on, classes of places are what counts fastest, up to as many
// bytes as have their slices in the second cache.
#ifdef XNCAPS_BITALG
constexpr int64_t kClassRows = 64, kClassBlocks = 64, kClassBytes = 512, kClassMostBytes = 1024;
#else
constexpr int64_t kClassRows = 16, kClassBlocks = 64, kClassBytes = 256, kClassMostBytes = 2048;
#endif

inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a); }
inline Vec set(float a) { return _mm512_set1_ps(a); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec abs(Vec a) { return _mm512_abs_ps(a); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }  // b if either is NaN
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Mask greater(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline uint32_t mask_bits(Mask m) { return m; }
inline Mask is_nan(Vec a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
inline Vec select(Mask m, Vec a, Vec b) { return _mm512_mask_blend_ps(m, b, a); }

// In a register: else the compiler may load it again for every use.
inline Vec keep(Vec a) {
  asm("" : "+v"(a));
  return a;
}

inline Vec load_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// bits - 2 * different, as floats.
inline Vec dots_of(const int32_t* different, int32_t bits) {
  const __m512i twice = _mm512_slli_epi32(_mm512_loadu_si512(different), 1);
  return _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_set1_epi32(bits), twice));
}

inline Vec load_counts(const uint16_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
}

// Turns as many rows as there are lanes into columns: by pairs of rows, by fours, then by quarters of registers.
inline void turn(Vec* rows) {
  Vec a[16];
#pragma GCC unroll 8
  for (int k = 0; k < 16; k += 2) {
    a[k] = _mm512_unpacklo_ps(rows[k], rows[k + 1]);
    a[k + 1] = _mm512_unpackhi_ps(rows[k], rows[k + 1]);
  }
  const auto low = [](Vec x, Vec y) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)));
  };
  const auto high = [](Vec x, Vec y) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)));
  };
  // Row k + c: column c of four rows, and behind it columns c + 4, c + 8 and c + 12.
#pragma GCC unroll 4
  for (int k = 0; k < 16; k += 4) {
    rows[k] = low(a[k], a[k + 2]);
    rows[k + 1] = high(a[k], a[k + 2]);
    rows[k + 2] = low(a[k + 1], a[k + 3]);
    rows[k + 3] = high(a[k + 1], a[k + 3]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const Vec even = _mm512_shuffle_f32x4(rows[c], rows[4 + c], 0x88);
    const Vec odd = _mm512_shuffle_f32x4(rows[c], rows[4 + c], 0xdd);
    const Vec more_even = _mm512_shuffle_f32x4(rows[8 + c], rows[12 + c], 0x88);
    const Vec more_odd = _mm512_shuffle_f32x4(rows[8 + c], rows[12 + c], 0xdd);
    rows[c] = _mm512_shuffle_f32x4(even, more_even, 0x88);
    rows[4 + c] = _mm512_shuffle_f32x4(odd, more_odd, 0x88);
    rows[8 + c] = _mm512_shuffle_f32x4(even, more_even, 0xdd);
    rows[12 + c] = _mm512_shuffle_f32x4(odd, more_odd, 0xdd);
  }
}

// exp(a) for a <= 0 or NaN, within 4 units in the last place.
inline Vec exp_of_nonpositive(Vec a) {
  const Vec n = _mm512_roundscale_ps(a * set(kLog2OfE), _MM_FROUND_TO_NEAREST_INT);
  const Vec r = _mm512_fmsub_ps(a, set(kLog2OfE), n);
  Vec p = set(kPowerOf2[5]);
#pragma GCC unroll 16
  for (int k = 4; k >= 0; --k) p = fma(p, r, set(kPowerOf2[k]));
  // -inf - (-inf) is NaN above: zero is set apart.
  const Mask finite = _mm512_cmp_ps_mask(a, set(-150.0f), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(finite, p, n);
}

inline float sum_of_lanes(Vec a) { return _mm512_reduce_add_ps(a); }

// Totals are half as wide as vectors: they are loaded and stored for every row.
inline void add_to_total(float* total, bool first, Vec a) {
  __m256 sum = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  if (!first) sum = _mm256_add_ps(sum, _mm256_loadu_ps(total));
  _mm256_storeu_ps(total, sum);
}
// The totals of two rows, which fill a vector.
inline void add_to_totals(float* totals, bool first, Vec a, Vec b) {
  Vec sum = _mm512_shuffle_f32x4(a, b, 0x44) + _mm512_shuffle_f32x4(a, b, 0xee);
  if (!first) sum = sum + load(totals);
  store(totals, sum);
}

constexpr int kReduced = 16;  // totals at once
// sums[k] = sum of the k-th of 16 totals, or of its absolute numbers. Each step adds halves of what is left.
template <bool Absolute = false>
inline void reduce(const float* totals, float* sums) {
  Vec a[8];  // two totals each
#pragma GCC unroll 8
  for (int k = 0; k < 8; ++k) {
    a[k] = load(totals + k * kLanes);
    if (Absolute) a[k] = abs(a[k]);
  }
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
    const Vec x = a[2 * k], y = a[2 * k + 1];
    a[k] = _mm512_unpacklo_ps(x, y) + _mm512_unpackhi_ps(x, y);
  }
#pragma GCC unroll 2
  for (int k = 0; k < 2; ++k) {
    const __m512d x = _mm512_castps_pd(a[2 * k]), y = _mm512_castps_pd(a[2 * k + 1]);
    a[k] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y)) + _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
  }
  const Vec sum = _mm512_shuffle_f32x4(a[0], a[1], 0x88) + _mm512_shuffle_f32x4(a[0], a[1], 0xdd);
  // Of each eight, totals with even numbers come first.
  const __m512i order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  store(sums, _mm512_permutexvar_ps(order, sum));
}

// Signed bytes as floats, in units of kByteUnit.
constexpr float kByteUnit = 1.0f;
inline void floats_of_bytes(Bytes a, Vec* out) {
  const __m128i low = _mm256_castsi256_si128(a), high = _mm256_extracti128_si256(a, 1);
  out[0] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(low));
  out[1] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(high));
}

#ifdef XNCAPS_BITALG

template <bool OneByte>
struct TwoRows;

// Dot products of vectors of up to eight signs: the bits that differ are counted for two rows at once, every count
// becomes the lowest byte of a lane, and the lanes look up what it stands for. They look at four bits only, so that
// the other bytes may be anything.
template <>
struct TwoRows<true> {
  __m512i x, moves[2 * kVecs];
  Vec meanings;

  template <class Signs>
  TwoRows(const Signs& signs, int64_t dim) : x(_mm512_broadcast_i64x4(signs.first)) {
    alignas(64) static constexpr float kDots[kLanes] = {0, -2, -4, -6, -8, -10, -12, -14, -16};
    meanings = load(kDots) + set(static_cast<float>(dim));
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int q = 0; q < 2 * kVecs; ++q) moves[q] = _mm512_add_epi32(lane, _mm512_set1_epi32(q * kLanes));
  }

  void dots(const uint8_t* rows, Vec* out) const {
    const __m512i differ = _mm512_popcnt_epi8(_mm512_xor_si512(x, _mm512_loadu_si512(rows)));
#pragma GCC unroll 4
    for (int q = 0; q < 2 * kVecs; ++q) {
      out[q] = _mm512_permutexvar_ps(_mm512_permutexvar_epi8(moves[q], differ), meanings);
    }
  }
};

#endif

// to[k] = from[k] for so many.
inline void copy(float* to, const float* from, int64_t count) {
  for (; count >= kLanes; count -= kLanes, to += kLanes, from += kLanes) store(to, load(from));
  const Mask rest = static_cast<Mask>((1u << count) - 1);
  _mm512_mask_storeu_ps(to, rest, _mm512_maskz_loadu_ps(rest, from));
}

inline void add_to_counts(uint16_t* counts, Bytes a) {
  const __m512i sum = _mm512_add_epi16(_mm512_loadu_si512(counts), _mm512_cvtepu8_epi16(a));
  _mm512_storeu_si512(counts, sum);
}

// Four bytes: bit k is whether p[k] is above the threshold.
inline void positive_bits(const float* p, float threshold, uint8_t* bits) {
  const uint32_t low = greater(load(p), set(threshold));
  const uint32_t both = low | static_cast<uint32_t>(greater(load(p + kLanes), set(threshold))) << kLanes;
  std::memcpy(bits, &both, sizeof(both));
}

// Signs of the 32 lanes of a block.
using Signs = uint32_t;

inline Signs signs_of(const Vec* a, const Vec* thresholds) {
  const uint32_t low = greater(a[0], thresholds[0]), high = greater(a[1], thresholds[1]);
  return low | high << 16;
}
// Bytes that were added up by signs, as bytes of lanes in order.
inline Bytes in_order(Bytes a) { return a; }
// Adds `value` to the bytes of the lanes whose sign is +1.
inline Bytes add_where(Bytes a, Signs positive, Bytes value) {
  return _mm256_mask_add_epi8(a, positive, a, value);
}

}  // namespace xncaps::XNCAPS_ISA
