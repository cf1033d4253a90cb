// The core of products of signs for AVX-512 where no instruction counts bits: whole registers of bits are added up
// as numbers whose digits lie in different registers.
//
// A slice has a bit of each of 512 columns (or 256, in half a register): whether their signs differ from a row's at
// one place. Of three places the number that differ, 0 to 3, is two slices, one of ones and one of twos. It depends
// on three bits of the row only, so that both are looked up in a table of eight, made once for many rows. Full
// adders, which are two instructions, add them to what has been counted, digit by digit:
//
//     sum   = a ^ b ^ c                 has the weight of the three
//     carry = at least two of a, b, c   weighs twice as much
//
// Half as many carries come out of the ones as go in, and so on: a step of 48 places makes 24 carries for the twos
// (16 of them from the table), 12 for the fours, 6, 3, and in the end one that is worth 64. Those
// of all steps are counted like a binary number: at each level one carry waits for the next.
#pragma once

#include <immintrin.h>

#include "count_bytes.h"

namespace xncaps::XNCAPS_ISA {

constexpr int kStepBytes = 6, kTriples = 16;  // three places each
constexpr int kEntry = 64;                    // bytes in a table
constexpr int kDigits = 6;                    // of what is counted in a step: ones to thirty-twos
constexpr int kLevels = 7;                    // of carries that are worth 64 and more
constexpr int64_t kMostSteps = (1 << kLevels) - 1;
static_assert(kStepBytes * 8 * kMostSteps < 1 << (kDigits + kLevels), "the last carry is none");

template <class V>
constexpr int64_t kColumns = int64_t{8} * sizeof(V);

template <class V>
inline V load_slice(const void* p);
template <>
inline __m512i load_slice(const void* p) {
  return _mm512_load_si512(p);
}
template <>
inline __m256i load_slice(const void* p) {
  return _mm256_load_si256(static_cast<const __m256i*>(p));
}
inline void store_slice(void* p, __m512i a) { _mm512_store_si512(p, a); }
inline void store_slice(void* p, __m256i a) { _mm256_store_si256(static_cast<__m256i*>(p), a); }

// A function of three bits: bit 4 a + 2 b + c of Table.
template <int Table>
inline __m512i of_three(__m512i a, __m512i b, __m512i c) {
  return _mm512_ternarylogic_epi64(a, b, c, Table);
}
template <int Table>
inline __m256i of_three(__m256i a, __m256i b, __m256i c) {
  return _mm256_ternarylogic_epi64(a, b, c, Table);
}
constexpr int kSum = 0x96, kMajority = 0xe8, kSelect = 0xe4;  // kSelect: c ? a : b

// A full adder: the sum comes in place of the first bits, the carry is returned. It follows from the other two and
// the sum: if they are the same, that is it.
template <class V>
inline V add(V& a, V b, V c) {
  a = of_three<kSum>(a, b, c);
  return of_three<0xd4>(b, c, a);
}

// Exchanges bits of two registers: those of a above the mask with those of b below, Shift bits apart.
template <int Shift>
inline void exchange(__m512i& a, __m512i& b, int mask) {
  const __m512i below = _mm512_set1_epi8(static_cast<char>(mask));
  const __m512i up = _mm512_slli_epi16(b, Shift), down = _mm512_srli_epi16(a, Shift);
  a = of_three<kSelect>(a, up, below);
  b = of_three<kSelect>(down, b, below);
}
template <int Shift>
inline void exchange(__m256i& a, __m256i& b, int mask) {
  const __m256i below = _mm256_set1_epi8(static_cast<char>(mask));
  const __m256i up = _mm256_slli_epi16(b, Shift), down = _mm256_srli_epi16(a, Shift);
  a = of_three<kSelect>(a, up, below);
  b = of_three<kSelect>(down, b, below);
}

// Of eight registers of bytes, to[m] byte n bit k = from[k] byte n bit m: makes slices of the bytes of columns, and
// numbers of the slices of their digits.
template <class V>
inline void turn_bits(V* a) {
#pragma GCC unroll 16
  for (int k = 0; k < 4; ++k) exchange<4>(a[k], a[k + 4], 0x0f);
#pragma GCC unroll 16
  for (int k = 0; k < 4; ++k) exchange<2>(a[k + k / 2 * 2], a[k + k / 2 * 2 + 2], 0x33);
#pragma GCC unroll 16
  for (int k = 0; k < 4; ++k) exchange<1>(a[2 * k], a[2 * k + 1], 0x55);
}

// The bits of a row at three places, as the offset of an entry.
using Triple = uint16_t;

// What 0 to 3 differing places look like, for every triple of a step and the eight ways in which its bits can be
// in a row.
template <class V>
struct Tables {
  alignas(64) uint8_t ones[kTriples][8][kEntry];
  alignas(64) uint8_t twos[kTriples][8][kEntry];

