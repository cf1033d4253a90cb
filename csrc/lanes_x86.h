// What the lanes of AVX2 and AVX-512 have in common.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "power.h"

namespace xncaps {
namespace {  // compiled anew for every instruction set

// Bytes of the 32 lanes of a block.
using Bytes = __m256i;

inline Bytes load_bytes(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
inline void store_bytes(void* p, Bytes a) { _mm256_storeu_si256(static_cast<__m256i*>(p), a); }
inline Bytes set_bytes(int a) { return _mm256_set1_epi8(static_cast<char>(a)); }
inline Bytes add_bytes(Bytes a, Bytes b) { return _mm256_add_epi8(a, b); }
inline Bytes sub_bytes(Bytes a, Bytes b) { return _mm256_sub_epi8(a, b); }

// The bits of 32 bytes from a bit of the first on, but for those that the mask has not.
inline Bytes move_bits(const uint8_t* from, int bit, const uint8_t* mask) {
  const Bytes low = _mm256_srl_epi64(load_bytes(from), _mm_cvtsi32_si128(bit));
  const Bytes high = _mm256_sll_epi64(load_bytes(from + 8), _mm_cvtsi32_si128(64 - bit));
  return _mm256_and_si256(_mm256_or_si256(low, high), load_bytes(mask));
}

// Byte n of register m becomes byte 8 n + m, quarter by quarter (half by half) of the registers; zip(a, b) makes two of the
// bytes of two in turns.
template <class Register, class Zip>
inline void zip_eight(Register* a, Zip zip) {
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) zip(a[k], a[k + 4]);
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) zip(a[k + k / 2 * 2], a[k + k / 2 * 2 + 2]);
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) zip(a[2 * k], a[2 * k + 1]);
}

// Turns 8 rows of 8 floats into columns.
inline void turn8(__m256* a) {
  __m256 b[8];
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
    b[2 * k] = _mm256_unpacklo_ps(a[2 * k], a[2 * k + 1]);
    b[2 * k + 1] = _mm256_unpackhi_ps(a[2 * k], a[2 * k + 1]);
  }
#pragma GCC unroll 2
  for (int k = 0; k < 2; ++k) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      a[4 * k + 2 * h] = _mm256_shuffle_ps(b[4 * k + h], b[4 * k + 2 + h], 0x44);
      a[4 * k + 2 * h + 1] = _mm256_shuffle_ps(b[4 * k + h], b[4 * k + 2 + h], 0xee);
    }
  }
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
    const __m256 low = a[k], high = a[k + 4];
    a[k] = _mm256_permute2f128_ps(low, high, 0x20);
    a[k + 4] = _mm256_permute2f128_ps(low, high, 0x31);
  }
}

// Moves 8 rows of 8 floats to 8 columns.
inline void transpose8(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  __m256 a[8];
  for (int k = 0; k < 8; ++k) a[k] = _mm256_loadu_ps(from + k * from_stride);
  turn8(a);
  for (int k = 0; k < 8; ++k) _mm256_storeu_ps(to + k * to_stride, a[k]);
}

// Moves 16 rows of 16 bytes to 16 columns: each step interleaves the rows of the first half with those
// of the second.
inline void transpose16(const uint8_t* from, int64_t from_stride, uint8_t* to, int64_t to_stride) {
  __m128i a[16], b[16];
  for (int k = 0; k < 16; ++k) {
    a[k] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + k * from_stride));
  }
  for (int step = 0; step < 4; ++step) {
    for (int k = 0; k < 8; ++k) {
      b[2 * k] = _mm_unpacklo_epi8(a[k], a[k + 8]);
      b[2 * k + 1] = _mm_unpackhi_epi8(a[k], a[k + 8]);
    }
    for (int k = 0; k < 16; ++k) a[k] = b[k];
  }
  for (int k = 0; k < 16; ++k) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + k * to_stride), a[k]);
  }
}

}  // namespace
}  // namespace xncaps
