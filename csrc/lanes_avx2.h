// The lanes of AVX2 with FMA and F16C: 8 floats, 32 bytes.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "half_bytes.h"
#include "layout.h"
#include "lanes_x86.h"

namespace xncaps::avx2 {

using Vec = __m256;
using Mask = __m256;  // all bits of a lane
constexpr int kLanes = 8, kVecs = kBlock / kLanes;
constexpr int kAhead = 1024;  // weights of a projection are asked for so many floats early, or 0
constexpr int kRowsOfOne = 2;  // of a projection of one sample at once
constexpr int kSums = kVecs;  // vectors that registers can hold two sums of

inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec a) { _mm256_storeu_ps(p, a); }
inline Vec set(float a) { return _mm256_set1_ps(a); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec abs(Vec a) { return _mm256_andnot_ps(set(-0.0f), a); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }  // b if either is NaN
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Mask greater(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
inline uint32_t mask_bits(Mask m) { return static_cast<uint32_t>(_mm256_movemask_ps(m)); }
inline Mask is_nan(Vec a) { return _mm256_cmp_ps(a, a, _CMP_UNORD_Q); }
inline Vec select(Mask m, Vec a, Vec b) { return _mm256_blendv_ps(b, a, m); }

// In a register: else the compiler may load it again for every use.
inline Vec keep(Vec a) {
  asm("" : "+x"(a));
  return a;
}

inline Vec load_half(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// bits - 2 * different, as floats.
inline Vec dots_of(const int32_t* different, int32_t bits) {
  const __m256i twice = _mm256_slli_epi32(load_bytes(different), 1);
  return _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_set1_epi32(bits), twice));
}
inline Vec load_counts(const uint16_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
// Turns as many rows as there are lanes into columns.
inline void turn(Vec* rows) { turn8(rows); }

// exp(a) for a <= 0 or NaN, within 4 units in the last place; 0 where it would be subnormal.
inline Vec exp_of_nonpositive(Vec a) {
  const Vec normal = _mm256_cmp_ps(a, set(-87.3f), _CMP_NLT_UQ);
  const Vec n = _mm256_round_ps(a * set(kLog2OfE), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Vec r = _mm256_fmsub_ps(a, set(kLog2OfE), n);
  Vec p = set(kPowerOf2[5]);
#pragma GCC unroll 16
  for (int k = 4; k >= 0; --k) p = fma(p, r, set(kPowerOf2[k]));
  const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
  const Vec scaled = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent));
  return _mm256_and_ps(select(is_nan(a), a, scaled), normal);
}

inline float sum_of_lanes(Vec a) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
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
  const __m256 sign = _mm256_set1_ps(-0.0f);
  __m256 a[8];
  for (int k = 0; k < 8; ++k) {
    a[k] = _mm256_loadu_ps(totals + 8 * k);
    if (Absolute) a[k] = _mm256_andnot_ps(sign, a[k]);
  }
  for (int k = 0; k < 4; ++k) a[k] = _mm256_hadd_ps(a[2 * k], a[2 * k + 1]);
  const __m256 low = _mm256_hadd_ps(a[0], a[1]), high = _mm256_hadd_ps(a[2], a[3]);
  const __m256 left = _mm256_permute2f128_ps(low, high, 0x20);
  _mm256_storeu_ps(sums, _mm256_add_ps(left, _mm256_permute2f128_ps(low, high, 0x31)));
}

