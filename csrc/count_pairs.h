// The core of products of signs for AVX-512: counts the bits in which rows differ from columns, two bytes at a
// time, with carry-save adders.
//
// For each lane and each of the 8 places in a byte, `ones` is a bit that has been counted already but not added:
// with the two bits of a pair of bytes it makes a sum of 0 to 3, whose lower bit is the new `ones` and whose upper
// bit, the carry, is worth two. Only carries are counted with vpopcntb and added, so that a pair takes
// five instructions instead of six: of columns c1, c2 and row r1, r2
//
//     different = c1 ^ r1
//     sum       = ones ^ (c1 ^ c2) ^ (r1 ^ r2)     the brackets are made once for many rows and columns
//     carry     = what ones, sum and different say about the second pair of bits
//     twos     += popcount(carry)
//     ones      = sum
#pragma once

#include "count_bytes.h"

namespace xncaps::XNCAPS_ISA {

// Lanes of a register of bytes: two blocks.
constexpr int kByteLanes = 2 * kBlock;

// Pairs whose carries a byte can count, 8 for each; bytes whose bits a word can count.
constexpr int kPairs = 255 / 8, kPairBytes = 2 * kPairs;
constexpr int64_t kWordBytes = 65535 / 8 / kPairBytes * kPairBytes;

// What has been counted for one row and the columns of a register.
struct alignas(64) Tally {
  uint8_t ones[kByteLanes];
  uint16_t even[kBlock], odd[kBlock];  // carries in even and odd lanes
};

// Of every pair of bytes the first one, and both xored, lane by lane.
template <int Registers>
struct ColumnPairs {
  alignas(64) uint8_t first[kPairs][Registers][kByteLanes];
  alignas(64) uint8_t both[kPairs][Registers][kByteLanes];

