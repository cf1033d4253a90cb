"""MultiMNIST: what each image shows, recovered from its pixels, and that no digit leaks."""

import gzip
import hashlib
import os
import resource
import time
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from checks import refused
from xncaps.data import Dataset, compose, load, load_data, load_multimnist, load_sample, multimnist
from xncaps.data.multimnist import compose_authors
from xncaps.errors import InputError, InputTypeError, RunError

TEN = tuple("0123456789")
SHIFTS = list(product(range(-4, 5), repeat=2))


def sample(split):
    return Dataset(*load_sample(split), TEN)


def placed(digit, shift):
    """A digit on the ground of 36x36, moved from the middle."""
    ground = np.zeros((36, 36), np.int32)
    y, x = 4 + shift[0], 4 + shift[1]
    ground[y : y + 28, x : x + 28] = digit
    return ground


def recover(image, first, second):
    """The shifts of two digits that give this image, of all there are."""
    ones, others = (np.stack([placed(d, s) for s in SHIFTS]) for d in (first, second))
    return [
        (SHIFTS[i], SHIFTS[j])
        for i, one in enumerate(ones)
        for j in np.nonzero((np.minimum(one + others, 255) == image).all(axis=(1, 2)))[0]
    ]


def overlaid(first, second, shifts):
    """The image that two shifted digits give, pixel by pixel."""
    image = [[0] * 36 for _ in range(36)]
    for digit, (down, right) in zip((first, second), shifts, strict=True):
        for y in range(28):
            for x in range(28):
                row, column = y + 4 + down, x + 4 + right
                image[row][column] = min(255, image[row][column] + int(digit[y][x]))
    return image


def assert_shows_its_sources(pairs, digits, places):
    """Pixels and labels of some images are those of their sources; returns the shifts."""
    found = []
    for place in places:
        image = pairs.images[place, 0].numpy()
        a, b = pairs.sources[place].tolist()
        first, second = (digits.images[n, 0].numpy() for n in (a, b))
        shifts = recover(image, first, second)
        assert shifts, place
        assert overlaid(first, second, shifts[0]) == image.tolist()
        classes = {int(digits.labels[a]), int(digits.labels[b])}
        assert pairs.labels[place].tolist() == [int(n in classes) for n in range(10)]
        assert len(classes) == 2
        if len(shifts) == 1:
            found += shifts[0]
    return found


def assert_labels_and_turns(pairs, labels):
    """Of all images: two different classes, those of the sources; base digits take turns."""
    first, second = pairs.sources.numpy().T
    assert (labels[first] != labels[second]).all()
    expected = np.zeros((len(pairs), 10), np.uint8)
    expected[np.arange(len(pairs)), labels[first]] = 1
    expected[np.arange(len(pairs)), labels[second]] = 1
    assert (pairs.labels.numpy() == expected).all()
    used = np.bincount(first)
    assert used[used > 0].max() - used[used > 0].min() <= 1


# --- on the sample ---


def test_images_are_their_sources_shifted_and_added():
    digits = sample("test")
    pairs = compose(digits, 300)
    assert_labels_and_turns(pairs, digits.labels.numpy())
    shifts = assert_shows_its_sources(pairs, digits, range(0, 300, 6))
    assert {n for shift in shifts for n in shift} == set(range(-4, 5))


def dots(count=1000):
    """Digits of one pixel, in the middle, as bright as their class says."""
    labels = torch.arange(count) % 10
    images = torch.zeros(count, 1, 28, 28, dtype=torch.uint8)
    images[:, 0, 13, 14] = (10 + labels).to(torch.uint8)
    return Dataset(images, labels, TEN)


def test_every_shift_is_as_likely_for_both_digits():
    digits = dots()
    pairs = compose(digits, 20000)
    counts = np.zeros((2, 9, 9))
    for image, source in zip(pairs.images[:, 0].numpy(), pairs.sources.tolist(), strict=True):
        for which, number in enumerate(source):
            places = np.argwhere(image == 10 + number % 10)
            if len(places):  # else both digits fell on one pixel
                y, x = places[0] - (13, 14)
                counts[which, y, x] += 1
    expected = 20000 / 81
    assert counts.sum() == 2 * ((pairs.images.flatten(1) > 0).sum(1) == 2).sum()
    assert np.abs(counts - expected * 80 / 81).max() < 6 * expected**0.5


