"""Augmentation of whole batches, as tensor code.

What happens to an image is drawn first, for the whole batch, and then applied: so a machine that
holds a part of the batch does to it what one machine would have done.
"""

import math
from dataclasses import dataclass, fields
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from xncaps.errors import MOST, InputError, brief, message

Draw = dict[str, Tensor]
KNOTS = 7
"""Of the field that bends an image, along each axis."""


@dataclass(frozen=True)
class Augment:
    """What may happen to an image. Everything is off by default.

    Args:
        shift: moved by up to this many pixels along each axis.
        rotate: turned by up to this many degrees either way.
        scale: enlarged or shrunk by up to this share.
        flip: mirrored left to right, half of the time.
        crop: moved by up to this many whole pixels along each axis, the edge reflected.
        cutout: a square of this side, anywhere, takes the mean colour.
        bend: bent smoothly, each pixel by up to this many along each axis.
        alternate: with ``flip``, each image is mirrored in every second epoch, not by chance.

    >>> images = torch.zeros(2, 1, 28, 28, dtype=torch.uint8)
    >>> augment = Augment(shift=2, rotate=10)
    >>> augment(images, augment.draw(2, (28, 28), torch.Generator().manual_seed(0))).dtype
    torch.float32
    """

    shift: float = 0.0
    rotate: float = 0.0
    scale: float = 0.0
    flip: bool = False
    crop: int = 0
    cutout: int = 0
    bend: float = 0.0
    alternate: bool = False

    def __post_init__(self) -> None:
        most = {"rotate": 180.0, "scale": 0.99, "crop": MOST, "cutout": MOST}
        for field in fields(self):
            value = getattr(self, field.name)
            top = most.get(field.name, 1e4)
            switch = field.name in ("flip", "alternate")
            if switch:
                right, kind = isinstance(value, bool), "true or false"
            elif field.name in ("crop", "cutout"):
                right, kind = isinstance(value, int), "a whole number of pixels, 0 or more"
            else:
                right, kind = isinstance(value, int | float), f"a number from 0 to {top:g}"
            if isinstance(value, bool) != switch or not right or not 0 <= value <= top:
                raise InputError(message("Augment", field.name, f"be {kind}", brief(value)))
        if self.alternate and not self.flip:
            raise InputError(message("Augment", "alternate", "go with flip", "flip false"))

    @property
    def moves(self) -> bool:
        """Whether images are resampled."""
        return bool(self.shift or self.rotate or self.scale or self.bend)

    def draw(
        self,
        count: int,
        size: tuple[int, int],
        generator: torch.Generator,
        mirrored: Tensor | None = None,
    ) -> Draw:
        """What happens to each of ``count`` images of this height and width.

        Which of them are mirrored is drawn as well, unless it is given.
        """

        def uniform(*shape: int) -> Tensor:
            return torch.rand(count, *shape, generator=generator)

        drawn = {}
        flip = mirrored
        if flip is None:
            flip = (uniform() < 0.5) if self.flip else torch.zeros(count).bool()
        if self.crop or (self.flip and not self.moves):
            span = 2 * self.crop + 1
            drawn["flip"] = flip
            drawn["crop"] = (uniform(2) * span).long() - self.crop
            flip = torch.zeros_like(flip)
        if self.moves:
            height, width = size
            turn, grow, across, down = uniform(4).mul_(2).sub_(1).unbind(1)
            angle = turn * math.radians(self.rotate)
            factor = 1 / (1 + grow * self.scale)
            cos, sin = factor * angle.cos(), factor * angle.sin()
            matrix = [cos, sin * (-height / width), across * (2 * self.shift / width)]
            # Resampling can mirror as well: x is read from -x.
            matrix = [torch.where(flip, -value, value) for value in matrix]
            matrix += [sin * (width / height), cos, down * (2 * self.shift / height)]
            drawn["matrix"] = torch.stack(matrix, dim=1).view(count, 2, 3)
            if self.bend:
                reach = 2 * self.bend / torch.tensor([width, height])
                drawn["bend"] = uniform(2, KNOTS, KNOTS).mul_(2).sub_(1) * reach.view(2, 1, 1)
        if self.cutout:
            drawn["cutout"] = (uniform(2) * torch.tensor(size)).long()
        return drawn

    def __call__(self, images: Tensor, drawn: Draw) -> Tensor:
        """Move the images as drawn: uint8 -> uint8, or float32 (0 to 255) where resampled."""
        if "crop" in drawn:
            images = _crop_and_flip(images, drawn["crop"], drawn["flip"], self.crop)
        if "matrix" in drawn:
            grid = _grid(drawn["matrix"], *images.shape[2:])
            if "bend" in drawn:
                grid = grid + _field(drawn["bend"], *images.shape[2:])
            images = F.grid_sample(
                images.float(), grid, "bilinear", padding_mode="border", align_corners=False
            )
        return images

    def blank(self, images: Tensor, drawn: Draw) -> Tensor:
        """Cut the squares out of normalised images, where 0 is the mean colour."""
        if "cutout" not in drawn:
            return images
        height, width = images.shape[2:]
        center = drawn["cutout"]
        inside = []
        for axis, size in enumerate((height, width)):
            low = center[:, axis, None] - self.cutout // 2
            place = torch.arange(size)
            inside.append((place >= low) & (place < low + self.cutout))
        mask = inside[0][:, None, :, None] & inside[1][:, None, None, :]
        return images.masked_fill_(mask, 0)


