// The core of products of signs for AVX-512 where no instruction counts bits: registers full of bits are added up as
// numbers whose digits lie in different registers.
//
// A slice has a bit for each of 512 columns: whether their signs differ from a row's at one place. Of three places
// the number that differ, 0 to 3, is two slices, one of ones and one of twos. Of the row they depend on three bits
// only, so that both are looked up in a table of eight, made once for many rows. Full adders, of two instructions,
// add them to what has been counted:
//
//     sum   = a ^ b ^ c                 a digit of the same weight
//     carry = at least two of a, b, c   worth twice as much
//
// A step of 48 places has 16 ones and 16 twos from the tables. They make 8 carries for the twos, then 12 for the
// fours, 6 for the eights, 3, 2, and one that is worth 64. Those of all steps are counted as a binary number counts:
// at each level one carry waits for the next.
//
// If there are 256 columns or less, a register has those of two rows.
#pragma once

#include <immintrin.h>

#include "count_two_rows.h"
#include "slices.h"

namespace xncaps::XNCAPS_ISA {

// What a register holds for each of so many rows that share it.
template <int Rows>
struct Share {
  using Bits = Slice;
};
template <>
struct Share<2> {
  using Bits = HalfSlice;
};

constexpr int kStepBytes = 6, kTriples = 16;  // three places each
constexpr int kDigits = 6;                    // of what is counted in a step: ones to thirty-twos
constexpr int kLevels = 7;                    // of carries that are worth 64 and more
constexpr int64_t kMostSteps = (1 << kLevels) - 1;
static_assert(kStepBytes * 8 * kMostSteps < 1 << (kDigits + kLevels), "no carry is lost");

// Up to these few blocks or rows are counted two rows at a time.
constexpr int kFewBlocks = 4, kFewRows = 3;
static_assert(kTileBlocks == kSliceBlocks && kFewBlocks <= kRowBlocks);
inline bool by_slices(int64_t rows, int64_t blocks) { return rows > kFewRows && blocks > kFewBlocks; }

// The truth table with the bits of one side the other way: Side is 4 for a, 2 for b, 1 for c.
constexpr int flipped(int truth, int side) {
  int out = 0;
  for (int k = 0; k < 8; ++k) out |= (truth >> (k ^ side) & 1) << k;
  return out;
}

// What 0 to 3 differing places look like, for every triple of a step and the eight ways in which the bits of a row
// can be. Entries are a slice, or half of one.
struct Tables {
  static constexpr int kEntry = sizeof(Slice);
  alignas(64) uint8_t ones[kTriples][8][kEntry];
  alignas(64) uint8_t twos[kTriples][8][kEntry];

  // Byte k of a block is at columns + (block * bytes + k) * 32; `first` is the first one of the step. What lies past
  // the last block or byte counts as zero.
  template <class V>
  void fill(const uint8_t* columns, int64_t bytes, int64_t blocks, int64_t first) {
    constexpr int kAll = kSliceBlocks * sizeof(V) / sizeof(Slice);
    const uint8_t* from = columns + first * kBlock;
    int64_t stride = bytes * kBlock;
    // Asks for the columns of the next step, which come from far away.
    for (int64_t block = 0; first + 2 * kStepBytes <= bytes && block < blocks; ++block) {
#pragma GCC unroll 4
      for (int k = 0; k < kStepBytes; k += 2) {
        __builtin_prefetch(from + block * stride + (kStepBytes + k) * kBlock);
      }
    }
    // Slices and steps that are not whole are filled up with zeros.
    alignas(64) uint8_t padded[kAll][kStepBytes][kBlock];
    const int64_t there = bytes - first < kStepBytes ? bytes - first : kStepBytes;
    if (blocks < kAll || there < kStepBytes) {
      std::memset(padded, 0, sizeof padded);
      for (int64_t m = 0; m < blocks; ++m) std::memcpy(padded[m], from + m * stride, there * kBlock);
      from = padded[0][0];
      stride = sizeof padded[0];
    }
    // As many at once as registers can hold.
    fill_half<V>(from, stride, 0);
    fill_half<V>(from + kStepBytes / 2 * kBlock, stride, kTriples / 2);
  }

