"""What a network's user must know of the data it was trained on."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from xncaps.data.batches import Preprocess
from xncaps.data.dataset import Splits
from xncaps.images import ground_of

MOST_NUMBER = 1e30
"""Above it, numbers of an image would overflow."""


@dataclass(frozen=True)
class Facts:
    """What is known of the data a network was trained on.

    Args:
        name: of the data set.
        classes: their names.
        shape: channels, height and width of an image.
        pairs: whether an image shows two classes.
        mean, std: of each channel over the training images.
        ground: what grey images are drawn on: dark, light or mixed.
        counts: images to learn from, for validation, and to test on.
        fingerprint: of the images and labels of each part.
    """

    name: str
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    pairs: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]
    ground: str
    counts: tuple[int, int, int]
    fingerprint: dict[str, str]

    def __post_init__(self) -> None:
        channels = len(self.mean)
        numbers = [*self.mean, *self.std]
        right = (
            all(isinstance(text, str) for text in (self.name, self.ground, *self.classes))
            and len(set(self.classes)) == len(self.classes) > self.pairs
            and isinstance(self.pairs, bool)
            and isinstance(self.fingerprint, dict)
            and all(type(size) is int and 0 < size < 2**15 for size in self.shape)
            and (len(self.shape), len(self.std), len(self.counts)) == (3, channels, 3)
            and self.shape[0] == channels
            and all(isinstance(value, float) and abs(value) < MOST_NUMBER for value in numbers)
            and all(each == 0 or each > 1 / MOST_NUMBER for each in self.std)
        )
        if not right:
            raise TypeError("values of the wrong kind")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Facts":
        """Of plain values, as JSON has them."""
        plain: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        return cls(**plain)

    def to_json(self) -> str:
        """As indented JSON."""
        return json.dumps(asdict(self), indent=2) + "\n"

    def preprocess(self, image_size: int | None = None) -> Preprocess:
        """What makes network input of this data's images: of this side, or of their own."""
        return Preprocess(self.mean, self.std, self.side(image_size))

    def side(self, image_size: int | None = None) -> int:
        """The side of the images a network is built for: the one asked for, or their own."""
        return image_size or max(self.shape[1:])


def facts_of(data: Splits) -> Facts:
    """What is to be noted of these data."""
    mean, std = data.train.moments()
    gray = data.train.shape[0] == 1
    return Facts(
        name=data.name,
        classes=data.train.classes,
        shape=data.train.shape,
        pairs=data.train.pairs,
        mean=mean,
        std=std,
        ground=ground_of(data.train.images[:1000]) if gray else "mixed",
        counts=(len(data.train), len(data.validation), len(data.test)),
        fingerprint={
            part: getattr(data, part).fingerprint() for part in ("train", "validation", "test")
        },
    )
