#define XNCAPS_ISA avx2

#include "lanes_avx2.h"

#include "backward.h"
#include "count_two_rows.h"
#include "conv.h"
#include "pack.h"
#include "primary.h"

namespace xncaps {

const Kernel* avx2_kernel() {
  static const Kernel kernel{
      "avx2",
      avx2::forward,
      avx2::backward,
      avx2::linear,
      avx2::conv,
      avx2::plan_conv,
      avx2::squash,
      avx2::primary,
      avx2::pack_capsules,
      avx2::pack_linear,
      avx2::pack_conv,
  };
  return &kernel;
}

}  // namespace xncaps
