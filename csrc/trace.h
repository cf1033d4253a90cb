// Step 1 of the backward pass (see backward.h): for every sample, back through the routing.
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

// dlogits = c * (dc - sum_j c dc), in place of dc, for a block. The couplings, and the
// gradient that they may have of their own, lie in rows of all capsules.
inline void softmax_backward(const Sizes& sizes, const float* c, const float* grad_c, int64_t block,
                             float* dc) {
  const int64_t stride = sizes.blocks * kBlock;
#pragma GCC unroll 16
  for (int q = 0; q < kVecs; ++q) {
    const int64_t lane = block * kBlock + q * kLanes;
    Vec sum = set(0.0f);
    for (int64_t j = 0; j < sizes.caps_out; ++j) {
      float* at = dc + j * kBlock + q * kLanes;
      if (grad_c != nullptr) store(at, load(at) + load(grad_c + j * stride + lane));
      sum = fma(load(c + j * stride + lane), load(at), sum);
    }
    for (int64_t j = 0; j < sizes.caps_out; ++j) {
      float* at = dc + j * kBlock + q * kLanes;
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
                           const Described& described, const DescribedOutputs& outputs, bool learned,
                           bool first, float* agreed, float* totals, float* d_means,
                           float* d_scale) {
  for (int64_t j = 0; j < sizes.caps_out; ++j) {
    Vec weight[kVecs], thresholds[kVecs];
    if (learned || !layer.detach_scale) {
      Vec dots[kVecs], sum = set(0.0f);
      dot_described(sizes, described, outputs, j, dots);
#pragma GCC unroll 16
      for (int q = 0; q < kVecs; ++q) {
        const int64_t at = j * kBlock + q * kLanes;
        const Vec product = dots[q] * load(agreed + at);
        sum = learned ? sum + product : fma(product, load(described.means + at), sum);
        if (!learned) store(d_means + at, fma(product, set(outputs.means[j]), load(d_means + at)));
      }
      alignas(64) float lanes[kLanes];
      store(lanes, sum);
      for (int k = 0; k < kLanes; ++k) d_scale[j] += lanes[k];
    }
#pragma GCC unroll 16
    for (int q = 0; q < kVecs; ++q) {
      const int64_t at = j * kBlock + q * kLanes;
      weight[q] = load(agreed + at);
      if (!learned) weight[q] = weight[q] * load(described.means + at);
      store(agreed + at, weight[q]);
    }
    thresholds_of(layer.agreement, u, sizes.dim_out, thresholds);
    add_to_totals(sizes.dim_out, first, totals, [&](int64_t e) {
      Vec total = set(0.0f);
#pragma GCC unroll 16
      for (int q = 0; q < kVecs; ++q) {
        const Mask positive = greater(load(u + e * kBlock + q * kLanes), thresholds[q]);
        total = total + select(positive, weight[q], set(0.0f) - weight[q]);
      }
      return total;
    });
    u += sizes.dim_out * kBlock;
    totals += sizes.dim_out * kTotal;
  }
}

struct Gradients {
  float* g;         // (rows): of v of an iteration
  float* d_agreed;  // (blocks, caps_out, 32)
  float* d_scale;   // (caps_out)
  float* d_means;   // (blocks, caps_out, 32)
  float* block;     // (caps_out + 1, 32)

  Gradients(const Layer& layer, const Sizes& sizes, Parts& parts) {
    const bool xnor = layer.agreement != Binarizer::none;
    const int64_t lanes = sizes.caps_out * kBlock;
    g = parts.take<float>(sizes.rows);
    d_agreed = parts.take<float>(xnor ? sizes.blocks * lanes : 0);
    d_scale = parts.take<float>(sizes.caps_out);
    d_means = parts.take<float>(xnor ? sizes.blocks * lanes : 0);
    block = parts.take<float>(logits_size(sizes));
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
    squash(sizes.caps_out, sizes.dim_out, sums + t * sizes.rows, vector);
    for (int64_t row = 0; !xnor && t > 0 && row < sizes.rows; ++row) {
      vector[row] += vector[row - sizes.rows];
    }
  }
  std::memset(out.d_learned, 0, sizes.caps_out * sizeof(float));
  if (xnor && sizes.iterations > 1) {
    std::memset(grad.d_agreed, 0, sizes.blocks * lanes * sizeof(float));
    std::memset(grad.d_means, 0, sizes.blocks * lanes * sizeof(float));
    for (int64_t block = 0; block < sizes.blocks; ++block) {
      describe<false>(sizes, layer.agreement, u + block * sizes.u_block,
                      work.described(sizes, block), false, nullptr);
    }
  }
  std::memcpy(grad.g, grad_v, sizes.rows * sizeof(float));
  for (int64_t t = sizes.iterations - 1; t >= 0; --t) {
    float* ds = out.ds + t * sizes.rows;
    squash_backward(sizes, sums + t * sizes.rows, grad.g, ds);
    if (t == 0) break;
    float* v = out.vectors + (t - 1) * sizes.rows;  // xnor: v of the iteration before
    if (xnor) {
      describe_outputs(sizes, layer.agreement, v, work.outputs);
      std::memset(grad.d_scale, 0, sizes.caps_out * sizeof(float));
    }
    const float* c = couplings + (t - 1) * kept;
    const float* grad_c = grad_couplings == nullptr ? nullptr : grad_couplings + (t - 1) * kept;
    float* coefficients = out.coefficients + (t - 1) * kept;
    if (!xnor) {
      const float* x_scale = folded ? work.x_scale : nullptr;
      const bool back = (sizes.iterations - t) % 2 == 1;
      sweep<true>(sizes, u, back, grad.block, work.totals, [&](int64_t block, const float* at, float* d) {
        const float* factor = x_scale == nullptr ? nullptr : x_scale + block * kBlock;
        dot_block(sizes, at, ds, factor, d);
        softmax_backward(sizes, c, grad_c, block, d);
        spread(sizes, d, block, coefficients);
        set_factor(sizes, factor, d);
      });
    }
    for (int64_t block = 0; xnor && block < sizes.blocks; ++block) {
      const float* u_block = u + block * sizes.u_block;
      float *agreed = grad.d_agreed + block * lanes, *d = grad.block;
      dot_block(sizes, u_block, ds, nullptr, d);
      softmax_backward(sizes, c, grad_c, block, d);
      for (int64_t k = 0; k < lanes; ++k) d[k] = agreed[k] = agreed[k] + d[k];
      agree_backward(layer, sizes, u_block, work.described(sizes, block), work.outputs, learned,
                     block == 0, d, work.totals, grad.d_means + block * lanes, grad.d_scale);
      spread(sizes, d, block, coefficients);
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
      const float scale = learned ? weights.agreement_scale[j] : work.outputs.means[j];
      const float d_mean = learned || layer.detach_scale
                               ? 0.0f
                               : grad.d_scale[j] / static_cast<float>(sizes.dim_out);
      if (learned) out.d_learned[j] += grad.d_scale[j];
      const uint8_t* bits = work.outputs.bits + j * bytes_for(sizes.dim_out);
      for (int64_t e = 0; e < sizes.dim_out; ++e) {
        const int64_t row = j * sizes.dim_out + e;
        grad.g[row] = pass_sign(layer.agreement, v[row], work.sums[row] * scale) +
                      d_mean * sign_or_zero(v[row]);
        v[row] = is_positive(bits, e) ? scale : -scale;
      }
    }
  }
  if (out.d_means != nullptr) {
    for (int64_t block = 0; block < sizes.blocks; ++block) {
      spread(sizes, grad.d_means + block * lanes, block, out.d_means);
    }
  }
}

}  // namespace xncaps::XNCAPS_ISA
