"""The built-in sample: genuine MNIST digits, split for good."""

import gzip
import hashlib
import os
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch

from xncaps.data import load_sample
from xncaps.errors import InputError


def test_sizes_and_balance() -> None:
    for split, each in (("train", 400), ("test", 100)):
        images, labels = load_sample(split)
        assert images.shape == (10 * each, 1, 28, 28)
        assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
        assert labels.bincount().tolist() == [each] * 10


def test_splits_are_shuffled_and_share_no_image() -> None:
    (train, labels), (test, _) = load_sample("train"), load_sample("test")
    assert set(labels[:100].tolist()) == set(range(10))
    seen = {image.numpy().tobytes() for image in train}
    assert not any(image.numpy().tobytes() in seen for image in test)


def test_the_file_is_small_and_always_the_same() -> None:
    content = (files("xncaps.data") / "sample.npz").read_bytes()
    assert len(content) < 1_100_000
    digest = "f309124d8938251f65c2d847fbbef4162bcdb77bcd5d6502e33d701ad5a84006"
    assert hashlib.sha256(content).hexdigest() == digest


def test_unknown_split() -> None:
    with pytest.raises(InputError) as caught:
        load_sample("tset")
    assert str(caught.value) == (
        "load_sample: split must be one of train, test; got 'tset'. Did you mean 'test'?"
    )


@pytest.mark.skipif("XNCAPS_DATA" not in os.environ, reason="XNCAPS_DATA names no data folder")
def test_every_digit_is_in_the_mnist_training_set() -> None:
    folder = Path(os.environ["XNCAPS_DATA"]) / "mnist"
    raw = gzip.decompress((folder / "train-images-idx3-ubyte.gz").read_bytes())[16:]
    raw_labels = gzip.decompress((folder / "train-labels-idx1-ubyte.gz").read_bytes())[8:]
    mnist = {
        image.tobytes(): label
        for image, label in zip(
            np.frombuffer(raw, np.uint8).reshape(-1, 784), raw_labels, strict=True
        )
    }
    for split in ("train", "test"):
        for image, label in zip(*load_sample(split), strict=True):
            assert mnist[image.numpy().tobytes()] == label
