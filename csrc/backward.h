// The fused backward pass, in two steps.
//
// 1. For every sample, back through the routing. The gradient of the predictions has low rank: for
//    input capsule i and output capsule j it is a sum of coefficient[i, j] * vector[j],
//
//        du = sum_t couplings_t * ds_t + sum_t dlogits_t * (v_1 + ... + v_t-1)         (dot)
//        du = sum_t couplings_t * ds_t + slope(u) * sum_t dagreed_t * scale * sign(v_t)    (xnor)
//
//    so only coefficients and vectors are kept.
// 2. For every block of input capsules, du is put together for a few samples at a time and at once
//    multiplied with x (for the weights) and with the weights (for x).
#pragma once

#include "forward.h"

namespace xncaps::XNCAPS_ISA {

// What step 1 leaves of one sample.
struct Traces {
  float* coefficients;  // (iterations - 1, caps_out, padded caps_in): dlogits or scaled dagreed
  float* d_means;       // (caps_out, padded caps_in): of the means of abs(u), or nothing
  float* ds;            // (iterations, rows)
  float* vectors;       // (iterations - 1, rows): sums of v, or scaled signs of v
  float* d_learned;     // (caps_out): of the learned scale of the agreement
};

class TraceBuffer {
 public:
  TraceBuffer(const Layer& layer, const Sizes& sizes, int64_t batch)
      : lanes_(sizes.caps_out * sizes.blocks * kBlock),
        coefficients_((sizes.iterations - 1) * lanes_),
        d_means_(layer.agreement != Binarizer::none && !layer.detach_scale ? lanes_ : 0),
        ds_(sizes.iterations * sizes.rows),
        vectors_((sizes.iterations - 1) * sizes.rows),
        caps_out_(sizes.caps_out),
        buffer_(batch * (coefficients_ + d_means_ + ds_ + vectors_ + caps_out_) * sizeof(float)) {}

  Traces of(int64_t sample) const {
    Traces out;
    float* at = reinterpret_cast<float*>(buffer_.data()) +
                sample * (coefficients_ + d_means_ + ds_ + vectors_ + caps_out_);
    out.coefficients = at;
    out.d_means = d_means_ == 0 ? nullptr : at + coefficients_;
    out.ds = at + coefficients_ + d_means_;
    out.vectors = out.ds + ds_;
    out.d_learned = out.vectors + vectors_;
    return out;
  }

