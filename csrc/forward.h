// The fused forward pass: project a block, then sweep over the blocks once for every iteration, while
// the predictions of a sample stay in the cache.
#pragma once

#include "project.h"
#include "sweep.h"

namespace xncaps::XNCAPS_ISA {

// What one sample needs while it is routed.
struct Workspace {
  float* totals;       // (rows, kTotal): sums of a sweep, lane by lane
  float* logits;       // (blocks, caps_out, 32) of the xnor agreement
  float* means;        // (blocks, caps_out, 32): of the predictions
  uint8_t* bits;       // (blocks, caps_out, bytes of dim_out, 32): and their signs
  float* sums;         // (rows)
  float* v;            // (rows)
  float* v_sum;        // (rows): v of all iterations so far
  DescribedOutputs outputs;
  float* couplings;    // (caps_out + 1, 32)
  float* x_scale;      // (samples, blocks, 32)
  uint8_t* x_bits;     // (blocks, bytes, 32)
  float* x_lanes;      // (samples, dim_in, 32)
  float* u;            // (samples, blocks, rows, 32)

  Workspace(const Layer& layer, const Sizes& sizes, int64_t samples, Parts& parts) {
    const bool xnor = layer.agreement != Binarizer::none;
    const bool binary = layer.projection != Binarizer::none;
    const int64_t lanes = sizes.caps_out * kBlock;
    totals = parts.take<float>(totals_size(sizes));
    logits = parts.take<float>(xnor ? sizes.blocks * lanes : 0);
    means = parts.take<float>(xnor ? sizes.blocks * lanes : 0);
    bits = parts.take<uint8_t>(xnor ? sizes.blocks * lanes * bytes_for(sizes.dim_out) : 0);
    sums = parts.take<float>(sizes.rows);
    v = parts.take<float>(sizes.rows);
    v_sum = parts.take<float>(sizes.rows);
    outputs.means = parts.take<float>(sizes.caps_out);
    outputs.bits = parts.take<uint8_t>(sizes.caps_out * bytes_for(sizes.dim_out));
    couplings = parts.take<float>(logits_size(sizes));
    x_scale = parts.take<float>(samples * sizes.blocks * kBlock);
    x_bits = parts.take<uint8_t>(binary ? sizes.blocks * sizes.bytes * kBlock : 0);
    x_lanes = parts.take<float>(samples * sizes.dim_in * kBlock);
    u = parts.take<float>(samples * sizes.u_size);
  }

