// The fused backward pass, in two steps.
//
// 1. For every sample, back through the routing (trace.h). The gradient of the predictions has low
//    rank: for input capsule i and output capsule j it is a sum of coefficient[i, j] * vector[j],
//
//        du = sum_t couplings_t * ds_t + sum_t dlogits_t * (v_1 + ... + v_t-1)         (dot)
//        du = sum_t couplings_t * ds_t + slope(u) * sum_t dagreed_t * scale * sign(v_t)    (xnor)
//
//    so only coefficients and vectors are kept.
// 2. For every block of input capsules (gradient.h), du is put together for a few samples at a time
//    and at once multiplied with x (for the weights) and with the weights (for x).
#pragma once

#include "gradient.h"

namespace xncaps::XNCAPS_ISA {

inline void backward(const Layer& layer, const Weights& weights, const BackwardCall& call) {
  const Sizes sizes = sizes_of(layer);
  const TraceBuffer traces(layer, sizes, call.batch);
  const int64_t kept = (sizes.iterations - 1) * sizes.caps_out * sizes.blocks * kBlock;
  each_sample<Gradients>(
      layer, sizes, weights, call.x, call.batch, call.threads,
      [&](int64_t b, const float* u, Workspace& work, Gradients& grad) {
        trace(layer, sizes, weights, u, call.sums + b * sizes.iterations * sizes.rows,
              call.couplings + b * kept, call.grad_v + b * sizes.rows,
              call.grad_couplings == nullptr ? nullptr : call.grad_couplings + b * kept, work, grad,
              traces.of(b));
      });

  Parts weights_count(nullptr), block_count(nullptr);
  WeightBlocks(sizes, weights, weights_count);
  const Buffer buffer(weights_count.used());
  Parts weights_parts(buffer.data());
  const WeightBlocks blocks(sizes, weights, weights_parts);
  BlockGradient(layer, sizes, weights, blocks, call, traces, block_count);
  const int threads = call.batch == 1 ? 1 : call.threads;  // one sample opens no parallel region
  const int64_t block_parts = sizes.blocks < threads ? sizes.blocks : threads;
  parallel(block_parts, threads, block_count.used(), [&](int64_t part, char* memory) {
    Parts parts(memory);
    BlockGradient gradient(layer, sizes, weights, blocks, call, traces, parts);
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
