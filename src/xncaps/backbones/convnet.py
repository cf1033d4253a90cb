"""A small convolutional network that learns small images in minutes on a CPU."""

from torch import nn

from xncaps.backbones.base import Backbone, conv
from xncaps.errors import check_width


class ConvNet(Backbone):
    """Six 3x3 convolutions in three stages (16, 32, 64 channels) and a 1x1 to 128.

    Args:
        in_channels: channels of the images.
        image_size: side of the images in pixels.
        width: multiplies all channels.

    Shape:
        ``(batch, in_channels, height, width)`` -> ``(batch, 128 * width, height / 4, width / 4)``.

    >>> ConvNet(in_channels=1, image_size=28)(torch.randn(2, 1, 28, 28)).shape
    torch.Size([2, 128, 7, 7])
    """

    default_channels, default_size, least_size = 1, 28, 8
    caps_in = 32
    hidden = (128, 64)

    def __init__(self, in_channels: int, image_size: int, width: float = 1.0) -> None:
        super().__init__()
        check_width(type(self).__name__, width)
        first, second, third, last = (max(1, round(n * width)) for n in (16, 32, 64, 128))
        self.trunk_features, self.features = third, last
        self.trunk = nn.Sequential(
            conv(in_channels, first),
            conv(first, first),
            conv(first, second, stride=2),
            conv(second, second),
            conv(second, third, stride=2),
            conv(third, third),
        )
        self.top = conv(third, last, kernel=1)
        self.reset_parameters()

    def frozen(self) -> list[nn.Module]:
        return [self.top]
