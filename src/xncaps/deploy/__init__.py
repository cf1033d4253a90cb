"""Deployment: networks made small and quick for inference."""

from xncaps.deploy.fold import Affine, Folded
from xncaps.deploy.pack import pack
from xncaps.deploy.packed import PackedCapsules
from xncaps.deploy.packed_xnor import PackedXnorConv2d, PackedXnorLinear

__all__ = [
    "Affine",
    "Folded",
    "PackedCapsules",
    "PackedXnorConv2d",
    "PackedXnorLinear",
    "pack",
]
