"""ResNet-50 (He et al.) as Keras builds it, without its classifier.

Keras' version strides in the first 1x1 convolution of a stage and gives every convolution a bias;
PyTorch's common one does neither, so the counts differ.
"""

from collections import OrderedDict

from torch import Tensor, nn
from torch.nn import functional as F

from xncaps.backbones.base import Backbone, he_init
from xncaps.primary import PrimaryCaps

# width, blocks, stride of the first block
STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1.001e-5)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around which the input is added.

    Where the number of channels changes, the input goes through a 1x1 convolution of its own.

    Shape:
        ``(batch, channels_in, height, width)`` -> ``(batch, channels, height', width')``.
    """

    def __init__(self, channels_in: int, width: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(channels_in, width, 1, stride),
            _norm(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            _norm(width),
            nn.ReLU(),
            nn.Conv2d(width, channels, 1),
            _norm(channels),
        )
        self.shortcut: nn.Module = nn.Identity()
        if channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride), _norm(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.branch(x))


class ResNet50(Backbone):
    """ResNet-50 up to its 2048 feature maps.

    Below 64 px the stem's stride is 1, and nothing else changes.

    Args:
        in_channels: channels of the images.
        image_size: side of the images in pixels.

    Shape:
        ``(batch, in_channels, height, width)`` -> ``(batch, 2048, height', width')``.

    >>> ResNet50(in_channels=1, image_size=28).eval()(torch.randn(1, 1, 28, 28)).shape
    torch.Size([1, 2048, 2, 2])
    """

    default_channels, default_size, least_size = 3, 224, 28
    caps_in = 256
    hidden = (1024, 512)
    trunk_features = 2048
    features = 2048

    def __init__(self, in_channels: int, image_size: int) -> None:
        super().__init__()
        stride = 2 if image_size >= 64 else 1
        blocks: OrderedDict[str, nn.Module] = OrderedDict()
        blocks["stem"] = nn.Sequential(
            nn.Conv2d(in_channels, 64, 7, stride, padding=3),
            _norm(64),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, padding=1),
        )
        channels_in = 64
        for stage, (width, count, stride) in enumerate(STAGES, start=2):
            for index in range(count):
                step = stride if index == 0 else 1
                blocks[f"conv{stage}_block{index + 1}"] = Bottleneck(
                    channels_in, width, 4 * width, step
                )
                channels_in = 4 * width
        self.top = blocks.popitem()[1]
        self.trunk = nn.Sequential(blocks)
        self.reset_parameters()

    def frozen(self) -> list[nn.Module]:
        return [self.top]

    def replacing_caps(self, caps: int, dim: int) -> nn.Module:
        """A new bottleneck like the one it replaces; its pooled channels are the capsules."""
        channels = caps * dim
        bottleneck = Bottleneck(self.trunk_features, STAGES[-1][0], channels)
        he_init(bottleneck)
        return nn.Sequential(bottleneck, PrimaryCaps(channels, caps, dim, project=False))

    def appended_caps(self, caps: int, dim: int) -> nn.Module:
        return self.replacing_caps(caps, dim)
