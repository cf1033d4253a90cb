"""A network that pools early and is wide late: the most accuracy for the time on a CPU."""

from torch import nn

from xncaps.backbones.base import Backbone, conv
from xncaps.errors import check_width


class WideNet(Backbone):
    """Seven 3x3 convolutions, pooled by maximum after the second, the fourth and the sixth.

    Few channels where the maps are large (32, 64), many where they are small (256): convolutions
    of many channels make the most of a processor, above all in bfloat16.

    Args:
        in_channels: channels of the images.
        image_size: side of the images in pixels.
        width: multiplies all channels.

    Shape:
        ``(batch, in_channels, height, width)`` -> ``(batch, 256 * width, height / 8, width / 8)``.

    >>> WideNet(in_channels=3, image_size=32)(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 256, 4, 4])
    """

    default_channels, default_size, least_size = 3, 32, 8
    caps_in = 32
    hidden = (256, 128)

    def __init__(self, in_channels: int, image_size: int, width: float = 1.0) -> None:
        super().__init__()
        check_width(type(self).__name__, width)
        stem, first, last = (max(1, round(n * width)) for n in (32, 64, 256))
        self.trunk_features = self.features = last
        self.trunk = nn.Sequential(
            conv(in_channels, stem),
            conv(stem, first),
            nn.MaxPool2d(2),
            conv(first, first),
            conv(first, last),
            nn.MaxPool2d(2),
            conv(last, last),
            conv(last, last),
            nn.MaxPool2d(2),
        )
        self.top = conv(last, last)
        self.reset_parameters()

    def frozen(self) -> list[nn.Module]:
        return [self.top]
