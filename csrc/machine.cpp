#include "machine.h"

#include <chrono>
#include <memory>
#include <vector>

#if defined(XNCAPS_X86)
#define XNCAPS_CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2,fma", "default")))
#else
#define XNCAPS_CLONES
#endif

namespace xncaps {
namespace {

constexpr int kWidth = 16, kChains = 12;

// Twelve independent chains of vectors: enough to hide the latency of a multiply-add.
XNCAPS_CLONES void multiply_add(float* state, long steps) {
  typedef float Wide __attribute__((vector_size(kWidth * sizeof(float)), aligned(4)));
  Wide a[kChains];
  for (int k = 0; k < kChains; ++k) a[k] = *reinterpret_cast<Wide*>(state + kWidth * k);
  const Wide factor = a[0] * 0.0f + 0.999f, addend = a[0] * 0.0f + 1e-3f;
  for (long step = 0; step < steps; ++step) {
    for (int k = 0; k < kChains; ++k) a[k] = a[k] * factor + addend;
  }
  for (int k = 0; k < kChains; ++k) *reinterpret_cast<Wide*>(state + kWidth * k) = a[k];
}

XNCAPS_CLONES float add_all(const float* data, size_t count) {
  typedef float Wide __attribute__((vector_size(kWidth * sizeof(float)), aligned(4)));
  Wide sums[4] = {};
  for (size_t k = 0; k < count; k += 4 * kWidth) {
    for (int h = 0; h < 4; ++h) sums[h] += *reinterpret_cast<const Wide*>(data + k + h * kWidth);
  }
  const Wide sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  float total = 0.0f;
  for (int k = 0; k < kWidth; ++k) total += sum[k];
  return total;
}

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
  float state[kWidth * kChains] = {};
  constexpr long steps = 20000;
  return best_rate(seconds, 2.0 * kWidth * kChains * steps, [&] { multiply_add(state, steps); });
}

double read_rate(size_t bytes, double seconds) {
  const size_t unit = 4 * kWidth, count = (bytes / sizeof(float) + unit - 1) / unit * unit;
  // A vector that crosses the end of a cache line would take two reads.
  std::vector<float> memory(count + kWidth, 1.0f);
  size_t room = memory.size() * sizeof(float);
  void* start = memory.data();
  const float* data =
      static_cast<const float*>(std::align(64, count * sizeof(float), start, room));
  const size_t repeats = 1 + (size_t{4} << 20) / (count * sizeof(float));
  volatile float sink = 0.0f;
  return best_rate(seconds, static_cast<double>(repeats * count * sizeof(float)), [&] {
    for (size_t k = 0; k < repeats; ++k) sink = sink + add_all(data, count);
  });
}

}  // namespace xncaps
