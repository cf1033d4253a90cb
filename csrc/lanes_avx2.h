// The lanes of AVX2 with FMA and F16C: 8 floats, 32 bytes.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "layout.h"
#include "lanes_x86.h"

namespace xncaps::avx2 {

using Vec = __m256;
using Mask = __m256;  // all bits of a lane
constexpr int kLanes = 8, kVecs = kBlock / kLanes;

inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec a) { _mm256_storeu_ps(p, a); }
inline Vec set(float a) { return _mm256_set1_ps(a); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec abs(Vec a) { return _mm256_andnot_ps(set(-0.0f), a); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }  // b if either is NaN
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Mask greater(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
inline Mask is_nan(Vec a) { return _mm256_cmp_ps(a, a, _CMP_UNORD_Q); }
inline Vec select(Mask m, Vec a, Vec b) { return _mm256_blendv_ps(b, a, m); }

inline Vec load_half(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

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

// Bytes of the 32 lanes of a block.
using Bytes = __m256i;

inline Bytes load_bytes(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
inline void store_bytes(void* p, Bytes a) { _mm256_storeu_si256(static_cast<__m256i*>(p), a); }
inline Bytes set_bytes(int a) { return _mm256_set1_epi8(static_cast<char>(a)); }
inline Bytes add_bytes(Bytes a, Bytes b) { return _mm256_add_epi8(a, b); }
inline Bytes sub_bytes(Bytes a, Bytes b) { return _mm256_sub_epi8(a, b); }
inline Bytes count_different_bits(Bytes a, Bytes b) {
  const __m256i counts = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4));  // of each half byte
  const __m256i x = _mm256_xor_si256(a, b), low = _mm256_set1_epi8(15);
  return _mm256_add_epi8(
      _mm256_shuffle_epi8(counts, _mm256_and_si256(x, low)),
      _mm256_shuffle_epi8(counts, _mm256_and_si256(_mm256_srli_epi16(x, 4), low)));
}

inline Vec floats_of_bytes(const int8_t* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}

// The core of the XNOR product: how many bits of each lane differ from those of a row's byte. Each
// half of that byte picks a table, in which the halves of the lanes' bytes look up the count.
constexpr int kTileRows = 4, kTileBlocks = 2;
struct Code {
  uint8_t low, high;  // offsets of the tables
};
struct Column {
  Bytes low, high;
};

struct Tables {
  alignas(64) uint8_t count[16][16];
  constexpr Tables() : count() {
    for (int a = 0; a < 16; ++a) {
      for (int b = 0; b < 16; ++b) {
        const int x = a ^ b;
        count[a][b] = static_cast<uint8_t>((x & 1) + (x >> 1 & 1) + (x >> 2 & 1) + (x >> 3));
      }
    }
  }
};
constexpr Tables kTables;

inline Code code_of(uint8_t byte) {
  return {static_cast<uint8_t>(byte << 4), static_cast<uint8_t>(byte & 0xf0)};
}
inline Column column_of(Bytes bytes) {
  const __m256i low = _mm256_set1_epi8(15);
  return {_mm256_and_si256(bytes, low), _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low)};
}
inline __m256i table_at(uint8_t offset) {
  const uint8_t* table = &kTables.count[0][0] + offset;
  return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
}
inline Bytes count_different(Column column, Code code) {
  return _mm256_add_epi8(_mm256_shuffle_epi8(table_at(code.low), column.low),
                         _mm256_shuffle_epi8(table_at(code.high), column.high));
}

// to[k] = from[k] for so many.
inline void copy(float* to, const float* from, int64_t count) {
  for (; count >= kLanes; count -= kLanes, to += kLanes, from += kLanes) store(to, load(from));
  for (int64_t k = 0; k < count; ++k) to[k] = from[k];
}

inline void add_to_counts(uint16_t* counts, Bytes a) {
  __m256i* to = reinterpret_cast<__m256i*>(counts);
  const __m256i low = _mm256_cvtepu8_epi16(_mm256_castsi256_si128(a));
  const __m256i high = _mm256_cvtepu8_epi16(_mm256_extracti128_si256(a, 1));
  _mm256_storeu_si256(to, _mm256_add_epi16(_mm256_loadu_si256(to), low));
  _mm256_storeu_si256(to + 1, _mm256_add_epi16(_mm256_loadu_si256(to + 1), high));
}

// Bit k is whether p[k] is above the threshold.
inline uint8_t positive_bits(const float* p, float threshold) {
  return static_cast<uint8_t>(_mm256_movemask_ps(greater(load(p), set(threshold))));
}

// Signs of the 32 lanes of a block: all bits of a byte.
using Signs = __m256i;

inline Signs signs_of(const Vec* a, const Vec* thresholds) {
  __m256i m[4];
  for (int q = 0; q < 4; ++q) m[q] = _mm256_castps_si256(greater(a[q], thresholds[q]));
  const __m256i mixed =
      _mm256_packs_epi16(_mm256_packs_epi32(m[0], m[1]), _mm256_packs_epi32(m[2], m[3]));
  // Packing works on halves of a register; this puts the lanes in order again.
  return _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
// Adds `value` to the bytes of the lanes whose sign is +1.
inline Bytes add_where(Bytes a, Signs positive, Bytes value) {
  return _mm256_add_epi8(a, _mm256_and_si256(positive, value));
}
// Adds one to the bytes of the lanes whose sign is not `sign`.
inline Bytes count_where_not(Bytes a, Signs signs, bool sign) {
  return _mm256_sub_epi8(a, _mm256_xor_si256(signs, _mm256_set1_epi8(sign ? -1 : 0)));
}

}  // namespace xncaps::avx2