def test_every_partner_of_another_class_is_as_likely():
    sizes = [10, 20, 40, 5, 15, 1, 3, 2, 1, 3]
    labels = torch.arange(10).repeat_interleave(torch.tensor(sizes))
    labels = labels[torch.randperm(100, generator=torch.Generator().manual_seed(0))]
    digits = Dataset(torch.zeros(100, 1, 28, 28, dtype=torch.uint8), labels, TEN)
    count = 100_000
    sources = compose(digits, count).sources.numpy()
    table = np.zeros((100, 100))
    np.add.at(table, (sources[:, 0], sources[:, 1]), 1)
    other = labels.numpy()[:, None] != labels.numpy()[None]
    expected = np.where(other, 1 / other.sum(1, keepdims=True), 0) * count / 100
    assert (table[~other] == 0).all()
    for axis in (0, 1):
        wanted = expected.sum(axis=axis)
        assert (np.abs(table.sum(axis=axis) - wanted) < 5 * wanted**0.5).all()
    assert (np.abs(table - expected)[other] < 7 * expected[other] ** 0.5).all()


@pytest.mark.parametrize(
    ("one", "other", "both"), [(255, 255, 255), (200, 100, 255), (100, 90, 190)]
)
def test_the_sum_is_clipped(one, other, both):
    images = torch.full((2, 1, 28, 28), one, dtype=torch.uint8)
    images[1] = other
    pairs = compose(Dataset(images, torch.tensor([0, 1]), TEN), 50)
    assert pairs.images[:, :, 8:28, 8:28].unique().tolist() == [both]  # where both always lie
    assert set(pairs.images.unique().tolist()) == {0, one, other, both}


@pytest.mark.parametrize("count", [1, 2, 999, 1000, 1001, 4000, 4321])
def test_any_count(count):
    pairs = compose(sample("test"), count)
    assert pairs.images.shape == (count, 1, 36, 36)
    assert pairs.labels.shape == (count, 10)
    assert pairs.sources.shape == (count, 2)
    assert [part.dtype for part in (pairs.images, pairs.labels)] == [torch.uint8] * 2
    assert (pairs.pairs, pairs.classes) == (True, TEN)
    assert_labels_and_turns(pairs, sample("test").labels.numpy())


def test_four_of_each_digit_if_no_count_is_given():
    pairs = compose(sample("test"))
    assert pairs.sources[:, 0].bincount().tolist() == [4] * 1000


def test_a_seed_decides_everything():
    one, same, other = (compose(sample("test"), 500, seed) for seed in (3, 3, 4))
    assert one.fingerprint() == same.fingerprint() != other.fingerprint()
    assert torch.equal(one.sources, same.sources)
    assert not torch.equal(one.sources, other.sources)
    torch.manual_seed(5)  # a generator of its own, which leaves torch's alone
    before = torch.get_rng_state()
    compose(sample("test"), 5)
    assert torch.equal(before, torch.get_rng_state())


def wide():
    return Dataset(torch.zeros(2, 1, 28, 30, dtype=torch.uint8), torch.tensor([0, 1]), TEN)


def single():
    return Dataset(torch.zeros(2, 1, 28, 28, dtype=torch.uint8), torch.tensor([7, 7]), TEN)


@pytest.mark.parametrize(
    ("kind", "digits", "count", "told"),
    [
        (InputError, wide(), 1, "digits must have shape (1, 28, 28); got (1, 28, 30)."),
        (InputError, single(), 1, "digits must show at least two classes; got one."),
        (InputError, dots(), 0, "count must be at least 1; got 0."),
        (InputError, dots(), -4, "count must be at least 1; got -4."),
        (InputTypeError, dots(), 2.5, "count must be a whole number; got 2.5."),
        (InputTypeError, dots(), True, "count must be a whole number; got True."),
    ],
)
def test_what_compose_refuses(kind, digits, count, told):
    assert refused(kind, compose, digits, count) == f"compose: {told}"


