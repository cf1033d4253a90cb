"""What a data set is: uint8 images and labels in memory."""

import hashlib
import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from xncaps.errors import InputError, message


@dataclass(frozen=True)
class Dataset:
    """Images in memory, and what they show.

    Args:
        images: uint8, ``(n, channels, height, width)``.
        labels: class numbers, int64 ``(n,)``; or, where an image shows two classes, uint8
            ``(n, classes)`` with two ones in each row.
        classes: the names of the classes.
        sources: the base images each image was composed of, if it was.

    >>> from xncaps.data import load_data
    >>> digits = load_data("sample").test
    >>> len(digits), digits.shape, digits.pairs
    (1000, (1, 28, 28), False)
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    sources: Tensor | None = None

    def __len__(self) -> int:
        return len(self.images)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        _, channels, height, width = self.images.shape
        return channels, height, width

    @property
    def pairs(self) -> bool:
        """Whether an image shows two classes."""
        return self.labels.dim() == 2

    def take(self, indices: Tensor) -> "Dataset":
        """The images at these places, in this order."""
        sources = None if self.sources is None else self.sources[indices]
        images, labels = self.images[indices], self.labels[indices]
        return replace(self, images=images, labels=labels, sources=sources)

    def fingerprint(self) -> str:
        """SHA-256 over shape, classes, images and labels: equal only for equal data."""
        digest = hashlib.sha256(repr((tuple(self.images.shape), self.classes)).encode())
        for part in (self.images, self.labels):
            digest.update(np.ascontiguousarray(part.numpy()).data)
        return digest.hexdigest()

    def moments(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each channel, for pixels from 0 to 1."""
        values = torch.arange(256, dtype=torch.float64) / 255
        means, deviations = [], []
        for channel in range(self.images.shape[1]):
            counts = torch.zeros(256, dtype=torch.float64)
            for part in torch.split(self.images[:, channel], 8192):  # bincount makes int64 of them
                counts += part.flatten().bincount(minlength=256)
            shares = counts / counts.sum()
            mean = (shares * values).sum()
            means.append(float(mean))
            deviations.append(float((shares * (values - mean) ** 2).sum().sqrt()))
        return tuple(means), tuple(deviations)


@dataclass(frozen=True)
class Splits:
    """The three parts of a data set: to learn from, to choose by, to be judged on."""

    name: str
    train: Dataset
    validation: Dataset
    test: Dataset


def hold_out(labels: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Choose ``count`` of the samples, every class in its share; returns (the others, the chosen).

    Args:
        labels: class numbers.
        count: how many to choose.
        seed: of the choice.

    Shape:
        labels ``(n,)`` -> the indices of the others ``(n - count,)`` and of the chosen
        ``(count,)``, both in ascending order.

    >>> hold_out(torch.tensor([0, 0, 1, 1, 1, 1]), 3, seed=0)[1].tolist()
    [0, 2, 5]
    """
    if not 0 <= count <= len(labels):
        requirement = f"be from 0 to the {len(labels)} images there are"
        raise InputError(message("hold_out", "count", requirement, count))
    generator = torch.Generator().manual_seed(seed)
    sizes = labels.bincount()
    exact = sizes.double() * count / max(len(labels), 1)
    # A class that can gives one and keeps one, if the count allows it.
    low, high = (sizes > 1).long(), (sizes - 1).clamp(min=0)
    if not int(low.sum()) <= count <= int(high.sum()):
        low, high = torch.zeros_like(sizes), sizes
    shares = exact.floor().long().clamp(low, high)
    while missing := count - int(shares.sum()):
        step = 1 if missing > 0 else -1
        room = shares < high if step > 0 else shares > low
        # Largest remainders first; a stable sort gives ties to the lower class.
        need = torch.where(room, (exact - shares) * step, -math.inf)
        shares[need.argsort(descending=True, stable=True)[0]] += step
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for number, share in enumerate(shares.tolist()):
        members = (labels == number).nonzero().squeeze(1)
        chosen[members[torch.randperm(len(members), generator=generator)[:share]]] = True
    return (~chosen).nonzero().squeeze(1), chosen.nonzero().squeeze(1)


def validation_size(count: int) -> int:
    """How many training images to hold out: 5,000, or a tenth of a smaller set."""
    return min(5000, count // 10)
