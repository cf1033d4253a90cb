"""MobileNetV2 (Sandler et al.) as Keras builds it, without its classifier."""

from collections import OrderedDict

from torch import Tensor, nn

from xncaps.backbones.base import Backbone, SameConv2d, he_init
from xncaps.primary import PrimaryCaps

# expansion, channels, blocks, stride of the first block
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


def _conv(
    channels_in: int, channels: int, kernel: int, stride: int = 1, groups: int = 1
) -> nn.Module:
    conv = SameConv2d(channels_in, channels, kernel, stride, groups=groups, bias=False)
    return nn.Sequential(conv, _norm(channels), nn.ReLU6())


class InvertedResidual(nn.Module):
    """Expand by a 1x1 convolution, filter depthwise, project back; add the input where it fits.

    Shape:
        ``(batch, channels_in, height, width)`` -> ``(batch, channels, height', width')``.
    """

    def __init__(self, channels_in: int, channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = channels_in * expansion
        self.expand = _conv(channels_in, wide, 1) if expansion > 1 else nn.Identity()
        self.depthwise = _conv(wide, wide, 3, stride, groups=wide)
        self.project = nn.Sequential(
            nn.Conv2d(wide, channels, 1, bias=False),
            _norm(channels),
        )
        self.adds_input = stride == 1 and channels_in == channels

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.project(self.depthwise(self.expand(x)))
        return x + y if self.adds_input else y


class MobileNetV2(Backbone):
    """MobileNetV2 up to its 1280 feature maps.

    Below 64 px the stem's stride is 1, and nothing else changes.

    Args:
        in_channels: channels of the images.
        image_size: side of the images in pixels.

    Shape:
        ``(batch, in_channels, height, width)`` -> ``(batch, 1280, height', width')``.

    >>> MobileNetV2(in_channels=1, image_size=28).eval()(torch.randn(1, 1, 28, 28)).shape
    torch.Size([1, 1280, 2, 2])
    """

    default_channels, default_size, least_size = 3, 224, 28
    caps_in = 128
    hidden = (512, 256, 128)
    trunk_features = STAGES[-1][1]
    features = 1280

    def __init__(self, in_channels: int, image_size: int) -> None:
        super().__init__()
        blocks: OrderedDict[str, nn.Module] = OrderedDict()
        blocks["stem"] = _conv(in_channels, 32, 3, stride=2 if image_size >= 64 else 1)
        channels_in = 32
        for expansion, channels, count, stride in STAGES:
            for index in range(count):
                step = stride if index == 0 else 1
                block = InvertedResidual(channels_in, channels, step, expansion)
                blocks[f"block_{len(blocks) - 1}"] = block
                channels_in = channels
        self.trunk = nn.Sequential(blocks)
        self.top = _conv(channels_in, self.features, 1)
        self.reset_parameters()

    def frozen(self) -> list[nn.Module]:
        """The last five Keras layers: block_16's projection with its norm, and the top."""
        last = self.trunk.get_submodule("block_16.project")
        return [last, self.top]

    def appended_caps(self, caps: int, dim: int) -> nn.Module:
        channels = self.features
        depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        he_init(depthwise)
        return nn.Sequential(
            depthwise,
            _norm(channels),
            PrimaryCaps(channels, caps, dim),
        )
