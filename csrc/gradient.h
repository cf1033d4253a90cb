// Step 2 of the backward pass (see backward.h): for every block, from the predictions to x and the
// weights.
#pragma once

#include "trace.h"

namespace xncaps::XNCAPS_ISA {

// Samples and vectors of lanes whose du is put together at once, so that it stays in the smallest
// cache; and the rows and dims of sums that fit the registers.
constexpr int kTile = 16, kWide = 2, kRows = kLanes / 4, kDims = 4;
static_assert(kVecs % kWide == 0, "a block is so many vectors, several times");

// out[r, d] += sum over t of g[t, r] * a[t, d], for Dims dims of one vector of lanes. Steps are those
// of t, strides those of r.
struct Products {
  const float *g, *a;
  float* out;
  int64_t g_step, g_stride, a_step, out_stride, rows, count;
};

template <int Rows, int Dims>
inline void add_tile(const Products& p, int64_t row, int64_t dim) {
  const float *g = p.g + row * p.g_stride, *a = p.a + dim * kBlock;
  float* out = p.out + row * p.out_stride + dim * kBlock;
  Vec sum[Rows][Dims];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
    for (int d = 0; d < Dims; ++d) sum[r][d] = load(out + r * p.out_stride + d * kBlock);
  }
  for (int64_t t = 0; t < p.count; ++t, g += p.g_step, a += p.a_step) {
    Vec factor[Rows];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) factor[r] = load(g + r * p.g_stride);
#pragma GCC unroll 16
    for (int d = 0; d < Dims; ++d) {
      const Vec value = keep(load(a + d * kBlock));
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) sum[r][d] = fma(factor[r], value, sum[r][d]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
    for (int d = 0; d < Dims; ++d) store(out + r * p.out_stride + d * kBlock, sum[r][d]);
  }
}

template <int Dims>
inline void add_dims(const Products& p, int64_t dim) {
  int64_t row = 0;
  for (; row + kRows <= p.rows; row += kRows) add_tile<kRows, Dims>(p, row, dim);
  for (; row < p.rows; ++row) add_tile<1, Dims>(p, row, dim);
}

// The same for any number of dims.
inline void add_products(const Products& p, int64_t dims) {
  int64_t dim = 0;
  for (; dim + kDims <= dims; dim += kDims) add_dims<kDims>(p, dim);
  for (; dim < dims; ++dim) add_dims<1>(p, dim);
}

// Step 2 for one block of input capsules.
class BlockGradient {
 public:
  static constexpr int64_t kChunk = 128;  // samples whose x is laid out at once

  BlockGradient(const Layer& layer, const Sizes& sizes, const Weights& weights,
                const WeightBlocks& blocks, const BackwardCall& call, const TraceBuffer& traces,
                Parts& parts)
      : layer_(layer), sizes_(sizes), weights_(weights), blocks_(blocks), call_(call),
        traces_(traces), xnor_(layer.projection != Binarizer::none),
        sums_(layer.detach_routing ? 1 : sizes.iterations),
        count_(layer.detach_routing ? 1 : 2 * sizes.iterations - 1) {
    const int64_t chunk = call.batch < kChunk ? call.batch : kChunk;
    x_ = parts.take<float>(chunk * sizes.dim_in * kBlock);
    d_x_ = parts.take<float>(chunk * sizes.dim_in * kBlock);
    x_scale_ = parts.take<float>(chunk * kBlock);
    signs_ = parts.take<float>(xnor_ ? sizes.rows * sizes.dim_in * kBlock : 0);
    scale_ = parts.take<float>(xnor_ ? sizes.rows * kBlock : 0);
    d_weight_ = parts.take<float>(sizes.rows * sizes.dim_in * kBlock);
    d_scale_ = parts.take<float>(sizes.rows * kBlock);
    du_ = parts.take<float>(kTile * sizes.dim_out * kWide * kLanes);
    du_scaled_ = parts.take<float>(xnor_ ? kTile * sizes.dim_out * kWide * kLanes : 0);
    lane_ = parts.take<float>(sizes.rows);
    even_ = parts.take<float>(kBlock);
    terms_ = parts.take<Term>(kTile * count_);
  }

