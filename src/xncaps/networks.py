"""What a whole network is, and two that come whole: CapsNet and XNOR-Net."""

from typing import Any

import torch
from torch import Tensor, nn

from xncaps.errors import (
    InputError,
    check_choice,
    check_floating,
    check_like,
    check_options,
    check_shape,
    check_size,
    check_width,
    message,
)
from xncaps.heads import (
    CAPSULE_HEADS,
    DIM_IN,
    DIM_OUT,
    HEAD_OPTIONS,
    HEADS,
    CapsuleHead,
    FCHead,
    LinearHead,
)
from xncaps.primary import ConvPrimaryCaps
from xncaps.xnor import XnorConv2d, XnorLinear


class Classifier(nn.Module):
    """A backbone and a head: images in, one score for each class out.

    Args:
        backbone: images to feature maps.
        head: features to scores.
        in_channels: channels of the images.
        image_size: side of the images in pixels.
        mirror: outside of training, the scores of an image are the means of its own and those of
            its mirror image.

    Attributes:
        fixed_size: whether images of any other size are refused.
        scores: what the scores are, ``lengths`` of capsules or ``logits``.
        num_classes: number of classes.

    Shape:
        ``(batch, in_channels, height, width)`` -> ``(batch, num_classes)``; with a capsule head on
        request also the couplings ``(batch, caps_in, num_classes)``.

    >>> from xncaps.heads import LinearHead
    >>> Classifier(nn.Conv2d(1, 6, 3), LinearHead(6, 4), 1, 28)(torch.randn(2, 1, 28, 28)).shape
    torch.Size([2, 4])
    """

    fixed_size = False

    def __init__(
        self,
        backbone: nn.Module,
        head: LinearHead | FCHead | CapsuleHead,
        in_channels: int,
        image_size: int,
        mirror: bool = False,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.in_channels = in_channels
        self.image_size = image_size
        self.mirror = mirror

    @property
    def scores(self) -> str:
        return self.head.scores

    @property
    def num_classes(self) -> int:
        return self.head.num_classes

    def forward(
        self, images: Tensor, return_couplings: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        where = type(self).__name__
        self.check_images(images)
        if self.mirror and not self.training:
            images = torch.cat([images, images.flip(3)])
        features = self.backbone(images)
        if not return_couplings:
            scores: Tensor = self.head(features)
            return self._of_images(scores)
        if not isinstance(self.head, CapsuleHead):
            requirement = "be false without a capsule head"
            raise InputError(message(where, "return_couplings", requirement, True))
        scores, couplings = self.head(features, return_couplings=True)
        return self._of_images(scores), self._of_images(couplings)

    def _of_images(self, values: Tensor) -> Tensor:
        """Means over each image and its mirror image, if there are any."""
        if not self.mirror or self.training:
            return values
        return values.view(2, values.shape[0] // 2, *values.shape[1:]).mean(dim=0)

    def check_images(self, images: Tensor) -> None:
        """Refuse images that the network was not built for."""
        where = type(self).__name__
        check_floating(where, "images", images)
        size = self.image_size if self.fixed_size else None
        check_shape(
            where, "images", images, batch=None, channels=self.in_channels, height=size, width=size
        )
        parameter = next(self.parameters(), None)
        if parameter is not None:  # a packed network may have none
            check_like(where, "images", images, parameter)
        if torch.compiler.is_compiling():
            return  # the rest would tie a dynamic height and width down
        least = getattr(self.backbone, "least_size", 1)
        if min(images.shape[2:]) < least:
            got = "x".join(map(str, images.shape[2:]))
            raise InputError(message(where, "images", f"have sides of at least {least} px", got))


class CapsNet(Classifier):
    """The network of Sabour et al. without its decoder: two 9x9 convolutions and a capsule layer.

    Args:
        num_classes: number of classes.
        in_channels: channels of the images.
        image_size: side of the images in pixels, at least 17.
        head: the capsule layer: dr, xnodr, xnidr or xnboth.
        caps_in: number of primary capsules, a multiple of the places they sit at (36 at 28 px);
            32 at each place if not given.
        dim_in, dim_out: sizes of primary and output capsules.
        options: further options of the capsule layer.

    Shape:
        ``(batch, in_channels, image_size, image_size)`` -> ``(batch, num_classes)``.

    >>> sum(p.numel() for p in CapsNet().parameters())
    6804224
    """

    default_channels, default_size, least_size = 1, 28, 17
    fixed_size = True

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = default_channels,
        image_size: int = default_size,
        head: str = "dr",
        *,
        caps_in: int | None = None,
        dim_in: int = DIM_IN,
        dim_out: int = DIM_OUT,
        **options: Any,
    ) -> None:
        where = type(self).__name__
        check_choice(where, "head", head, CAPSULE_HEADS)
        check_options(where, f"the {head} head", HEAD_OPTIONS[head], options)
        check_size(where, "in_channels", in_channels)
        check_image_size(where, image_size, self.least_size)
        places = ((image_size - 8 - 9) // 2 + 1) ** 2
        caps_in = 32 * places if caps_in is None else check_size(where, "caps_in", caps_in)
        if caps_in % places:
            requirement = f"be a multiple of {places}, the places of the primary capsules"
            raise InputError(message(where, "caps_in", requirement, caps_in))
        check_size(where, "dim_in", dim_in)
        primary = ConvPrimaryCaps(256, caps_in // places, dim_in, kernel_size=9, stride=2)
        super().__init__(
            nn.Sequential(nn.Conv2d(in_channels, 256, 9), nn.ReLU()),
            HEADS[head](
                256,
                num_classes,
                caps_in=caps_in,
                dim_in=dim_in,
                dim_out=dim_out,
                primary=primary,
                **options,
            ),
            in_channels,
            image_size,
        )


class XnorNet(Classifier):
    """XNOR-Net on BinaryNet's VGG for CIFAR-10: xnorized but for the first and the last layer.

    Convolutions of 128, 128, 256, 256, 512, 512 channels with pooling behind each pair, then two
    layers of 1024. Each xnorized layer has its batch normalisation before it.

    Args:
        num_classes: number of classes.
        in_channels: channels of the images.
        image_size: side of the images in pixels, at least 8.
        width: multiplies all channels.
        options: ``binarizer``, ``scale``, ``detach_scale`` of the xnorized layers.

    Shape:
        ``(batch, in_channels, image_size, image_size)`` -> ``(batch, num_classes)``.

    >>> XnorNet(width=0.25).eval()(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    default_channels, default_size, least_size = 3, 32, 8
    fixed_size = True

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = default_channels,
        image_size: int = default_size,
        *,
        width: float = 1.0,
        **options: Any,
    ) -> None:
        where = type(self).__name__
        check_size(where, "in_channels", in_channels)
        check_image_size(where, image_size, self.least_size)
        check_width(where, width)
        first, second, third, dense = (max(1, round(n * width)) for n in (128, 256, 512, 1024))
        places = (image_size // 8) ** 2

        def conv(channels_in: int, channels: int) -> list[nn.Module]:
            layer = XnorConv2d(channels_in, channels, 3, padding=1, bias=False, **options)
            return [nn.BatchNorm2d(channels_in), layer]

        def linear(features: int) -> list[nn.Module]:
            layer = XnorLinear(features, dense, bias=False, **options)
            return [nn.BatchNorm1d(features), layer]

        stem = nn.Conv2d(in_channels, first, 3, padding=1, bias=False)
        super().__init__(
            nn.Sequential(
                *(stem, nn.BatchNorm2d(first), nn.ReLU()),
                *(*conv(first, first), nn.MaxPool2d(2)),
                *(*conv(first, second), *conv(second, second), nn.MaxPool2d(2)),
                *(*conv(second, third), *conv(third, third), nn.MaxPool2d(2)),
                *(nn.Flatten(), *linear(third * places), *linear(dense)),
                *(nn.BatchNorm1d(dense), nn.ReLU()),
            ),
            LinearHead(dense, num_classes),
            in_channels,
            image_size,
        )


def check_image_size(where: str, image_size: object, least: int, hint: str = "") -> None:
    """Refuse an image side that is no whole number or too small."""
    requirement = f"be at least {least} px {hint}".rstrip()
    if check_size(where, "image_size", image_size) < least:
        raise InputError(message(where, "image_size", requirement, image_size))
