"""The built-in sample: 5,000 genuine MNIST digits that need no download.

MNIST is the work of Y. LeCun, C. Cortes and C. J. C. Burges; ``scripts/make_sample.py`` made the
file.
"""

from importlib.resources import files

import numpy as np
import torch
from torch import Tensor

from xncaps.errors import check_choice

SPLITS = ("train", "test")


def load_sample(split: str = "train") -> tuple[Tensor, Tensor]:
    """The images and labels of one split: 4,000 to train on, 1,000 to test on, digits evenly.

    Args:
        split: ``train`` or ``test``.

    Shape:
        images ``(n, 1, 28, 28)`` uint8, labels ``(n,)`` int64.

    >>> images, labels = load_sample("test")
    >>> images.shape, images.dtype, labels.bincount().tolist()
    (torch.Size([1000, 1, 28, 28]), torch.uint8, [100, 100, 100, 100, 100, 100, 100, 100, 100, 100])
    """
    check_choice("load_sample", "split", split, SPLITS)
    with (files("xncaps.data") / "sample.npz").open("rb") as file, np.load(file) as arrays:
        images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
    return torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels.astype(np.int64))
