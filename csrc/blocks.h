// What inference and training share: a capsule layer in blocks of 32 input capsules, which are the
// lanes of vectors. Included once for every instruction set, after its lanes.
#pragma once

#include <cmath>
#include <cstring>

#include "kernel.h"
#include "layout.h"
#include "parallel.h"

namespace xncaps::XNCAPS_ISA {

// Lanes of a total: sums over capsules are kept lane by lane until all blocks are added up.
constexpr int kTotal = 8;

struct Sizes {
  int64_t caps_in, dim_in, caps_out, dim_out, iterations;
  int64_t blocks;   // of input capsules
  int64_t rows;     // caps_out * dim_out: numbers predicted for an input capsule
  int64_t bytes;    // of the signs of an input capsule
  int64_t u_block;  // floats of the predictions of a block
  int64_t u_size;   // and of all of them
  bool two_fit;     // two blocks of them fit into the first cache
};

inline Sizes sizes_of(const Layer& layer) {
  const int64_t blocks = blocks_for(layer.caps_in), rows = layer.caps_out * layer.dim_out;
  return {layer.caps_in,    layer.dim_in, layer.caps_out, layer.dim_out,
          layer.iterations, blocks,       rows,           bytes_for(layer.dim_in),
          rows * kBlock,    blocks * rows * kBlock,
          rows * (2 * kBlock + kTotal) * int64_t{sizeof(float)} <= first_cache_bytes()};
}

// totals[k] += row(k) for so many rows, or = for the first block.
template <class Row>
inline void add_to_totals(int64_t rows, bool first, float* totals, const Row& row) {
  int64_t k = 0;
  for (; k + 2 <= rows; k += 2) {
    const Vec a = row(k), b = row(k + 1);
    add_to_totals(totals + k * kTotal, first, a, b);
  }
  if (k < rows) add_to_total(totals + k * kTotal, first, row(k));
}

// The weights of one block, all of its rows 32 lanes wide.
struct BlockWeights {
  const float* floats;
  const uint8_t* bits;
  const void* scale;
};

// Finds the weights of a block. The last one may be narrow: it is copied once, zeros filling it up.
class WeightBlocks {
 public:
  WeightBlocks(const Sizes& sizes, const Weights& weights, Parts& parts)
      : sizes_(sizes), weights_(weights), scale_size_(weights.half ? 2 : 4) {
    const int64_t first = (sizes.blocks - 1) * kBlock, width = width_at(first, sizes.caps_in);
    if (width == kBlock) return;
    const int64_t float_rows = sizes.rows * sizes.dim_in, bit_rows = sizes.rows * sizes.bytes;
    last_.floats = static_cast<float*>(
        widen(weights.floats, 4, first, width, float_rows, parts));
    last_.bits = static_cast<uint8_t*>(widen(weights.bits, 1, first, width, bit_rows, parts));
    last_.scale = widen(weights.scale, scale_size_, first, width, sizes.rows, parts);
    has_last_ = true;
  }

  BlockWeights at(int64_t block) const {
    if (has_last_ && block == sizes_.blocks - 1) return last_;
    const int64_t first = block * kBlock;
    BlockWeights out{};
    if (weights_.floats) out.floats = weights_.floats + first * sizes_.rows * sizes_.dim_in;
    if (weights_.bits) out.bits = weights_.bits + first * sizes_.rows * sizes_.bytes;
    if (weights_.scale) {
      out.scale = static_cast<const char*>(weights_.scale) + first * sizes_.rows * scale_size_;
    }
    return out;
  }

 private:
  // Without memory in `parts`, only counts.
  static void* widen(const void* from, int64_t size, int64_t first, int64_t width, int64_t rows,
                     Parts& parts) {
    if (from == nullptr) return nullptr;
    char* to = parts.take<char>(rows * kBlock * size);
    if (to == nullptr) return nullptr;
    const char* source = static_cast<const char*>(from) + first * rows * size;
    for (int64_t row = 0; row < rows; ++row) {
      std::memcpy(to + row * kBlock * size, source + row * width * size, width * size);
      std::memset(to + (row * kBlock + width) * size, 0, (kBlock - width) * size);
    }
    return to;
  }