# --- the sample in place of MNIST ---


@pytest.fixture
def small(monkeypatch):
    """MNIST is the sample's 4,000 and 1,000 digits."""
    for module in (multimnist, load):
        monkeypatch.setattr(module, "load_mnist", lambda split, *_: sample(split))


def digest(pairs):
    return hashlib.sha256(
        pairs.images.numpy().tobytes() + pairs.labels.numpy().tobytes()
    ).hexdigest()


@pytest.mark.parametrize("split", ["train", "test"])
def test_images_that_are_not_the_expected_ones_are_refused(small, monkeypatch, split):
    pairs = compose(sample(split))
    expected = multimnist.SHA256[split]
    assert refused(RunError, load_multimnist, split) == (
        f"multimnist: {len(pairs):,} images were made, but not the expected ones: SHA-256 "
        f"{digest(pairs)[:16]}..., expected {expected[:16]}.... This version of torch seems to "
        "draw other random numbers."
    )
    monkeypatch.setitem(multimnist.SHA256, split, digest(pairs))
    assert load_multimnist(split).fingerprint() == pairs.fingerprint()


@pytest.mark.parametrize("part", ["learnt", "checked", "test"])
def test_load_data_asserts_the_digest_of_each_part(small, monkeypatch, part):
    whole = load_data("multimnist", validation=1600)  # a tenth, but asked for: not asserted
    parts = {"learnt": whole.train, "checked": whole.validation, "test": whole.test}
    for name, pairs in parts.items():
        monkeypatch.setitem(multimnist.SHA256, name, digest(pairs) if name != part else "0" * 64)
    told = refused(RunError, load_data, "multimnist")
    assert told.startswith(
        f"multimnist: {len(parts[part]):,} images were made, but not the expected"
    )
    monkeypatch.setitem(multimnist.SHA256, part, digest(parts[part]))
    assert load_data("multimnist").train.fingerprint() == whole.train.fingerprint()


def test_counts_and_seeds_of_ones_own_are_not_held_to_a_digest(small):
    assert (
        load_multimnist("test", count=7).fingerprint() == compose(sample("test"), 7).fingerprint()
    )
    made = load_multimnist("train", seed=9)
    assert made.fingerprint() == compose(sample("train"), seed=9).fingerprint()


@pytest.mark.parametrize(
    ("count", "validation", "sizes"),
    [
        (100, None, (90, 10)),
        (2, None, (2, 0)),
        (2, 1, (1, 1)),
        (500, 0, (500, 0)),
        (20000, 4000, (16000, 4000)),
        (20000, 19999, (1, 19999)),
        (None, 40, (15960, 40)),
    ],
)
def test_train_and_validation_never_share_a_digit(small, count, validation, sizes):
    data = load_data("multimnist", train_count=count, validation=validation)
    assert (len(data.train), len(data.validation), len(data.test)) == (*sizes, 4000)
    train, held = (set(part.sources.flatten().tolist()) for part in (data.train, data.validation))
    assert not train & held
    for part in (data.train, data.validation):
        assert_shows_its_sources(part, sample("train"), range(min(3, len(part))))


@pytest.mark.parametrize("count", [1, 5, 4000])
def test_authors_pairs_in_any_count(small, count):
    assert load_multimnist("test", count=count, authors=True).images.shape == (count, 1, 36, 36)


@pytest.mark.parametrize("count", [0, -1, 4001, 2.5])
def test_authors_pairs_that_cannot_be(small, count):
    with pytest.raises(InputError, match="count must be"):
        load_multimnist("test", count=count, authors=True)


def test_unknown_split():
    told = refused(InputError, load_multimnist, "tests")
    assert told == (
        "load_multimnist: split must be one of train, test; got 'tests'. Did you mean 'test'?"
    )


# --- on MNIST itself ---

