// Weights as the calls want them: capsules or outputs as lanes, signs as bits.
#pragma once

#include "xnor.h"

namespace xncaps::XNCAPS_ISA {

// Writes the first `width` lanes of a row.
inline void store_lanes(float* to, const Vec* a, int64_t width) {
  alignas(64) float lanes[kBlock];
  for (int q = 0; q < kVecs; ++q) store(lanes + q * kLanes, a[q]);
  std::memcpy(to, lanes, width * sizeof(float));
}

inline void pack_capsules(const Layer& layer, const float* weight, const float* scale,
                          PackedWeights out) {
  const Sizes sizes = sizes_of(layer);
  const int64_t dim = sizes.dim_in, dim_out = sizes.dim_out, all = sizes.rows * dim;
  Parts count(nullptr);
  count.take<float>(dim * dim_out * kBlock);
  count.take<uint8_t>(sizes.bytes * kBlock);
  const Buffer buffer(count.used());
  Parts parts(buffer.data());
  float* lanes = parts.take<float>(dim * dim_out * kBlock);  // (dim_in, dim_out, 32) of one capsule
  uint8_t* bits = parts.take<uint8_t>(sizes.bytes * kBlock);
  for (int64_t block = 0; block < sizes.blocks; ++block) {
    const int64_t first = block * kBlock, width = width_at(first, sizes.caps_in);
    for (int64_t j = 0; j < sizes.caps_out; ++j) {
      gather(weight + first * all + j * dim * dim_out, dim * dim_out, width, lanes, all);
      for (int64_t e = 0; e < dim_out; ++e) {
        const int64_t row = j * dim_out + e, stride = dim_out * kBlock;
        const float* vectors = lanes + e * kBlock;
        for (int64_t d = 0; out.floats != nullptr && d < dim; ++d) {
          std::memcpy(out.floats + first * all + (row * dim + d) * width, vectors + d * stride,
                      width * sizeof(float));
        }
        if (out.bits == nullptr) continue;
        Vec means[kVecs];
        pack_signs(layer.projection, vectors, dim, bits, means, stride);
        for (int64_t k = 0; k < sizes.bytes; ++k) {
          std::memcpy(out.bits + first * sizes.rows * sizes.bytes + (row * sizes.bytes + k) * width,
                      bits + k * kBlock, width);
        }
        float* to = out.scale + first * sizes.rows + row * width;
        if (scale == nullptr) {
          store_lanes(to, means, width);
        } else {
          for (int64_t k = 0; k < width; ++k) to[k] = scale[(first + k) * sizes.rows + row];
        }
      }
    }
  }
}

inline void pack_linear(int64_t outputs, int64_t inputs, Binarizer binarizer, const float* weight,
                        PackedWeights out) {
  const int64_t bytes = bytes_for(inputs);
  const Buffer buffer(bytes);
  uint8_t* row = reinterpret_cast<uint8_t*>(buffer.data());
  for (int64_t n = 0; n < outputs; ++n) {
    const float mean = pack_row(binarizer, weight + n * inputs, inputs, row);
    if (out.scale != nullptr) out.scale[n] = mean;
    const int64_t first = n / kBlock * kBlock, width = width_at(first, outputs);
    uint8_t* to = out.bits + first * bytes + (n - first);
    for (int64_t k = 0; k < bytes; ++k) to[k * width] = row[k];
  }
}

inline void pack_conv(int64_t outputs, int64_t channels, int64_t places, Binarizer binarizer,
                      const float* weight, PackedWeights out) {
  const int64_t bytes = bytes_for(channels);
  std::memset(out.bits, 0, outputs * places * bytes);
  for (int64_t n = 0; n < outputs; ++n) {
    const float* filter = weight + n * channels * places;
    const Row row = describe_row(binarizer, filter, channels * places);
    if (out.scale != nullptr) out.scale[n] = row.mean;
    for (int64_t c = 0; c < channels; ++c) {
      for (int64_t place = 0; place < places; ++place) {
        const unsigned bit = filter[c * places + place] > row.threshold;
        out.bits[(n * places + place) * bytes + c / 8] |= static_cast<uint8_t>(bit << (c % 8));
      }
    }
  }
}

}  // namespace xncaps::XNCAPS_ISA