 private:
  int64_t lanes_, coefficients_, d_means_, ds_, vectors_, caps_out_;
  Buffer buffer_;
};

// ds = f g + s (s . g) f' / norm, with f = norm / (1 + norm^2) and v = f s.
inline void squash_backward(const Sizes& sizes, const float* s, const float* g, float* ds) {
  for (int64_t j = 0; j < sizes.caps_out; ++j) {
    float norm, dot = 0.0f;
    const float factor = squash_factor(s, sizes.dim_out, &norm);
    for (int64_t e = 0; e < sizes.dim_out; ++e) dot += s[e] * g[e];
    const float under = 1.0f + norm * norm;
    const float along = norm > 0.0f ? dot * (1.0f - norm * norm) / (under * under) / norm : 0.0f;
    for (int64_t e = 0; e < sizes.dim_out; ++e) ds[e] = factor * g[e] + along * s[e];
    s += sizes.dim_out, g += sizes.dim_out, ds += sizes.dim_out;
  }
}

// dlogits = c * (dc - sum_j c dc), in place of dc, for a half of a block. The couplings, and the
// gradient that they may have of their own, lie in rows of all capsules.
inline void softmax_backward(const Sizes& sizes, const float* c, const float* grad_c, int64_t half,
                             float* dc) {
  const int64_t stride = sizes.blocks * kBlock;
#pragma GCC unroll 16
  for (int q = 0; q < kHalfVecs; ++q) {
    const int64_t lane = half * kHalf + q * kLanes;
    Vec sum = set(0.0f);
    for (int64_t j = 0; j < sizes.caps_out; ++j) {
      float* at = dc + j * kHalf + q * kLanes;
      if (grad_c != nullptr) store(at, load(at) + load(grad_c + j * stride + lane));
      sum = fma(load(c + j * stride + lane), load(at), sum);
    }
    for (int64_t j = 0; j < sizes.caps_out; ++j) {
      float* at = dc + j * kHalf + q * kLanes;
      store(at, load(c + j * stride + lane) * (load(at) - sum));
    }
  }
}

// A gradient back through the signs of x, straight through: where the slope is 0 nothing passes.
inline float pass_sign(Binarizer binarizer, float x, float g) {
  const float size = std::fabs(x);
  if (!(size <= 1.0f)) return 0.0f;
  return binarizer == Binarizer::approxsign ? g * (2.0f - 2.0f * size) : g;
}
inline Vec pass_sign(Binarizer binarizer, Vec x, Vec g) {
  const Vec size = abs(x), zero = set(0.0f), edge = set(1.0f + 1.1920929e-7f);
  if (binarizer == Binarizer::approxsign) g = g * (set(2.0f) - set(2.0f) * size);
  return select(greater(edge, size), g, zero);  // size <= 1, not NaN
}
inline float sign_or_zero(float x) { return static_cast<float>((x > 0.0f) - (x < 0.0f)); }

// Back through the xnor agreement of one block with v of one iteration: `agreed` is the gradient of
// what was added to the logits. Leaves scale * agreed in its place; adds to `totals` what belongs
// to the signs of v, to d_means what belongs to the means of u, and to d_scale what belongs to the
// scale of each output capsule (the mean of v, or the learned one).
inline void agree_backward(const Layer& layer, const Sizes& sizes, const float* u,
                           const Described& described, const uint8_t* v_positive,
                           const float* v_means, bool learned, bool first, float* agreed,
                           float* totals,
                           float* d_means, float* d_scale) {
  for (int64_t j = 0; j < sizes.caps_out; ++j) {
    Vec weight[kVecs], thresholds[kVecs];
    if (learned || !layer.detach_scale) {
      Vec dots[kVecs], sum = set(0.0f);
      dot_described(sizes, described.signs + j * sizes.dim_out, v_positive + j * sizes.dim_out, dots);
#pragma GCC unroll 16
      for (int q = 0; q < kVecs; ++q) {
        const int64_t at = lanes_at(sizes, j, q);
        const Vec product = dots[q] * load(agreed + at);
        sum = learned ? sum + product : fma(product, load(described.means + at), sum);
        if (!learned) store(d_means + at, fma(product, set(v_means[j]), load(d_means + at)));
      }
      alignas(64) float lanes[kLanes];
      store(lanes, sum);
      for (int k = 0; k < kLanes; ++k) d_scale[j] += lanes[k];
    }
#pragma GCC unroll 16
    for (int q = 0; q < kVecs; ++q) {
      const int64_t at = lanes_at(sizes, j, q);
      weight[q] = load(agreed + at);
      if (!learned) weight[q] = weight[q] * load(described.means + at);
      store(agreed + at, weight[q]);
    }
    thresholds_of(layer.agreement, u, sizes.dim_out, thresholds);
    for (int64_t e = 0; e < sizes.dim_out; ++e, u += kBlock, totals += kTotal) {
      Vec total = set(0.0f);
#pragma GCC unroll 16
      for (int q = 0; q < kVecs; ++q) {
        const Mask positive = greater(load(u + q * kLanes), thresholds[q]);
        total = total + select(positive, weight[q], set(0.0f) - weight[q]);
      }
      add_to_total(totals, first, total);
    }
  }
}

struct Gradients {
  float* g;         // (rows): of v of an iteration
  float* d_agreed;  // (halves, caps_out, 16)
  float* d_scale;   // (caps_out)
  float* d_means;   // (halves, caps_out, 16)
  float* block;     // (2, caps_out, 16), and room for two rows more