  // Byte k of a block is at columns + (block * bytes + k) * 32. What lies past the last block or byte is zero.
  void fill(const uint8_t* columns, int64_t bytes, int64_t blocks, int64_t first) {
    constexpr int kAll = kColumns<V> / kBlock;
    const uint8_t* from = columns + first * kBlock;
    for (int64_t block = 0; block < blocks; ++block) {  // the next step's
      const uint8_t* next = from + (block * bytes + kStepBytes) * kBlock;
#pragma GCC unroll 4
      for (int k = 0; k < kStepBytes; k += 2) __builtin_prefetch(next + k * kBlock);
    }
    int64_t stride = bytes * kBlock;
    alignas(64) uint8_t padded[kAll][kStepBytes][kBlock];
    const int64_t there = bytes - first < kStepBytes ? bytes - first : kStepBytes;
    if (blocks < kAll || there < kStepBytes) {
      std::memset(padded, 0, sizeof padded);
      for (int64_t m = 0; m < blocks; ++m) std::memcpy(padded[m], from + m * stride, there * kBlock);
      from = padded[0][0];
      stride = kStepBytes * kBlock;
    }
    fill_half(from, stride, 0);
    fill_half(from + kStepBytes / 2 * kBlock, stride, kTriples / 2);
  }

 private:
  // As many triples as registers can hold.
  void fill_half(const uint8_t* from, int64_t stride, int triple) {
    V slices[3 * kTriples / 2];
#pragma GCC unroll 4
    for (int k = 0; k < kStepBytes / 2; ++k) {
#pragma GCC unroll 8
      for (int m = 0; m < 8; ++m) take(from + k * kBlock, stride, m, slices[8 * k + m]);
      turn_bits(slices + 8 * k);
    }
    const V all = ~V{};
#pragma GCC unroll 8
    for (int t = 0; t < kTriples / 2; ++t) {
      const V a = slices[3 * t], b = slices[3 * t + 1], c = slices[3 * t + 2];
      const V odd = of_three<kSum>(a, b, c), even = of_three<kSum ^ 0xff>(a, b, c);
#pragma GCC unroll 8
      for (int row = 0; row < 8; ++row) {
        const bool flip = row == 1 || row == 2 || row == 4 || row == 7;
        store_slice(ones[triple + t][row], flip ? even : odd);
      }
      // With all bits of a row the other way, three less as many differ: all digits are the other way.
      const V two[4] = {of_three<kMajority>(a, b, c), of_three<0x8e>(a, b, c), of_three<0xb2>(a, b, c),
                        of_three<0x2b>(a, b, c)};
#pragma GCC unroll 4
      for (int row = 0; row < 4; ++row) {
        store_slice(twos[triple + t][row], two[row]);
        store_slice(twos[triple + t][7 - row], two[row] ^ all);
      }
    }
  }

  // A byte of the m-th part of the columns.
  static void take(const uint8_t* from, int64_t stride, int m, __m256i& to) {
    to = load_bytes(from + m * stride);
  }
  static void take(const uint8_t* from, int64_t stride, int m, __m512i& to) {
    const __m256i one = load_bytes(from + 2 * m * stride), other = load_bytes(from + (2 * m + 1) * stride);
    to = _mm512_inserti64x4(_mm512_castsi256_si512(one), other, 1);
  }
};

// What has been counted for one row, digit by digit.
template <class V>
struct Tally {
  alignas(64) uint8_t digits[kDigits][sizeof(V)];
};
// Of one row and level: a digit, and the carry that waits.
template <class V>
struct Level {
  alignas(64) uint8_t sum[sizeof(V)], waiting[sizeof(V)];
};

// The sums of a step under way.
template <class V>
struct Adder {
  struct Three {
    V a, b, c;
  };
  const Tables<V>* tables;
  const Triple* codes;
  V ones, twos, fours, eights;

