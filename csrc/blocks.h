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
};

inline Sizes sizes_of(const Layer& layer) {
  const int64_t blocks = blocks_for(layer.caps_in), rows = layer.caps_out * layer.dim_out;
  return {layer.caps_in,    layer.dim_in, layer.caps_out, layer.dim_out,
          layer.iterations, blocks,       rows,           bytes_for(layer.dim_in),
          rows * kBlock,    blocks * rows * kBlock};
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
#pragma GCC unroll 16
  for (int q = 0; q < kVecs; ++q) {
    Vec sum = set(0.0f);
    for (int64_t k = 0; k < count; ++k) sum = sum + abs(load(rows + k * stride + q * kLanes));
    means[q] = sum / set(static_cast<float>(count));
  }
}

// Signs of the vectors of a block as bits: to[byte][lane].
inline void pack_signs(Binarizer binarizer, const float* rows, int64_t dim, uint8_t* to,
                       int64_t stride = kBlock) {
  Vec thresholds[kVecs];
  thresholds_of(binarizer, rows, dim, thresholds, stride);
  for (int64_t first = 0; first < dim; first += 8) {
    Bytes byte = set_bytes(0);
    const int64_t last = first + 8 < dim ? first + 8 : dim;
    for (int64_t d = first; d < last; ++d) {
      Vec a[kVecs];
#pragma GCC unroll 16
      for (int q = 0; q < kVecs; ++q) a[q] = load(rows + d * stride + q * kLanes);
      byte = add_where(byte, signs_of(a, thresholds), set_bytes(1 << (d - first)));
    }
    store_bytes(to + first / 8 * kBlock, byte);
  }
}

inline Vec load_scale(const float* p) { return load(p); }
inline Vec load_scale(const uint16_t* p) { return load_half(p); }

// Signed bytes hold the dot products of so many bytes of signs.
constexpr int64_t kBytesAtOnce = 15;

// Dot products of the signs of a block with one row of weights, as floats.
template <bool OneByte>
inline void dot_signs(const Sizes& sizes, const uint8_t* x_bits, const uint8_t* row, Vec* dots) {
  const int64_t bytes = OneByte ? 1 : sizes.bytes;
  for (int64_t first = 0; first < bytes; first += kBytesAtOnce) {
    const int64_t last = first + kBytesAtOnce < bytes ? first + kBytesAtOnce : bytes;
    Bytes different = count_different_bits(load_bytes(x_bits + first * kBlock),
                                           load_bytes(row + first * kBlock));
    for (int64_t k = first + 1; k < last; ++k) {
      different = add_bytes(different, count_different_bits(load_bytes(x_bits + k * kBlock),
                                                            load_bytes(row + k * kBlock)));
    }
    const int64_t bits = (last < bytes ? 8 * last : sizes.dim_in) - 8 * first;
    const Bytes dot = sub_bytes(set_bytes(static_cast<int>(bits)), add_bytes(different, different));
    alignas(64) int8_t lanes[kBlock];
    store_bytes(lanes, dot);
#pragma GCC unroll 16
    for (int q = 0; q < kVecs; ++q) {
      const Vec part = floats_of_bytes(lanes + q * kLanes);
      dots[q] = first == 0 ? part : dots[q] + part;
    }
  }
}

