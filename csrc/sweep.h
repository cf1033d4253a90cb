// Routing over the predictions of a sample: weighted sums, agreements, softmax and squash.
#pragma once

#include "blocks.h"

namespace xncaps::XNCAPS_ISA {

// totals[row] += sum of the vectors of u in that row; of the first block, = instead of +=.
inline void add_rows(const Sizes& sizes, const float* u, bool first, float* totals) {
  for (int64_t row = 0; row < sizes.rows; ++row) {
    Vec total = load(u + row * kBlock);
#pragma GCC unroll 16
    for (int q = 1; q < kVecs; ++q) total = total + load(u + row * kBlock + q * kLanes);
    add_to_total(totals + row * kTotal, first, total);
  }
}

// Routing goes over u in strips: whole blocks, or halves of them where the lanes say so. Then a strip
// that is read and one that is waiting, with the totals, fit into the smallest cache.
constexpr int kStripVecs = kStrip / kLanes, kStrips = kBlock / kStrip;

inline const float* strip_of(const Sizes& sizes, const float* u, int64_t strip) {
  return u + strip / kStrips * sizes.u_block + strip % kStrips * kStrip;
}

// What is known of a strip for each output capsule has one more row at its end: of logits their
// largest, of weights a factor of them all.
inline int64_t strip_size(const Sizes& sizes) { return (sizes.caps_out + 1) * kStrip; }

// out[j] = u[j] . v[j], lane by lane, and totals[j, e] += c[j] * u_before[j, e] in the same pass: while
// one strip comes from a larger cache, the sums of the strip before it are made from the smallest.
template <bool Dot, bool Add, bool First>
inline void dot_and_add(const Sizes& sizes, const float* u, const float* v, const float* factor,
                        float* out, const float* u_before, const float* c, float* totals) {
  const int64_t caps_out = sizes.caps_out, dim_out = sizes.dim_out;
  Vec factors[kStripVecs], most[kStripVecs], all[kStripVecs];
#pragma GCC unroll 16
  for (int q = 0; q < kStripVecs; ++q) {
    if (Dot) factors[q] = factor == nullptr ? set(1.0f) : load(factor + q * kLanes);
    if (Add) all[q] = load(c + caps_out * kStrip + q * kLanes);
  }
  // Two sums for each vector, so that an addition need not wait for the one before.
  Vec sums[2][kStripVecs], weight[kStripVecs];
  const auto work = [&](int64_t row, int which) {
    if (Dot) {
      const Vec value = set(v[row]);
#pragma GCC unroll 16
      for (int q = 0; q < kStripVecs; ++q) {
        sums[which][q] = fma(value, load(u + row * kBlock + q * kLanes), sums[which][q]);
      }
    }
    if (Add) {
      Vec sum = weight[0] * load(u_before + row * kBlock);
#pragma GCC unroll 16
      for (int q = 1; q < kStripVecs; ++q) {
        sum = fma(weight[q], load(u_before + row * kBlock + q * kLanes), sum);
      }
      add_to_total(totals + row * kTotal, First, sum);
    }
  };
  for (int64_t j = 0; j < caps_out; ++j) {
#pragma GCC unroll 16
    for (int q = 0; q < kStripVecs; ++q) {
      sums[0][q] = sums[1][q] = set(0.0f);
      if (Add) weight[q] = load(c + j * kStrip + q * kLanes) * all[q];
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
    for (int q = 0; Dot && q < kStripVecs; ++q) {
      const Vec logit = (sums[0][q] + sums[1][q]) * factors[q];
      store(out + j * kStrip + q * kLanes, logit);
      most[q] = j == 0 ? logit : max(most[q], logit);
    }
  }
#pragma GCC unroll 16
  for (int q = 0; Dot && q < kStripVecs; ++q) store(out + caps_out * kStrip + q * kLanes, most[q]);
}

// Only the one, or only the other.
inline void dot_strip(const Sizes& sizes, const float* u, const float* v, const float* factor,
                     float* out) {
  dot_and_add<true, false, true>(sizes, u, v, factor, out, nullptr, nullptr, nullptr);
}
inline void add_strip(const Sizes& sizes, const float* u, const float* c, bool first, float* totals) {
  const auto run = first ? &dot_and_add<false, true, true> : &dot_and_add<false, true, false>;
  run(sizes, nullptr, nullptr, nullptr, nullptr, u, c, totals);
}

// Goes over all of u once: for every strip, logits = u . v, which `weigh` turns into weights,
// and totals = sum of weights * u. `factor` has a factor of the logits for every lane, or is null.
template <class Weigh>
inline void sweep(const Sizes& sizes, const float* u, const float* v, const float* factor,
                  float* logits, float* totals, const Weigh& weigh) {
  const int64_t strips = kStrips * sizes.blocks;
  const auto at = [&](int64_t strip) { return strip_of(sizes, u, strip); };
  const auto factor_at = [&](int64_t strip) {
    return factor == nullptr ? nullptr : factor + strip * kStrip;
  };
  if (kStrips == 1) {
    for (int64_t strip = 0; strip < strips; ++strip) {
      dot_strip(sizes, at(strip), v, factor_at(strip), logits);
      weigh(strip, logits);
      add_strip(sizes, at(strip), logits, strip == 0, totals);
    }
    return;
  }
  float *now = logits, *next = logits + strip_size(sizes);
  dot_strip(sizes, at(0), v, factor_at(0), now);
  for (int64_t strip = 0; strip < strips; ++strip) {
    weigh(strip, now);
    if (strip + 1 == strips) return add_strip(sizes, at(strip), now, strip == 0, totals);
    const auto run = strip == 0 ? &dot_and_add<true, true, true> : &dot_and_add<true, true, false>;
    run(sizes, at(strip + 1), v, factor_at(strip + 1), next, at(strip), now, totals);
    float* swap = now;
    now = next;
    next = swap;
  }
}

// The last row of weights: a factor of each lane, or 1.
inline void set_factor(const Sizes& sizes, const float* factor, float* c) {
#pragma GCC unroll 16
  for (int q = 0; q < kStripVecs; ++q) {
    store(c + sizes.caps_out * kStrip + q * kLanes,
          factor == nullptr ? set(1.0f) : load(factor + q * kLanes));
  }
}

// Softmax over the output capsules, in place; all but the division by the sum, which goes into the
// last row together with a factor of each lane, if there is one. If they are wanted, the couplings
// go to rows of all capsules.
inline void softmax(const Sizes& sizes, const float* lane_factor, float* logits, float* couplings) {
  const int64_t caps_out = sizes.caps_out, stride = sizes.blocks * kBlock;
#pragma GCC unroll 16
  for (int q = 0; q < kStripVecs; ++q) {
    float* column = logits + q * kLanes;
    const Vec most = load(column + caps_out * kStrip);
    Vec sums[2] = {set(0.0f), set(0.0f)};
    int64_t j = 0;
    for (; j + 2 <= caps_out; j += 2) {
#pragma GCC unroll 16
      for (int h = 0; h < 2; ++h) {
        float* at = column + (j + h) * kStrip;
        const Vec e = exp_of_nonpositive(load(at) - most);
        store(at, e);
        sums[h] = sums[h] + e;
      }
    }
    if (j < caps_out) {
      const Vec e = exp_of_nonpositive(load(column + j * kStrip) - most);
      store(column + j * kStrip, e);
      sums[0] = sums[0] + e;
    }
    const Vec factor = lane_factor == nullptr ? set(1.0f) : load(lane_factor + q * kLanes);
    const Vec sum = sums[0] + sums[1];
    store(column + caps_out * kStrip, factor / sum);
    for (j = 0; couplings != nullptr && j < caps_out; ++j) {
      store(couplings + j * stride + q * kLanes, load(column + j * kStrip) * (set(1.0f) / sum));
    }
  }
}

// Copies rows of a strip to rows of all capsules.
inline void spread(const Sizes& sizes, const float* from, int64_t strip, float* to) {
  const int64_t stride = sizes.blocks * kBlock;
  for (int64_t j = 0; j < sizes.caps_out; ++j) {
    std::memcpy(to + j * stride + strip * kStrip, from + j * kStrip, kStrip * sizeof(float));
  }
}

// Where vector q of a block is in rows of its strips, (strips, caps_out, kStrip).
inline int64_t lanes_at(const Sizes& sizes, int64_t j, int q) {
  const int64_t strip = q * kLanes / kStrip;
  return (strip * sizes.caps_out + j) * kStrip + q * kLanes % kStrip;
}

// What the xnor agreement needs to know of the predictions of a block.
struct Described {
  float* means;   // (strips, caps_out, kStrip): mean of the absolute numbers
  Signs* signs;   // (caps_out, dim_out)
};

inline void describe(const Sizes& sizes, Binarizer binarizer, const float* u, Described out) {
  for (int64_t j = 0; j < sizes.caps_out; ++j) {
    Vec sums[kVecs], thresholds[kVecs];
    thresholds_of(binarizer, u, sizes.dim_out, thresholds);
#pragma GCC unroll 16
    for (int q = 0; q < kVecs; ++q) sums[q] = set(0.0f);
    for (int64_t e = 0; e < sizes.dim_out; ++e, u += kBlock) {
      Vec a[kVecs];
#pragma GCC unroll 16
      for (int q = 0; q < kVecs; ++q) {
        a[q] = load(u + q * kLanes);
        sums[q] = sums[q] + abs(a[q]);
      }
      out.signs[j * sizes.dim_out + e] = signs_of(a, thresholds);
    }
    const Vec count = set(static_cast<float>(sizes.dim_out));
#pragma GCC unroll 16
    for (int q = 0; q < kVecs; ++q) store(out.means + lanes_at(sizes, j, q), sums[q] / count);
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
    Vec part[kVecs];
    floats_in_order(dot, part);
#pragma GCC unroll 16
    for (int q = 0; q < kVecs; ++q) {
      part[q] = part[q] * set(kByteUnit);
      dots[q] = first == 0 ? part[q] : dots[q] + part[q];
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
    const int64_t count = sizes.rows - row;
    if (count >= 8) {
      for (int k = 0; k < 8; ++k) sums[row + k] = group[k] * factor;
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

inline void squash(const Sizes& sizes, const float* s, float* v) {
  for (int64_t j = 0; j < sizes.caps_out; ++j, s += sizes.dim_out, v += sizes.dim_out) {
    const float factor = squash_factor(s, sizes.dim_out);
    for (int64_t e = 0; e < sizes.dim_out; ++e) v[e] = s[e] * factor;
  }
}

// Rows of totals, filled up to whole groups of eight for `reduce`.
inline int64_t totals_size(const Sizes& sizes) { return (sizes.rows + 7) / 8 * 8 * kTotal; }

}  // namespace xncaps::XNCAPS_ISA