FOLDER = Path(os.environ.get("XNCAPS_DATA", "")) / "mnist"
needs_mnist = pytest.mark.skipif(
    "XNCAPS_DATA" not in os.environ or not (FOLDER / "train-images-idx3-ubyte.gz").is_file(),
    reason="XNCAPS_DATA names no folder with mnist/train-images-idx3-ubyte.gz",
)


@pytest.fixture(scope="module")
def mnist():
    """Train and test digits, read without the library."""
    parts = []
    for name, count in (("train", 60000), ("t10k", 10000)):
        images = gzip.decompress((FOLDER / f"{name}-images-idx3-ubyte.gz").read_bytes())[16:]
        labels = gzip.decompress((FOLDER / f"{name}-labels-idx1-ubyte.gz").read_bytes())[8:]
        images = torch.frombuffer(bytearray(images), dtype=torch.uint8).view(count, 1, 28, 28)
        parts.append(Dataset(images, torch.tensor(list(labels)), TEN))
    return parts


@needs_mnist
def test_no_digit_leaks_between_train_validation_and_test(mnist):
    train, test = mnist
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    data = load_data("multimnist")
    assert time.process_time() - start < 60  # seconds, on a slow machine too
    rise = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    pixels = 280_000 * 36 * 36
    assert rise * 1024 < 2.5 * pixels  # in floats it would be 4 times as many bytes

    learnt, held, judged = data.train, data.validation, data.test
    assert (len(learnt), len(held), len(judged)) == (235_000, 5_000, 40_000)
    shown = set(learnt.sources.flatten().tolist()), set(held.sources.flatten().tolist())
    assert not shown[0] & shown[1]
    assert shown[0] | shown[1] <= set(range(60000))
    # Test images are made of test digits, and no digit is in both of MNIST's splits.
    seen = {image.numpy().tobytes() for image in train.images}
    assert not any(image.numpy().tobytes() in seen for image in test.images)
    shifts = []
    for part, digits in ((learnt, train), (held, train), (judged, test)):
        assert (part.images.dtype, part.labels.dtype) == (torch.uint8, torch.uint8)
        assert_labels_and_turns(part, digits.labels.numpy())
        places = torch.linspace(0, len(part) - 1, 15).long().tolist()
        shifts += assert_shows_its_sources(part, digits, places)
    assert {n for shift in shifts for n in shift} == set(range(-4, 5))


@needs_mnist
def test_the_splits_have_four_images_of_each_digit(mnist):
    for name, digits in zip(("train", "test"), mnist, strict=True):
        pairs = load_multimnist(name)  # its digest is asserted
        assert pairs.sources[:, 0].bincount().tolist() == [4] * len(digits)
        assert_labels_and_turns(pairs, digits.labels.numpy())


@needs_mnist
def test_the_authors_pairing_leaks_and_is_named_so(mnist):
    joined = Dataset(
        *(torch.cat([getattr(d, n) for d in mnist]) for n in ("images", "labels")), TEN
    )
    data = load_data("multimnist-authors")
    assert data.name == "multimnist-authors"
    assert (len(data.train), len(data.validation), len(data.test)) == (235_000, 5_000, 40_000)
    parts = (data.train, data.validation, data.test)
    bases = torch.cat([part.sources[:, 0] for part in parts])
    assert bases.bincount().tolist() == [4] * 70000
    shown = np.zeros(70000, bool)
    shown[data.train.sources.numpy()] = True
    assert shown[data.test.sources.numpy()].any(axis=1).mean() > 0.99
    assert (data.train.sources >= 60000).any()
    assert (data.test.sources < 60000).any()
    for part in parts:
        assert_shows_its_sources(part, joined, range(4))


def test_the_authors_pairing_is_seeded():
    train, test = (sample(split).take(torch.arange(100)) for split in ("train", "test"))
    one, same, other = (compose_authors(train, test, seed) for seed in (1, 1, 2))
    for part in range(2):
        assert len(one[part]) == 400
        assert one[part].fingerprint() == same[part].fingerprint() != other[part].fingerprint()