  const Sizes& sizes_;
  const Weights& weights_;
  int64_t scale_size_;
  BlockWeights last_{};
  bool has_last_ = false;
};

// The vectors of a block with the vectors as lanes: to[dim][lane], zeros where there is none. They
// follow each other, or lie `stride` apart.
inline void gather(const float* x, int64_t dim, int64_t width, float* to, int64_t stride) {
  if (width < kBlock) std::memset(to, 0, dim * kBlock * sizeof(float));
  const int64_t lanes8 = width / 8 * 8, dims8 = dim / 8 * 8;
  for (int64_t lane = 0; lane < lanes8; lane += 8) {
    for (int64_t d = 0; d < dims8; d += 8) {
      transpose8(x + lane * stride + d, stride, to + d * kBlock + lane, kBlock);
    }
  }
  for (int64_t lane = 0; lane < width; ++lane) {
    for (int64_t d = lane < lanes8 ? dims8 : 0; d < dim; ++d) {
      to[d * kBlock + lane] = x[lane * stride + d];
    }
  }
}
inline void gather(const float* x, int64_t dim, int64_t width, float* to) {
  gather(x, dim, width, to, dim);
}

// The thresholds above which numbers of a vector are +1. The vectors lie along `count` rows of lanes.
inline void thresholds_of(Binarizer binarizer, const float* rows, int64_t count, Vec* thresholds,
                          int64_t stride = kBlock) {
#pragma GCC unroll 16
  for (int q = 0; q < kVecs; ++q) {
    thresholds[q] = set(0.0f);
    if (binarizer != Binarizer::midrange) continue;
    Vec most = load(rows + q * kLanes), least = most;
    for (int64_t k = 1; k < count; ++k) {
      const Vec a = load(rows + k * stride + q * kLanes);
      most = select(is_nan(most), most, max(most, a));  // max gives `a` if it is NaN
      least = select(is_nan(most), most, min(least, a));
    }
    thresholds[q] = (most + least) * set(0.5f);
  }
}

// Mean of the absolute numbers of vectors that lie along rows of lanes.
inline void mean_abs(const float* rows, int64_t count, Vec* means, int64_t stride = kBlock) {
  Vec sums[kVecs];
#pragma GCC unroll 16
  for (int q = 0; q < kVecs; ++q) sums[q] = set(0.0f);
  for (int64_t k = 0; k < count; ++k, rows += stride) {
#pragma GCC unroll 16
    for (int q = 0; q < kVecs; ++q) sums[q] = sums[q] + abs(load(rows + q * kLanes));
  }
#pragma GCC unroll 16
  for (int q = 0; q < kVecs; ++q) means[q] = sums[q] / set(static_cast<float>(count));
}

// Signs of the vectors of a block as bits: to[byte][lane]; and the means of their absolute numbers.
inline void pack_signs(Binarizer binarizer, const float* rows, int64_t dim, uint8_t* to, Vec* means,
                       int64_t stride = kBlock) {
  Vec thresholds[kVecs], sums[kVecs];
  thresholds_of(binarizer, rows, dim, thresholds, stride);
#pragma GCC unroll 16
  for (int q = 0; q < kVecs; ++q) sums[q] = set(0.0f);
  for (int64_t first = 0; first < dim; first += 8, to += kBlock) {
    Bytes byte = set_bytes(0), bit = set_bytes(1);
    const int64_t end = first + 8 < dim ? first + 8 : dim;
    for (int64_t d = first; d < end; ++d, rows += stride, bit = add_bytes(bit, bit)) {
      Vec a[kVecs];
#pragma GCC unroll 16
      for (int q = 0; q < kVecs; ++q) {
        a[q] = load(rows + q * kLanes);
        sums[q] = sums[q] + abs(a[q]);
      }
      byte = add_where(byte, signs_of(a, thresholds), bit);
    }
    store_bytes(to, in_order(byte));
  }
#pragma GCC unroll 16
  for (int q = 0; q < kVecs; ++q) means[q] = sums[q] / set(static_cast<float>(dim));
}

// Signs of a block of vectors of 8 numbers, a byte each, and the means of their absolute numbers; as
// above, for a threshold of 0, without moving them into lanes first.
inline void describe_eights(const float* x, uint8_t* bits, Vec* means) {
  alignas(64) float sums[kBlock];
  for (int64_t k = 0; k < kBlock; k += kReduced) reduce<true>(x + 8 * k, sums + k);
  for (int64_t k = 0; k < kBlock; k += 4) positive_bits(x + 8 * k, 0.0f, bits + k);
#pragma GCC unroll 16
  for (int q = 0; q < kVecs; ++q) means[q] = load(sums + q * kLanes) / set(8.0f);
}

// Signed bytes hold the dot products of so many bytes of signs.
constexpr int64_t kBytesAtOnce = 15;

// dots += floats of bytes, or = for the first.
inline void add_floats(Bytes bytes, bool first, Vec* dots) {
  Vec part[kVecs];
  floats_of_bytes(bytes, part);
#pragma GCC unroll 16
  for (int q = 0; q < kVecs; ++q) dots[q] = first ? part[q] : dots[q] + part[q];
}

// The signs of a block of vectors; their first byte is held in a register. The bits that fill up the
// last byte are the same in all signs.
struct LaneSigns {
  const uint8_t* bits;
  int64_t bytes;
  Bytes first, filling;

  LaneSigns(const uint8_t* bits, int64_t bytes, int64_t dim)
      : bits(bits),
        bytes(bytes),
        first(load_bytes(bits)),
        filling(set_bytes(static_cast<int>(8 * bytes - dim))) {}
};

// Dot products of the signs of a block with others, of which other(k) is byte k for all lanes; as floats
// in units of kByteUnit.
template <bool OneByte, class Other>
inline void dot_signs(const LaneSigns& x, const Other& other, Vec* dots) {
  Bytes dot = dot_of_bits(x.first, other(0));
  if (OneByte) return floats_of_bytes(sub_bytes(dot, x.filling), dots);
  for (int64_t k = 1, added = 1; k < x.bytes; ++k, ++added) {
    const Bytes next = dot_of_bits(load_bytes(x.bits + k * kBlock), other(k));
    if (added < kBytesAtOnce) {
      dot = add_bytes(dot, next);
      continue;
    }
    add_floats(dot, k == kBytesAtOnce, dots);
    dot = next;
    added = 0;
  }
  add_floats(sub_bytes(dot, x.filling), x.bytes <= kBytesAtOnce, dots);
}

}  // namespace xncaps::XNCAPS_ISA
