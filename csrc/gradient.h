// Step 2 of the backward pass (see backward.h): for every block, from the predictions to x and the
// weights.
#pragma once

#include "trace.h"

namespace xncaps::XNCAPS_ISA {

// Samples whose du is put together at once, and the rows and dims of sums that fit the registers.
constexpr int kTile = 8, kRows = kLanes / 4, kDims = 4;

// out[r, d] += sum over t of g[t, r] * a[t, d], for Rows rows and Dims dims of one vector of lanes.
// Steps are those of t, strides those of r.
template <int Rows, int Dims>
inline void add_products(const float* g, int64_t g_step, int64_t g_stride, const float* a,
                         int64_t a_step, int64_t count, float* out, int64_t out_stride) {
  Vec sum[Rows][Dims];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
    for (int d = 0; d < Dims; ++d) sum[r][d] = load(out + r * out_stride + d * kBlock);
  }
  for (int64_t t = 0; t < count; ++t) {
    Vec factor[Rows];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) factor[r] = load(g + t * g_step + r * g_stride);
#pragma GCC unroll 16
    for (int d = 0; d < Dims; ++d) {
      const Vec value = load(a + t * a_step + d * kBlock);
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) sum[r][d] = fma(factor[r], value, sum[r][d]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
    for (int d = 0; d < Dims; ++d) store(out + r * out_stride + d * kBlock, sum[r][d]);
  }
}

// The same for any number of rows and dims.
inline void add_all_products(int64_t rows, int64_t dims, const float* g, int64_t g_step,
                             int64_t g_stride, const float* a, int64_t a_step, int64_t count,
                             float* out, int64_t out_stride) {
  for (int64_t d = 0; d < dims;) {
    const bool whole = d + kDims <= dims;
    const auto many = whole ? &add_products<kRows, kDims> : &add_products<kRows, 1>;
    const auto one = whole ? &add_products<1, kDims> : &add_products<1, 1>;
    for (int64_t r = 0; r < rows;) {
      const bool fits = r + kRows <= rows;
      (fits ? many : one)(g + r * g_stride, g_step, g_stride, a + d * kBlock, a_step, count,
                          out + r * out_stride + d * kBlock, out_stride);
      r += fits ? kRows : 1;
    }
    d += whole ? kDims : 1;
  }
}

// Step 2 for one block of input capsules.
class BlockGradient {
 public:
  static constexpr int64_t kChunk = 128;  // samples whose x is laid out at once

  BlockGradient(const Layer& layer, const Sizes& sizes, const Weights& weights,
                const WeightBlocks& blocks, const BackwardCall& call, const TraceBuffer& traces,
                Parts& parts)
      : layer_(layer), sizes_(sizes), weights_(weights), blocks_(blocks), call_(call),
        traces_(traces), xnor_(layer.projection != Binarizer::none) {
    const int64_t chunk = call.batch < kChunk ? call.batch : kChunk;
    x_ = parts.take<float>(chunk * sizes.dim_in * kBlock);
    d_x_ = parts.take<float>(chunk * sizes.dim_in * kBlock);
    x_scale_ = parts.take<float>(chunk * kBlock);
    signs_ = parts.take<float>(xnor_ ? sizes.rows * sizes.dim_in * kBlock : 0);
    scale_ = parts.take<float>(xnor_ ? sizes.rows * kBlock : 0);
    d_weight_ = parts.take<float>(sizes.rows * sizes.dim_in * kBlock);
    d_scale_ = parts.take<float>(sizes.rows * kBlock);
    du_ = parts.take<float>(kTile * sizes.dim_out * kLanes);
    du_scaled_ = parts.take<float>(kTile * sizes.dim_out * kLanes);
    lane_ = parts.take<float>(sizes.rows);
    terms_ = parts.take<Term>(2 * sizes.iterations);
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
    for (int64_t j = 0; j < sizes_.caps_out; ++j) {
#pragma GCC unroll 16
      for (int q = 0; q < kVecs; ++q) {
        for (int64_t s = 0; s < count; s += kTile) {
          const int samples = static_cast<int>(count - s < kTile ? count - s : kTile);
          for (int k = 0; k < samples; ++k) put_together(first_sample + s + k, s + k, j, q, k);
          multiply(s, samples, j, q);
        }
      }
    }
    for (int64_t s = 0; s < count; ++s) write_x(first_sample + s, s);
  }

  // A part of du: a coefficient of each lane (1 / caps_out if there are none) times a vector.
  struct Term {
    const float* coefficient;
    const float* vector;
  };

