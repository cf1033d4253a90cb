#include "lanes_portable.h"

#define XNCAPS_ISA portable
#include "backward.h"
#include "count_bytes.h"
#include "conv.h"
#include "pack.h"
#include "primary.h"

namespace xncaps {

const Kernel* portable_kernel() {
  static const Kernel kernel{
      "portable",
      portable::forward,
      portable::backward,
      portable::linear,
      portable::conv,
      portable::plan_conv,
      portable::squash,
      nullptr,  // primary: torch multiplies faster
      portable::pack_capsules,
      portable::pack_linear,
      portable::pack_conv,
  };
  return &kernel;
}

}  // namespace xncaps
