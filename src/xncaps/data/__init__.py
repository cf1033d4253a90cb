"""Data sets in memory, as uint8 tensors; usable without the rest of the library.

>>> data = load_data("sample")
>>> len(data.train), len(data.validation), len(data.test)
(3600, 400, 1000)
"""

from xncaps.data.augment import Augment
from xncaps.data.batches import Batches, Preprocess
from xncaps.data.cifar10 import load_cifar10
from xncaps.data.dataset import Dataset, Splits
from xncaps.data.facts import Facts, facts_of
from xncaps.data.folder import load_folder
from xncaps.data.idx import load_idx, load_mnist, read_idx
from xncaps.data.load import DATASETS, load_data
from xncaps.data.multimnist import compose, load_multimnist
from xncaps.data.sample import load_sample

__all__ = [
    "DATASETS",
    "Augment",
    "Batches",
    "Dataset",
    "Facts",
    "Preprocess",
    "Splits",
    "compose",
    "facts_of",
    "load_cifar10",
    "load_data",
    "load_folder",
    "load_idx",
    "load_mnist",
    "load_multimnist",
    "load_sample",
    "read_idx",
]
