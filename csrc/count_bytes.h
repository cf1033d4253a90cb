// The core of products of signs: counts the bits in which rows differ from columns, byte by byte, in tiles of
// a few rows and a few blocks of 32 columns.
#pragma once

#include "blocks.h"

namespace xncaps::XNCAPS_ISA {

// So many bytes of counts below 256, and of counts below 65,536.
constexpr int64_t kByteSteps = 255 / 8, kWordSteps = 65535 / 8;

constexpr int kMostBlocks = kRowBlocks > kTileBlocks ? kRowBlocks : kTileBlocks;
static_assert(kGroup % kTileRows == 0, "a group is whole tiles");

// Columns where they lie: blocks are `stride` bytes apart.
struct Columns {
  const uint8_t* bytes;
  int64_t stride;

  const uint8_t* at(int64_t k, int block) const { return bytes + block * stride + k * kBlock; }
  Bytes part(int64_t k, int part, int block) const {
    return part_of(load_bytes(at(k, block)), part);
  }
};

// words[row][block][lane] += bits in which a few bytes of rows differ from those of columns. Inlined, it
// would have to share the registers.
template <int Rows, int Blocks>
__attribute__((noinline)) void count_tile(const uint8_t* rows, int64_t row_stride, int64_t bytes,
                                          const Columns& columns, uint16_t* words) {
  Bytes sum[Rows][Blocks];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
    for (int b = 0; b < Blocks; ++b) sum[r][b] = set_bytes(0);
  }
  for (int64_t k = 0; k < bytes; ++k) {
#pragma GCC unroll 16
    for (int part = 0; part < kCodeParts; ++part) {
      Bytes column[Blocks];
#pragma GCC unroll 16
      for (int b = 0; b < Blocks; ++b) column[b] = columns.part(k, part, b);
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) {
        const Bytes code = part_of(rows[r * row_stride + k], part);
#pragma GCC unroll 16
        for (int b = 0; b < Blocks; ++b) add_different(sum[r][b], column[b], code);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
    for (int b = 0; b < Blocks; ++b) add_to_counts(words + (r * Blocks + b) * kBlock, sum[r][b]);
  }
}

// The same for any number of rows: as many as possible at once.
template <int Blocks, int Rows = kByteRows>
inline void count_tiles(int64_t count, const uint8_t* rows, int64_t row_stride, int64_t bytes,
                        const Columns& columns, uint16_t* words) {
  for (; count >= Rows; count -= Rows) {
    count_tile<Rows, Blocks>(rows, row_stride, bytes, columns, words);
    rows += Rows * row_stride;
    words += Rows * Blocks * kBlock;
  }
  if constexpr (Rows > 1) {
    if (count > 0) count_tiles<Blocks, Rows / 2>(count, rows, row_stride, bytes, columns, words);
  }
}

// What a core asks for: room for the codes of a row of a layer with so many blocks of columns, memory for a group of
// rows of so many bytes, and how many rows and blocks are counted at once.
inline int64_t code_room(InBytes, int64_t bytes, int64_t) { return bytes; }
inline int64_t bytes_of_work(InBytes, int64_t, int64_t) { return 0; }
inline int64_t rows_of_tile(InBytes) { return kTileRows; }
inline int64_t rows_of_group(InBytes) { return kGroup; }
inline int64_t most_blocks(InBytes) { return kMostBlocks; }
// How many of the last blocks are copied, side by side, where the very last is not whole and is filled up.
inline int64_t blocks_copied(InBytes, int64_t) { return 1; }
inline int64_t blocks_of_tile(InBytes, int64_t rows) { return rows == 1 ? kRowBlocks : kTileBlocks; }

// Codes of so many rows, made ready for being counted in so many blocks.
inline void prepare(InBytes, int64_t, int64_t, uint8_t*, int64_t, int64_t, char*) {}

// counts[row][block][lane] = bits in which the rows of a group differ from columns, of which byte k of a block
// is at columns + (block * bytes + k) * 32.
template <int Blocks>
inline void count_group(InBytes, int64_t count, const uint8_t* rows, int64_t row_stride, int64_t bytes,
                        const uint8_t* columns, int32_t* counts) {
  const int64_t stride = bytes * kBlock;
  alignas(64) uint16_t words[kGroup * Blocks * kBlock];
  for (int64_t begin = 0; begin < bytes; begin += kWordSteps) {
    const int64_t end = begin + kWordSteps < bytes ? begin + kWordSteps : bytes;
    std::memset(words, 0, count * Blocks * kBlock * sizeof(uint16_t));
    for (int64_t first = begin; first < end; first += kByteSteps) {
      const int64_t steps = first + kByteSteps < end ? kByteSteps : end - first;
      const Columns here = {columns + first * kBlock, stride};
      count_tiles<Blocks>(count, rows + first, row_stride, steps, here, words);
    }
    for (int64_t k = 0; k < count * Blocks * kBlock; ++k) {
      counts[k] = begin == 0 ? words[k] : counts[k] + words[k];
    }
  }
}

// As count_group, for any number of blocks; `work` is what bytes_of_work asks for.
template <int Blocks = kMostBlocks, class Core>
inline void count_any(Core core, int64_t count, int64_t blocks, const uint8_t* rows, int64_t row_stride,
                      int64_t bytes, const uint8_t* columns, int32_t* counts, char* work) {
  if (blocks == Blocks) {
    count_group<Blocks>(core, count, rows, row_stride, bytes, columns, counts);
  } else if constexpr (Blocks > 1) {
    count_any<Blocks - 1>(core, count, blocks, rows, row_stride, bytes, columns, counts, work);
  }
}

}  // namespace xncaps::XNCAPS_ISA