  static Three add_six(V& sum, Three x, Three y) {
    const V a = add(sum, x.a, x.b), b = add(sum, x.c, y.a), c = add(sum, y.b, y.c);
    return {a, b, c};
  }
  // Adds 4 triples from here on; the carries are worth 4 each.
  inline __attribute__((always_inline)) Three add_four(int first) {
    V one[4], two[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const int64_t offset = codes[first + k];
      one[k] = load_slice<V>(&tables->ones[first + k][0][0] + offset);
      two[k] = load_slice<V>(&tables->twos[first + k][0][0] + offset);
    }
    const V a = add(ones, one[0], one[1]), b = add(ones, one[2], one[3]);
    return add_six(twos, {two[0], two[1], a}, {two[2], two[3], b});
  }
  // The same for 8 and 16 triples, with carries of 8 and 16.
  inline __attribute__((always_inline)) Three add_eight(int first) {
    const Three x = add_four(first), y = add_four(first + 4);
    return add_six(fours, x, y);
  }
  inline __attribute__((always_inline)) Three add_sixteen() {
    const Three x = add_eight(0), y = add_eight(8);
    return add_six(eights, x, y);
  }
};

// Adds a step, of which there were so many before, to the tallies of rows. `codes` are those of the step in the
// first row.
template <class V>
__attribute__((noinline)) void add_step(const Tables<V>& tables, const Triple* codes, int64_t stride,
                                        int64_t rows, int64_t before, Tally<V>* tallies, Level<V>* levels) {
  for (int64_t r = 0; r < rows; ++r, codes += stride) {
    __builtin_prefetch(codes + 4 * stride);
    const Tables<V>* here = &tables;
    asm volatile("" : "+r"(here));  // else addresses are made in advance, more of them than there are registers for
    auto& digits = tallies[r].digits;
    const auto digit = [&](int k) { return load_slice<V>(digits[k]); };
    Adder<V> adder{here, codes, digit(0), digit(1), digit(2), digit(3)};
    const auto carries = adder.add_sixteen();
    store_slice(digits[0], adder.ones);
    store_slice(digits[1], adder.twos);
    store_slice(digits[2], adder.fours);
    store_slice(digits[3], adder.eights);
    V sixteens = digit(4), thirtytwos = digit(5);
    const V one = add(sixteens, carries.a, carries.b), other = add(sixteens, carries.c, V{});
    V carry = add(thirtytwos, one, other);
    store_slice(digits[4], sixteens);
    store_slice(digits[5], thirtytwos);
    Level<V>* level = levels + r * kLevels;
    for (int64_t k = before; k & 1; k >>= 1, ++level) {
      V sum = load_slice<V>(level->sum);
      carry = add(sum, load_slice<V>(level->waiting), carry);
      store_slice(level->sum, sum);
    }
    store_slice(level->waiting, carry);
  }
}

// Writes or adds what has been counted in so many steps: counts[block][lane].
template <class V>
inline void read_tally(const Tally<V>& tally, const Level<V>* levels, int64_t steps, int64_t blocks,
                       bool first, int32_t* counts) {
  V digits[16];
  for (int k = 0; k < kDigits; ++k) digits[k] = load_slice<V>(tally.digits[k]);
  V carry{};
  for (int k = 0; k < kLevels; ++k) {
    V sum = load_slice<V>(levels[k].sum);
    carry = add(sum, steps >> k & 1 ? load_slice<V>(levels[k].waiting) : V{}, carry);
    digits[kDigits + k] = sum;
  }
  for (int k = kDigits + kLevels; k < 16; ++k) digits[k] = V{};
  // Byte n of register m is that of column n of the m-th part of the columns.
  turn_bits(digits);
  turn_bits(digits + 8);
  alignas(64) uint8_t low[kColumns<V>], high[kColumns<V>];
  for (int m = 0; m < 8; ++m) {
    store_slice(low + m * sizeof(V), digits[m]);
    store_slice(high + m * sizeof(V), digits[8 + m]);
  }
  for (int64_t k = 0; k < blocks * kBlock; k += 16) {
    const auto widen = [&](const uint8_t* from) {
      return _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(from + k)));
    };
    __m512i count = _mm512_or_si512(widen(low), _mm512_slli_epi32(widen(high), 8));
    if (!first) count = _mm512_add_epi32(count, _mm512_loadu_si512(counts + k));
    _mm512_storeu_si512(counts + k, count);
  }
}

