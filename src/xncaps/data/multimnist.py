"""MultiMNIST: two digits of different classes on one image, composed from MNIST.

Pairs are made within a split, so that no digit of a test image was ever seen in training. The
paper's released generator joins both splits first; ``authors=True`` rebuilds that, leak and all.
"""

import hashlib
import os
from dataclasses import replace

import torch
from torch import Tensor

from xncaps.data.dataset import Dataset
from xncaps.data.files import Progress
from xncaps.data.idx import load_mnist
from xncaps.errors import InputError, RunError, check_choice, check_size, message

SIDE, SHIFT = 36, 4
EACH = 4
"""Composites per base digit."""

SHA256 = {
    "train": "b482985e429ad7a2337aa49c179bfab56d93ba973f8ca23f9eaa5dd91fdd0a98",
    "test": "af2cd30195949fcc0a8a9361dd32ba4a03f4a9605f1d3ba6c2311aedac4e589a",
    "learnt": "0b18655d34d1860dee30c4f044ff6363b90d40a5d003876b9a5887668383b6be",
    "checked": "17820910d9630930c7b89f68d5462a22b7d4703644b3187bd3b9ad3e5c1048ca",
}
"""Of the images and labels that MNIST and seed 0 give: the two splits, and the training images with
5,000 for validation set apart."""


def load_multimnist(
    split: str = "train",
    data_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    *,
    count: int | None = None,
    seed: int = 0,
    authors: bool = False,
) -> Dataset:
    """MultiMNIST: 240,000 training and 40,000 test images of two digits, made in seconds.

    Args:
        split: ``train`` or ``test``.
        data_dir, progress: as in :func:`load_mnist`.
        count: number of images, if not four for each digit.
        seed: of partners and shifts.
        authors: the released generator's **leaky** pairing, for comparison with the paper only.

    Shape:
        images ``(n, 1, 36, 36)`` uint8, labels ``(n, 10)`` uint8 with two ones in each row.
    """
    check_choice("load_multimnist", "split", split, ("train", "test"))
    if authors:
        both = [load_mnist(part, data_dir, progress) for part in ("train", "test")]
        pairs = compose_authors(both[0], both[1], seed)[split == "test"]
        if count is None:
            return pairs
        if check_size("load_multimnist", "count", count) > len(pairs):
            requirement = f"be at most the {len(pairs):,} images of the authors' {split} set"
            raise InputError(message("load_multimnist", "count", requirement, count))
        return pairs.take(torch.arange(count))
    pairs = compose(load_mnist(split, data_dir, progress), count, seed)
    if count is None and seed == 0:
        check_digest(pairs, SHA256[split])
    return pairs


def compose(digits: Dataset, count: int | None = None, seed: int = 0) -> Dataset:
    """Images of two digits, each moved by up to 4 px each way, their pixels added and clipped.

    Base digits take turns, so that ``count`` images use them evenly; the other digit of a pair is
    any one of another class, each as likely.

    Args:
        digits: images of one digit, 28x28.
        count: number of images; four for each digit if not given.
        seed: of partners and shifts.

    Shape:
        images ``(count, 1, 36, 36)`` uint8, labels ``(count, classes)`` uint8, sources
        ``(count, 2)``: which digits the image shows.

    >>> from xncaps.data import load_data
    >>> digits = load_data("sample").test
    >>> pairs = compose(digits, 5)
    >>> pairs.shape, pairs.labels.sum(dim=1).tolist(), pairs.sources[:, 0].tolist()
    ((1, 36, 36), [2, 2, 2, 2, 2], [0, 1, 2, 3, 4])
    """
    side = SIDE - 2 * SHIFT
    if digits.shape != (1, side, side):
        raise InputError(
            message("compose", "digits", f"have shape (1, {side}, {side})", digits.shape)
        )
    count = EACH * len(digits) if count is None else check_size("compose", "count", count)
    sizes = digits.labels.bincount(minlength=len(digits.classes))
    if (sizes > 0).sum() < 2:
        raise InputError(message("compose", "digits", "show at least two classes", "one"))
    generator = torch.Generator().manual_seed(seed)

    first = torch.arange(count) % len(digits)
    # Digits in the order of their classes; those of another class lie before or behind one's own.
    by_class = digits.labels.argsort(stable=True)
    label = digits.labels[first]
    start, size = (sizes.cumsum(0) - sizes)[label], sizes[label]
    draw = torch.rand(count, generator=generator, dtype=torch.float64)
    place = (draw * (len(digits) - size)).long()
    second = by_class[torch.where(place < start, place, place + size)]
    sources = torch.stack([first, second], dim=1)

    shifts = torch.randint(2 * SHIFT + 1, (count, 2, 2), generator=generator)
    images = torch.zeros(count, SIDE, SIDE, dtype=torch.uint8)
    for which in range(2):
        place = shifts[:, which, 0] * (2 * SHIFT + 1) + shifts[:, which, 1]
        for number, members in enumerate(_members(place, (2 * SHIFT + 1) ** 2)):
            y, x = divmod(number, 2 * SHIFT + 1)
            window = images[:, y : y + side, x : x + side]
            old = window[members]
            new = digits.images[sources[members, which], 0]
            window[members] = old + torch.minimum(new, 255 - old)

    labels = torch.zeros(count, len(digits.classes), dtype=torch.uint8)
    labels.scatter_(1, digits.labels[sources], 1)
    return Dataset(images.unsqueeze(1), labels, digits.classes, sources)


def _members(numbers: Tensor, count: int) -> list[Tensor]:
    """For each number below ``count``: where it stands."""
    order = numbers.argsort(stable=True)
    return list(torch.split(order, numbers.bincount(minlength=count).tolist()))


def compose_from(digits: Dataset, chosen: Tensor, count: int, seed: int = 0) -> Dataset:
    """Images of the chosen digits alone; ``sources`` count through all the digits."""
    pairs = compose(digits.take(chosen), count, seed)
    return replace(pairs, sources=chosen[pairs.sources])


def compose_authors(train: Dataset, test: Dataset, seed: int = 0) -> tuple[Dataset, Dataset]:
    """MultiMNIST with the released generator's leak: train and test digits joined before pairing.

    Nearly every test image shows digits that training images show too. ``sources`` count through
    the training digits, then the test digits.

    Args:
        train, test: the digits.
        seed: of partners, shifts and the split.
    """
    joined = Dataset(
        torch.cat([train.images, test.images]),
        torch.cat([train.labels, test.labels]),
        train.classes,
    )
    pairs = compose(joined, seed=seed)
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))
    cut = EACH * len(train)
    return pairs.take(order[:cut]), pairs.take(order[cut:])


def check_digest(pairs: Dataset, sha256: str) -> None:
    """Refuse images that are not the ones every other machine makes."""
    digest = hashlib.sha256(pairs.images.numpy().data)
    digest.update(pairs.labels.numpy().data)
    if digest.hexdigest() != sha256:
        raise RunError(
            f"multimnist: {len(pairs):,} images were made, but not the expected ones: SHA-256 "
            f"{digest.hexdigest()[:16]}..., expected {sha256[:16]}.... This version of torch "
            "seems to draw other random numbers."
        )
