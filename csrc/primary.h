// Primary capsules: numbers cut into squashed vectors, and for one sample the linear layer before.
#pragma once

#include "sweep.h"

namespace xncaps::XNCAPS_ISA {

inline void squash(const SquashCall& call) {
  const int64_t parts = call.count < call.threads ? call.count : call.threads;
  parallel(parts, call.threads, 0, [&](int64_t part, char*) {
    const int64_t first = call.count * part / parts, end = call.count * (part + 1) / parts;
    squash(end - first, call.dim, call.s + first * call.dim, call.v + first * call.dim);
  });
}

// y[r] = row r of the weights . x + bias[r], for a few rows that share what is loaded of x.
template <int Rows>
inline void multiply_rows(const float* weight, const float* x, const float* bias, int64_t count,
                          float* y) {
  Vec sums[Rows];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) sums[r] = set(0.0f);
  int64_t k = 0;
  for (; k + kLanes <= count; k += kLanes) {
    const Vec a = load(x + k);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) sums[r] = fma(a, load(weight + r * count + k), sums[r]);
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
    float sum = sum_of_lanes(sums[r]);
    for (int64_t rest = k; rest < count; ++rest) sum += x[rest] * weight[r * count + rest];
    y[r] = bias == nullptr ? sum : sum + bias[r];
  }
}

inline void primary(const PrimaryCall& call) {
  constexpr int kRows = 4;
  const int64_t rows = call.caps * call.dim;
  int64_t row = 0;
  const auto bias_at = [&](int64_t r) { return call.bias == nullptr ? nullptr : call.bias + r; };
  for (; row + kRows <= rows; row += kRows) {
    multiply_rows<kRows>(call.weight + row * call.features, call.x, bias_at(row), call.features,
                         call.v + row);
  }
  for (; row < rows; ++row) {
    multiply_rows<1>(call.weight + row * call.features, call.x, bias_at(row), call.features,
                     call.v + row);
  }
  squash(call.caps, call.dim, call.v, call.v);
}

}  // namespace xncaps::XNCAPS_ISA
