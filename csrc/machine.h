// What this machine can do at most, measured: the bounds that a kernel is compared with.
#pragma once

#include <cstddef>

namespace xncaps {

double fma_rate(double seconds);                 // floating-point operations a second, one thread
double read_rate(size_t bytes, double seconds);  // bytes a second, reading so many again and again

}  // namespace xncaps
