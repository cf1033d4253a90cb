// The core of products of signs where bits are looked up by halves of bytes (AVX2): two rows at a time.
//
// The halves of a byte of two rows pick one of 256 tables. In it a half byte of a column finds how many of its bits
// differ from those of the first row, and above that, in the upper half of the same byte, how many from those of the
// second: one shuffle for both. Three such numbers, of up to 4, fit into half a byte:
//
//     s      = table 0 [half 0] + table 1 [half 1] + table 2 [half 2]
//     lower += s & 15            byte by byte: the first row
//     upper += s >> 4            in words of two lanes: the second row, and 16 times the upper lane's first
#pragma once

#include "count_bytes.h"

namespace xncaps::XNCAPS_ISA {

struct TwoCounts {
  alignas(64) uint8_t count[256][16];
  constexpr TwoCounts() : count() {
    for (int rows = 0; rows < 256; ++rows) {
      for (int half = 0; half < 16; ++half) {
        count[rows][half] = static_cast<uint8_t>(kHalfCounts.count[rows & 15][half] |
                                                 kHalfCounts.count[rows >> 4][half] << 4);
      }
    }
  }
};
constexpr TwoCounts kTwoCounts;

// So many bytes have counts below 256, and three bytes are two steps of the sum above.
constexpr int kTwoRowBytes = 30;
// As many bytes of them as have counts below 65,536.
constexpr int64_t kTwoRowWords = 65535 / 8 / kTwoRowBytes * kTwoRowBytes;
static_assert(kGroup % 2 == 0 && kTileRows % 2 == 0, "no two rows are torn apart");

// A few bytes of columns, taken apart once for many rows: the lower halves, and the upper ones.
template <int Blocks>
struct TakenApart {
  alignas(64) uint8_t halves[2][kTwoRowBytes][Blocks][kBlock];

  void take(const Columns& columns, int64_t count) {
    for (int64_t k = 0; k < count; ++k) {
#pragma GCC unroll 4
      for (int b = 0; b < Blocks; ++b) {
        const Bytes column = load_bytes(columns.at(k, b));
#pragma GCC unroll 2
        for (int part = 0; part < 2; ++part) store_bytes(halves[part][k][b], part_of(column, part));
      }
    }
  }
};

// Adds so many half bytes (three, or one that is left) of two rows to their sums. Lines of assembler keep these where
// they are.
template <int Halves, int Blocks>
__attribute__((always_inline)) inline void add_halves(const uint8_t* codes, const uint8_t (*columns)[Blocks][kBlock],
                                                      Bytes (&lower)[Blocks], Bytes (&upper)[Blocks]) {
  Bytes tables[Halves];
#pragma GCC unroll 4
  for (int k = 0; k < Halves; ++k) tables[k] = load_table(kTwoCounts.count[codes[k]]);
#pragma GCC unroll 4
  for (int b = 0; b < Blocks; ++b) {
    Bytes s = _mm256_shuffle_epi8(tables[0], load_bytes(columns[0][b]));
#pragma GCC unroll 4
    for (int k = 1; k < Halves; ++k) {
      s = add_bytes(s, _mm256_shuffle_epi8(tables[k], load_bytes(columns[k][b])));
    }
    asm("vpaddb %1, %0, %0" : "+x"(lower[b]) : "x"(_mm256_and_si256(s, set_bytes(15))));
    asm("vpaddw %1, %0, %0" : "+x"(upper[b]) : "x"(_mm256_srli_epi16(s, 4)));
  }
}

// The codes of a few bytes of two rows: of their lower halves, and of the upper ones.
struct TwoCodes {
  alignas(32) uint8_t codes[2][kBlock];

  // Reads whole vectors: rows lie far enough apart.
  TwoCodes(const uint8_t* row, const uint8_t* next) {
    const Bytes a = load_bytes(row), b = load_bytes(next), low = set_bytes(15);
    const Bytes up = _mm256_slli_epi16(_mm256_and_si256(b, low), 4);
    const Bytes down = _mm256_and_si256(_mm256_srli_epi16(a, 4), low);
    store_bytes(codes[0], _mm256_or_si256(_mm256_and_si256(a, low), up));
    store_bytes(codes[1], _mm256_or_si256(_mm256_andnot_si256(low, b), down));
  }
};
static_assert(kTwoRowBytes <= kBlock);

// words[row][block][lane] += bits in which a few bytes of two rows differ from those of columns. Inlined, it
// would have to share the registers.
template <int Blocks>
__attribute__((noinline)) void count_two_rows(const uint8_t* row, const uint8_t* next, int64_t bytes,
                                              const TakenApart<Blocks>& columns, uint16_t* words) {
  const TwoCodes two(row, next);
  Bytes lower[Blocks], upper[Blocks];
#pragma GCC unroll 4
  for (int b = 0; b < Blocks; ++b) lower[b] = upper[b] = set_bytes(0);
  for (int part = 0; part < 2; ++part) {
    const uint8_t* codes = two.codes[part];
    const auto* halves = columns.halves[part];
    int64_t k = 0;
    for (; k + 3 <= bytes; k += 3) add_halves<3>(codes + k, halves + k, lower, upper);
    for (; k < bytes; ++k) add_halves<1>(codes + k, halves + k, lower, upper);
  }
#pragma GCC unroll 4
  for (int b = 0; b < Blocks; ++b) {
    // In a word of `upper`: the second row's counts of both lanes, and 16 times the first row's of the upper lane.
    const Bytes of_upper_lanes = _mm256_andnot_si256(_mm256_set1_epi16(255), lower[b]);
    add_to_counts(words + b * kBlock, lower[b]);
    add_to_counts(words + (Blocks + b) * kBlock, _mm256_sub_epi16(upper[b], _mm256_srli_epi16(of_upper_lanes, 4)));
  }
}

// counts[row][block][lane] as in count_bytes.h, which counts a row or two by themselves.
template <int Blocks>
inline void count_group(InTwoRows, int64_t count, const uint8_t* rows, int64_t row_stride, int64_t bytes,
                        const uint8_t* columns, int32_t* counts) {
  if (count <= kByteRows) return count_group<Blocks>(InBytes(), count, rows, row_stride, bytes, columns, counts);
  alignas(64) uint16_t words[kGroup * Blocks * kBlock];
  TakenApart<Blocks> apart;
  for (int64_t begin = 0; begin < bytes; begin += kTwoRowWords) {
    const int64_t end = begin + kTwoRowWords < bytes ? begin + kTwoRowWords : bytes;
    std::memset(words, 0, (count + 1) / 2 * 2 * Blocks * kBlock * sizeof(uint16_t));
    for (int64_t at = begin; at < end; at += kTwoRowBytes) {
      const int64_t some = end - at < kTwoRowBytes ? end - at : kTwoRowBytes;
      const Columns here = {columns + at * kBlock, bytes * kBlock};
      apart.take(here, some);
      for (int64_t k = some; k < some + kTwoRowBytes && at + k < end; ++k) {
        for (int b = 0; b < Blocks; ++b) __builtin_prefetch(here.at(k, b));
      }
      for (int64_t r = 0; r < count; r += 2) {
        const uint8_t* row = rows + r * row_stride + at;
        // A last row that is alone is its own neighbour.
        count_two_rows(row, r + 1 < count ? row + row_stride : row, some, apart, words + r * Blocks * kBlock);
      }
    }
    for (int64_t k = 0; k < count * Blocks * kBlock; ++k) {
      counts[k] = begin == 0 ? words[k] : counts[k] + words[k];
    }
  }
}

}  // namespace xncaps::XNCAPS_ISA