  void run(int64_t block) {
    first_ = block * kBlock;
    width_ = width_at(first_, sizes_.caps_in);
    w_ = xnor_ ? signs_ : blocks_.at(block).floats;
    if (xnor_) unpack(blocks_.at(block));
    std::memset(d_weight_, 0, sizes_.rows * sizes_.dim_in * kBlock * sizeof(float));
    for (int64_t b = 0; b < call_.batch; b += kChunk) {
      const int64_t left = call_.batch - b;
      run_chunk(b, left < kChunk ? left : kChunk);
    }
    write_weight();
  }

 private:
  // Signs and scales of the weights of the block as floats.
  void unpack(const BlockWeights& from) {
    for (int64_t row = 0; row < sizes_.rows; ++row) {
      for (int64_t d = 0; d < sizes_.dim_in; ++d) {
        const uint8_t* bytes = from.bits + (row * sizes_.bytes + d / 8) * kBlock;
        float* to = signs_ + (row * sizes_.dim_in + d) * kBlock;
        for (int64_t k = 0; k < kBlock; ++k) to[k] = (bytes[k] >> (d % 8)) & 1 ? 1.0f : -1.0f;
      }
    }
    std::memcpy(scale_, from.scale, sizes_.rows * kBlock * sizeof(float));
  }

  void run_chunk(int64_t first_sample, int64_t count) {
    const int64_t x_size = sizes_.dim_in * kBlock;
    for (int64_t s = 0; s < count; ++s) {
      float* x = x_ + s * x_size;
      gather(x_of(first_sample + s), sizes_.dim_in, width_, x);
      if (!xnor_) continue;
      Vec means[kVecs], thresholds[kVecs];
      mean_abs(x, sizes_.dim_in, means);
      thresholds_of(layer_.projection, x, sizes_.dim_in, thresholds);
#pragma GCC unroll 16
      for (int q = 0; q < kVecs; ++q) {
        store(x_scale_ + s * kBlock + q * kLanes, weights_.learned ? set(1.0f) : means[q]);
        for (int64_t d = 0; d < sizes_.dim_in; ++d) {
          float* at = x + d * kBlock + q * kLanes;
          store(at, select(greater(load(at), thresholds[q]), set(1.0f), set(-1.0f)));
        }
      }
    }
    std::memset(d_x_, 0, count * x_size * sizeof(float));
    for (int64_t s = 0; s < count; s += kTile) {
      const int samples = static_cast<int>(count - s < kTile ? count - s : kTile);
      find_terms(first_sample + s, samples);
      for (int64_t j = 0; j < sizes_.caps_out; ++j) {
        for (int q = 0; q < kVecs; q += kWide) {
          for (int k = 0; k < samples; ++k) put_together(first_sample + s + k, s + k, j, q, k);
          multiply(s, samples, j, q);
        }
      }
    }
    for (int64_t s = 0; s < count; ++s) write_x(first_sample + s, s);
  }

  // A part of du: a coefficient of each lane times a vector. Both are those of output capsule 0; the
  // coefficients of the next one follow at the stride.
  struct Term {
    const float* coefficient;
    int64_t stride;
    const float* vector;
  };

  // The parts of du of every sample of a tile: those through the weighted sums, then those through
  // the logits.
  void find_terms(int64_t first_sample, int samples) {
    const int64_t stride = sizes_.blocks * kBlock, kept = sizes_.caps_out * stride;
    const int64_t last = sizes_.iterations - 1;
    for (int64_t k = 0; k < kBlock; ++k) even_[k] = 1.0f / static_cast<float>(sizes_.caps_out);
    Term* term = terms_;
    for (int64_t sample = first_sample; sample < first_sample + samples; ++sample) {
      const Traces traces = traces_.of(sample);
      const float* couplings = call_.couplings + sample * last * kept + first_;
      for (int64_t t = last + 1 - sums_; t <= last; ++t, ++term) {
        term->coefficient = t == 0 ? even_ : couplings + (t - 1) * kept;
        term->stride = t == 0 ? 0 : stride;
        term->vector = traces.ds + t * sizes_.rows;
      }
      for (int64_t t = 0; t < count_ - sums_; ++t, ++term) {
        *term = {traces.coefficients + t * kept + first_, stride, traces.vectors + t * sizes_.rows};
      }
    }
  }