  Gradients(const Layer& layer, const Sizes& sizes, Parts& parts) {
    const bool xnor = layer.agreement != Binarizer::none;
    const int64_t lanes = sizes.caps_out * kBlock;
    g = parts.take<float>(sizes.rows);
    d_agreed = parts.take<float>(xnor ? sizes.blocks * lanes : 0);
    d_scale = parts.take<float>(sizes.caps_out);
    d_means = parts.take<float>(xnor ? sizes.blocks * lanes : 0);
    block = parts.take<float>(2 * half_size(sizes));
  }
};

// Step 1 for one sample, whose predictions are in u.
inline void trace(const Layer& layer, const Sizes& sizes, const Weights& weights, const float* u,
                  const float* sums, const float* couplings, const float* grad_v,
                  const float* grad_couplings, Workspace& work, Gradients& grad,
                  const Traces& out) {
  const bool xnor = layer.agreement != Binarizer::none, folded = is_folded(layer, weights);
  const bool learned = weights.agreement_scale != nullptr;
  const int64_t lanes = sizes.caps_out * kBlock, kept = lanes * sizes.blocks;
  // The vectors: for the dot agreement v of all iterations before t, added up.
  for (int64_t t = 0; t + 1 < sizes.iterations; ++t) {
    float* vector = out.vectors + t * sizes.rows;
    squash(sizes, sums + t * sizes.rows, vector);
    for (int64_t row = 0; !xnor && t > 0 && row < sizes.rows; ++row) {
      vector[row] += vector[row - sizes.rows];
    }
  }
  std::memset(out.d_learned, 0, sizes.caps_out * sizeof(float));
  if (xnor && sizes.iterations > 1) {
    std::memset(grad.d_agreed, 0, sizes.blocks * lanes * sizeof(float));
    std::memset(grad.d_means, 0, sizes.blocks * lanes * sizeof(float));
    for (int64_t block = 0; block < sizes.blocks; ++block) {
      describe(sizes, layer.agreement, u + block * sizes.u_block,
               {work.means + block * lanes, work.signs + block * sizes.rows});
    }
  }
  std::memcpy(grad.g, grad_v, sizes.rows * sizeof(float));
  for (int64_t t = sizes.iterations - 1; t >= 0; --t) {
    float* ds = out.ds + t * sizes.rows;
    squash_backward(sizes, sums + t * sizes.rows, grad.g, ds);
    if (t == 0) break;
    float* v = out.vectors + (t - 1) * sizes.rows;  // xnor: v of the iteration before
    for (int64_t j = 0; xnor && j < sizes.caps_out; ++j) {
      const int64_t at = j * sizes.dim_out;
      work.v_means[j] = describe_output(layer.agreement, v + at, sizes.dim_out,
                                        work.v_positive + at);
      grad.d_scale[j] = 0.0f;
    }
    const float* c = couplings + (t - 1) * kept;
    const float* grad_c = grad_couplings == nullptr ? nullptr : grad_couplings + (t - 1) * kept;
    float* coefficients = out.coefficients + (t - 1) * kept;
    if (!xnor) {
      const float* x_scale = folded ? work.x_scale : nullptr;
      sweep(sizes, u, ds, x_scale, grad.block, work.totals, [&](int64_t half, float* d) {
        softmax_backward(sizes, c, grad_c, half, d);
        spread(sizes, d, half, coefficients);
        set_factor(sizes, x_scale == nullptr ? nullptr : x_scale + half * kHalf, d);
      });
    }
    for (int64_t block = 0; xnor && block < sizes.blocks; ++block) {
      const float* u_block = u + block * sizes.u_block;
      float *agreed = grad.d_agreed + block * lanes, *d = grad.block;
      for (int64_t half = 0; half < 2; ++half) {
        float* d_half = d + half * sizes.caps_out * kHalf;
        dot_half(sizes, u_block + half * kHalf, ds, nullptr, d_half);
        softmax_backward(sizes, c, grad_c, 2 * block + half, d_half);
      }
      for (int64_t k = 0; k < lanes; ++k) d[k] = agreed[k] = agreed[k] + d[k];
      agree_backward(layer, sizes, u_block,
                     {work.means + block * lanes, work.signs + block * sizes.rows},
                     work.v_positive, work.v_means, learned, block == 0, d, work.totals,
                     grad.d_means + block * lanes, grad.d_scale);
      for (int64_t half = 0; half < 2; ++half) {
        spread(sizes, d + half * sizes.caps_out * kHalf, 2 * block + half, coefficients);
      }
    }
    finish_sums(sizes, work.totals, 1.0f, nullptr, work.sums);
    if (!xnor) {
      // v of this iteration is in the sums of v of all later ones.
      const bool last = t + 1 == sizes.iterations;
      for (int64_t row = 0; row < sizes.rows; ++row) {
        grad.g[row] = last ? work.sums[row] : grad.g[row] + work.sums[row];
      }
      continue;
    }
    for (int64_t j = 0; j < sizes.caps_out; ++j) {
      const float scale = learned ? weights.agreement_scale[j] : work.v_means[j];
      const float d_mean = learned || layer.detach_scale
                               ? 0.0f
                               : grad.d_scale[j] / static_cast<float>(sizes.dim_out);
      if (learned) out.d_learned[j] += grad.d_scale[j];
      for (int64_t row = j * sizes.dim_out; row < (j + 1) * sizes.dim_out; ++row) {
        grad.g[row] = pass_sign(layer.agreement, v[row], work.sums[row] * scale) +
                      d_mean * sign_or_zero(v[row]);
        v[row] = work.v_positive[row] ? scale : -scale;
      }
    }
  }
  if (out.d_means != nullptr) {
    for (int64_t half = 0; half < 2 * sizes.blocks; ++half) {
      spread(sizes, grad.d_means + half * sizes.caps_out * kHalf, half, out.d_means);
    }
  }
}

// Samples whose du is put together at once, and the tiles that fit the registers.
constexpr int kTile = 8, kDims = kLanes / 2;

// out[row, d] += sum_s du[s, row] * x[s, d] for Rows rows and Dims dims of one vector of lanes.
template <int Rows, int Dims>
inline void add_outer(const float* du, int64_t du_stride, const float* x, int64_t x_stride,
                      int samples, float* out, int64_t out_stride) {
  Vec sum[Rows][Dims];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
    for (int d = 0; d < Dims; ++d) sum[r][d] = load(out + r * out_stride + d * kBlock);
  }
  for (int s = 0; s < samples; ++s) {
    Vec g[Rows];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) g[r] = load(du + s * du_stride + r * kLanes);
#pragma GCC unroll 16
    for (int d = 0; d < Dims; ++d) {
      const Vec a = load(x + s * x_stride + d * kBlock);
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) sum[r][d] = fma(g[r], a, sum[r][d]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
    for (int d = 0; d < Dims; ++d) store(out + r * out_stride + d * kBlock, sum[r][d]);
  }
}

