#include "machine.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

#if defined(XNCAPS_X86)
#define XNCAPS_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define XNCAPS_CLONES
#endif

namespace xncaps {
namespace {

// The widest vectors that are tried. Where they are too wide, narrower ones are faster: a vector takes
// several registers then, and there are not enough of them.
constexpr int kWidth = 16, kChains = 12, kSums = 8;
typedef float Wide16 __attribute__((vector_size(64)));
typedef float Wide8 __attribute__((vector_size(32)));
typedef float Wide4 __attribute__((vector_size(16)));

// Twelve independent chains of vectors: enough to hide the latency of a multiply-add.
template <class Wide>
inline __attribute__((always_inline)) void multiply_add(float* state, long steps) {
  constexpr int kLanes = sizeof(Wide) / sizeof(float);
  Wide a[kChains];
  for (int k = 0; k < kChains; ++k) a[k] = *reinterpret_cast<Wide*>(state + kLanes * k);
  const Wide factor = a[0] * 0.0f + 0.999f, addend = a[0] * 0.0f + 1e-3f;
  for (long step = 0; step < steps; ++step) {
#pragma GCC unroll 16
    for (int k = 0; k < kChains; ++k) a[k] = a[k] * factor + addend;
  }
  for (int k = 0; k < kChains; ++k) *reinterpret_cast<Wide*>(state + kLanes * k) = a[k];
}
XNCAPS_CLONES void multiply_add_16(float* state, long steps) { multiply_add<Wide16>(state, steps); }
XNCAPS_CLONES void multiply_add_8(float* state, long steps) { multiply_add<Wide8>(state, steps); }
XNCAPS_CLONES void multiply_add_4(float* state, long steps) { multiply_add<Wide4>(state, steps); }

template <class Wide>
inline __attribute__((always_inline)) float add_all(const float* data, size_t count) {
  constexpr int kLanes = sizeof(Wide) / sizeof(float);
  Wide sums[kSums] = {}, sum = {};
  for (size_t k = 0; k < count; k += kSums * kLanes) {
#pragma GCC unroll 16
    for (int h = 0; h < kSums; ++h) {
      sums[h] += *reinterpret_cast<const Wide*>(data + k + h * kLanes);
    }
  }
  for (int h = 0; h < kSums; ++h) sum += sums[h];
  float total = 0.0f;
  for (int k = 0; k < kLanes; ++k) total += sum[k];
  return total;
}
XNCAPS_CLONES float add_all_16(const float* data, size_t count) { return add_all<Wide16>(data, count); }
XNCAPS_CLONES float add_all_8(const float* data, size_t count) { return add_all<Wide8>(data, count); }
XNCAPS_CLONES float add_all_4(const float* data, size_t count) { return add_all<Wide4>(data, count); }

// The best rate of repeated turns, each of `work` units.
template <class Turn>
double best_rate(double seconds, double work, Turn turn) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  double best = 0.0;
  do {
    const auto start = Clock::now();
    turn();
    const double rate = work / std::chrono::duration<double>(Clock::now() - start).count();
    if (rate > best) best = rate;
  } while (std::chrono::duration<double>(Clock::now() - begin).count() < seconds);
  return best;
}

}  // namespace

double fma_rate(double seconds) {
  alignas(64) float state[kWidth * kChains] = {};
  constexpr long steps = 20000;
  const auto rate = [&](int width, auto turn) {
    return best_rate(seconds / 3, 2.0 * width * kChains * steps, [&] { turn(state, steps); });
  };
  return std::max({rate(16, multiply_add_16), rate(8, multiply_add_8), rate(4, multiply_add_4)});
}

double read_rate(size_t bytes, double seconds) {
  const size_t unit = kSums * kWidth, count = (bytes / sizeof(float) + unit - 1) / unit * unit;
  // A vector that crosses the end of a cache line would take two reads.
  std::vector<float> memory(count + kWidth, 1.0f);
  size_t room = memory.size() * sizeof(float);
  void* start = memory.data();
  const float* data =
      static_cast<const float*>(std::align(64, count * sizeof(float), start, room));
  const size_t repeats = 1 + (size_t{4} << 20) / (count * sizeof(float));
  volatile float sink = 0.0f;
  const auto rate = [&](auto turn) {
    return best_rate(seconds / 3, static_cast<double>(repeats * count * sizeof(float)), [&] {
      for (size_t k = 0; k < repeats; ++k) sink = sink + turn(data, count);
    });
  };
  return std::max({rate(add_all_16), rate(add_all_8), rate(add_all_4)});
}

}  // namespace xncaps
