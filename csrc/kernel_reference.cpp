// The specification as a kernel: slow, for tests and for reading along.
#include "reference.h"
#include "reference_pack.h"

namespace xncaps {

const Kernel* reference_kernel() {
  static const Kernel kernel{
      "reference",
      reference::forward,
      reference::backward,
      reference::linear,
      reference::conv,
      nullptr,
      reference::squash_all,
      reference::primary,
      reference::pack_capsules,
      reference::pack_linear,
      reference::pack_conv,
  };
  return &kernel;
}

}  // namespace xncaps
