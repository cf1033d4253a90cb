// The specification of the packed weights: what bit is where.
#pragma once

#include "reference.h"

namespace xncaps::reference {

inline void pack_capsules(const Layer& layer, const float* weight, const float* scale,
                          PackedWeights out) {
  const int64_t caps_in = layer.caps_in, caps_out = layer.caps_out;
  const int64_t dim_in = layer.dim_in, dim_out = layer.dim_out;
  const int64_t rows = caps_out * dim_out, bytes = bytes_for(dim_in);
  if (out.bits != nullptr) {
    for (int64_t k = 0; k < caps_in * rows * bytes; ++k) out.bits[k] = 0;
  }
  for (int64_t i = 0; i < caps_in; ++i) {
    for (int64_t j = 0; j < caps_out; ++j) {
      for (int64_t e = 0; e < dim_out; ++e) {
        const int64_t row = j * dim_out + e;
        std::vector<float> column(dim_in);
        for (int64_t d = 0; d < dim_in; ++d) {
          column[d] = weight[((i * caps_out + j) * dim_in + d) * dim_out + e];
          if (out.floats != nullptr) {
            out.floats[laned(row * dim_in + d, i, rows * dim_in, caps_in)] = column[d];
          }
        }
        if (out.bits == nullptr) continue;
        const float middle = threshold(layer.projection, column.data(), dim_in);
        for (int64_t d = 0; d < dim_in; ++d) {
          const int64_t at = laned(row * bytes + d / 8, i, rows * bytes, caps_in);
          if (column[d] > middle) out.bits[at] |= static_cast<uint8_t>(1 << d % 8);
        }
        out.scale[laned(row, i, rows, caps_in)] =
            scale == nullptr ? mean_abs(column.data(), dim_in) : scale[i * rows + row];
      }
    }
  }
}

inline void pack_linear(int64_t outputs, int64_t inputs, Binarizer binarizer, const float* weight,
                        PackedWeights out) {
  const int64_t bytes = bytes_for(inputs);
  for (int64_t k = 0; k < outputs * bytes; ++k) out.bits[k] = 0;
  for (int64_t n = 0; n < outputs; ++n) {
    const float* row = weight + n * inputs;
    const float middle = threshold(binarizer, row, inputs);
    for (int64_t k = 0; k < inputs; ++k) {
      if (row[k] > middle) {
        out.bits[laned(k / 8, n, bytes, outputs)] |= static_cast<uint8_t>(1 << k % 8);
      }
    }
    if (out.scale != nullptr) out.scale[n] = mean_abs(row, inputs);
  }
}

inline void pack_conv(int64_t outputs, int64_t channels, int64_t places, Binarizer binarizer,
                      const float* weight, PackedWeights out) {
  const int64_t bytes = bytes_for(channels);
  for (int64_t k = 0; k < outputs * places * bytes; ++k) out.bits[k] = 0;
  for (int64_t n = 0; n < outputs; ++n) {
    const float* filter = weight + n * channels * places;
    const float middle = threshold(binarizer, filter, channels * places);
    for (int64_t c = 0; c < channels; ++c) {
      for (int64_t place = 0; place < places; ++place) {
        if (filter[c * places + place] > middle) {
          out.bits[(n * places + place) * bytes + c / 8] |= static_cast<uint8_t>(1 << c % 8);
        }
      }
    }
    if (out.scale != nullptr) out.scale[n] = mean_abs(filter, channels * places);
  }
}

}  // namespace xncaps::reference
