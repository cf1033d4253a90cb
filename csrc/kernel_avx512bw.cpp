#define XNCAPS_ISA avx512bw

#include "lanes_avx512.h"

#include "backward.h"
#include "count_slices.h"
#include "conv.h"
#include "pack.h"
#include "primary.h"

namespace xncaps {

const Kernel* avx512bw_kernel() {
  static const Kernel kernel{
      "avx512bw",
      avx512bw::forward,
      avx512bw::backward,
      avx512bw::linear,
      avx512bw::conv,
      avx512bw::plan_conv,
      avx512bw::squash,
      avx512bw::primary,
      avx512bw::pack_capsules,
      avx512bw::pack_linear,
      avx512bw::pack_conv,
  };
  return &kernel;
}

}  // namespace xncaps
