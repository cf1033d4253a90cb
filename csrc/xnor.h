// Products of signs: the linear layer. Columns are lanes: 32 outputs. The core, which counts the bits in which
// rows differ from columns, is in count_classes.h for many rows and columns, else in count_bytes.h, count_two_rows.h,
// count_pairs.h or count_slices.h: one of them is included before.
#pragma once

#include "blocks.h"
#include "count_classes.h"

namespace xncaps::XNCAPS_ISA {

// Rows of codes lie this far apart: more than they take, and not a power of two, for then they would share
// places in the cache.
template <class Core>
inline int64_t code_stride(Core core, int64_t bytes, int64_t blocks) {
  return (code_room(core, bytes, blocks) + 63) / 64 * 64 + 32;
}

// Of so many rows, how many are counted together: whole tiles in groups of one size, as nearly as that goes.
template <class Core>
inline int64_t group_for(Core core, int64_t rows) {
  if (rows == 0) return 0;
  const int64_t most = rows_of_group(core), tile = rows_of_tile(core);
  const int64_t groups = (rows + most - 1) / most, each = (rows + groups - 1) / groups;
  const int64_t whole = (each + tile - 1) / tile * tile;
  return whole < rows ? whole : rows;
}

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

// The signs of a row as bytes; returns the mean of its absolute numbers.
inline float pack_row(Binarizer binarizer, const float* x, int64_t count, uint8_t* bytes) {
  const Row row = describe_row(binarizer, x, count);
  int64_t k = 0;
  for (; k + 32 <= count; k += 32) positive_bits(x + k, row.threshold, bytes + k / 8);
  std::memset(bytes + k / 8, 0, bytes_for(count - k));
  for (; k < count; ++k) {
    bytes[k / 8] = static_cast<uint8_t>(bytes[k / 8] | (x[k] > row.threshold) << k % 8);
  }
  return row.mean;
}

// What counting a group of rows needs besides them.
struct Counts {
  int32_t* counts;
  char* work;

  template <class Core>
  Counts(Core core, int64_t rows, int64_t bytes, Parts& parts)
      : counts(parts.take<int32_t>(rows * most_blocks(core) * kBlock)),
        work(parts.take<char>(bytes_of_work(core, rows, bytes))) {}
};

// y of the rows of a group for as many blocks of outputs as a tile has.
template <class Core>
inline void multiply_columns(Core core, const LinearCall& call, const uint8_t* codes, int64_t stride,
                             const float* means, int64_t first_row, int64_t rows, int64_t block,
                             int64_t blocks, const uint8_t* columns, const Counts& to) {
  const int64_t bytes = bytes_for(call.in_features), first = block * kBlock;
  const int64_t left = call.out_features - first;
  const int64_t width = left < blocks * kBlock ? left : blocks * kBlock;
  float* const out = call.y + first_row * call.out_features + first;
  // What is written later comes from far away meanwhile.
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t k = 0; k < width; k += 16) __builtin_prefetch(out + row * call.out_features + k, 0, 2);
  }
  count_any(core, rows, blocks, codes, stride, bytes, columns, to.counts, to.work);
  const int32_t bits = static_cast<int32_t>(call.in_features);
  const float* __restrict scale = call.scale + first;
  const float* __restrict bias = call.bias == nullptr ? nullptr : call.bias + first;
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t* __restrict different = to.counts + row * blocks * kBlock;
    const float mean = call.learned ? 1.0f : means[row];
    float* __restrict y = out + row * call.out_features;
    for (int64_t k = 0; k < width; ++k) {
      y[k] = static_cast<float>(bits - 2 * different[k]) * mean * scale[k];
    }
    for (int64_t k = 0; bias != nullptr && k < width; ++k) y[k] += bias[k];
  }
}

template <class Core>
inline void linear_by(Core core, const LinearCall& call) {
  const int64_t bytes = bytes_for(call.in_features), blocks = blocks_for(call.out_features);
  const int64_t last = (blocks - 1) * kBlock, last_width = width_at(last, call.out_features);
  const int64_t tile = rows_of_tile(core), tiles = (call.rows + tile - 1) / tile;
  const int64_t parts_count = tiles < call.threads ? tiles : call.threads;
  struct Memory {
    uint8_t* copied;  // the last blocks, if the very last is not 32 lanes wide, filled up with zeros
    uint8_t* codes;
    float* means;
    Counts counts;
    Memory(int64_t copied_bytes, int64_t rows, int64_t bytes, int64_t stride, Parts& parts)
        : copied(parts.take<uint8_t>(copied_bytes)),
          codes(parts.take<uint8_t>(rows * stride)),
          means(parts.take<float>(rows)),
          counts(Core(), rows, bytes, parts) {}
  };
  const int64_t copied = last_width < kBlock ? blocks_copied(core, blocks) : 0;
  const int64_t block_bytes = bytes * kBlock;
  const int64_t group = group_for(core, call.rows);
  Parts count(nullptr);
  const int64_t stride = code_stride(core, bytes, blocks);
  Memory(copied * block_bytes, group, bytes, stride, count);
  parallel(parts_count, call.threads, count.used(), [&](int64_t part, char* memory) {
    Parts parts(memory);
    const Memory work(copied * block_bytes, group, bytes, stride, parts);
    if (copied > 0) {
      const int64_t whole = (copied - 1) * block_bytes;
      std::memcpy(work.copied, call.bits + (blocks - copied) * block_bytes, whole);
      std::memset(work.copied + whole, 0, block_bytes);
      for (int64_t k = 0; k < bytes; ++k) {
        std::memcpy(work.copied + whole + k * kBlock, call.bits + last * bytes + k * last_width, last_width);
      }
    }
    const int64_t end_tile = tiles * (part + 1) / parts_count * tile;
    const int64_t end_row = end_tile < call.rows ? end_tile : call.rows;
    for (int64_t first = tiles * part / parts_count * tile; first < end_row; first += group) {
      const int64_t rows = end_row - first < group ? end_row - first : group;
      for (int64_t r = 0; r < rows; ++r) {
        uint8_t* codes = work.codes + r * stride;
        work.means[r] = pack_row(call.binarizer, call.x + (first + r) * call.in_features,
                                 call.in_features, codes);
      }
      prepare(core, rows, blocks, work.codes, stride, bytes, work.counts.work);
      const int64_t together = blocks_of_tile(core, rows);
      for (int64_t block = 0; block < blocks; block += together) {
        int64_t count_blocks = blocks - block < together ? blocks - block : together;
        const uint8_t* columns = call.bits + block * block_bytes;
        if (copied > 0 && block + count_blocks == blocks) {
          // Those that were copied come by themselves.
          const int64_t before = count_blocks - copied;
          if (before > 0) {
            multiply_columns(core, call, work.codes, stride, work.means, first, rows, block, before,
                             columns, work.counts);
          }
          block += before;
          count_blocks = copied;
          columns = work.copied;
        }
        multiply_columns(core, call, work.codes, stride, work.means, first, rows, block, count_blocks,
                         columns, work.counts);
      }
    }
  });
}

inline void linear(const LinearCall& call) {
  const int64_t rows = call.rows / (call.threads > 1 ? call.threads : 1);  // of a thread
  if (by_classes(rows, blocks_for(call.out_features), bytes_for(call.in_features))) {
    linear_by(InClasses(), call);
  } else {
    linear_by(Counting(), call);
  }
}

}  // namespace xncaps::XNCAPS_ISA