// Predictions of a block from signs: u = (dot * x_scale) * scale, row by row. Folded leaves x_scale
// to whoever reads u. The sums over the lanes of x_scale * dot * scale are added to `totals`, or put
// there for the first block.
template <bool OneByte, bool Folded, class Scale>
inline void project_signs(const Sizes& sizes, const BlockWeights& weights, const uint8_t* x_bits,
                          const Vec* x_scale, bool first, float* u, float* totals) {
  const uint8_t* bits = weights.bits;
  const Scale* scale = static_cast<const Scale*>(weights.scale);
  for (int64_t row = 0; row < sizes.rows; ++row) {
    Vec dots[kVecs];
    dot_signs<OneByte>(sizes, x_bits, bits, dots);
    Vec total = set(0.0f);
#pragma GCC unroll 16
    for (int q = 0; q < kVecs; ++q) {
      const Vec w_scale = load_scale(scale + q * kLanes);
      const Vec value = Folded ? dots[q] * w_scale : dots[q] * x_scale[q] * w_scale;
      store(u + q * kLanes, value);
      total = Folded ? fma(value, x_scale[q], total) : total + value;
    }
    add_to_total(totals, first, total);
    bits += sizes.bytes * kBlock;
    scale += kBlock;
    u += kBlock;
    totals += kTotal;
  }
}

