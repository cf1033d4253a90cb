"""A network that pools early and is wide late: the most accuracy for the time on a CPU."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xncaps.backbones.base import Backbone
from xncaps.errors import check_width

SIDE = 2
"""Of the patches that the first layer sees."""
LEAST = 5e-4
"""Variances are taken as at least about this share of their mean."""


class Highest(nn.Module):
    """The maximum of each map.

    Shape:
        ``(batch, channels, height, width)`` -> ``(batch, channels, 1, 1)``.
    """

    def forward(self, maps: Tensor) -> Tensor:
        return maps.amax(dim=(2, 3), keepdim=True)


class WideNet(Backbone):
    """Patches of 2x2 pixels, then six 3x3 convolutions, pooled by maximum behind every other one.

    Few channels where the maps are large (64), many where they are small (256): convolutions of
    many channels make the most of a processor, above all in bfloat16. Two things let it learn in
    few epochs: each convolution begins with filters that hand its input on, and training first
    shows the network some images (:meth:`prepare`), whose patches the first layer then whitens.

    Args:
        in_channels: channels of the images.
        image_size: side of the images in pixels.
        width: multiplies the channels of the convolutions.

    Shape:
        ``(batch, in_channels, height, width)`` -> ``(batch, 256 * width, 1, 1)``.

    >>> WideNet(in_channels=3, image_size=32)(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 256, 1, 1])
    """

    default_channels, default_size, least_size = 3, 32, 9
    caps_in = 32
    hidden = (256, 128)

    def __init__(self, in_channels: int, image_size: int, width: float = 1.0) -> None:
        super().__init__()
        check_width(type(self).__name__, width)
        first, last = (max(1, round(n * width)) for n in (64, 256))
        patches = 2 * in_channels * SIDE**2
        self.trunk_features = self.features = last
        self.trunk = nn.Sequential(
            *(nn.Conv2d(in_channels, patches, SIDE), nn.GELU()),
            *(*_pooled(patches, first), *_plain(first, first)),
            *(*_pooled(first, last), *_plain(last, last)),
            *_pooled(last, last),
        )
        self.top = nn.Sequential(*_plain(last, last), Highest())
        self.reset_parameters()

    @property
    def stem(self) -> nn.Conv2d:
        """The first layer."""
        return next(part for part in self.trunk.modules() if isinstance(part, nn.Conv2d))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for part in self.modules():
            if isinstance(part, nn.Conv2d) and part is not self.stem:
                nn.init.dirac_(part.weight.data[: part.in_channels])

    @torch.no_grad()
    def prepare(self, images: Tensor) -> None:
        """Let the first layer whiten the patches of these images, each way round, from now on.

        Its filters are the directions in which patches vary, each scaled to a variance of 1, and
        their negatives. They are not trained, only the bias is.

        Shape:
            ``(n, in_channels, height, width)``.
        """
        count, total, products = 0, torch.zeros(()), torch.zeros(())
        for part in torch.split(images.double(), 100):
            patches = F.unfold(part, SIDE).transpose(1, 2).flatten(0, 1)
            count += len(patches)
            total = total + patches.sum(dim=0)
            products = products + patches.t() @ patches
        mean = total / count
        variances, directions = torch.linalg.eigh(products / count - mean.outer(mean))
        least = LEAST * variances.mean().clamp(min=torch.finfo(torch.float32).tiny)
        filters = (directions / (variances.clamp(min=0) + least).sqrt()).t()
        filters = filters.reshape(-1, *self.stem.weight.shape[1:])
        self.stem.weight.copy_(torch.cat([filters, -filters]))
        self.stem.weight.requires_grad_(False)

    def frozen(self) -> list[nn.Module]:
        return [self.top]


def _pooled(channels_in: int, channels: int) -> list[nn.Module]:
    return [_conv(channels_in, channels), nn.MaxPool2d(2), nn.BatchNorm2d(channels), nn.GELU()]


def _plain(channels_in: int, channels: int) -> list[nn.Module]:
    return [_conv(channels_in, channels), nn.BatchNorm2d(channels), nn.GELU()]


def _conv(channels_in: int, channels: int) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels, 3, padding=1, bias=False)
