// Bits of bytes compared by halves, where no instruction counts bits (AVX2, and AVX-512 without BITALG): each half
// of a byte looks its count up in a table of 16, 32 halves in one shuffle.
#pragma once

#include "lanes_x86.h"

namespace xncaps::XNCAPS_ISA {

// How many of 8 bits are the same, minus how many are not.
inline Bytes dot_of_bits(Bytes a, Bytes b) {
  const __m256i dots = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(4, 2, 2, 0, 2, 0, 0, -2, 2, 0, 0, -2, 0, -2, -2, -4));  // of each half byte
  const __m256i x = _mm256_xor_si256(a, b), low = _mm256_set1_epi8(15);
  return _mm256_add_epi8(
      _mm256_shuffle_epi8(dots, _mm256_and_si256(x, low)),
      _mm256_shuffle_epi8(dots, _mm256_and_si256(_mm256_srli_epi16(x, 4), low)));
}

// The core of the XNOR product: how many bits of each lane differ from those of a row's byte, in two
// parts. Each half of that byte picks a table, in which the halves of the lanes' bytes look up the count. That is for a
// row or two; several are counted in twos, looked up at once.
struct InBytes {};
struct InTwoRows : InBytes {};
constexpr int kCodeParts = 2, kByteRows = 2;
struct HalfCounts {
  alignas(64) uint8_t count[16][16];
  constexpr HalfCounts() : count() {
    for (int a = 0; a < 16; ++a) {
      for (int b = 0; b < 16; ++b) {
        const int x = a ^ b;
        count[a][b] = static_cast<uint8_t>((x & 1) + (x >> 1 & 1) + (x >> 2 & 1) + (x >> 3));
      }
    }
  }
};
constexpr HalfCounts kHalfCounts;

// A part of the bytes of a column, and the table that is looked up with it.
inline Bytes part_of(Bytes column, int part) {
  const __m256i half = part == 0 ? column : _mm256_srli_epi16(column, 4);
  return _mm256_and_si256(half, _mm256_set1_epi8(15));
}
// The table of so many bytes that is picked by a half byte.
inline Bytes load_table(const uint8_t* table) {
  return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
}
inline Bytes part_of(uint8_t code, int part) {
  return load_table(kHalfCounts.count[part == 0 ? code & 15 : code >> 4]);
}
inline void add_different(Bytes& sum, Bytes column, Bytes code) {
  sum = _mm256_add_epi8(sum, _mm256_shuffle_epi8(code, column));
  asm volatile("" : "+v"(sum));  // one by one: looking up several first takes too many registers
}

}  // namespace xncaps::XNCAPS_ISA