// out[s, d] += sum_row du[s, row] * w[row, d] for Samples samples and Dims dims.
template <int Samples, int Dims>
inline void add_product(const float* du, int64_t du_stride, const float* w, int64_t w_stride,
                        int64_t rows, float* out, int64_t out_stride) {
  Vec sum[Samples][Dims];
#pragma GCC unroll 16
  for (int s = 0; s < Samples; ++s) {
#pragma GCC unroll 16
    for (int d = 0; d < Dims; ++d) sum[s][d] = load(out + s * out_stride + d * kBlock);
  }
  for (int64_t row = 0; row < rows; ++row) {
    Vec g[Samples];
#pragma GCC unroll 16
    for (int s = 0; s < Samples; ++s) g[s] = load(du + s * du_stride + row * kLanes);
#pragma GCC unroll 16
    for (int d = 0; d < Dims; ++d) {
      const Vec a = load(w + row * w_stride + d * kBlock);
#pragma GCC unroll 16
      for (int s = 0; s < Samples; ++s) sum[s][d] = fma(g[s], a, sum[s][d]);
    }
  }
#pragma GCC unroll 16
  for (int s = 0; s < Samples; ++s) {
#pragma GCC unroll 16
    for (int d = 0; d < Dims; ++d) store(out + s * out_stride + d * kBlock, sum[s][d]);
  }
}

// Step 2 for one block of input capsules.
class BlockGradient {
 public:
  static constexpr int64_t kChunk = 128;  // samples whose x is laid out at once