  // Blocks lie `stride` apart. Lanes past the last block are counted like others, and thrown away.
  template <int Blocks>
  void take(const uint8_t* columns, int64_t stride, int64_t bytes) {
    for (int64_t k = 0; k < bytes; k += 2) {
      const __mmask64 there = k + 1 < bytes ? ~uint64_t{0} : ~uint32_t{0};
#pragma GCC unroll 16
      for (int q = 0; q < Registers; ++q) {
        const uint8_t* at = columns + 2 * q * stride + k * kBlock;
        const uint8_t* next = 2 * q + 1 < Blocks ? at + stride : at;
        const __m512i a = _mm512_maskz_loadu_epi8(there, at);  // both bytes of a block
        const __m512i b = _mm512_maskz_loadu_epi8(there, next);
        const __m512i one = _mm512_shuffle_i64x2(a, b, 0x44);
        const __m512i other = _mm512_shuffle_i64x2(a, b, 0xee);
        _mm512_store_si512(first[k / 2][q], one);
        _mm512_store_si512(both[k / 2][q], _mm512_xor_si512(one, other));
      }
    }
  }
};

// The step above. Without the lines of assembler, which are empty, the compiler moves sums to and fro.
inline void add_pair(__m512i& ones, __m512i& twos, __m512i first, __m512i both, __m512i row_first,
                     __m512i row_both) {
  const __m512i different = _mm512_xor_si512(first, row_first);
  __m512i before = ones;
  asm("" : "+v"(before));
  ones = _mm512_ternarylogic_epi32(ones, both, row_both, 0x96);  // a ^ b ^ c
  asm("" : "+v"(ones));
  // Where the second bits differ, or not, follows from all three: at least two of before, first and second.
  const __m512i carry = _mm512_ternarylogic_epi32(different, before, ones, 0xd4);
  asm("vpaddb %1, %0, %0" : "+v"(twos) : "v"(_mm512_popcnt_epi8(carry)));
}

// Adds so many pairs to the tallies of a few rows. Inlined, it would have to share the registers.
template <int Rows, int Registers>
__attribute__((noinline)) void count_tile(const uint8_t* rows, int64_t row_stride, int64_t pairs,
                                          const ColumnPairs<Registers>& columns, Tally* tallies) {
  __m512i ones[Rows][Registers], twos[Rows][Registers];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
    for (int q = 0; q < Registers; ++q) {
      ones[r][q] = _mm512_load_si512(tallies[r * Registers + q].ones);
      twos[r][q] = _mm512_setzero_si512();
    }
  }
  for (int64_t k = 0; k < pairs; ++k) {
    __m512i first[Registers], both[Registers];
#pragma GCC unroll 16
    for (int q = 0; q < Registers; ++q) {
      first[q] = _mm512_load_si512(columns.first[k][q]);
      both[q] = _mm512_load_si512(columns.both[k][q]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const __m512i row_first = _mm512_set1_epi8(static_cast<char>(rows[r * row_stride + 2 * k]));
      const __m512i row_both = _mm512_set1_epi8(static_cast<char>(rows[r * row_stride + 2 * k + 1]));
#pragma GCC unroll 16
      for (int q = 0; q < Registers; ++q) {
        add_pair(ones[r][q], twos[r][q], first[q], both[q], row_first, row_both);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
    for (int q = 0; q < Registers; ++q) {
      Tally& tally = tallies[r * Registers + q];
      _mm512_store_si512(tally.ones, ones[r][q]);
      const __m512i even = _mm512_and_si512(twos[r][q], _mm512_set1_epi16(255));
      const __m512i odd = _mm512_srli_epi16(twos[r][q], 8);
      _mm512_store_si512(tally.even, _mm512_add_epi16(_mm512_load_si512(tally.even), even));
      _mm512_store_si512(tally.odd, _mm512_add_epi16(_mm512_load_si512(tally.odd), odd));
    }
  }
}

// The same for any number of rows: as many as possible at once.
template <int Registers, int Rows = kTileRows>
inline void count_tiles(int64_t count, const uint8_t* rows, int64_t row_stride, int64_t pairs,
                        const ColumnPairs<Registers>& columns, Tally* tallies) {
  for (; count >= Rows; count -= Rows, rows += Rows * row_stride, tallies += Rows * Registers) {
    count_tile<Rows, Registers>(rows, row_stride, pairs, columns, tallies);
  }
  if constexpr (Rows > 1) {
    if (count > 0) count_tiles<Registers, Rows / 2>(count, rows, row_stride, pairs, columns, tallies);
  }
}

// What a tally says: counts[lane] of the first so many lanes, = or +=.
inline void read_tally(const Tally& tally, int64_t lanes, bool first, int32_t* counts) {
  alignas(64) uint16_t words[kByteLanes];
  const __m512i ones = _mm512_popcnt_epi8(_mm512_load_si512(tally.ones));
  const auto total = [](__m512i carries, __m512i rest) {
    return _mm512_add_epi16(_mm512_add_epi16(carries, carries), rest);
  };
  const __m512i even = total(_mm512_load_si512(tally.even),
                             _mm512_and_si512(ones, _mm512_set1_epi16(255)));
  const __m512i odd = total(_mm512_load_si512(tally.odd), _mm512_srli_epi16(ones, 8));
  // Each quarter of a register has the words of 16 lanes.
  const __m512i low = _mm512_unpacklo_epi16(even, odd), high = _mm512_unpackhi_epi16(even, odd);
  const __m512i from_low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  const __m512i from_high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  _mm512_store_si512(words, _mm512_permutex2var_epi64(low, from_low, high));
  _mm512_store_si512(words + kBlock, _mm512_permutex2var_epi64(low, from_high, high));
  for (int64_t lane = 0; lane < lanes; ++lane) {
    counts[lane] = first ? words[lane] : counts[lane] + words[lane];
  }
}

// Codes of rows that are counted together: the first byte of every pair, and both xored. A last byte
// that is alone has a zero beside it. Whole registers are written; rows lie far enough apart.
inline void prepare(InPairs, int64_t count, int64_t, uint8_t* codes, int64_t stride, int64_t bytes, char*) {
  if (count == 1) return;
  for (int64_t r = 0; r < count; ++r, codes += stride) {
    for (int64_t k = 0; k < bytes; k += kByteLanes) {
      const int64_t left = bytes - k;
      const __mmask64 there = left < kByteLanes ? (uint64_t{1} << left) - 1 : ~uint64_t{0};
      const __m512i words = _mm512_maskz_loadu_epi8(there, codes + k);
      _mm512_storeu_si512(codes + k, _mm512_xor_si512(words, _mm512_slli_epi16(words, 8)));
    }
  }
}

// counts[row][block][lane] as in count_bytes.h, which counts a single row.
template <int Blocks>
inline void count_group(InPairs, int64_t count, const uint8_t* rows, int64_t row_stride,
                        int64_t bytes, const uint8_t* columns, int32_t* counts) {
  if (count == 1) {
    return count_group<Blocks>(InBytes(), count, rows, row_stride, bytes, columns, counts);
  }
  constexpr int kRegisters = (Blocks + 1) / 2;
  Tally tallies[kGroup * kRegisters];
  ColumnPairs<kRegisters> pairs;
  for (int64_t begin = 0; begin < bytes; begin += kWordBytes) {
    const int64_t end = begin + kWordBytes < bytes ? begin + kWordBytes : bytes;
    std::memset(tallies, 0, count * kRegisters * sizeof(Tally));
    for (int64_t at = begin; at < end; at += kPairBytes) {
      const int64_t some = end - at < kPairBytes ? end - at : kPairBytes;
      pairs.template take<Blocks>(columns + at * kBlock, bytes * kBlock, some);
      count_tiles<kRegisters>(count, rows + at, row_stride, (some + 1) / 2, pairs, tallies);
    }
    for (int64_t r = 0; r < count; ++r) {
      for (int q = 0; q < kRegisters; ++q) {
        const int64_t lane = q * kByteLanes, left = Blocks * kBlock - lane;
        read_tally(tallies[r * kRegisters + q], left < kByteLanes ? left : kByteLanes, begin == 0,
                   counts + r * Blocks * kBlock + lane);
      }
    }
  }
}

}  // namespace xncaps::XNCAPS_ISA