 private:
  template <class V>
  void fill_half(const uint8_t* from, int64_t stride, int triple) {
    V slices[3 * kTriples / 2];
#pragma GCC unroll 4
    for (int k = 0; k < kStepBytes / 2; ++k) {
#pragma GCC unroll 8
      for (int m = 0; m < 8; ++m) take(from + k * kBlock, stride, m, slices[8 * k + m]);
      turn_bits(slices + 8 * k);
    }
#pragma GCC unroll 8
    for (int t = 0; t < kTriples / 2; ++t) {
      const V a = slices[3 * t], b = slices[3 * t + 1], c = slices[3 * t + 2];
      const V odd = of_three<kOdd>(a, b, c), even = ~odd;
#pragma GCC unroll 8
      for (int row = 0; row < 8; ++row) {
        store(ones[triple + t][row], row == 0 || row == 3 || row == 5 || row == 6 ? odd : even);
      }
      const V two[4] = {
          of_three<kMajority>(a, b, c),
          of_three<flipped(kMajority, 4)>(a, b, c),
          of_three<flipped(kMajority, 2)>(a, b, c),
          of_three<flipped(kMajority, 4 | 2)>(a, b, c),
      };
      // With all bits of a row the other way, n that differ become 3 - n: both digits are the other way.
#pragma GCC unroll 4
      for (int row = 0; row < 4; ++row) {
        store(twos[triple + t][row], two[row]);
        store(twos[triple + t][7 - row], ~two[row]);
      }
    }
  }

  // A byte of the m-th eighth of the columns.
  static void take(const uint8_t* from, int64_t stride, int m, HalfSlice& to) {
    to = load_bytes(from + m * stride);
  }
  static void take(const uint8_t* from, int64_t stride, int m, Slice& to) {
    const Bytes one = load_bytes(from + 2 * m * stride), other = load_bytes(from + (2 * m + 1) * stride);
    to = _mm512_inserti64x4(_mm512_castsi256_si512(one), other, 1);
  }
  static void store(uint8_t* to, Slice a) { _mm512_store_si512(to, a); }
  static void store(uint8_t* to, HalfSlice a) { store_bytes(to, a); }
};

// A triple of a row is the offset of its entry.
constexpr int kTripleBytes = 2;
static_assert(sizeof(Tables::ones[0]) <= 1 << 8 * kTripleBytes);

// The triples of one row, or of two whose halves share a register.
template <int Rows>
struct Triples {
  const uint8_t* row[Rows];

  int64_t offset(int r, int k) const {
    uint16_t offset;
    std::memcpy(&offset, row[r] + k * kTripleBytes, sizeof offset);
    return offset;
  }
  Slice load(const uint8_t (*entries)[Tables::kEntry], int k) const {
    const uint8_t* table = entries[0];
    if constexpr (Rows == 1) {
      return _mm512_load_si512(table + offset(0, k));
    } else {
      const Bytes one = load_bytes(table + offset(0, k));
      const Bytes other = load_bytes(table + offset(1, k));
      return _mm512_inserti64x4(_mm512_castsi256_si512(one), other, 1);
    }
  }
};

// What has been counted for the columns of a slice.
struct Tally {
  Slice digits[kDigits];
  struct {
    Slice sum, waiting;
  } levels[kLevels];
};

// The sums of a step under way. All is inlined: carries stay in registers.
template <int Rows>
struct Adder {
  struct Three {
    Slice a, b, c;
  };
  const Tables& tables;
  Triples<Rows> triples;
  Slice ones, twos, fours, eights;

