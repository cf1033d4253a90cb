// Products of signs: the core that linear layer and convolution share, which counts the bits in which
// rows differ from columns, and the linear layer. Columns are lanes: 32 outputs.
#pragma once

#include "blocks.h"

namespace xncaps::XNCAPS_ISA {

// So many bytes of counts below 256, and of counts below 65,536.
constexpr int64_t kByteSteps = 255 / 8, kWordSteps = 65535 / 8;

// Rows that are counted together: what is read and counted for a few bytes of them stays in the
// smallest cache.
constexpr int kGroup = 48, kMostBlocks = kRowBlocks > kTileBlocks ? kRowBlocks : kTileBlocks;
static_assert(kGroup % kTileRows == 0, "a group is whole tiles");

// Columns where they lie: byte k of a block is at bytes + block * stride + offsets[k].
struct Columns {
  const uint8_t* bytes;
  int64_t stride;
  const int64_t* offsets;

  Bytes part(int64_t k, int part, int block) const {
    return part_of(load_bytes(bytes + block * stride + offsets[k]), part);
  }
};

// A few bytes of columns, taken apart once for many rows.
template <int Blocks>
struct TakenApart {
  alignas(64) uint8_t bytes[kByteSteps][kCodeParts][Blocks][kBlock];

  void take(const Columns& columns, int64_t count) {
    for (int64_t k = 0; k < count; ++k) {
#pragma GCC unroll 16
      for (int part = 0; part < kCodeParts; ++part) {
#pragma GCC unroll 16
        for (int b = 0; b < Blocks; ++b) store_bytes(bytes[k][part][b], columns.part(k, part, b));
      }
    }
  }
  Bytes part(int64_t k, int part, int block) const { return load_bytes(bytes[k][part][block]); }
};

// words[row][block][lane] += bits in which a few bytes of rows differ from those of columns. Inlined, it
// would have to share the registers.
template <int Rows, int Blocks, class From>
__attribute__((noinline)) void count_tile(const Code* rows, int64_t row_stride, int64_t bytes, const From& columns,
                       uint16_t* words) {
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
template <int Blocks, int Rows = kTileRows, class From>
inline void count_tiles(int64_t count, const Code* rows, int64_t row_stride, int64_t bytes,
                        const From& columns, uint16_t* words) {
  for (; count >= Rows; count -= Rows) {
    count_tile<Rows, Blocks>(rows, row_stride, bytes, columns, words);
    rows += Rows * row_stride;
    words += Rows * Blocks * kBlock;
  }
  if constexpr (Rows > 1) {
    constexpr int kFewer = Rows > 4 ? 4 : Rows / 2;
    if (count > 0) count_tiles<Blocks, kFewer>(count, rows, row_stride, bytes, columns, words);
  }
}

// counts[row][block][lane] = bits in which the rows of a group differ from columns.
template <int Blocks>
inline void count_group(int64_t count, const Code* rows, int64_t row_stride, int64_t bytes,
                        const Columns& columns, int32_t* counts) {
  alignas(64) uint16_t words[kGroup * Blocks * kBlock];
  TakenApart<Blocks> apart;
  for (int64_t begin = 0; begin < bytes; begin += kWordSteps) {
    const int64_t end = begin + kWordSteps < bytes ? begin + kWordSteps : bytes;
    std::memset(words, 0, count * Blocks * kBlock * sizeof(uint16_t));
    for (int64_t first = begin; first < end; first += kByteSteps) {
      const int64_t steps = first + kByteSteps < end ? kByteSteps : end - first;
      const Columns here = {columns.bytes, columns.stride, columns.offsets + first};
      if (kCodeParts > 1 && Blocks <= kTileBlocks && count > kTileRows) {
        apart.take(here, steps);
        for (int64_t k = first + steps; k < first + steps + kByteSteps && k < end; ++k) {
          for (int b = 0; b < Blocks; ++b) {
            __builtin_prefetch(columns.bytes + b * columns.stride + columns.offsets[k]);
          }
        }
        count_tiles<Blocks>(count, rows + first, row_stride, steps, apart, words);
      } else if (Blocks <= kTileBlocks) {
        count_tiles<Blocks>(count, rows + first, row_stride, steps, here, words);
      } else {
        count_tiles<Blocks, 1>(count, rows + first, row_stride, steps, here, words);
      }
    }
    for (int64_t k = 0; k < count * Blocks * kBlock; ++k) {
      counts[k] = begin == 0 ? words[k] : counts[k] + words[k];
    }
  }
}

// The same for any number of blocks.
template <int Blocks = kMostBlocks>
inline void count_any(int64_t count, int blocks, const Code* rows, int64_t row_stride, int64_t bytes,
                      const Columns& columns, int32_t* counts) {
  if (blocks == Blocks) {
    count_group<Blocks>(count, rows, row_stride, bytes, columns, counts);
  } else if constexpr (Blocks > 1) {
    count_any<Blocks - 1>(count, blocks, rows, row_stride, bytes, columns, counts);
  }
}

// Rows of codes lie this far apart: not a power of two, for then they would share places in the cache.
inline int64_t code_stride(int64_t bytes) { return (bytes + 63) / 64 * 64 + 32; }

// What the signs of a vector depend on, and the mean of its absolute numbers.
struct Row {
  float threshold, mean;
};

inline Row describe_row(Binarizer binarizer, const float* x, int64_t count) {
  float most = x[0], least = x[0];
  for (int64_t k = 1; binarizer == Binarizer::midrange && k < count; ++k) {
    most = most > x[k] || most != most ? most : x[k];
    least = least < x[k] || least != least ? least : x[k];
  }
  Vec sums[2] = {set(0.0f), set(0.0f)};
  int64_t k = 0;
  for (; k + 2 * kLanes <= count; k += 2 * kLanes) {
#pragma GCC unroll 16
    for (int h = 0; h < 2; ++h) sums[h] = sums[h] + abs(load(x + k + h * kLanes));
  }
  alignas(64) float lanes[kLanes];
  store(lanes, sums[0] + sums[1]);
  float sum = 0.0f;
  for (int lane = 0; lane < kLanes; ++lane) sum += lanes[lane];
  for (; k < count; ++k) sum += std::fabs(x[k]);
  const float threshold = binarizer == Binarizer::midrange ? (most + least) * 0.5f : 0.0f;
  return {threshold, sum / static_cast<float>(count)};
}

// The signs of up to 8 numbers.
inline uint8_t byte_at(const float* x, int64_t left, float threshold) {
  if (left >= 8) return positive_bits(x, threshold);
  unsigned bits = 0;
  for (int64_t k = 0; k < left; ++k) bits |= static_cast<unsigned>(x[k] > threshold) << k;
  return static_cast<uint8_t>(bits);
}

// The signs of a row as codes; returns the mean of its absolute numbers.
inline float encode_row(Binarizer binarizer, const float* x, int64_t count, Code* codes) {
  const Row row = describe_row(binarizer, x, count);
  for (int64_t k = 0; k < count; k += 8) {
    codes[k / 8] = code_of(byte_at(x + k, count - k, row.threshold));
  }
  return row.mean;
}

// y of the rows of a group for as many blocks of outputs as a tile has.
inline void multiply_columns(const LinearCall& call, const Code* codes, const float* means,
                             int64_t first_row, int64_t rows, int64_t block, int blocks,
                             const uint8_t* columns, const int64_t* offsets) {
  const int64_t bytes = bytes_for(call.in_features), first = block * kBlock;
  const int64_t left = call.out_features - first;
  const int64_t width = left < blocks * kBlock ? left : blocks * kBlock;
  alignas(64) int32_t counts[kGroup * kMostBlocks * kBlock];
  count_any(rows, blocks, codes, code_stride(bytes), bytes, {columns, bytes * kBlock, offsets}, counts);
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t* different = counts + row * blocks * kBlock;
    const float mean = call.learned ? 1.0f : means[row];
    const float* scale = call.scale + first;
    const int32_t bits = static_cast<int32_t>(call.in_features);
    float* y = call.y + (first_row + row) * call.out_features + first;
    for (int64_t k = 0; k < width; ++k) {
      const float dot = static_cast<float>(bits - 2 * different[k]);
      y[k] = dot * mean * scale[k] + (call.bias == nullptr ? 0.0f : call.bias[first + k]);
    }
  }
}

inline void linear(const LinearCall& call) {
  const int64_t bytes = bytes_for(call.in_features), blocks = blocks_for(call.out_features);
  const int64_t last = (blocks - 1) * kBlock, last_width = width_at(last, call.out_features);
  const int64_t tiles = (call.rows + kTileRows - 1) / kTileRows;
  const int64_t parts_count = tiles < call.threads ? tiles : call.threads;
  struct Memory {
    int64_t* offsets;
    uint8_t* narrow;  // the last block, if it is not 32 lanes wide, filled up with zeros
    Code* codes;
    float* means;
    Memory(int64_t bytes, int64_t narrow_bytes, int64_t rows, Parts& parts)
        : offsets(parts.take<int64_t>(bytes)),
          narrow(parts.take<uint8_t>(narrow_bytes)),
          codes(parts.take<Code>(rows * code_stride(bytes))),
          means(parts.take<float>(rows)) {}
  };
  const int64_t narrow_bytes = last_width < kBlock ? bytes * kBlock : 0;
  Parts count(nullptr);
  Memory(bytes, narrow_bytes, kGroup, count);
  parallel(parts_count, call.threads, count.used(), [&](int64_t part, char* memory) {
    Parts parts(memory);
    const Memory work(bytes, narrow_bytes, kGroup, parts);
    for (int64_t k = 0; k < bytes; ++k) work.offsets[k] = k * kBlock;
    if (narrow_bytes > 0) {
      std::memset(work.narrow, 0, narrow_bytes);
      for (int64_t k = 0; k < bytes; ++k) {
        std::memcpy(work.narrow + k * kBlock, call.bits + last * bytes + k * last_width, last_width);
      }
    }
    const int64_t end_tile = tiles * (part + 1) / parts_count * kTileRows;
    const int64_t end_row = end_tile < call.rows ? end_tile : call.rows;
    for (int64_t first = tiles * part / parts_count * kTileRows; first < end_row; first += kGroup) {
      const int64_t rows = end_row - first < kGroup ? end_row - first : kGroup;
      for (int64_t r = 0; r < rows; ++r) {
        work.means[r] = encode_row(call.binarizer, call.x + (first + r) * call.in_features,
                                   call.in_features, work.codes + r * code_stride(bytes));
      }
      const int64_t together = rows == 1 ? kRowBlocks : kTileBlocks;
      for (int64_t block = 0; block < blocks; block += together) {
        int count_blocks = static_cast<int>(blocks - block < together ? blocks - block : together);
        const uint8_t* columns = call.bits + block * kBlock * bytes;
        if (narrow_bytes > 0 && block + count_blocks == blocks) {
          // The narrow one comes alone.
          if (count_blocks > 1) {
            multiply_columns(call, work.codes, work.means, first, rows, block, count_blocks - 1,
                             columns, work.offsets);
          }
          block += count_blocks - 1;
          count_blocks = 1;
          columns = work.narrow;
        }
        multiply_columns(call, work.codes, work.means, first, rows, block, count_blocks, columns,
                         work.offsets);
      }
    }
  });
}

}  // namespace xncaps::XNCAPS_ISA
