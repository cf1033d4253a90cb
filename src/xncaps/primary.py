"""What stands before a capsule layer: features of a CNN become the first capsules."""

import torch
from torch import Tensor, nn

from xncaps.capsules import squash
from xncaps.errors import (
    InputError,
    check_floating,
    check_like,
    check_shape,
    check_size,
    message,
)


def pool_features(where: str, features: Tensor, in_features: int) -> Tensor:
    """Average feature maps over the image; pooled features pass as they are.

    Shape:
        ``(batch, in_features, height, width)`` or ``(batch, in_features)`` ->
        ``(batch, in_features)``.
    """
    check_floating(where, "features", features)
    if features.dim() == 4:
        check_shape(
            where, "features", features, batch=None, features=in_features, height=None, width=None
        )
        if 0 in features.shape[2:]:
            requirement = "have at least one pixel"
            raise InputError(message(where, "features", requirement, tuple(features.shape)))
        return features.mean(dim=(2, 3))
    check_shape(where, "features", features, batch=None, features=in_features)
    return features


class PrimaryCaps(nn.Module):
    """Capsules from pooled features: average over the image, project, cut into capsules, squash.

    The paper convolves (1x1) before it averages. Without an activation between them the two
    commute exactly, so the average comes first: at 7x7 pixels that is 49 times less work.

    Args:
        in_features: channels of the feature maps, or size of the pooled features.
        caps: number of capsules.
        dim: size of a capsule.
        project: put a linear layer (with bias) before the capsules; without it the features
            themselves are cut into capsules, and in_features must be caps * dim.

    Shape:
        ``(batch, in_features[, height, width])`` -> ``(batch, caps, dim)``.

    >>> PrimaryCaps(320, 128, 8)(torch.randn(2, 320, 7, 7)).shape
    torch.Size([2, 128, 8])
    """

    def __init__(self, in_features: int, caps: int, dim: int, *, project: bool = True) -> None:
        super().__init__()
        where = type(self).__name__
        self.in_features = check_size(where, "in_features", in_features)
        self.caps = check_size(where, "caps", caps)
        self.dim = check_size(where, "dim", dim)
        if not project and in_features != caps * dim:
            requirement = f"be caps * dim = {caps * dim} without a projection"
            raise InputError(message(where, "in_features", requirement, in_features))
        self.projection = nn.Linear(in_features, caps * dim) if project else None

    def forward(self, features: Tensor) -> Tensor:
        where = type(self).__name__
        pooled = pool_features(where, features, self.in_features)
        if self.projection is not None:
            check_like(where, "features", features, self.projection.weight)
            pooled = self.projection(pooled)
        return squash(torch.unflatten(pooled, 1, (self.caps, self.dim)))

    def extra_repr(self) -> str:
        return f"caps={self.caps}, dim={self.dim}"


class ConvPrimaryCaps(nn.Module):
    """Capsules at every place of a feature map, as in CapsNet: a convolution, then squash.

    Args:
        in_channels: channels of the feature maps.
        types: capsules at each place.
        dim: size of a capsule.
        kernel_size, stride: of the convolution, which has a bias and no padding.

    Shape:
        ``(batch, in_channels, height, width)`` -> ``(batch, types * height' * width', dim)``.

    >>> ConvPrimaryCaps(256, 32, 8, kernel_size=9, stride=2)(torch.randn(1, 256, 20, 20)).shape
    torch.Size([1, 1152, 8])
    """

    def __init__(
        self, in_channels: int, types: int, dim: int, *, kernel_size: int, stride: int = 1
    ) -> None:
        super().__init__()
        where = type(self).__name__
        check_size(where, "in_channels", in_channels)
        self.types = check_size(where, "types", types)
        self.dim = check_size(where, "dim", dim)
        check_size(where, "kernel_size", kernel_size)
        check_size(where, "stride", stride)
        self.conv = nn.Conv2d(in_channels, types * dim, kernel_size, stride)

    def forward(self, maps: Tensor) -> Tensor:
        where = type(self).__name__
        check_floating(where, "maps", maps)
        channels = self.conv.in_channels
        check_shape(where, "maps", maps, batch=None, channels=channels, height=None, width=None)
        check_like(where, "maps", maps, self.conv.weight)
        places = self.conv(maps).flatten(2)  # (batch, types * dim, places)
        capsules = torch.unflatten(places, 1, (self.types, self.dim)).transpose(2, 3)
        return squash(capsules.flatten(1, 2))


class CapsuleNorm(nn.Module):
    """Batch normalisation over the coordinates of capsules, then ReLU: the released code's.

    Args:
        dim: size of a capsule.

    Shape:
        ``(batch, caps, dim)`` -> the same.

    >>> CapsuleNorm(8)(torch.randn(2, 128, 8)).min() >= 0
    tensor(True)
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(check_size(type(self).__name__, "dim", dim), eps=1e-3)

    def forward(self, capsules: Tensor) -> Tensor:
        where = type(self).__name__
        check_floating(where, "capsules", capsules)
        check_shape(where, "capsules", capsules, batch=None, caps=None, dim=self.norm.num_features)
        flat: Tensor = self.norm(capsules.flatten(0, 1))
        return torch.relu(flat.reshape(capsules.shape))
