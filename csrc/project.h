// Predictions of a block: from signs, or in floats for several samples at once.
#pragma once

#include "blocks.h"

namespace xncaps::XNCAPS_ISA {

inline Vec load_scale(const float* p) { return load(p); }
inline Vec load_scale(const uint16_t* p) { return load_half(p); }

// Dot products of the signs of a block with those of a row of weights.
template <bool OneByte>
inline void dot_signs(const LaneSigns& x, const uint8_t* row, Vec* dots) {
  dot_signs<OneByte>(x, [&](int64_t k) { return load_bytes(row + k * kBlock); }, dots);
}

// The same for two rows that follow each other. Lanes may have a way of their own for signs of one byte.
template <bool OneByte>
struct TwoRows {
  const LaneSigns& x;

  TwoRows(const LaneSigns& x, int64_t) : x(x) {}

  void dots(const uint8_t* rows, Vec* out) const {
    dot_signs<OneByte>(x, rows, out);
    dot_signs<OneByte>(x, rows + (OneByte ? 1 : x.bytes) * kBlock, out + kVecs);
  }
};

// Predictions of a block from signs: u = (dot * x_scale) * scale, row by row, with x_scale in the
// units of the dot products. Folded leaves x_scale to whoever reads u. The sums over the lanes of
// x_scale * dot * scale are added to `totals`, or put there for the first block.
template <bool OneByte, bool Folded, class Scale>
inline void project_signs(const Sizes& sizes, const BlockWeights& weights, const uint8_t* x_bits,
                          const float* x_scale, bool first, float* u, float* totals) {
  const uint8_t* bits = weights.bits;
  const Scale* scale = static_cast<const Scale*>(weights.scale);
  // Copies: what is stored could change what pointers and references show.
  const int64_t rows = sizes.rows, row_bytes = (OneByte ? 1 : sizes.bytes) * kBlock;
  const LaneSigns x(x_bits, OneByte ? 1 : sizes.bytes, sizes.dim_in);
  const TwoRows<OneByte> two_rows(x, sizes.dim_in);
  Vec factors[kVecs];
#pragma GCC unroll 16
  for (int q = 0; q < kVecs; ++q) factors[q] = load(x_scale + q * kLanes);
  const auto predict = [&](int64_t row, const Vec* dots) {
    Vec total = set(0.0f);
#pragma GCC unroll 16
    for (int q = 0; q < kVecs; ++q) {
      const int64_t at = row * kBlock + q * kLanes;
      const Vec w_scale = load_scale(scale + at);
      const Vec value = Folded ? dots[q] * w_scale : dots[q] * factors[q] * w_scale;
      store(u + at, value);
      total = Folded ? fma(value, factors[q], total) : total + value;
    }
    return total;
  };
  int64_t row = 0;
  for (; row + 2 <= rows; row += 2) {
    Vec dots[2 * kVecs];
    two_rows.dots(bits + row * row_bytes, dots);
    const Vec a = predict(row, dots), b = predict(row + 1, dots + kVecs);
    add_to_totals(totals + row * kTotal, first, a, b);
  }
  if (row < rows) {
    Vec dots[kVecs];
    dot_signs<OneByte>(x, bits + row * row_bytes, dots);
    add_to_total(totals + row * kTotal, first, predict(row, dots));
  }
}

// Predictions of a block in floats, for several samples, rows and vectors of lanes at once: each weight is
// loaded once. x_lanes and u are those of the first sample; the next ones follow at the strides.
template <int Samples, int Rows, int Vecs>
inline void project_rows(const Sizes& sizes, const float* weights, const float* x_lanes,
                         int64_t x_stride, float* u, int64_t u_stride) {
  static_assert(kVecs % Vecs == 0, "blocks are whole groups of vectors");
#pragma GCC unroll 16
  for (int lane = 0; lane < kBlock; lane += Vecs * kLanes) {
    Vec sum[Rows][Samples][Vecs];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
      for (int s = 0; s < Samples; ++s) {
#pragma GCC unroll 16
        for (int q = 0; q < Vecs; ++q) sum[r][s][q] = set(0.0f);
      }
    }
    for (int64_t d = 0; d < sizes.dim_in; ++d) {
      Vec x[Samples][Vecs];
#pragma GCC unroll 16
      for (int s = 0; s < Samples; ++s) {
#pragma GCC unroll 16
        for (int q = 0; q < Vecs; ++q) {
          x[s][q] = keep(load(x_lanes + s * x_stride + d * kBlock + lane + q * kLanes));
        }
      }
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) {
        const float* at = weights + (r * sizes.dim_in + d) * kBlock + lane;
#pragma GCC unroll 16
        for (int q = 0; q < Vecs; ++q) {
          // Once for each line of the cache.
          const float* next = at + q * kLanes + kAhead;
          if (kAhead > 0 && (lane + q * kLanes) % 16 == 0) __builtin_prefetch(next);
          const Vec w = load(at + q * kLanes);
#pragma GCC unroll 16
          for (int s = 0; s < Samples; ++s) sum[r][s][q] = fma(w, x[s][q], sum[r][s][q]);
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
      for (int s = 0; s < Samples; ++s) {
#pragma GCC unroll 16
        for (int q = 0; q < Vecs; ++q) {
          store(u + s * u_stride + r * kBlock + lane + q * kLanes, sum[r][s][q]);
        }
      }
    }
  }
}

template <int Samples>
inline void project_floats(const Sizes& sizes, const float* weights, const float* x_lanes,
                           int64_t x_stride, float* u, int64_t u_stride) {
  // As many sums as there are registers for; weights that serve one sample alone are read in the order
  // in which they lie.
  constexpr int kVecsAtOnce = Samples == 1 ? kVecs : 1;
  constexpr int kRows = Samples == 1 ? kRowsOfOne : kLanes / 4;
  int64_t row = 0;
  for (; row + kRows <= sizes.rows; row += kRows) {
    project_rows<Samples, kRows, kVecsAtOnce>(sizes, weights + row * sizes.dim_in * kBlock, x_lanes,
                                              x_stride, u + row * kBlock, u_stride);
  }
  for (; row < sizes.rows; ++row) {
    project_rows<Samples, 1, kVecsAtOnce>(sizes, weights + row * sizes.dim_in * kBlock, x_lanes,
                                          x_stride, u + row * kBlock, u_stride);
  }
}

}  // namespace xncaps::XNCAPS_ISA