  // sum[k] += the parts of du for Count rows from e on.
  template <int Count>
  void add_terms(const Term* terms, int64_t count, int64_t e, Vec* sum) const {
    const Vec even = set(1.0f / static_cast<float>(sizes_.caps_out));
    for (int64_t t = 0; t < count; ++t) {
      const Vec c = terms[t].coefficient == nullptr ? even : load(terms[t].coefficient);
#pragma GCC unroll 16
      for (int k = 0; k < Count; ++k) sum[k] = fma(c, set(terms[t].vector[e + k]), sum[k]);
    }
  }

  // du of one sample for output capsule j and one vector of lanes.
  void put_together(int64_t sample, int64_t s, int64_t j, int q, int slot) {
    const int64_t kept = sizes_.caps_out * sizes_.blocks * kBlock, row = j * sizes_.dim_out;
    const int64_t lane = j * sizes_.blocks * kBlock + first_ + q * kLanes;
    const int64_t last = sizes_.iterations - 1;
    const Traces traces = traces_.of(sample);
    const float* couplings = call_.couplings + sample * last * kept + lane;
    int64_t count = 0;
    for (int64_t t = layer_.detach_routing ? last : 0; t <= last; ++t) {
      const float* coupling = t == 0 ? nullptr : couplings + (t - 1) * kept;
      terms_[count++] = {coupling, traces.ds + t * sizes_.rows + row};
    }
    const int64_t sums = count;
    for (int64_t t = 0; !layer_.detach_routing && t < last; ++t) {
      terms_[count++] = {traces.coefficients + t * kept + lane,
                         traces.vectors + t * sizes_.rows + row};
    }
    const float* d_means = traces.d_means == nullptr ? nullptr : traces.d_means + lane;
    const int64_t all = sizes_.dim_out;
    int64_t e = 0;
    for (; e + 4 <= all; e += 4) put_rows<4>(s, j, q, slot, e, sums, count, d_means);
    for (; e < all; ++e) put_rows<1>(s, j, q, slot, e, sums, count, d_means);
  }

  template <int Count>
  void put_rows(int64_t s, int64_t j, int q, int slot, int64_t e, int64_t sums, int64_t count,
                const float* d_means) {
    Vec g[Count];
#pragma GCC unroll 16
    for (int k = 0; k < Count; ++k) g[k] = set(0.0f);
    if (layer_.agreement != Binarizer::none && count > sums) {
      add_terms<Count>(terms_ + sums, count - sums, e, g);
      pass_signs<Count>(s, j, q, e, d_means, g);
      add_terms<Count>(terms_, sums, e, g);
    } else {
      add_terms<Count>(terms_, count, e, g);
    }
    const int64_t at = slot * sizes_.dim_out * kLanes;
    const Vec x_scale = xnor_ ? load(x_scale_ + s * kBlock + q * kLanes) : set(1.0f);
#pragma GCC unroll 16
    for (int k = 0; k < Count; ++k) {
      const int64_t row = j * sizes_.dim_out + e + k;
      // The weights get du times the scale of x, and x gets du times the scale of the weights.
      store(du_ + at + (e + k) * kLanes, xnor_ ? g[k] * x_scale : g[k]);
      if (!xnor_) continue;
      store(du_scaled_ + at + (e + k) * kLanes, g[k] * load(scale_ + row * kBlock + q * kLanes));
    }
  }

  // What came through the signs of u: times their slope, plus the gradient of the means.
  template <int Count>
  void pass_signs(int64_t s, int64_t j, int q, int64_t e, const float* d_means, Vec* g) const {
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
    const int64_t x_size = sizes_.dim_in * kBlock, du_size = sizes_.dim_out * kLanes;
    const int64_t x_at = s * x_size + q * kLanes, w_at = j * sizes_.dim_out * x_size + q * kLanes;
    add_all_products(sizes_.dim_out, sizes_.dim_in, du_, du_size, kLanes, x_ + x_at, x_size, samples,
                     d_weight_ + w_at, x_size);
    add_all_products(samples, sizes_.dim_in, xnor_ ? du_scaled_ : du_, kLanes, du_size, w_ + w_at,
                     x_size, sizes_.dim_out, d_x_ + x_at, x_size);
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
  float *x_, *d_x_, *x_scale_, *signs_, *scale_, *d_weight_, *d_scale_, *du_, *du_scaled_, *lane_;
  Term* terms_;
  const float* w_ = nullptr;  // the weights of the block, or their signs
  int64_t first_ = 0, width_ = 0;
};

}  // namespace xncaps::XNCAPS_ISA