  BlockGradient(const Layer& layer, const Sizes& sizes, const Weights& weights,
                const BackwardCall& call, const TraceBuffer& traces, Parts& parts)
      : layer_(layer), sizes_(sizes), weights_(weights), call_(call), traces_(traces),
        xnor_(layer.projection != Binarizer::none), blocks_(sizes, weights, parts) {
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
    block_ = block;
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

  void multiply(int64_t s, int samples, int64_t j, int q) {
    const int64_t x_size = sizes_.dim_in * kBlock, du_size = sizes_.dim_out * kLanes;
    const int64_t at = j * sizes_.dim_out * x_size + q * kLanes;
    const float* x = x_ + s * x_size + q * kLanes;
    float* d_x = d_x_ + s * x_size + q * kLanes;
    const float* for_x = xnor_ ? du_scaled_ : du_;
    for (int64_t d = 0; d < sizes_.dim_in;) {
      const bool whole = d + kDims <= sizes_.dim_in;
      const int64_t dim = d * kBlock;
      int64_t e = 0;
      for (; e + 2 <= sizes_.dim_out; e += 2) {
        const auto add = whole ? &add_outer<2, kDims> : &add_outer<2, 1>;
        add(du_ + e * kLanes, du_size, x + dim, x_size, samples, d_weight_ + at + e * x_size + dim,
            x_size);
      }
      if (e < sizes_.dim_out) {
        const auto add = whole ? &add_outer<1, kDims> : &add_outer<1, 1>;
        add(du_ + e * kLanes, du_size, x + dim, x_size, samples, d_weight_ + at + e * x_size + dim,
            x_size);
      }
      int k = 0;
      for (; k + 2 <= samples; k += 2) {
        const auto add = whole ? &add_product<2, kDims> : &add_product<2, 1>;
        add(for_x + k * du_size, du_size, w_ + at + dim, x_size, sizes_.dim_out,
            d_x + k * x_size + dim, x_size);
      }
      if (k < samples) {
        const auto add = whole ? &add_product<1, kDims> : &add_product<1, 1>;
        add(for_x + k * du_size, du_size, w_ + at + dim, x_size, sizes_.dim_out,
            d_x + k * x_size + dim, x_size);
      }
      d += whole ? kDims : 1;
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
  const BackwardCall& call_;
  const TraceBuffer& traces_;
  const bool xnor_;
  const WeightBlocks blocks_;
  float *x_, *d_x_, *x_scale_, *signs_, *scale_, *d_weight_, *d_scale_, *du_, *du_scaled_, *lane_;
  Term* terms_;
  const float* w_ = nullptr;  // the weights of the block, or their signs
  int64_t block_ = 0, first_ = 0, width_ = 0;
};

inline void backward(const Layer& layer, const Weights& weights, const BackwardCall& call) {
  const Sizes sizes = sizes_of(layer);
  const TraceBuffer traces(layer, sizes, call.batch);
  const int64_t kept = (sizes.iterations - 1) * sizes.caps_out * sizes.blocks * kBlock;
  const int64_t together = layer.projection == Binarizer::none && call.batch >= 4 ? 4 : 1;
  const int64_t groups = (call.batch + together - 1) / together;
  const int64_t parts_count = groups < call.threads ? groups : call.threads;
  Parts count(nullptr);
  WeightBlocks(sizes, weights, count);
  Workspace(layer, sizes, together, count);
  Gradients(layer, sizes, count);
  parallel(parts_count, call.threads, count.used(), [&](int64_t part, char* memory) {
    Parts parts(memory);
    const WeightBlocks blocks(sizes, weights, parts);
    Workspace work(layer, sizes, together, parts);
    Gradients grad(layer, sizes, parts);
    const int64_t end = groups * (part + 1) / parts_count;
    for (int64_t group = groups * part / parts_count; group < end; ++group) {
      const int64_t first = group * together, left = call.batch - first;
      const int samples = static_cast<int>(left < together ? left : together);
      project(layer, sizes, weights, blocks, call.x + first * sizes.caps_in * sizes.dim_in, samples,
              work);
      for (int s = 0; s < samples; ++s) {
        const int64_t b = first + s;
        trace(layer, sizes, weights, work.u + s * sizes.u_size,
              call.sums + b * sizes.iterations * sizes.rows, call.couplings + b * kept,
              call.grad_v + b * sizes.rows,
              call.grad_couplings == nullptr ? nullptr : call.grad_couplings + b * kept, work, grad,
              traces.of(b));
      }
    }
  });

  Parts block_count(nullptr);
  BlockGradient(layer, sizes, weights, call, traces, block_count);
  const int64_t block_parts = sizes.blocks < call.threads ? sizes.blocks : call.threads;
  parallel(block_parts, call.threads, block_count.used(), [&](int64_t part, char* memory) {
    Parts parts(memory);
    BlockGradient gradient(layer, sizes, weights, call, traces, parts);
    const int64_t end = sizes.blocks * (part + 1) / block_parts;
    for (int64_t block = sizes.blocks * part / block_parts; block < end; ++block) {
      gradient.run(block);
    }
  });

  if (call.grad_bias != nullptr) {
    std::memset(call.grad_bias, 0, sizes.rows * sizeof(float));
    for (int64_t b = 0; b < call.batch; ++b) {
      const float* ds = traces.of(b).ds;
      for (int64_t k = 0; k < sizes.iterations * sizes.rows; ++k) {
        call.grad_bias[k % sizes.rows] += ds[k];
      }
    }
  }
  if (call.grad_agreement_scale != nullptr) {
    std::memset(call.grad_agreement_scale, 0, sizes.caps_out * sizeof(float));
    for (int64_t b = 0; b < call.batch; ++b) {
      const float* d_learned = traces.of(b).d_learned;
      for (int64_t j = 0; j < sizes.caps_out; ++j) call.grad_agreement_scale[j] += d_learned[j];
    }
  }
}

}  // namespace xncaps::XNCAPS_ISA
