"""What every backbone is: a trunk, a top, and the primary capsules that fit it.

``attach="replace"`` drops the top, ``"append"`` freezes it (with whatever else ``frozen`` names),
and ``"features"`` leaves everything as it is.
"""

import math
from abc import ABC, abstractmethod

from torch import Tensor, nn
from torch.nn import functional as F

from xncaps.primary import PrimaryCaps


class Backbone(nn.Module, ABC):
    """Images in, feature maps out: ``top(trunk(images))``.

    A backbone takes ``(in_channels, image_size)`` and sets ``trunk`` and ``top``.

    Attributes:
        default_channels, default_size: the images it is usually fed.
        least_size: side of the smallest image it takes, in pixels.
        caps_in: how many primary capsules it usually feeds.
        hidden: the hidden layers of its FC head.
        trunk_features: channels that the trunk gives.
        features: channels that the whole gives.
    """

    default_channels: int
    default_size: int
    least_size: int
    caps_in: int
    hidden: tuple[int, ...]

    trunk: nn.Module
    top: nn.Module
    trunk_features: int
    features: int
    _is_frozen = False

    @abstractmethod
    def frozen(self) -> list[nn.Module]:
        """The modules that ``append`` freezes."""

    def replacing_caps(self, caps: int, dim: int) -> nn.Module:
        """Primary capsules in place of the top, on the features of the trunk."""
        return PrimaryCaps(self.trunk_features, caps, dim)

    def appended_caps(self, caps: int, dim: int) -> nn.Module:
        """Primary capsules behind the (frozen) top, as in the authors' released code."""
        return PrimaryCaps(self.features, caps, dim)

    def drop_top(self) -> None:
        """Leave the top out; the features are then the trunk's."""
        self.top = nn.Identity()
        self.features = self.trunk_features

    def freeze_top(self) -> None:
        """Stop the frozen modules from learning; their batch normalisation stays in eval mode."""
        self._is_frozen = True
        for module in self.frozen():
            module.requires_grad_(False)
        self.train(self.training)

    def train(self, mode: bool = True) -> "Backbone":
        super().train(mode)
        if self._is_frozen:
            for module in self.frozen():
                module.eval()
        return self

    def reset_parameters(self) -> None:
        he_init(self)

    def forward(self, images: Tensor) -> Tensor:
        maps: Tensor = self.top(self.trunk(images))
        return maps


def he_init(module: nn.Module) -> None:
    """He initialisation for all convolutions in a module; biases start at 0."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, nonlinearity="relu")
            if part.bias is not None:
                nn.init.zeros_(part.bias)


def conv(channels_in: int, channels: int, kernel: int = 3, stride: int = 1) -> nn.Module:
    """A convolution without bias, batch normalisation and ReLU; it keeps the size at stride 1."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
    )


class SameConv2d(nn.Conv2d):
    """A convolution padded as Keras pads ``same``: an odd pixel goes to the right and below."""

    def forward(self, x: Tensor) -> Tensor:
        vertical, horizontal = (
            max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)
            for size, stride, kernel in zip(x.shape[2:], self.stride, self.kernel_size, strict=True)
        )
        left, above = horizontal // 2, vertical // 2
        padded = F.pad(x, (left, horizontal - left, above, vertical - above))
        return super().forward(padded)
