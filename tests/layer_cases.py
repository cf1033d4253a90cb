"""The capsule layers that the tests go through, and inputs for them."""

import torch

from xncaps import CapsFC, XnIDR, XnODR
from xncaps.layers import xnorize_both

F64 = torch.float64

# name: (what builds the layer, the projection's binarizer, the agreement's)
KINDS = {
    "plain": (CapsFC, None, None),
    "out": (XnODR, "sign", None),
    "in": (XnIDR, None, "sign"),
    "both": (xnorize_both, "sign", "sign"),
}


def make(kind, *sizes, dtype=F64, **options):
    """A layer whose weights go beyond 1 and whose optional parameters are not at their start."""
    layer = KINDS[kind][0](*sizes, dtype=dtype, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return layer


def capsules(*shape, dtype=F64):
    return torch.randn(*shape, dtype=dtype)


def gradients(v, inputs, seed=11):
    cotangent = torch.randn(v.shape, dtype=F64, generator=torch.Generator().manual_seed(seed))
    return torch.autograd.grad((v * cotangent).sum(), inputs)
