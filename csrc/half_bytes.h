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
// parts. Each half of that byte picks a table, in which the halves of the lanes' bytes look up the count.
struct InBytes {};
constexpr int kCodeParts = 2;
struct Code {
  uint8_t offset[kCodeParts];  // of the tables
};

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

inline Code code_of(uint8_t byte) {
  return {{static_cast<uint8_t>(byte << 4), static_cast<uint8_t>(byte & 0xf0)}};
}
inline void encode_bytes(const uint8_t* from, int64_t count, Code* to) {
  const __m256i high = _mm256_set1_epi8(static_cast<char>(0xf0));
  int64_t k = 0;
  for (; k + 32 <= count; k += 32) {
    const __m256i bytes = load_bytes(from + k);
    const __m256i a = _mm256_and_si256(_mm256_slli_epi16(bytes, 4), high);
    const __m256i b = _mm256_and_si256(bytes, high);
    const __m256i even = _mm256_unpacklo_epi8(a, b), odd = _mm256_unpackhi_epi8(a, b);
    store_bytes(to + k, _mm256_permute2x128_si256(even, odd, 0x20));
    store_bytes(to + k + 16, _mm256_permute2x128_si256(even, odd, 0x31));
  }
  for (; k < count; ++k) to[k] = code_of(from[k]);
}
// A part of the bytes of a column, and what of a code is compared with it.
inline Bytes part_of(Bytes column, int part) {
  const __m256i half = part == 0 ? column : _mm256_srli_epi16(column, 4);
  return _mm256_and_si256(half, _mm256_set1_epi8(15));
}
inline Bytes part_of(Code code, int part) {
  const uint8_t* table = &kHalfCounts.count[0][0] + code.offset[part];
  return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
}
inline void add_different(Bytes& sum, Bytes column, Bytes code) {
  sum = _mm256_add_epi8(sum, _mm256_shuffle_epi8(code, column));
  asm volatile("" : "+v"(sum));  // one by one: looking up several first takes too many registers
}

}  // namespace xncaps::XNCAPS_ISA