  __attribute__((always_inline)) static Three add_six(Slice& sum, Three x, Three y) {
    const Slice a = add(sum, x.a, x.b), b = add(sum, x.c, y.a), c = add(sum, y.b, y.c);
    return {a, b, c};
  }
  // Adds 4 triples; the carries are worth 4.
  __attribute__((always_inline)) Three add_four(int first) {
    Slice one[4], two[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      one[k] = triples.load(tables.ones[first + k], first + k);
      two[k] = triples.load(tables.twos[first + k], first + k);
    }
    const Slice a = add(ones, one[0], one[1]), b = add(ones, one[2], one[3]);
    return add_six(twos, {two[0], two[1], a}, {two[2], two[3], b});
  }
  // The same for 8 and 16 triples, with carries of 8 and 16.
  __attribute__((always_inline)) Three add_eight(int first) {
    const Three x = add_four(first), y = add_four(first + 4);
    return add_six(fours, x, y);
  }
  __attribute__((always_inline)) Three add_sixteen() {
    const Three x = add_eight(0), y = add_eight(8);
    return add_six(eights, x, y);
  }
};

// Adds a step, of which there were so many before, to the tallies of `count` rows, whose triples lie `stride` apart.
template <int Rows>
__attribute__((noinline)) void add_step(const Tables& all, int64_t count, const uint8_t* rows,
                                        int64_t stride, int64_t before, Tally* tallies) {
  for (int64_t r = 0; r < count; r += Rows) {
    const uint8_t* row = rows + r * stride;
    Tally* tally = tallies + r / Rows;
    __builtin_prefetch(r + 4 * Rows < count ? row + 4 * Rows * stride : row);  // soon to be read
    const Tables* tables = &all;
    // Else the compiler makes addresses in advance, more of them than there are registers for.
    asm volatile("" : "+r"(tables));
    Triples<Rows> triples{{row}};
    if (Rows == 2) triples.row[Rows - 1] = r + 1 < count ? row + stride : row;
    Slice* digits = tally->digits;
    Adder<Rows> adder{*tables, triples, digits[0], digits[1], digits[2], digits[3]};
    const auto carries = adder.add_sixteen();
    digits[0] = adder.ones;
    digits[1] = adder.twos;
    digits[2] = adder.fours;
    digits[3] = adder.eights;
    const Slice one = add(digits[4], carries.a, carries.b), other = add(digits[4], carries.c, Slice{});
    Slice carry = add(digits[5], one, other);
    auto* level = tally->levels;
    for (int64_t k = before; k & 1; k >>= 1, ++level) carry = add(level->sum, level->waiting, carry);
    level->waiting = carry;
  }
}

// Reads what has been counted in so many steps: counts[row][block][lane], = or +=.
template <int Rows>
inline void read_tally(const Tally& tally, int64_t steps, int64_t count, int64_t blocks, bool first,
                       int32_t* counts) {
  Slice digits[16] = {};
  for (int k = 0; k < kDigits; ++k) digits[k] = tally.digits[k];
  Slice carry{};
  for (int k = 0; k < kLevels; ++k) {
    digits[kDigits + k] = tally.levels[k].sum;
    carry = add(digits[kDigits + k], steps >> k & 1 ? tally.levels[k].waiting : Slice{}, carry);
  }
  // Bytes of numbers now: in register m those of the m-th eighth of the columns.
  turn_bits(digits);
  turn_bits(digits + 8);
  constexpr int64_t kWidth = sizeof(Slice) / Rows;  // of such an eighth
  const uint8_t *low = reinterpret_cast<const uint8_t*>(digits), *high = low + 8 * sizeof(Slice);
  for (int64_t r = 0; r < count; ++r, low += kWidth, high += kWidth) {
    for (int64_t k = 0; k < blocks * kBlock; k += 16, counts += 16) {
      const int64_t at = k / kWidth * int64_t{sizeof(Slice)} + k % kWidth;
      const auto widen = [&](const uint8_t* from) {
        return _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(from + at)));
      };
      __m512i sum = _mm512_or_si512(widen(low), _mm512_slli_epi32(widen(high), 8));
      if (!first) sum = _mm512_add_epi32(sum, _mm512_loadu_si512(counts));
      _mm512_storeu_si512(counts, sum);
    }
  }
}

inline int64_t steps_for(int64_t bytes) { return (bytes + kStepBytes - 1) / kStepBytes; }

// Blocks of columns that are counted at once for so many rows.
inline int64_t blocks_of_tile(InSlices, int64_t rows) { return rows > kFewRows ? kSliceBlocks : kRowBlocks; }

// The triples of a row lie behind its codes. They are made for two steps at once.
constexpr int64_t kTwoSteps = 2 * kTriples * kTripleBytes;
inline int64_t triples_at(int64_t bytes) { return (bytes + 63) / 64 * 64; }
inline int64_t code_room(InSlices, int64_t bytes, int64_t blocks) {
  return blocks > kFewBlocks ? triples_at(bytes) + (steps_for(bytes) + 1) / 2 * kTwoSteps : bytes;
}