// Predictions of a block in floats, for several samples at once: each weight is loaded once.
// x_lanes and u are those of the first sample; the next ones follow at the strides.
template <int Samples, int Rows>
inline void project_rows(const Sizes& sizes, const float* weights, const float* x_lanes,
                         int64_t x_stride, float* u, int64_t u_stride) {
#pragma GCC unroll 16
  for (int q = 0; q < kVecs; ++q) {
    Vec sum[Rows][Samples];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
      for (int s = 0; s < Samples; ++s) sum[r][s] = set(0.0f);
    }
    for (int64_t d = 0; d < sizes.dim_in; ++d) {
      Vec x[Samples];
#pragma GCC unroll 16
      for (int s = 0; s < Samples; ++s) x[s] = load(x_lanes + s * x_stride + d * kBlock + q * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) {
        const Vec w = load(weights + (r * sizes.dim_in + d) * kBlock + q * kLanes);
#pragma GCC unroll 16
        for (int s = 0; s < Samples; ++s) sum[r][s] = fma(w, x[s], sum[r][s]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
      for (int s = 0; s < Samples; ++s) store(u + s * u_stride + r * kBlock + q * kLanes, sum[r][s]);
    }
  }
}

template <int Samples>
inline void project_floats(const Sizes& sizes, const float* weights, const float* x_lanes,
                           int64_t x_stride, float* u, int64_t u_stride) {
  constexpr int kRows = Samples == 1 ? 8 : kLanes / 4;  // as many sums as there are registers for
  int64_t row = 0;
  for (; row + kRows <= sizes.rows; row += kRows) {
    project_rows<Samples, kRows>(sizes, weights + row * sizes.dim_in * kBlock, x_lanes, x_stride,
                                 u + row * kBlock, u_stride);
  }
  for (; row < sizes.rows; ++row) {
    project_rows<Samples, 1>(sizes, weights + row * sizes.dim_in * kBlock, x_lanes, x_stride,
                             u + row * kBlock, u_stride);
  }
}

// totals[row] += sum of the vectors of u in that row; of the first block, = instead of +=.
inline void add_rows(const Sizes& sizes, const float* u, bool first, float* totals) {
  for (int64_t row = 0; row < sizes.rows; ++row) {
    Vec total = load(u + row * kBlock);
#pragma GCC unroll 16
    for (int q = 1; q < kVecs; ++q) total = total + load(u + row * kBlock + q * kLanes);
    add_to_total(totals + row * kTotal, first, total);
  }
}

// Routing goes over u in halves of blocks: one that is read and one that is waiting, with the totals,
// fit into the smallest cache.
constexpr int kHalf = 16, kHalfVecs = kHalf / kLanes;

// What is known of a half for each output capsule has one more row at its end: of logits their
// largest, of weights a factor of them all.
inline int64_t half_size(const Sizes& sizes) { return (sizes.caps_out + 1) * kHalf; }

// out[j] = u[j] . v[j], lane by lane, and totals[j, e] += c[j] * u_before[j, e] in the same pass: while
// one half comes from a larger cache, the sums of the half before it are made from the smallest.
template <bool Dot, bool Add, bool First>
inline void dot_and_add(const Sizes& sizes, const float* u, const float* v, const float* factor,
                        float* out, const float* u_before, const float* c, float* totals) {
  const int64_t caps_out = sizes.caps_out, dim_out = sizes.dim_out;
  Vec factors[kHalfVecs], most[kHalfVecs], all[kHalfVecs];
#pragma GCC unroll 16
  for (int q = 0; q < kHalfVecs; ++q) {
    if (Dot) factors[q] = factor == nullptr ? set(1.0f) : load(factor + q * kLanes);
    if (Add) all[q] = load(c + caps_out * kHalf + q * kLanes);
  }
  // Two sums for each vector, so that an addition need not wait for the one before.
  Vec sums[2][kHalfVecs], weight[kHalfVecs];
  const auto work = [&](int64_t row, int which) {
    if (Dot) {
      const Vec value = set(v[row]);
#pragma GCC unroll 16
      for (int q = 0; q < kHalfVecs; ++q) {
        sums[which][q] = fma(value, load(u + row * kBlock + q * kLanes), sums[which][q]);
      }
    }
    if (Add) {
      Vec sum = weight[0] * load(u_before + row * kBlock);
#pragma GCC unroll 16
      for (int q = 1; q < kHalfVecs; ++q) {
        sum = fma(weight[q], load(u_before + row * kBlock + q * kLanes), sum);
      }
      add_to_total(totals + row * kTotal, First, sum);
    }
  };
  for (int64_t j = 0; j < caps_out; ++j) {
#pragma GCC unroll 16
    for (int q = 0; q < kHalfVecs; ++q) {
      sums[0][q] = sums[1][q] = set(0.0f);
      if (Add) weight[q] = load(c + j * kHalf + q * kLanes) * all[q];
    }
    int64_t row = j * dim_out;
    const int64_t end = row + dim_out;
    for (; row + 4 <= end; row += 4) {
      work(row, 0);
      work(row + 1, 1);
      work(row + 2, 0);
      work(row + 3, 1);
    }
    for (; row < end; ++row) work(row, 0);
#pragma GCC unroll 16
    for (int q = 0; Dot && q < kHalfVecs; ++q) {
      const Vec logit = (sums[0][q] + sums[1][q]) * factors[q];
      store(out + j * kHalf + q * kLanes, logit);
      most[q] = j == 0 ? logit : max(most[q], logit);
    }
  }
#pragma GCC unroll 16
  for (int q = 0; Dot && q < kHalfVecs; ++q) store(out + caps_out * kHalf + q * kLanes, most[q]);
}

// Only the one, or only the other.
inline void dot_half(const Sizes& sizes, const float* u, const float* v, const float* factor,
                     float* out) {
  dot_and_add<true, false, true>(sizes, u, v, factor, out, nullptr, nullptr, nullptr);
}
inline void add_half(const Sizes& sizes, const float* u, const float* c, bool first, float* totals) {
  const auto run = first ? &dot_and_add<false, true, true> : &dot_and_add<false, true, false>;
  run(sizes, nullptr, nullptr, nullptr, nullptr, u, c, totals);
}

// Goes over all of u once: for every half of a block, logits = u . v, which `weigh` turns into weights,
// and totals = sum of weights * u. `factor` has a factor of the logits for every lane, or is null.
template <class Weigh>
inline void sweep(const Sizes& sizes, const float* u, const float* v, const float* factor,
                  float* logits, float* totals, const Weigh& weigh) {
  const int64_t halves = 2 * sizes.blocks;
  const auto at = [&](int64_t half) {
    return u + half / 2 * sizes.u_block + half % 2 * kHalf;
  };
  const auto factor_at = [&](int64_t half) {
    return factor == nullptr ? nullptr : factor + half * kHalf;
  };
  float *now = logits, *next = logits + half_size(sizes);
  dot_half(sizes, at(0), v, factor_at(0), now);
  for (int64_t half = 0; half < halves; ++half) {
    weigh(half, now);
    if (half + 1 == halves) return add_half(sizes, at(half), now, half == 0, totals);
    const auto run = half == 0 ? &dot_and_add<true, true, true> : &dot_and_add<true, true, false>;
    run(sizes, at(half + 1), v, factor_at(half + 1), next, at(half), now, totals);
    float* swap = now;
    now = next;
    next = swap;
  }
}

// The last row of weights: a factor of each lane, or 1.
inline void set_factor(const Sizes& sizes, const float* factor, float* c) {
#pragma GCC unroll 16
  for (int q = 0; q < kHalfVecs; ++q) {
    store(c + sizes.caps_out * kHalf + q * kLanes,
          factor == nullptr ? set(1.0f) : load(factor + q * kLanes));
  }
}

// Softmax over the output capsules, in place; all but the division by the sum, which goes into the
// last row together with a factor of each lane, if there is one. If they are wanted, the couplings
// go to rows of all capsules.
inline void softmax(const Sizes& sizes, const float* lane_factor, float* logits, float* couplings) {
  const int64_t caps_out = sizes.caps_out, stride = sizes.blocks * kBlock;
#pragma GCC unroll 16
  for (int q = 0; q < kHalfVecs; ++q) {
    float* column = logits + q * kLanes;
    const Vec most = load(column + caps_out * kHalf);
    Vec sums[2] = {set(0.0f), set(0.0f)};
    int64_t j = 0;
    for (; j + 2 <= caps_out; j += 2) {
#pragma GCC unroll 16
      for (int h = 0; h < 2; ++h) {
        float* at = column + (j + h) * kHalf;
        const Vec e = exp_of_nonpositive(load(at) - most);
        store(at, e);
        sums[h] = sums[h] + e;
      }
    }
    if (j < caps_out) {
      const Vec e = exp_of_nonpositive(load(column + j * kHalf) - most);
      store(column + j * kHalf, e);
      sums[0] = sums[0] + e;
    }
    const Vec factor = lane_factor == nullptr ? set(1.0f) : load(lane_factor + q * kLanes);
    const Vec sum = sums[0] + sums[1];
    store(column + caps_out * kHalf, factor / sum);
    for (j = 0; couplings != nullptr && j < caps_out; ++j) {
      store(couplings + j * stride + q * kLanes, load(column + j * kHalf) * (set(1.0f) / sum));
    }
  }
}

// Copies rows of a half of a block to rows of all capsules.
inline void spread(const Sizes& sizes, const float* from, int64_t half, float* to) {
  const int64_t stride = sizes.blocks * kBlock;
  for (int64_t j = 0; j < sizes.caps_out; ++j) {
    std::memcpy(to + j * stride + half * kHalf, from + j * kHalf, kHalf * sizeof(float));
  }
}

// Where vector q of a block is in rows of its two halves, (2, caps_out, 16).
inline int64_t lanes_at(const Sizes& sizes, int64_t j, int q) {
  const int64_t half = q * kLanes / kHalf;
  return (half * sizes.caps_out + j) * kHalf + q * kLanes % kHalf;
}

// What the xnor agreement needs to know of the predictions of a block.
struct Described {
  float* means;   // (2, caps_out, 16): mean of the absolute numbers
  Signs* signs;   // (caps_out, dim_out)
};

inline void describe(const Sizes& sizes, Binarizer binarizer, const float* u, Described out) {
  for (int64_t j = 0; j < sizes.caps_out; ++j) {
    Vec means[kVecs], thresholds[kVecs];
    mean_abs(u, sizes.dim_out, means);
    thresholds_of(binarizer, u, sizes.dim_out, thresholds);
#pragma GCC unroll 16
    for (int q = 0; q < kVecs; ++q) store(out.means + lanes_at(sizes, j, q), means[q]);
    for (int64_t e = 0; e < sizes.dim_out; ++e, u += kBlock) {
      Vec a[kVecs];
#pragma GCC unroll 16
      for (int q = 0; q < kVecs; ++q) a[q] = load(u + q * kLanes);
      out.signs[j * sizes.dim_out + e] = signs_of(a, thresholds);
    }
  }
}

// Dot products of the signs of the predictions for one output capsule with the signs of v.
inline void dot_described(const Sizes& sizes, const Signs* signs, const uint8_t* v_positive,
                          Vec* dots) {
  constexpr int64_t kAtOnce = 120;  // signed bytes hold the dot products of so many
  for (int64_t first = 0; first < sizes.dim_out; first += kAtOnce) {
    const int64_t left = sizes.dim_out - first, count = left < kAtOnce ? left : kAtOnce;
    Bytes different = set_bytes(0);
    for (int64_t e = first; e < first + count; ++e) {
      different = count_where_not(different, signs[e], v_positive[e] != 0);
    }
    const Bytes dot = sub_bytes(set_bytes(static_cast<int>(count)), add_bytes(different, different));
    alignas(64) int8_t lanes[kBlock];
    store_bytes(lanes, dot);
#pragma GCC unroll 16
    for (int q = 0; q < kVecs; ++q) {
      const Vec part = floats_of_bytes(lanes + q * kLanes);
      dots[q] = first == 0 ? part : dots[q] + part;
    }
  }
}

// The signs of an output capsule and the mean of its absolute numbers.
inline float describe_output(Binarizer binarizer, const float* v, int64_t dim, uint8_t* positive) {
  float threshold = 0.0f, sum = 0.0f;
  if (binarizer == Binarizer::midrange) {
    float most = v[0], least = v[0];
    for (int64_t e = 1; e < dim; ++e) {
      most = most > v[e] || most != most ? most : v[e];
      least = least < v[e] || least != least ? least : v[e];
    }
    threshold = (most + least) * 0.5f;
  }
  for (int64_t e = 0; e < dim; ++e) {
    positive[e] = v[e] > threshold;
    sum += std::fabs(v[e]);
  }
  return sum / static_cast<float>(dim);
}

// Sums over the lanes of every row, times a factor, plus the bias.
inline void finish_sums(const Sizes& sizes, const float* totals, float factor, const float* bias,
                        float* sums) {
  alignas(64) float group[8];
  for (int64_t row = 0; row < sizes.rows; row += 8) {
    reduce(totals + row * kTotal, group);
    const int64_t count = sizes.rows - row < 8 ? sizes.rows - row : 8;
    for (int64_t k = 0; k < count; ++k) {
      sums[row + k] = group[k] * factor;
    }
    for (int64_t k = 0; bias != nullptr && k < count; ++k) sums[row + k] += bias[row + k];
  }
}

// The factor that squash multiplies a vector with: norm / (1 + norm^2).
inline float squash_factor(const float* s, int64_t dim, float* norm_out = nullptr) {
  float part[4] = {0, 0, 0, 0};
  int64_t e = 0;
  for (; e + 4 <= dim; e += 4) {
    for (int k = 0; k < 4; ++k) part[k] += s[e + k] * s[e + k];
  }
  for (; e < dim; ++e) part[0] += s[e] * s[e];
  const float square = (part[0] + part[1]) + (part[2] + part[3]);
  const float norm = std::sqrt(square);
  if (norm_out != nullptr) *norm_out = norm;
  return norm / (1.0f + square);
}

inline void squash(const Sizes& sizes, const float* s, float* v) {
  for (int64_t j = 0; j < sizes.caps_out; ++j, s += sizes.dim_out, v += sizes.dim_out) {
    const float factor = squash_factor(s, sizes.dim_out);
    for (int64_t e = 0; e < sizes.dim_out; ++e) v[e] = s[e] * factor;
  }
}

// Rows of totals, filled up to whole groups of eight for `reduce`.
inline int64_t totals_size(const Sizes& sizes) { return (sizes.rows + 7) / 8 * 8 * kTotal; }

}  // namespace xncaps::XNCAPS_ISA