// Packing and shuffling work on halves of a register. So bytes have a second order, in which both
// halves hold four bytes of each vector.
inline Bytes to_halves(Bytes a) {
  return _mm256_permutevar8x32_epi32(a, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
}
inline Bytes from_halves(Bytes a) {
  return _mm256_permutevar8x32_epi32(a, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

// Signed bytes as floats, in units of kByteUnit: each becomes the highest byte of a whole number.
constexpr float kByteUnit = 1.0f / (1 << 24);
inline void floats_of_bytes(Bytes a, Vec* out) {
  const Bytes halves = to_halves(a);
#pragma GCC unroll 16
  for (int q = 0; q < kVecs; ++q) {
    const __m128i highest =
        _mm_setr_epi8(-1, -1, -1, static_cast<char>(4 * q), -1, -1, -1,
                      static_cast<char>(4 * q + 1), -1, -1, -1, static_cast<char>(4 * q + 2), -1,
                      -1, -1, static_cast<char>(4 * q + 3));
    out[q] = _mm256_cvtepi32_ps(_mm256_shuffle_epi8(halves, _mm256_broadcastsi128_si256(highest)));
  }
}

// A register full of bits, of which each belongs to another column.
using Slice = __m256i;
inline Slice load_slice(const Slice* p) { return _mm256_load_si256(p); }
inline void store_slice(Slice* p, Slice a) { _mm256_store_si256(p, a); }
inline Slice load_anywhere(const uint8_t* p) { return load_bytes(p); }
// The bytes of as many blocks as a slice takes: one.
inline Slice join_bytes(const uint8_t* one, const uint8_t*) { return load_bytes(one); }

// A full adder: the sum comes in place of a, the carry is returned.
inline Slice add(Slice& a, Slice b, Slice c) {
  const Slice odd = _mm256_xor_si256(b, c);
  const Slice carry = _mm256_or_si256(_mm256_and_si256(b, c), _mm256_and_si256(odd, a));
  a = _mm256_xor_si256(a, odd);
  return carry;
}

// to[8 n + m] = byte n of low[m] + 256 * that of high[m].
inline void store_in_turn(Slice* low, Slice* high, uint16_t* to) {
  const auto zip = [](Slice& one, Slice& two) {
    const Slice first = _mm256_unpacklo_epi8(one, two);
    two = _mm256_unpackhi_epi8(one, two);
    one = first;
  };
  zip_eight(low, zip);
  zip_eight(high, zip);
  for (int k = 0; k < 8; ++k) {
    zip(low[k], high[k]);
    store_bytes(to + 16 * k, _mm256_permute2x128_si256(low[k], high[k], 0x20));
    store_bytes(to + 128 + 16 * k, _mm256_permute2x128_si256(low[k], high[k], 0x31));
  }
}

// Of two bits: the sum comes in place of a, the carry is returned.
inline Slice half_add(Slice& a, Slice b) {
  const Slice carry = _mm256_and_si256(a, b);
  a = _mm256_xor_si256(a, b);
  return carry;
}

// Exchanges the upper bits of a's groups of 2 * Shift bits with the lower ones of b's.
template <int Shift>
inline void exchange(Slice& a, Slice& b) {
  const Slice lower = set_bytes(lower_halves(Shift));
  const Slice up = _mm256_slli_epi16(b, Shift), down = _mm256_srli_epi16(a, Shift);
  a = _mm256_or_si256(_mm256_and_si256(lower, a), _mm256_andnot_si256(lower, up));
  b = _mm256_or_si256(_mm256_and_si256(lower, down), _mm256_andnot_si256(lower, b));
}

constexpr bool kUnroll = false;  // lists of places are added up in loops
constexpr int64_t kMostPlanned = 1 << 15;  // of more places, classes of windows are faster than a plan of filters

// From so many rows, blocks of columns, and bytes of each on, classes of places are what counts fastest, up to as many
// bytes as have their slices in the second cache.
constexpr int64_t kClassRows = 16, kClassBlocks = 16, kClassBytes = 256, kClassMostBytes = 2048;

// Products of signs are counted two rows at a time. A tile of these and 4 blocks takes 8 of the 16 registers for its
// sums.
using Counting = InTwoRows;
constexpr int kGroup = 128;  // rows for which columns are taken apart once
constexpr int kTileRows = 2, kTileBlocks = 4, kRowBlocks = 4;

// to[k] = from[k] for so many.
inline void copy(float* to, const float* from, int64_t count) {
  if (count >= kLanes) {
    for (int64_t k = 0; k + kLanes < count; k += kLanes) store(to + k, load(from + k));
    store(to + count - kLanes, load(from + count - kLanes));
    return;
  }
  for (int64_t k = 0; k < count; ++k) to[k] = from[k];
}

inline void add_to_counts(uint16_t* counts, Bytes a) {
  __m256i* to = reinterpret_cast<__m256i*>(counts);
  const __m256i low = _mm256_cvtepu8_epi16(_mm256_castsi256_si128(a));
  const __m256i high = _mm256_cvtepu8_epi16(_mm256_extracti128_si256(a, 1));
  _mm256_storeu_si256(to, _mm256_add_epi16(_mm256_loadu_si256(to), low));
  _mm256_storeu_si256(to + 1, _mm256_add_epi16(_mm256_loadu_si256(to + 1), high));
}

// Four bytes: bit k is whether p[k] is above the threshold.
inline void positive_bits(const float* p, float threshold, uint8_t* bits) {
  for (int k = 0; k < kVecs; ++k) {
    bits[k] = static_cast<uint8_t>(_mm256_movemask_ps(greater(load(p + k * kLanes), set(threshold))));
  }
}

// Signs of the 32 lanes of a block: all bits of a byte, in the order of halves.
using Signs = __m256i;

inline Signs signs_of(const Vec* a, const Vec* thresholds) {
  __m256i m[4];
  for (int q = 0; q < 4; ++q) m[q] = _mm256_castps_si256(greater(a[q], thresholds[q]));
  return _mm256_packs_epi16(_mm256_packs_epi32(m[0], m[1]), _mm256_packs_epi32(m[2], m[3]));
}
// Bytes that were added up by signs, as bytes of lanes in order.
inline Bytes in_order(Bytes a) { return from_halves(a); }
// Adds `value` to the bytes of the lanes whose sign is +1.
inline Bytes add_where(Bytes a, Signs positive, Bytes value) {
  return _mm256_add_epi8(a, _mm256_and_si256(positive, value));
}

}  // namespace xncaps::avx2