  // du of one sample for output capsule j and kWide vectors of lanes from the q-th on.
  void put_together(int64_t sample, int64_t s, int64_t j, int q, int slot) {
    const int64_t all = sizes_.dim_out;
    // The parts lie apart: those of the next output capsule are asked for early.
    const Term* terms = terms_ + slot * count_;
    for (int64_t t = 0; q == 0 && t < count_; ++t) {
      const float* next = terms[t].coefficient + (j + 1) * terms[t].stride;
      for (int64_t k = 0; k < kBlock; k += 16) __builtin_prefetch(next + k);
      __builtin_prefetch(terms[t].vector + (j + 1) * sizes_.dim_out);
    }
    int64_t e = 0;
    if (layer_.agreement == Binarizer::none || count_ == sums_) {
      if (count_ == kUsual) return xnor_ ? put_usual<true>(s, j, q, slot) : put_usual<false>(s, j, q, slot);
      for (; e + 4 <= all; e += 4) put_rows<4, kWide>(sample, s, j, q, slot, e);
      for (; e < all; ++e) put_rows<1, kWide>(sample, s, j, q, slot, e);
      return;
    }
    for (; e + 4 <= all; e += 4) {
      for (int w = 0; w < kWide; ++w) put_rows<4, 1>(sample, s, j, q + w, slot, e);
    }
    for (; e < all; ++e) {
      for (int w = 0; w < kWide; ++w) put_rows<1, 1>(sample, s, j, q + w, slot, e);
    }
  }

  // The parts of three iterations: their coefficients stay in registers for all rows.
  static constexpr int kUsual = 5;

  template <bool Xnor>
  void put_usual(int64_t s, int64_t j, int q, int slot) {
    const Term* terms = terms_ + slot * kUsual;
    const int64_t row = j * sizes_.dim_out, lane = q * kLanes, stride = kWide * kLanes;
    const float* vectors[kUsual];
    Vec c[kUsual][kWide], x_scale[kWide];
#pragma GCC unroll 16
    for (int w = 0; w < kWide; ++w) {
#pragma GCC unroll 16
      for (int t = 0; t < kUsual; ++t) {
        vectors[t] = terms[t].vector + row;
        c[t][w] = keep(load(terms[t].coefficient + j * terms[t].stride + lane + w * kLanes));
      }
      x_scale[w] = Xnor ? load(x_scale_ + s * kBlock + lane + w * kLanes) : set(1.0f);
    }
    const int64_t at = slot * sizes_.dim_out * stride;
    for (int64_t e = 0; e < sizes_.dim_out; ++e) {
      Vec g[kWide];
#pragma GCC unroll 16
      for (int t = 0; t < kUsual; ++t) {
        const Vec value = set(vectors[t][e]);
#pragma GCC unroll 16
        for (int w = 0; w < kWide; ++w) g[w] = t == 0 ? c[t][w] * value : fma(c[t][w], value, g[w]);
      }
#pragma GCC unroll 16
      for (int w = 0; w < kWide; ++w) {
        const int64_t to = at + e * stride + w * kLanes;
        store(du_ + to, Xnor ? g[w] * x_scale[w] : g[w]);
        if (Xnor) store(du_scaled_ + to, g[w] * load(scale_ + (row + e) * kBlock + lane + w * kLanes));
      }
    }
  }

  template <int Count, int Wide>
  void put_rows(int64_t sample, int64_t s, int64_t j, int q, int slot, int64_t e) {
    const Term* terms = terms_ + slot * count_;
    Vec g[Count][Wide];
#pragma GCC unroll 16
    for (int k = 0; k < Count; ++k) {
#pragma GCC unroll 16
      for (int w = 0; w < Wide; ++w) g[k][w] = set(0.0f);
    }
    if (Wide == 1) {
      add_terms(terms + sums_, count_ - sums_, j, q, e, g);
      pass_signs<Count>(sample, s, j, q, e, &g[0][0]);
    }
    add_terms(terms, Wide == 1 ? sums_ : count_, j, q, e, g);
    // The weights get du times the scale of x, and x gets du times the scale of the weights.
    const int64_t row = j * sizes_.dim_out + e, stride = kWide * kLanes;
    const int64_t at = (slot * sizes_.dim_out + e) * stride + q % kWide * kLanes;
#pragma GCC unroll 16
    for (int w = 0; w < Wide; ++w) {
      const int64_t lane = (q + w) * kLanes;
      const Vec x_scale = xnor_ ? load(x_scale_ + s * kBlock + lane) : set(1.0f);
#pragma GCC unroll 16
      for (int k = 0; k < Count; ++k) {
        const int64_t to = at + k * stride + w * kLanes;
        store(du_ + to, g[k][w] * x_scale);
        if (xnor_) store(du_scaled_ + to, g[k][w] * load(scale_ + (row + k) * kBlock + lane));
      }
    }
  }