// Columns that are worth a table, and rows.
constexpr int kFewBlocks = 3, kFewRows = 3;

inline int64_t steps_for(int64_t bytes) { return (bytes + kStepBytes - 1) / kStepBytes; }

// The codes of triples lie behind those of bytes.
inline int64_t code_room(InSlices, int64_t bytes) {
  static_assert(sizeof(Triple) == sizeof(Code));
  return bytes + steps_for(bytes) * kTriples;
}
inline const Triple* triples_of(const Code* codes, int64_t bytes) {
  return reinterpret_cast<const Triple*>(codes + bytes);
}
inline void prepare(InSlices, int64_t count, Code* codes, int64_t bytes) {
  if (count <= kFewRows) return;
  Code* to = codes + bytes;
  for (int64_t k = 0; k < bytes; k += kStepBytes, to += kTriples) {
    // The higher half of each byte of a code has four bits of the row.
    uint64_t four = 0;
    uint32_t two = 0;
    if (bytes - k >= kStepBytes) {
      std::memcpy(&four, codes + k, sizeof four);
      std::memcpy(&two, codes + k + 4, sizeof two);
    } else {
      Code last[kStepBytes] = {};
      std::memcpy(last, codes + k, (bytes - k) * sizeof(Code));
      std::memcpy(&four, last, sizeof four);
      std::memcpy(&two, last + 4, sizeof two);
    }
    const uint64_t bits =
        _pext_u64(four, 0xf0f0f0f0f0f0f0f0) | uint64_t{_pext_u32(two, 0xf0f0f0f0)} << 32;
#pragma GCC unroll 4
    for (int t = 0; t < kTriples / 4; ++t) {
      const uint64_t triples = _pdep_u64(bits >> 12 * t, 7 * kEntry * 0x0001000100010001);
      std::memcpy(to + 4 * t, &triples, sizeof triples);
    }
  }
}

// Columns that a tile of so many rows has.
inline int64_t blocks_of_tile(InSlices, int64_t rows) { return rows <= kFewRows ? kRowBlocks : kTileBlocks; }

template <class V>
__attribute__((noinline)) void count_slices(int64_t count, int64_t blocks, const Code* rows,
                                            int64_t row_stride, int64_t bytes, const uint8_t* columns,
                                            int32_t* counts) {
  Tables<V> tables;
  Tally<V> tallies[kGroup];
  Level<V> levels[kGroup * kLevels];
  const int64_t all = steps_for(bytes);
  for (int64_t begin = 0; begin < all; begin += kMostSteps) {
    const int64_t steps = all - begin < kMostSteps ? all - begin : kMostSteps;
    std::memset(tallies, 0, count * sizeof(Tally<V>));
    std::memset(levels, 0, count * kLevels * sizeof(Level<V>));
    for (int64_t step = 0; step < steps; ++step) {
      tables.fill(columns, bytes, blocks, (begin + step) * kStepBytes);
      add_step(tables, triples_of(rows, bytes) + (begin + step) * kTriples, row_stride, count, step,
               tallies, levels);
    }
    for (int64_t r = 0; r < count; ++r) {
      read_tally(tallies[r], levels + r * kLevels, steps, blocks, begin == 0, counts + r * blocks * kBlock);
    }
  }
}

// counts[row][block][lane] as in count_bytes.h, which counts few rows and few columns.
template <int Blocks>
inline void count_group(InSlices, int64_t count, const Code* rows, int64_t row_stride, int64_t bytes,
                        const uint8_t* columns, int32_t* counts) {
  constexpr int64_t kHalf = kColumns<__m256i> / kBlock;
  if (Blocks <= kRowBlocks && (Blocks <= kFewBlocks || count <= kFewRows)) {
    count_group<Blocks <= kRowBlocks ? Blocks : 1>(InBytes(), count, rows, row_stride, bytes, columns,
                                                   counts);
  } else if (Blocks <= kHalf) {
    count_slices<__m256i>(count, Blocks, rows, row_stride, bytes, columns, counts);
  } else {
    count_slices<__m512i>(count, Blocks, rows, row_stride, bytes, columns, counts);
  }
}

}  // namespace xncaps::XNCAPS_ISA