def _grid(matrix: Tensor, height: int, width: int) -> Tensor:
    """What ``F.affine_grid(matrix, size, align_corners=False)`` gives, many times as fast."""
    across, down, start = matrix[..., None].unbind(2)
    rows = (across * _places(width) + start)[:, :, None, :]
    columns = (down * _places(height))[..., None]
    return (rows + columns).permute(0, 2, 3, 1)


def _field(knots: Tensor, height: int, width: int) -> Tensor:
    """A smooth field, as far from 0 as its knots at most.

    Shape:
        ``(batch, 2, knots, knots)`` -> ``(batch, height, width, 2)``.
    """
    return torch.einsum("yk,bckl,xl->byxc", _basis(height), knots, _basis(width))


@lru_cache(maxsize=8)
def _basis(size: int) -> Tensor:
    """How much each knot of a uniform cubic B-spline weighs at the middles of a line's pixels.

    Shape:
        ``(size, knots)``; each row sums to 1.
    """
    place = (torch.arange(size) + 0.5) / size * (KNOTS - 3)
    first = place.long()
    f = place - first
    parts = [(1 - f) ** 3, 3 * f**3 - 6 * f**2 + 4, -3 * f**3 + 3 * f**2 + 3 * f + 1, f**3]
    basis = torch.zeros(size, KNOTS)
    return basis.scatter_(1, first[:, None] + torch.arange(4), torch.stack(parts, dim=1) / 6)


@lru_cache(maxsize=8)
def _places(size: int) -> Tensor:
    """The middles of the pixels of a line that goes from -1 to 1."""
    return (2 * torch.arange(size) + 1) / size - 1


def _crop_and_flip(images: Tensor, offset: Tensor, flip: Tensor, most: int) -> Tensor:
    """Move by whole pixels with the edge reflected, and mirror: one gather."""
    batch, channels, height, width = images.shape
    rows = _sources(height, most)[0].index_select(0, offset[:, 0] + most) * width
    ways = (offset[:, 1] + most) + flip * (2 * most + 1)
    columns = _sources(width, most).flatten(0, 1).index_select(0, ways)
    place = (rows[:, :, None] + columns[:, None, :]).view(batch, 1, -1)
    moved = images.reshape(batch, channels, -1).gather(2, place.expand(-1, channels, -1))
    return moved.view(images.shape)


@lru_cache(maxsize=8)
def _sources(size: int, most: int) -> Tensor:
    """Where the pixels of a line come from: plain or mirrored, by offset from -most to most.

    Places outside ``0 .. size - 1`` are reflected at the first and the last pixel.

    Shape:
        ``(2, 2 * most + 1, size)``.
    """
    period = max(2 * (size - 1), 1)
    place = (torch.arange(size) + torch.arange(-most, most + 1)[:, None]).remainder(period)
    place = torch.where(place < size, place, period - place)
    return torch.stack([place, place.flip(1)])