  // g += parts of du, for rows from e on and vectors of lanes from the q-th on.
  template <int Count, int Wide>
  void add_terms(const Term* terms, int64_t count, int64_t j, int q, int64_t e,
                 Vec (&g)[Count][Wide]) const {
    for (const Term* term = terms; term < terms + count; ++term) {
      const float* vector = term->vector + j * sizes_.dim_out + e;
      Vec c[Wide];
#pragma GCC unroll 16
      for (int w = 0; w < Wide; ++w) c[w] = load(term->coefficient + j * term->stride + (q + w) * kLanes);
#pragma GCC unroll 16
      for (int k = 0; k < Count; ++k) {
        const Vec value = set(vector[k]);
#pragma GCC unroll 16
        for (int w = 0; w < Wide; ++w) g[k][w] = fma(c[w], value, g[k][w]);
      }
    }
  }

  // What came through the signs of u: times their slope, plus the gradient of the means.
  template <int Count>
  void pass_signs(int64_t sample, int64_t s, int64_t j, int q, int64_t e, Vec* g) const {
    const float* d_means = traces_.of(sample).d_means;
    if (d_means != nullptr) d_means += j * sizes_.blocks * kBlock + first_ + q * kLanes;
    const int64_t first = j * sizes_.dim_out + e, stride = sizes_.dim_in * kBlock;
    const float* x = x_ + s * stride + q * kLanes;
    const float* w = w_ + first * stride + q * kLanes;
    const Vec zero = set(0.0f);
    Vec u[Count];
#pragma GCC unroll 16
    for (int k = 0; k < Count; ++k) u[k] = zero;
    for (int64_t d = 0; d < sizes_.dim_in; ++d) {
      const Vec value = load(x + d * kBlock);
#pragma GCC unroll 16
      for (int k = 0; k < Count; ++k) u[k] = fma(value, load(w + k * stride + d * kBlock), u[k]);
    }
#pragma GCC unroll 16
    for (int k = 0; k < Count; ++k) {
      if (xnor_) {
        const Vec scale = load(scale_ + (first + k) * kBlock + q * kLanes);
        u[k] = u[k] * load(x_scale_ + s * kBlock + q * kLanes) * scale;
      }
      g[k] = pass_sign(layer_.agreement, u[k], g[k]);
      if (d_means == nullptr) continue;
      const Vec d_mean = load(d_means) * set(1.0f / static_cast<float>(sizes_.dim_out));
      const Vec minus = select(greater(zero, u[k]), zero - d_mean, zero);
      g[k] = g[k] + select(greater(u[k], zero), d_mean, minus);
    }
  }

  // du of the tile times x, for the weights; and times the weights, for x.
  void multiply(int64_t s, int samples, int64_t j, int q) {
    const int64_t x_size = sizes_.dim_in * kBlock, du_row = kWide * kLanes;
    const int64_t du_size = sizes_.dim_out * du_row;
    for (int w = 0; w < kWide; ++w) {
      const int64_t lane = (q + w) * kLanes, x_at = s * x_size + lane;
      const int64_t w_at = j * sizes_.dim_out * x_size + lane;
      const float* for_x = (xnor_ ? du_scaled_ : du_) + w * kLanes;
      add_products({du_ + w * kLanes, x_ + x_at, d_weight_ + w_at, du_size, du_row, x_size, x_size,
                    sizes_.dim_out, samples},
                   sizes_.dim_in);
      add_products({for_x, w_ + w_at, d_x_ + x_at, du_row, du_size, x_size, x_size, samples,
                    sizes_.dim_out},
                   sizes_.dim_in);
    }
  }

  const float* x_of(int64_t sample) const {
    return call_.x + (sample * sizes_.caps_in + first_) * sizes_.dim_in;
  }

