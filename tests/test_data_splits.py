"""Data sets and their parts: fingerprints, stratified choice, and what load_data gives by name."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xncaps.data import Dataset, load_data, load_sample
from xncaps.data.dataset import hold_out, validation_size
from xncaps.errors import InputError


def random_images(count, channels, height, width):
    shape = (count, channels, height, width)
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, shape, np.uint8))


def test_moments_equal_numpy():
    data = Dataset(random_images(9000, 3, 2, 3), torch.zeros(9000).long(), ("any",))
    mean, std = data.moments()
    values = data.images.numpy() / 255.0
    assert mean == pytest.approx(values.mean(axis=(0, 2, 3)))
    assert std == pytest.approx(values.std(axis=(0, 2, 3)))


def test_a_fingerprint_is_of_everything():
    data = Dataset(random_images(4, 1, 2, 3), torch.tensor([0, 1, 0, 1]), ("a", "b"))
    pixel = data.images.clone()
    pixel[3, 0, 1, 2] ^= 1
    others = [
        Dataset(pixel, data.labels, data.classes),
        Dataset(data.images, data.labels.flip(0), data.classes),
        Dataset(data.images, data.labels, ("a", "c")),
        Dataset(data.images.view(4, 1, 3, 2), data.labels, data.classes),
        data.take(torch.tensor([0, 1, 2])),
    ]
    assert len({data.fingerprint(), *(other.fingerprint() for other in others)}) == 6
    strided = data.images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert Dataset(strided, data.labels, data.classes).fingerprint() == data.fingerprint()
    taken = Dataset(data.images, data.labels, data.classes, torch.arange(8).view(4, 2)).take(
        torch.tensor([2, 0])
    )
    assert torch.equal(taken.images, data.images[[2, 0]])
    assert (taken.labels.tolist(), taken.sources.tolist()) == ([0, 0], [[4, 5], [0, 1]])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=0, max_size=60), st.data())
def test_hold_out_takes_every_class_in_its_share(numbers, data):
    count = data.draw(st.integers(0, len(numbers)))
    seed = data.draw(st.integers(0, 5))
    labels = torch.tensor(numbers, dtype=torch.int64)
    rest, chosen = hold_out(labels, count, seed)
    assert sorted(rest.tolist() + chosen.tolist()) == list(range(len(numbers)))
    assert len(chosen) == count
    assert all((part.diff() > 0).all() for part in (rest, chosen))
    assert torch.equal(hold_out(labels, count, seed)[1], chosen)
    exact = {number: numbers.count(number) * count / len(numbers) for number in numbers}
    if all(1 <= exact[number] <= numbers.count(number) - 1 for number in numbers):
        for number, share in exact.items():
            taken = int((labels[chosen] == number).sum())
            assert math.floor(share) <= taken <= math.ceil(share)


def test_hold_out_chooses_by_seed_and_refuses_what_is_not_there():
    labels = torch.arange(100) % 10
    assert not torch.equal(hold_out(labels, 30, 0)[1], hold_out(labels, 30, 1)[1])
    assert hold_out(labels, 30, 0)[1].remainder(10).bincount().tolist() == [3] * 10
    for count in (-1, 101):
        with pytest.raises(InputError) as caught:
            hold_out(labels, count, 0)
        told = f"hold_out: count must be from 0 to the 100 images there are; got {count}."
        assert str(caught.value) == told
    assert [validation_size(n) for n in (9, 10, 49999, 50000, 10**6)] == [0, 1, 4999, 5000, 5000]


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, (3600, 400)),
        ({"train_count": 500}, (450, 50)),
        ({"validation": 0}, (4000, 0)),
        ({"train_count": 100, "validation": 99}, (1, 99)),
        ({"train_count": 4000, "validation": 1000}, (3000, 1000)),
    ],
)
def test_load_data_splits_the_sample(options, sizes):
    data = load_data("sample", **options)
    assert data.name == "sample"
    assert (len(data.train), len(data.validation), len(data.test)) == (*sizes, 1000)
    key = {i.numpy().tobytes(): int(n) for i, n in zip(*load_sample("train"), strict=True)}
    found = [
        (image.numpy().tobytes(), int(label))
        for part in (data.train, data.validation)
        for image, label in zip(part.images, part.labels, strict=True)
    ]
    assert len(dict(found)) == sum(sizes)
    assert dict(found).items() <= key.items()
    whole = torch.cat([data.train.labels, data.validation.labels])
    assert whole.bincount().tolist() == [sum(sizes) // 10] * 10
    assert load_data("sample", **options).validation.fingerprint() == data.validation.fingerprint()


def test_hold_out_in_plain_numbers():
    sizes, count = (
        [50, 30, 12, 8],
        21,
    )  # shares 10.5, 6.3, 2.52, 1.68: the largest remainders get one
    labels = torch.arange(4).repeat_interleave(torch.tensor(sizes))
    assert labels[hold_out(labels, count, 0)[1]].bincount().tolist() == [10, 6, 3, 2]


@pytest.mark.parametrize("count", [10, 11, 15, 20, 30])
def test_every_class_stays_to_learn_from(count):
    """With no validation asked for, none is made of the last image of a class."""
    assert len(load_data("sample", train_count=count).train.labels.unique()) == 10


NAMES = "one of sample, mnist, cifar10, multimnist, multimnist-authors, folder:PATH, idx:PATH"


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("mnits", {}, f"data must be {NAMES}; got 'mnits'. Did you mean 'mnist'?"),
        ("", {}, f"data must be {NAMES}; got ''."),
        (None, {}, f"data must be {NAMES}; got None."),
        ("sample:x", {}, f"data must be {NAMES}; got 'sample:x'. Did you mean 'sample'?"),
        ("folder", {}, "data must name a folder, as folder:PATH; got 'folder'."),
        ("idx:", {}, "data must name a folder, as idx:PATH; got 'idx:'."),
        ("sample", {"train_count": 1}, "train_count must be at least 2; got 1."),
        ("sample", {"train_count": 2.5}, "train_count must be a whole number; got 2.5."),
        ("sample", {"validation": -1}, "validation must be at least 0; got -1."),
        ("sample", {"image_size": 0}, "image_size must be at least 1; got 0."),
        (
            "sample",
            {"train_count": 4001},
            "train_count must be at most the 4,000 training images there are; got 4001.",
        ),
        (
            "sample",
            {"train_count": 50, "validation": 50},
            "validation must be below the 50 training images there are; got 50.",
        ),
    ],
)
def test_what_load_data_refuses(name, options, told):
    with pytest.raises(InputError) as caught:
        load_data(name, **options)
    assert str(caught.value) == f"load_data: {told}"
