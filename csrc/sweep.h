// Routing over the predictions of a sample: weighted sums, agreements, softmax and squash.
#pragma once

#include "blocks.h"

namespace xncaps::XNCAPS_ISA {

// totals[row] += sum of the vectors of u in that row; of the first block, = instead of +=.
inline void add_rows(const Sizes& sizes, const float* u, bool first, float* totals) {
  add_to_totals(sizes.rows, first, totals, [&](int64_t row) {
    Vec total = load(u + row * kBlock);
#pragma GCC unroll 16
    for (int q = 1; q < kVecs; ++q) total = total + load(u + row * kBlock + q * kLanes);
    return total;
  });
}

// What is known of a block for each output capsule has one more row at its end: of logits their
// largest, of weights a factor of them all.
inline int64_t logits_size(const Sizes& sizes) { return (sizes.caps_out + 1) * kBlock; }

// out[j] = u[j] . v[j], lane by lane, times a factor of each lane, if there is one.
inline void dot_block(const Sizes& sizes, const float* u, const float* v, const float* factor,
                      float* out) {
  const int64_t caps_out = sizes.caps_out, dim_out = sizes.dim_out;
  Vec factors[kVecs], most[kVecs];
#pragma GCC unroll 16
  for (int q = 0; q < kVecs; ++q) {
    factors[q] = factor == nullptr ? set(1.0f) : load(factor + q * kLanes);
  }
  for (int64_t j = 0; j < caps_out; ++j) {
#pragma GCC unroll 16
    for (int first = 0; first < kVecs; first += kSums) {
      // Two sums for each vector, so that an addition need not wait for the one before.
      Vec sums[2][kSums];
#pragma GCC unroll 16
      for (int q = 0; q < kSums; ++q) sums[0][q] = sums[1][q] = set(0.0f);
      const auto add = [&](int64_t row, int which) {
        const Vec value = set(v[row]);
        const float* at = u + row * kBlock + first * kLanes;
#pragma GCC unroll 16
        for (int q = 0; q < kSums; ++q) {
          sums[which][q] = fma(value, load(at + q * kLanes), sums[which][q]);
        }
      };
      int64_t row = j * dim_out;
      const int64_t end = row + dim_out;
      for (; row + 2 <= end; row += 2) {
        add(row, 0);
        add(row + 1, 1);
      }
      if (row < end) add(row, 0);
#pragma GCC unroll 16
      for (int q = 0; q < kSums; ++q) {
        const Vec logit = (sums[0][q] + sums[1][q]) * factors[first + q];
        store(out + j * kBlock + (first + q) * kLanes, logit);
        most[first + q] = j == 0 ? logit : max(most[first + q], logit);
      }
    }
  }
#pragma GCC unroll 16
  for (int q = 0; q < kVecs; ++q) store(out + caps_out * kBlock + q * kLanes, most[q]);
}

// totals[j, e] += sum of c[j] * u[j, e], or = for the first block. Ahead asks for the block that comes next, for
// every second line of it: the processor brings their neighbours.
template <bool Ahead>
inline void add_block(const Sizes& sizes, const float* u, const float* c, bool first, float* totals,
                      const float* next) {
  const int64_t caps_out = sizes.caps_out, dim_out = sizes.dim_out;
  for (int64_t j = 0; j < caps_out; ++j) {
    Vec weight[kVecs];
#pragma GCC unroll 16
    for (int q = 0; q < kVecs; ++q) {
      weight[q] = load(c + j * kBlock + q * kLanes) * load(c + caps_out * kBlock + q * kLanes);
    }
    const int64_t begin = j * dim_out;
    add_to_totals(dim_out, first, totals + begin * kTotal, [&](int64_t e) {
      const float* row = u + (begin + e) * kBlock;
      if (Ahead) __builtin_prefetch(next + (begin + e) * kBlock);
      Vec sum = weight[0] * load(row);
#pragma GCC unroll 16
      for (int q = 1; q < kVecs; ++q) sum = fma(weight[q], load(row + q * kLanes), sum);
      return sum;
    });
  }
}

// Goes over all of u once: for every block, weigh(block, its u, c) makes weights c, and totals = sum of c * u,
// while the block is in the smallest cache. Sweeps go back and forth in turns: what the one before has
// left in the cache comes first. Where weigh reads u, the next block is asked for early if there is room.
template <bool Reads, class Weigh>
inline void sweep(const Sizes& sizes, const float* u, bool back, float* c, float* totals,
                  const Weigh& weigh) {
  const int64_t step = back ? -1 : 1;
  for (int64_t n = 0, block = back ? sizes.blocks - 1 : 0; n < sizes.blocks; ++n, block += step) {
    const float* at = u + block * sizes.u_block;
    weigh(block, at, c);
    const bool ahead = Reads && sizes.two_fit && n + 1 < sizes.blocks;
    const auto add = ahead ? &add_block<true> : &add_block<false>;
    add(sizes, at, c, n == 0, totals, ahead ? at + step * sizes.u_block : at);
  }
}

// The last row of weights: a factor of each lane, or 1.
inline void set_factor(const Sizes& sizes, const float* factor, float* c) {
#pragma GCC unroll 16
  for (int q = 0; q < kVecs; ++q) {
    store(c + sizes.caps_out * kBlock + q * kLanes,
          factor == nullptr ? set(1.0f) : load(factor + q * kLanes));
  }
}

// Softmax over the output capsules, in place; all but the division by the sum, which goes into the
// last row together with a factor of each lane, if there is one. If they are wanted, the couplings
// go to rows of all capsules.
inline void softmax(const Sizes& sizes, const float* lane_factor, float* logits, float* couplings) {
  const int64_t caps_out = sizes.caps_out, stride = sizes.blocks * kBlock;
#pragma GCC unroll 16
  for (int q = 0; q < kVecs; ++q) {
    float* column = logits + q * kLanes;
    const Vec most = load(column + caps_out * kBlock);
    Vec sums[2] = {set(0.0f), set(0.0f)};
    int64_t j = 0;
    for (; j + 2 <= caps_out; j += 2) {
#pragma GCC unroll 16
      for (int h = 0; h < 2; ++h) {
        float* at = column + (j + h) * kBlock;
        const Vec e = exp_of_nonpositive(load(at) - most);
        store(at, e);
        sums[h] = sums[h] + e;
      }
    }
    if (j < caps_out) {
      const Vec e = exp_of_nonpositive(load(column + j * kBlock) - most);
      store(column + j * kBlock, e);
      sums[0] = sums[0] + e;
    }
    const Vec factor = lane_factor == nullptr ? set(1.0f) : load(lane_factor + q * kLanes);
    const Vec sum = sums[0] + sums[1];
    store(column + caps_out * kBlock, factor / sum);
    for (j = 0; couplings != nullptr && j < caps_out; ++j) {
      store(couplings + j * stride + q * kLanes, load(column + j * kBlock) * (set(1.0f) / sum));
    }
  }
}

// Copies rows of a block to rows of all capsules.
inline void spread(const Sizes& sizes, const float* from, int64_t block, float* to) {
  const int64_t stride = sizes.blocks * kBlock;
  for (int64_t j = 0; j < sizes.caps_out; ++j) {
    std::memcpy(to + j * stride + block * kBlock, from + j * kBlock, kBlock * sizeof(float));
  }
}

// What the xnor agreement needs to know of the predictions of a block.
struct Described {
  float* means;   // (caps_out, 32): mean of the absolute numbers
  uint8_t* bits;  // (caps_out, bytes of dim_out, 32): signs
};

// Describes a block. With Totals, adds its rows to totals as add_rows does.
template <bool Totals>
inline void describe(const Sizes& sizes, Binarizer binarizer, const float* u, const Described& out,
                     bool first, float* totals) {
  const int64_t dim_out = sizes.dim_out;
  uint8_t* bits = out.bits;
  for (int64_t j = 0; j < sizes.caps_out; ++j) {
    Vec sums[kVecs], thresholds[kVecs];
    thresholds_of(binarizer, u, dim_out, thresholds);
#pragma GCC unroll 16
    for (int q = 0; q < kVecs; ++q) sums[q] = set(0.0f);
    for (int64_t begin = 0; begin < dim_out; begin += 8, bits += kBlock) {
      const int64_t end = begin + 8 < dim_out ? begin + 8 : dim_out;
      Bytes byte = set_bytes(0), bit = set_bytes(1);
      const auto take = [&](int64_t) {
        Vec a[kVecs], total = set(0.0f);
#pragma GCC unroll 16
        for (int q = 0; q < kVecs; ++q) {
          a[q] = load(u + q * kLanes);
          sums[q] = sums[q] + abs(a[q]);
          total = q == 0 ? a[q] : total + a[q];
        }
        byte = add_where(byte, signs_of(a, thresholds), bit);
        bit = add_bytes(bit, bit);
        u += kBlock;
        return total;
      };
      if (Totals) {
        add_to_totals(end - begin, first, totals, take);
        totals += (end - begin) * kTotal;
      } else {
        for (int64_t e = begin; e < end; ++e) take(e);
      }
      store_bytes(bits, in_order(byte));
    }
    const Vec count = set(static_cast<float>(dim_out));
#pragma GCC unroll 16
    for (int q = 0; q < kVecs; ++q) store(out.means + j * kBlock + q * kLanes, sums[q] / count);
  }
}

// What the xnor agreement needs to know of the output capsules.
struct DescribedOutputs {
  float* means;   // (caps_out)
  uint8_t* bits;  // (caps_out, bytes of dim_out)
};

inline bool is_positive(const uint8_t* bits, int64_t k) { return bits[k / 8] >> k % 8 & 1; }

inline void describe_outputs(const Sizes& sizes, Binarizer binarizer, const float* v,
                             const DescribedOutputs& out) {
  const int64_t dim = sizes.dim_out;
  std::memset(out.bits, 0, sizes.caps_out * bytes_for(dim));
  for (int64_t j = 0; j < sizes.caps_out; ++j, v += dim) {
    float threshold = 0.0f, sum = 0.0f;
    if (binarizer == Binarizer::midrange) {
      float most = v[0], least = v[0];
      for (int64_t e = 1; e < dim; ++e) {
        most = most > v[e] || most != most ? most : v[e];
        least = least < v[e] || least != least ? least : v[e];
      }
      threshold = (most + least) * 0.5f;
    }
    uint8_t* bits = out.bits + j * bytes_for(dim);
    for (int64_t e = 0; e < dim; ++e) {
      bits[e / 8] = static_cast<uint8_t>(bits[e / 8] | (v[e] > threshold) << e % 8);
      sum += std::fabs(v[e]);
    }
    out.means[j] = sum / static_cast<float>(dim);
  }
}

// Dot products of the signs of the predictions for output capsule j with its own.
inline void dot_described(const Sizes& sizes, const Described& u, const DescribedOutputs& v, int64_t j,
                          Vec* dots) {
  const int64_t bytes = bytes_for(sizes.dim_out);
  const uint8_t* row = v.bits + j * bytes;
  const LaneSigns signs(u.bits + j * bytes * kBlock, bytes, sizes.dim_out);
  dot_signs<false>(signs, [&](int64_t k) { return set_bytes(row[k]); }, dots);
#pragma GCC unroll 16
  for (int q = 0; q < kVecs; ++q) dots[q] = dots[q] * set(kByteUnit);
}

// Sums over the lanes of every row, times a factor, plus the bias.
inline void finish_sums(const Sizes& sizes, const float* totals, float factor, const float* bias,
                        float* sums) {
  alignas(64) float group[kReduced];
  for (int64_t row = 0; row < sizes.rows; row += kReduced) {
    reduce(totals + row * kTotal, group);
    const int64_t count = sizes.rows - row;
    if (count >= kReduced) {
      for (int k = 0; k < kReduced; ++k) sums[row + k] = group[k] * factor;
    } else {
      for (int64_t k = 0; k < count; ++k) sums[row + k] = group[k] * factor;
    }
  }
  for (int64_t row = 0; bias != nullptr && row < sizes.rows; ++row) sums[row] += bias[row];
}

// The factor that squash multiplies a vector with: norm / (1 + norm^2).
inline float squash_factor(const float* s, int64_t dim, float* norm_out = nullptr) {
  float square = 0.0f;
  int64_t e = 0;
  if (dim >= kLanes) {
    Vec squares = set(0.0f);
    for (; e + kLanes <= dim; e += kLanes) squares = fma(load(s + e), load(s + e), squares);
    square = sum_of_lanes(squares);
  }
  for (; e < dim; ++e) square += s[e] * s[e];
  const float norm = std::sqrt(square);
  if (norm_out != nullptr) *norm_out = norm;
  return norm / (1.0f + square);
}

inline void squash(int64_t count, int64_t dim, const float* s, float* v) {
  for (int64_t k = 0; k < count; ++k, s += dim, v += dim) {
    const float factor = squash_factor(s, dim);
    for (int64_t e = 0; e < dim; ++e) v[e] = s[e] * factor;
  }
}

// Rows of totals, filled up to whole groups for `reduce`.
inline int64_t totals_size(const Sizes& sizes) {
  return (sizes.rows + kReduced - 1) / kReduced * kReduced * kTotal;
}

}  // namespace xncaps::XNCAPS_ISA