// How the three bits of a triple get to bits 6 to 8 of a word, where they are the offset of an entry: the two bytes
// that the word is made of, and how far it is shifted down.
struct Moves {
  alignas(64) uint8_t bytes[2 * kTriples][2];
  alignas(64) uint16_t down[2 * kTriples];
  constexpr Moves() : bytes(), down() {
    for (int t = 0; t < 2 * kTriples; ++t) {
      const int byte = 3 * t / 8, bit = 3 * t % 8;
      const bool within = bit + 3 <= 8;  // one byte, which is the upper one then: bits 8 to 15
      bytes[t][0] = static_cast<uint8_t>(byte);
      bytes[t][1] = static_cast<uint8_t>(within ? byte : byte + 1);
      down[t] = static_cast<uint16_t>(within ? bit + 2 : bit - 6);
    }
  }
};
constexpr Moves kMoves;
static_assert(Tables::kEntry == 1 << 6);

// Makes the triples of a row, where they will be looked at.
inline void make_triples(uint8_t* codes, int64_t bytes) {
  uint8_t* to = codes + triples_at(bytes);
  const __m512i order = _mm512_load_si512(kMoves.bytes), down = _mm512_load_si512(kMoves.down);
  for (int64_t k = 0; k < bytes; k += 2 * kStepBytes, to += kTwoSteps) {
    const int64_t left = bytes - k < 2 * kStepBytes ? bytes - k : 2 * kStepBytes;
    const __m128i some = _mm_maskz_loadu_epi8(static_cast<__mmask16>((1 << left) - 1), codes + k);
    const __m512i words = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(some), order);
    const __m512i mask = _mm512_set1_epi16(7 * Tables::kEntry);
    _mm512_storeu_si512(to, _mm512_and_si512(_mm512_srlv_epi16(words, down), mask));
  }
}

inline void prepare(InSlices, int64_t count, int64_t blocks, uint8_t* codes, int64_t stride, int64_t bytes, char*) {
  for (int64_t r = 0; by_slices(count, blocks) && r < count; ++r) make_triples(codes + r * stride, bytes);
}

// Memory for a group of so many rows.
inline int64_t bytes_of_work(InSlices, int64_t rows, int64_t) { return rows * int64_t{sizeof(Tally)}; }

template <int Rows>
inline void count_slices(int64_t count, int64_t blocks, const uint8_t* rows, int64_t row_stride, int64_t bytes,
                         const uint8_t* columns, int32_t* counts, Tally* tallies) {
  Tables tables;
  const int64_t all = steps_for(bytes);
  for (int64_t begin = 0; begin < all; begin += kMostSteps) {
    const int64_t steps = all - begin < kMostSteps ? all - begin : kMostSteps;
    std::memset(static_cast<void*>(tallies), 0, (count + Rows - 1) / Rows * sizeof(Tally));
    for (int64_t step = 0; step < steps; ++step) {
      const int64_t at = begin + step;
      tables.fill<typename Share<Rows>::Bits>(columns, bytes, blocks, at * kStepBytes);
      add_step<Rows>(tables, count, rows + triples_at(bytes) + at * kTriples * kTripleBytes, row_stride, step,
                     tallies);
    }
    for (int64_t r = 0; r < count; r += Rows) {
      read_tally<Rows>(tallies[r / Rows], steps, count - r < Rows ? count - r : Rows, blocks, begin == 0,
                       counts + r * blocks * kBlock);
    }
  }
}

inline void count_any(InSlices, int64_t count, int64_t blocks, const uint8_t* rows, int64_t row_stride,
                      int64_t bytes, const uint8_t* columns, int32_t* counts, char* work) {
  if (!by_slices(count, blocks)) {
    return count_any<kRowBlocks>(InTwoRows(), count, blocks, rows, row_stride, bytes, columns, counts, work);
  }
  const auto run = blocks <= kSliceBlocks / 2 ? &count_slices<2> : &count_slices<1>;
  run(count, blocks, rows, row_stride, bytes, columns, counts, reinterpret_cast<Tally*>(work));
}

}  // namespace xncaps::XNCAPS_ISA
