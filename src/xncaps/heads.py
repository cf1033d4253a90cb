"""Classifier heads: features in, one score for each class out. ``HEADS`` names them.

Every head has one contract: built from ``(in_features, num_classes)``, it takes pooled features
``(batch, in_features)`` or feature maps ``(batch, in_features, height, width)``, which it averages,
and gives scores ``(batch, num_classes)``. ``head.scores`` says what they are: capsule ``lengths``
or ``logits``. To add a head, write such a module and name it in ``HEADS`` and ``HEAD_OPTIONS``.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from xncaps.capsules import capsule_length
from xncaps.errors import InputTypeError, check_like, check_size, message
from xncaps.layers import CapsFC, CapsuleLinear, XnIDR, XnODR, xnorize_both
from xncaps.primary import CapsuleNorm, PrimaryCaps, pool_features

CAPS_IN, DIM_IN, DIM_OUT = 128, 8, 16
"""The paper's capsules for MobileNetV2, and the default on any other network."""


class LinearHead(nn.Module):
    """One linear layer on the pooled features; its scores are logits.

    Args:
        in_features: size of the features.
        num_classes: number of classes.

    Shape:
        ``(batch, in_features[, height, width])`` -> ``(batch, num_classes)``.

    >>> LinearHead(320, 10)(torch.randn(2, 320, 7, 7)).shape
    torch.Size([2, 10])
    """

    scores = "logits"

    def __init__(self, in_features: int, num_classes: int) -> None:
        super().__init__()
        where = type(self).__name__
        self.in_features = check_size(where, "in_features", in_features)
        self.num_classes = check_size(where, "num_classes", num_classes)
        self.linear = nn.Linear(in_features, num_classes)

    def forward(self, features: Tensor) -> Tensor:
        where = type(self).__name__
        pooled = pool_features(where, features, self.in_features)
        check_like(where, "features", features, self.linear.weight)
        logits: Tensor = self.linear(pooled)
        return logits


class FCHead(nn.Module):
    """A stack of fully connected layers with ReLU between them (Appendix C); its scores are logits.

    Args:
        in_features: size of the features.
        num_classes: number of classes.
        hidden: sizes of the hidden layers; the paper's are 512, 256, 128 on MobileNetV2 (the
            default) and 1024, 512 on ResNet-50.

    Shape:
        ``(batch, in_features[, height, width])`` -> ``(batch, num_classes)``.

    >>> FCHead(2048, 10, hidden=(1024, 512))(torch.randn(2, 2048)).shape
    torch.Size([2, 10])
    """

    scores = "logits"

    def __init__(
        self, in_features: int, num_classes: int, *, hidden: Sequence[int] = (512, 256, 128)
    ) -> None:
        super().__init__()
        where = type(self).__name__
        self.in_features = check_size(where, "in_features", in_features)
        self.num_classes = check_size(where, "num_classes", num_classes)
        if not isinstance(hidden, Sequence):
            requirement = "be a sequence of sizes, such as (1024, 512)"
            raise InputTypeError(message(where, "hidden", requirement, repr(hidden)))
        sizes = [in_features, *(check_size(where, "hidden", size) for size in hidden), num_classes]
        layers: list[nn.Module] = []
        for size_in, size_out in pairwise(sizes):
            layers += [nn.Linear(size_in, size_out), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, features: Tensor) -> Tensor:
        where = type(self).__name__
        pooled = pool_features(where, features, self.in_features)
        check_like(where, "features", features, next(self.parameters()))
        logits: Tensor = self.layers(pooled)
        return logits


class CapsuleHead(nn.Module):
    """Primary capsules, a capsule layer, and the lengths of its output capsules as scores.

    Args:
        in_features: size of the features.
        num_classes: number of classes, and of output capsules.
        layer: what builds the capsule layer from ``(caps_in, dim_in, caps_out, dim_out)``.
        caps_in, dim_in: number and size of the primary capsules.
        dim_out: size of an output capsule.
        primary: the module that makes the primary capsules ``(batch, caps_in, dim_in)`` of the
            features; :class:`PrimaryCaps` if not given.
        norm: put batch normalisation and ReLU behind primary and output capsules, as the authors'
            released code does; the lengths are then not bounded by 1.
        options: further options of the capsule layer, see :class:`CapsuleLinear`.

    Shape:
        ``(batch, in_features[, height, width])`` -> ``(batch, num_classes)``; on request also the
        couplings ``(batch, caps_in, num_classes)``.

    >>> head = CapsuleHead(320, 10, layer=XnIDR)
    >>> head(torch.randn(2, 320, 7, 7)).shape
    torch.Size([2, 10])
    """

    scores = "lengths"

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        layer: Callable[..., CapsuleLinear],
        caps_in: int = CAPS_IN,
        dim_in: int = DIM_IN,
        dim_out: int = DIM_OUT,
        primary: nn.Module | None = None,
        norm: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        where = type(self).__name__
        self.in_features = check_size(where, "in_features", in_features)
        self.num_classes = check_size(where, "num_classes", num_classes)
        for what, size in (("caps_in", caps_in), ("dim_in", dim_in), ("dim_out", dim_out)):
            check_size(where, what, size)
        self.primary = PrimaryCaps(in_features, caps_in, dim_in) if primary is None else primary
        self.primary_norm = CapsuleNorm(dim_in) if norm else nn.Identity()
        self.capsules = layer(caps_in, dim_in, num_classes, dim_out, **options)
        self.capsules_norm = CapsuleNorm(dim_out) if norm else nn.Identity()

    def forward(
        self, features: Tensor, return_couplings: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        capsules = self.primary_norm(self.primary(features))
        if not return_couplings:
            return capsule_length(self.capsules_norm(self.capsules(capsules)))
        v, couplings = self.capsules(capsules, return_couplings=True)
        return capsule_length(self.capsules_norm(v)), couplings


HEADS: dict[str, Callable[..., LinearHead | FCHead | CapsuleHead]] = {
    "linear": LinearHead,
    "fc": FCHead,
    "dr": partial(CapsuleHead, layer=CapsFC),
    "xnodr": partial(CapsuleHead, layer=XnODR),
    "xnidr": partial(CapsuleHead, layer=XnIDR),
    "xnboth": partial(CapsuleHead, layer=xnorize_both),
}

CAPSULE_HEADS = ("dr", "xnodr", "xnidr", "xnboth")

_CAPSULE_OPTIONS = (
    *("caps_in", "dim_in", "dim_out", "iterations"),
    *("routing", "routing_bias", "detach_routing"),
)
_XNOR_OPTIONS = (*_CAPSULE_OPTIONS, "binarizer", "scale", "detach_scale")

HEAD_OPTIONS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "fc": ("hidden",),
    "dr": _CAPSULE_OPTIONS,
    "xnodr": _XNOR_OPTIONS,
    "xnidr": _XNOR_OPTIONS,
    "xnboth": _XNOR_OPTIONS,
}