  void write_x(int64_t sample, int64_t s) {
    const int64_t dim = sizes_.dim_in;
    const float* d_x = d_x_ + s * dim * kBlock;
    const float* signs = x_ + s * dim * kBlock;
    float* out = call_.grad_x + (sample * sizes_.caps_in + first_) * dim;
    scatter(d_x, kBlock, dim, out, dim);
    if (!xnor_) return;
    const bool through_mean = !layer_.detach_scale && !weights_.learned;
    for (int64_t k = 0; k < width_; ++k) {
      float d_mean = 0.0f;
      for (int64_t d = 0; through_mean && d < dim; ++d) {
        d_mean += d_x[d * kBlock + k] * signs[d * kBlock + k];
      }
      d_mean /= static_cast<float>(dim);
      const float scale = x_scale_[s * kBlock + k];
      const float* x = x_of(sample) + k * dim;
      for (int64_t d = 0; d < dim; ++d) {
        float& g = out[k * dim + d];
        g = pass_sign(layer_.projection, x[d], g * scale);
        if (through_mean) g += d_mean * sign_or_zero(x[d]);
      }
    }
  }

  // to[lane, k] = from[k, lane] for the capsules of the block.
  void scatter(const float* from, int64_t from_stride, int64_t count, float* to, int64_t to_stride) {
    const int64_t lanes8 = width_ / 8 * 8, count8 = count / 8 * 8;
    for (int64_t k = 0; k < count8; k += 8) {
      for (int64_t lane = 0; lane < lanes8; lane += 8) {
        transpose8(from + k * from_stride + lane, from_stride, to + lane * to_stride + k, to_stride);
      }
    }
    for (int64_t lane = 0; lane < width_; ++lane) {
      for (int64_t k = lane < lanes8 ? count8 : 0; k < count; ++k) {
        to[lane * to_stride + k] = from[k * from_stride + lane];
      }
    }
  }

  void write_weight() {
    const int64_t dim = sizes_.dim_in, dim_out = sizes_.dim_out, all = sizes_.rows * dim;
    for (int64_t row = 0; xnor_ && row < sizes_.rows; ++row) {
#pragma GCC unroll 16
      for (int q = 0; q < kVecs; ++q) {
        const Vec scale = load(scale_ + row * kBlock + q * kLanes);
        Vec d_scale = set(0.0f);
        for (int64_t d = 0; d < dim; ++d) {
          float* at = d_weight_ + (row * dim + d) * kBlock + q * kLanes;
          d_scale = fma(load(at), load(signs_ + (row * dim + d) * kBlock + q * kLanes), d_scale);
          store(at, load(at) * scale);
        }
        store(d_scale_ + row * kBlock + q * kLanes, d_scale);
      }
    }
    float* out = call_.grad_weight + first_ * all;
    for (int64_t j = 0; j < sizes_.caps_out; ++j) {
      for (int64_t d = 0; d < dim; ++d) {
        scatter(d_weight_ + (j * dim_out * dim + d) * kBlock, dim * kBlock, dim_out,
                out + (j * dim + d) * dim_out, all);
      }
    }
    if (!xnor_) return;
    const bool through_mean = !layer_.detach_scale && !weights_.learned;
    for (int64_t k = 0; k < width_; ++k) {
      for (int64_t row = 0; row < sizes_.rows; ++row) lane_[row] = d_scale_[row * kBlock + k];
      if (call_.grad_scale != nullptr) {
        std::memcpy(call_.grad_scale + (first_ + k) * sizes_.rows, lane_,
                    sizes_.rows * sizeof(float));
      }
      const float* w = call_.weight + (first_ + k) * all;
      float* g = out + k * all;
      for (int64_t j = 0; j < sizes_.caps_out; ++j) {
        for (int64_t d = 0; d < dim; ++d, w += dim_out, g += dim_out) {
          for (int64_t e = 0; e < dim_out; ++e) {
            g[e] = pass_sign(layer_.projection, w[e], g[e]);
          }
          for (int64_t e = 0; through_mean && e < dim_out; ++e) {
            g[e] += lane_[j * dim_out + e] / static_cast<float>(dim) * sign_or_zero(w[e]);
          }
        }
      }
    }
  }

  const Layer& layer_;
  const Sizes& sizes_;
  const Weights& weights_;
  const WeightBlocks& blocks_;
  const BackwardCall& call_;
  const TraceBuffer& traces_;
  const bool xnor_;
  const int64_t sums_, count_;  // parts of du: through the weighted sums, and all
  float *x_, *d_x_, *x_scale_, *signs_, *scale_, *d_weight_, *d_scale_, *du_, *du_scaled_, *lane_,
      *even_;
  Term* terms_;
  const float* w_ = nullptr;  // the weights of the block, or their signs
  int64_t first_ = 0, width_ = 0;
};

}  // namespace xncaps::XNCAPS_ISA