  // What is known of a block of predictions.
  Described described(const Sizes& sizes, int64_t block) const {
    const int64_t at = block * sizes.caps_out * kBlock;
    return {means + at, bits + at * bytes_for(sizes.dim_out)};
  }
};

// Whether the mean of abs(x) is left out of the predictions, and multiplied in where they are read.
// The signs of predictions need all of it.
inline bool is_folded(const Layer& layer, const Weights& weights) {
  return layer.projection != Binarizer::none && layer.agreement == Binarizer::none &&
         !weights.learned;
}

// The signs of the input capsules of a sample, and the means of their absolute numbers in the units of
// dot products; of a learned scale, these units alone.
inline void describe_input(const Layer& layer, const Sizes& sizes, bool learned, const float* x,
                           Workspace& work) {
  for (int64_t block = 0; block < sizes.blocks; ++block) {
    const int64_t first = block * kBlock, width = width_at(first, sizes.caps_in);
    const float* capsules = x + first * sizes.dim_in;
    uint8_t* bits = work.x_bits + first * sizes.bytes;
    Vec means[kVecs];
    if (sizes.dim_in == 8 && width == kBlock && layer.projection != Binarizer::midrange) {
      describe_eights(capsules, bits, means);
    } else {
      gather(capsules, sizes.dim_in, width, work.x_lanes);
      pack_signs(layer.projection, work.x_lanes, sizes.dim_in, bits, means);
    }
#pragma GCC unroll 16
    for (int q = 0; q < kVecs; ++q) {
      store(work.x_scale + first + q * kLanes, (learned ? set(1.0f) : means[q]) * set(kByteUnit));
    }
  }
}

// Predictions of one sample from signs; their sums over the lanes go to `totals`.
template <bool OneByte, bool Folded, class Scale>
inline void project_sample(const Layer& layer, const Sizes& sizes, const WeightBlocks& blocks,
                           bool learned, const float* x, Workspace& work, float* u) {
  describe_input(layer, sizes, learned, x, work);
  for (int64_t block = 0; block < sizes.blocks; ++block) {
    const int64_t first = block * kBlock;
    project_signs<OneByte, Folded, Scale>(sizes, blocks.at(block), work.x_bits + first * sizes.bytes,
                                          work.x_scale + first, block == 0,
                                          u + block * sizes.u_block, work.totals);
  }
}

// Predictions of one sample or of several, from signs or in floats. With signs `totals` has the
// sums of the (one) sample already.
inline void project(const Layer& layer, const Sizes& sizes, const Weights& weights,
                    const WeightBlocks& blocks, const float* x, int samples, Workspace& work) {
  if (layer.projection != Binarizer::none) {
    const bool one = sizes.bytes == 1, folded = is_folded(layer, weights);
    auto run = &project_sample<false, false, float>;
    if (weights.half) {
      run = folded ? (one ? &project_sample<true, true, uint16_t>
                          : &project_sample<false, true, uint16_t>)
                   : (one ? &project_sample<true, false, uint16_t>
                          : &project_sample<false, false, uint16_t>);
    } else {
      run = folded ? (one ? &project_sample<true, true, float> : &project_sample<false, true, float>)
                   : (one ? &project_sample<true, false, float>
                          : &project_sample<false, false, float>);
    }
    run(layer, sizes, blocks, weights.learned, x, work, work.u);
    return;
  }
  const int64_t x_stride = sizes.dim_in * kBlock;
  for (int64_t block = 0; block < sizes.blocks; ++block) {
    const int64_t first = block * kBlock, width = width_at(first, sizes.caps_in);
    for (int s = 0; s < samples; ++s) {
      gather(x + (s * sizes.caps_in + first) * sizes.dim_in, sizes.dim_in, width,
             work.x_lanes + s * x_stride);
    }
    const float* floats = blocks.at(block).floats;
    float* u = work.u + block * sizes.u_block;
    if (samples == 4) {
      project_floats<4>(sizes, floats, work.x_lanes, x_stride, u, sizes.u_size);
    } else {
      for (int s = 0; s < samples; ++s) {
        project_floats<1>(sizes, floats, work.x_lanes + s * x_stride, x_stride, u + s * sizes.u_size,
                          sizes.u_size);
      }
    }
  }
}

// Adds the xnor agreement of a block with v to its logits.
inline void agree_by_signs(const Sizes& sizes, const Described& u, const DescribedOutputs& v,
                           const float* learned, float* logits) {
  for (int64_t j = 0; j < sizes.caps_out; ++j) {
    Vec dots[kVecs];
    dot_described(sizes, u, v, j, dots);
    const Vec scale = set(learned == nullptr ? v.means[j] : learned[j]);
#pragma GCC unroll 16
    for (int q = 0; q < kVecs; ++q) {
      const int64_t at = j * kBlock + q * kLanes;
      if (learned == nullptr) dots[q] = dots[q] * load(u.means + at);
      store(logits + at, fma(dots[q], scale, load(logits + at)));
    }
  }
}

// Copies the logits of a block, and puts their largest behind them.
inline void copy_logits(const Sizes& sizes, const float* logits, float* c) {
#pragma GCC unroll 16
  for (int q = 0; q < kVecs; ++q) {
    Vec most = load(logits + q * kLanes);
    for (int64_t j = 0; j < sizes.caps_out; ++j) {
      const Vec logit = load(logits + j * kBlock + q * kLanes);
      store(c + j * kBlock + q * kLanes, logit);
      most = max(most, logit);
    }
    store(c + sizes.caps_out * kBlock + q * kLanes, most);
  }
}

// Routes one sample whose predictions are in u and, if they come from signs, their sums in
// work.totals.
inline void route(const Layer& layer, const Sizes& sizes, const Weights& weights, const float* u,
                  Workspace& work, float* v_out, float* sums_out, float* couplings_out) {
  const bool xnor = layer.agreement != Binarizer::none;
  const float* x_scale = is_folded(layer, weights) ? work.x_scale : nullptr;
  const int64_t lanes = sizes.caps_out * kBlock, kept = lanes * sizes.blocks;
  const bool described = xnor && sizes.iterations > 1;
  if (described) std::memset(work.logits, 0, sizes.blocks * lanes * sizeof(float));
  for (int64_t block = 0; block < sizes.blocks; ++block) {
    const float* at = u + block * sizes.u_block;
    const bool has_totals = layer.projection != Binarizer::none;
    if (described) {
      const auto run = has_totals ? &describe<false> : &describe<true>;
      run(sizes, layer.agreement, at, work.described(sizes, block), block == 0, work.totals);
    } else if (!has_totals) {
      add_rows(sizes, at, block == 0, work.totals);
    }
  }
  for (int64_t t = 0; t < sizes.iterations; ++t) {
    const auto couple = [&](int64_t block, const float* at, float* c) {
      const float* factor = x_scale == nullptr ? nullptr : x_scale + block * kBlock;
      if (xnor) {
        float* logits = work.logits + block * lanes;
        agree_by_signs(sizes, work.described(sizes, block), work.outputs, weights.agreement_scale,
                       logits);
        copy_logits(sizes, logits, c);
      } else {
        // u . v of all iterations so far, added up, is u . (the sum of v).
        dot_block(sizes, at, work.v_sum, factor, c);
      }
      float* to = couplings_out == nullptr ? nullptr : couplings_out + (t - 1) * kept + block * kBlock;
      softmax(sizes, factor, c, to);
    };
    const auto run = xnor ? &sweep<false, decltype(couple)> : &sweep<true, decltype(couple)>;
    if (t > 0) run(sizes, u, t % 2 == 1, work.couplings, work.totals, couple);
    const float factor = t == 0 ? 1.0f / static_cast<float>(sizes.caps_out) : 1.0f;
    float* sums = sums_out == nullptr ? work.sums : sums_out + t * sizes.rows;
    finish_sums(sizes, work.totals, factor, weights.bias, sums);
    const bool last = t + 1 == sizes.iterations;
    float* v = last ? v_out : work.v;
    squash(sizes.caps_out, sizes.dim_out, sums, v);
    if (last) break;
    for (int64_t row = 0; row < sizes.rows; ++row) {
      work.v_sum[row] = t == 0 ? v[row] : work.v_sum[row] + v[row];
    }
    if (xnor) describe_outputs(sizes, layer.agreement, v, work.outputs);
  }
}

// Calls function(sample, its predictions, a workspace, a More) for every sample, the samples shared
// among the threads. A More is what a caller needs besides; it takes its memory from Parts.
template <class More, class Function>
inline void each_sample(const Layer& layer, const Sizes& sizes, const Weights& weights,
                        const float* x, int64_t batch, int threads, const Function& function) {
  // In floats every weight that is loaded serves four samples; signs are cheap to load again.
  const int64_t together = layer.projection == Binarizer::none && batch >= 4 ? 4 : 1;
  const int64_t groups = (batch + together - 1) / together;
  const int64_t parts_count = groups < threads ? groups : threads;
  Parts count(nullptr);
  WeightBlocks(sizes, weights, count);
  Workspace(layer, sizes, together, count);
  More(layer, sizes, count);
  parallel(parts_count, threads, count.used(), [&](int64_t part, char* memory) {
    Parts parts(memory);
    const WeightBlocks blocks(sizes, weights, parts);
    Workspace work(layer, sizes, together, parts);
    More more(layer, sizes, parts);
    const int64_t end = groups * (part + 1) / parts_count;
    for (int64_t group = groups * part / parts_count; group < end; ++group) {
      const int64_t first = group * together, left = batch - first;
      const int samples = static_cast<int>(left < together ? left : together);
      project(layer, sizes, weights, blocks, x + first * sizes.caps_in * sizes.dim_in, samples, work);
      for (int s = 0; s < samples; ++s) function(first + s, work.u + s * sizes.u_size, work, more);
    }
  });
}

struct Nothing {
  Nothing(const Layer&, const Sizes&, Parts&) {}
};

inline void forward(const Layer& layer, const Weights& weights, const ForwardCall& call) {
  const Sizes sizes = sizes_of(layer);
  const int64_t kept = (sizes.iterations - 1) * sizes.caps_out * sizes.blocks * kBlock;
  each_sample<Nothing>(
      layer, sizes, weights, call.x, call.batch, call.threads,
      [&](int64_t b, const float* u, Workspace& work, Nothing&) {
        float* sums = call.sums == nullptr ? nullptr : call.sums + b * sizes.iterations * sizes.rows;
        float* couplings = call.couplings == nullptr ? nullptr : call.couplings + b * kept;
        route(layer, sizes, weights, u, work, call.v + b * sizes.rows, sums, couplings);
      });
}

}  // namespace xncaps::XNCAPS_ISA
