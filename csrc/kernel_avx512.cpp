#define XNCAPS_ISA avx512
#define XNCAPS_BITALG

#include "lanes_avx512.h"

#include "backward.h"
#include "count_pairs.h"
#include "conv.h"
#include "pack.h"
#include "primary.h"

namespace xncaps {

const Kernel* avx512_kernel() {
  static const Kernel kernel{
      "avx512",
      avx512::forward,
      avx512::backward,
      avx512::linear,
      avx512::conv,
      avx512::plan_conv,
      avx512::squash,
      avx512::primary,
      avx512::pack_capsules,
      avx512::pack_linear,
      avx512::pack_conv,
  };
  return &kernel;
}

}  // namespace xncaps
