// Which kernels this CPU can run, and which of them is the best. To add one, see docs/kernels.md.
#include <cstring>

#ifdef XNCAPS_X86
#include <cpuid.h>
#endif

#include "kernel.h"

namespace xncaps {
namespace {

#ifdef XNCAPS_X86
// clang's builtin does not know this one by name.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}
bool has_avx512bw() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512() {
  return has_avx512bw() && __builtin_cpu_supports("avx512bitalg") && __builtin_cpu_supports("avx512vbmi");
}
#endif

struct Choice {
  bool usable;
  const Kernel* kernel;
};

// From the slowest to the fastest.
const Choice* choices(int* count) {
  static const Choice all[] = {
      {true, reference_kernel()},
      {true, portable_kernel()},
#ifdef XNCAPS_X86
      {has_avx2(), avx2_kernel()},
      {has_avx512bw(), avx512bw_kernel()},
      {has_avx512(), avx512_kernel()},
#endif
  };
  *count = static_cast<int>(sizeof all / sizeof all[0]);
  return all;
}

}  // namespace

const Kernel* kernel_at(int index) {
  int count;
  const Choice* all = choices(&count);
  for (int k = 0; k < count; ++k) {
    if (all[k].usable && index-- == 0) return all[k].kernel;
  }
  return nullptr;
}

const Kernel* find_kernel(const char* name) {
  for (int k = 0; const Kernel* kernel = kernel_at(k); ++k) {
    if (std::strcmp(kernel->name, name) == 0) return kernel;
  }
  return nullptr;
}

const Kernel* best_kernel() {
  const Kernel* best = nullptr;
  for (int k = 0; const Kernel* kernel = kernel_at(k); ++k) best = kernel;
  return best;
}

}  // namespace xncaps
