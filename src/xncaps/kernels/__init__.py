"""The native kernels: which there are, which is used, and when a layer may use it.

Everything that knows the native module is in this package. Layers ask one question,
:func:`serves`, and call the functions of this package if the answer is yes; otherwise they
run the readable reference. ``XNCAPS_KERNEL`` names the kernel to use, one of :func:`available`.
"""

from xncaps.kernels.capsule_ops import capsules
from xncaps.kernels.product_ops import xnor_conv2d, xnor_linear
from xncaps.kernels.selection import available, disabled, native, selected, serves, use

__all__ = [
    "available",
    "capsules",
    "disabled",
    "native",
    "selected",
    "serves",
    "use",
    "xnor_conv2d",
    "xnor_linear",
]
