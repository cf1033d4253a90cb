"""From uint8 images in memory to the batches a network takes."""

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from xncaps.data.augment import Augment, Draw
from xncaps.data.dataset import Dataset
from xncaps.errors import InputError, check_shape, check_size, message


def generator_for(seed: int, *path: str | int) -> torch.Generator:
    """A random generator of its own for each purpose: it depends on the names and nothing else."""
    name = "/".join(map(str, (seed, *path)))
    digest = hashlib.sha256(name.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


@dataclass(frozen=True)
class Preprocess:
    """uint8 pixels to what a network takes: mean 0 and deviation 1 on each channel.

    Args:
        mean, std: of each channel, for pixels from 0 to 1.
        size: the side images are enlarged or shrunk to; None leaves it.

    Shape:
        ``(batch, channels, height, width)`` -> the same, or ``(batch, channels, size, size)``.

    >>> white = torch.full((1, 1, 1, 1), 255, dtype=torch.uint8)
    >>> round(Preprocess((0.5,), (0.25,))(white).item(), 5)
    2.0
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: int | None = None

    def __call__(self, images: Tensor) -> Tensor:
        return self.resize(self.normalise(images))

    def normalise(self, images: Tensor) -> Tensor:
        """Bytes, or floats from 0 to 255, to mean 0 and deviation 1."""
        channels = len(self.mean)
        check_shape(
            "Preprocess", "images", images, n=None, channels=channels, height=None, width=None
        )
        factor, offset = _table(self.mean, self.std, *images.shape[2:])
        return torch.addcmul(offset, images.to(factor.dtype), factor)

    def resize(self, pixels: Tensor) -> Tensor:
        """Float images to the side the network takes."""
        if self.size is None or pixels.shape[2:] == (self.size, self.size):
            return pixels
        sides = (self.size, self.size)
        return F.interpolate(
            pixels, sides, mode="bilinear", antialias=self.size < max(pixels.shape[2:])
        )


@lru_cache(maxsize=8)
def _table(
    mean: tuple[float, ...], std: tuple[float, ...], height: int, width: int
) -> tuple[Tensor, Tensor]:
    """The factor and the offset that normalise each pixel of an image.

    Written out for every pixel, because broadcasting over channels is several times as slow.
    """
    # A channel that never varies stays at 0.
    factor = [1 / (255 * each) if each > 0 else 0.0 for each in std]
    offset = [-255 * middle * times for middle, times in zip(mean, factor, strict=True)]
    shape = (len(mean), height, width)
    written = [torch.tensor(each)[:, None, None].expand(shape) for each in (factor, offset)]
    return written[0].contiguous(), written[1].contiguous()


class Batches:
    """The batches of a training run: shuffled anew each epoch, augmented, normalised.

    A batch is a function of the seed and its number, so that a run can go on anywhere. Images that
    do not fill a batch at the end of an epoch are left out of that epoch. With several processes,
    each gets its part of the same batch.

    Args:
        data: what to draw from.
        batch_size: images of a batch, over all processes; the whole set if that is smaller.
        preprocess: makes pixels of bytes.
        augment: what may happen to an image.
        seed: of order and augmentation.
        rank, world: this process' number, and the number of processes.

    >>> from xncaps.data import load_data
    >>> digits = load_data("sample").train
    >>> batches = Batches(digits, 100, Preprocess((0.13,), (0.31,)))
    >>> images, labels = batches(0)
    >>> images.shape, batches.steps
    (torch.Size([100, 1, 28, 28]), 36)
    """

    def __init__(
        self,
        data: Dataset,
        batch_size: int,
        preprocess: Preprocess,
        augment: Augment | None = None,
        *,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        check_size("Batches", "batch_size", batch_size)
        if not 0 <= rank < world:
            raise InputError(message("Batches", "rank", f"be from 0 to {world - 1}", rank))
        self.batch_size = min(batch_size, len(data))
        if self.batch_size < world:
            requirement = f"be at least the number of processes, {world}"
            raise InputError(message("Batches", "batch_size", requirement, self.batch_size))
        self.data, self.preprocess = data, preprocess
        self.augment = augment or Augment()
        self.seed = seed
        self.part = slice(rank * self.batch_size // world, (rank + 1) * self.batch_size // world)
        self.steps = len(data) // self.batch_size
        self._planned: tuple[int, Tensor, Draw] | None = None

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """The images and labels of the batch with this number, this process' part of it."""
        epoch, place = divmod(step, self.steps)
        order, drawn = self._plan(epoch)
        start = place * self.batch_size
        mine = slice(start + self.part.start, start + self.part.stop)
        chosen, fate = order[mine], {name: values[mine] for name, values in drawn.items()}
        moved = self.augment(self.data.images.index_select(0, chosen), fate)
        pixels = self.augment.blank(self.preprocess.normalise(moved), fate)
        return self.preprocess.resize(pixels), self.data.labels[chosen]

    def order(self, epoch: int) -> Tensor:
        """The order of the images in an epoch."""
        return self._plan(epoch)[0]

    def _plan(self, epoch: int) -> tuple[Tensor, Draw]:
        """The order of an epoch, and what happens to each image: drawn at once, once."""
        if self._planned is None or self._planned[0] != epoch:
            count = len(self.data)
            order = torch.randperm(count, generator=generator_for(self.seed, "order", epoch))
            chance = generator_for(self.seed, "augment", epoch)
            mirrored = None
            if self.augment.alternate:
                first = torch.rand(count, generator=generator_for(self.seed, "flip")) < 0.5
                mirrored = first[order] ^ (epoch % 2 == 1)
            drawn = self.augment.draw(count, self.data.shape[1:], chance, mirrored)
            self._planned = (epoch, order, drawn)
        return self._planned[1:]
