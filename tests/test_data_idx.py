"""IDX files: every array comes back, every damaged file is refused in one line."""

import gzip
import hashlib
import os
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from checks import refused
from xncaps.data import idx, load_data, load_idx, load_mnist, read_idx
from xncaps.errors import InputError, RunError

REPLACE = "Replace the file or move it away."
FORMS = {"plain": lambda content: content, "gz": lambda content: gzip.compress(content, mtime=0)}

HINT = "Replace the file or move it away."


def packed(values, kind=8):
    """An array as an IDX file."""
    array = np.asarray(values, np.uint8)
    head = struct.pack(f">HBB{array.ndim}I", 0, kind, array.ndim, *array.shape)
    return head + array.tobytes()


def outcome(call, *args):
    """What a call returns, or the line with which it is refused."""
    try:
        return call(*args), ""
    except RunError as error:
        return None, str(error)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a file"


def read(path, content):
    path.write_bytes(content)
    return read_idx(path)


TINY = np.arange(12, dtype=np.uint8).reshape(2, 3, 2) + 100
FILE = packed(TINY)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("shape", [(1,), (300,), (7, 5), (3, 4, 5), (2, 3, 4, 5), (0,), (3, 0, 2)])
def test_every_array_comes_back(path, shape, form):
    array = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    tensor = read(path, form(packed(array)))
    assert (tensor.dtype, tuple(tensor.shape)) == (torch.uint8, shape)
    assert tensor.tolist() == array.tolist()
    tensor += 1  # a tensor of its own, that can be written to


@pytest.mark.parametrize("length", range(len(FILE)))
def test_a_plain_file_cut_anywhere(path, length):
    if length < 4:
        problem = f"not an IDX file: it starts with {FILE[:length].hex(' ') or 'nothing'}. {HINT}"
    elif length < 16:
        problem = f"truncated: it ends inside its header. {HINT}"
    else:
        there = length - 16
        values = f"12 values of shape (2, 3, 2), {there} are there. {HINT}"
        problem = f"truncated: its header promises {values}"
    assert refused(RunError, read, path, FILE[:length]) == f"{path}: {problem}"


def test_a_packed_file_cut_anywhere(path):
    content = gzip.compress(FILE, mtime=0)
    for length in range(len(content)):
        told = refused(RunError, read, path, content[:length])
        if length < 2:
            start = content[:length].hex(" ") or "nothing"
            assert told == f"{path}: not an IDX file: it starts with {start}. {HINT}"
        else:
            assert told.startswith(f"{path}: cannot be read: ")
            assert told.endswith(f". {REPLACE}")
        assert path.read_bytes() == content[:length]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_every_bit_of_the_header_counts(path, form):
    for place in range(16):
        for bit in range(8):
            content = bytearray(FILE)
            content[place] ^= 1 << bit
            told = refused(RunError, read, path, form(bytes(content)))
            start = ("not an IDX file: ", "must hold bytes", "truncated: ", "longer than ")
            assert told.removeprefix(f"{path}: ").startswith(start)


def test_no_bit_of_a_packed_file_can_change_what_is_read(path):
    content = gzip.compress(FILE, mtime=0)
    for place in range(len(content)):
        for bit in range(8):
            changed = bytearray(content)
            changed[place] ^= 1 << bit
            tensor, told = outcome(read, path, changed)  # the time, for one, means nothing
            assert told.startswith(f"{path}: ") or tensor.tolist() == TINY.tolist()


def test_trailing_bytes(path):
    problem = f"{path}: longer than the 12 values of shape (2, 3, 2) it promises. {HINT}"
    whole = gzip.compress(FILE, mtime=0)
    assert refused(RunError, read, path, FILE + b"\0") == problem
    assert refused(RunError, read, path, gzip.compress(FILE + b"\0")) == problem
    assert refused(RunError, read, path, whole + gzip.compress(b"\0")) == problem
    assert refused(RunError, read, path, whole + b"more").startswith(f"{path}: cannot be read: ")
    assert read(path, whole + b"\0\0\0").tolist() == TINY.tolist()  # gzip's own padding


MUCH = 2**32 - 1


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("shape", [(MUCH,), (MUCH,) * 2, (MUCH,) * 4, (60000, 28, 28)])
def test_a_promise_allocates_nothing(path, shape, form):
    content = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape) + b"abc"
    path.write_bytes(form(content))
    tracemalloc.start()
    told = refused(RunError, read_idx, path)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    count = 1
    for size in shape:
        count *= size
    values = f"{count:,} values of shape {shape}"
    assert told == f"{path}: truncated: its header promises {values}, 3 are there. {HINT}"
    assert most < 1 << 26


@pytest.mark.parametrize("shape", [(0, MUCH, MUCH), (MUCH, MUCH, MUCH, 0)])
def test_a_promise_of_nothing_in_a_shape_that_cannot_be(path, shape):
    content = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape)
    assert refused(RunError, read, path, content).startswith(f"{path}: ")


@pytest.mark.parametrize("kind", [0x09, 0x0B, 0x0C, 0x0D, 0x0E, 0x00, 0xFF])
def test_other_types_than_bytes(path, kind):
    told = refused(RunError, read, path, packed(TINY, kind))
    assert told == f"{path}: must hold bytes (IDX type 0x08); got type {kind:#04x}."


@pytest.mark.parametrize(
    ("content", "start"),
    [
        (b"", "nothing"),
        (b"\x89PNG\r\n\x1a\n", "89 50 4e 47"),
        (b"<html>", "3c 68 74 6d"),
        (struct.pack(">HBB", 0, 8, 0), "00 00 08 00"),
        (struct.pack(">HBB5I", 0, 8, 5, 1, 1, 1, 1, 1) + b"a", "00 00 08 05"),
    ],
)
def test_other_files(path, content, start):
    assert (
        refused(RunError, read, path, content)
        == f"{path}: not an IDX file: it starts with {start}. {HINT}"
    )


def test_a_directory_a_missing_file_and_a_failing_disk(tmp_path):
    told = refused(RunError, read_idx, tmp_path)
    assert told == f"{tmp_path}: cannot be read: Is a directory. {REPLACE}"
    told = refused(RunError, read_idx, tmp_path / "gone")
    assert told == f"{tmp_path / 'gone'}: cannot be read: No such file or directory. {REPLACE}"
    if Path("/proc/self/mem").exists():  # its first byte cannot be read
        (tmp_path / "mem").symlink_to("/proc/self/mem")
        told = refused(RunError, read_idx, tmp_path / "mem")
        assert told == f"{tmp_path / 'mem'}: cannot be read: Input/output error. {REPLACE}"


# --- folders of one's own ---

IMAGES, LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"


def put(folder, form=FORMS["plain"], end="", **arrays):
    """Files named as MNIST's: put(folder, train=(images, labels), t10k=...)."""
    for part, both in arrays.items():
        for kind, array in zip((IMAGES, LABELS), both, strict=True):
            if array is not None:
                name = f"{part.replace('_', '-')}-{kind}{end}"
                (folder / name).write_bytes(form(packed(array)))


def some(count, height=4, width=4, start=0):
    return np.random.default_rng(start).integers(0, 256, (count, height, width), np.uint8)


@pytest.mark.parametrize("test", ["t10k", "test"])
@pytest.mark.parametrize(("form", "end"), [(FORMS["plain"], ""), (FORMS["gz"], ".gz")])
@pytest.mark.parametrize("prefix", ["", "emnist_letters_"])
def test_a_folder_of_its_own(tmp_path, test, form, end, prefix):
    train, other = some(52), some(26, start=1)
    letters = np.arange(26) % 26 + 1  # EMNIST's letters count from 1
    parts = {f"{prefix}train": (train, np.tile(letters, 2)), f"{prefix}{test}": (other, letters)}
    put(tmp_path, form, end, **parts)
    for data, images, copies in zip(load_idx(tmp_path), (train, other), (2, 1), strict=True):
        assert data.images.squeeze(1).tolist() == images.tolist()
        assert data.labels.tolist() == list(range(26)) * copies
        assert data.labels.dtype == torch.int64
        assert data.classes == tuple(str(n) for n in range(1, 27))
        assert data.shape == (1, 4, 4)


@pytest.mark.parametrize(("height", "width"), [(5, 2), (2, 5), (4, 3)])
def test_images_that_are_not_square_get_bands(tmp_path, height, width):
    """Bands in the mean of the border, the same that image files get."""
    images, side = some(4, height, width), max(height, width)
    put(tmp_path, train=(images, [0, 1, 0, 1]), test=(images[:2], [0, 1]))
    train, _ = load_idx(tmp_path)
    assert train.shape == (1, side, side)
    top, left = (side - height) // 2, (side - width) // 2
    for image, found in zip(images, train.images[:, 0].numpy(), strict=True):
        edge = [*image[0], *image[-1], *image[:, 0], *image[:, -1]]
        expected = np.full((side, side), round(np.mean(edge)))
        expected[top : top + height, left : left + width] = image
        assert found.tolist() == expected.tolist()


def test_labels_with_gaps_and_a_class_that_is_not_tested(tmp_path):
    put(tmp_path, train=(some(4), [7, 255, 7, 0]), test=(some(2), [255, 0]))
    train, test = load_idx(str(tmp_path))
    assert train.classes == test.classes == ("0", "7", "255")
    assert (train.labels.tolist(), test.labels.tolist()) == ([1, 2, 1, 0], [2, 0])


def test_without_test_files_a_share_of_each_class_is_split_off(tmp_path):
    images, labels = some(60), np.repeat([3, 5, 8], [30, 20, 10])
    put(tmp_path, train=(images, labels))
    train, test = load_idx(tmp_path)
    assert train.labels.bincount().tolist() == [24, 16, 8]
    assert test.labels.bincount().tolist() == [6, 4, 2]
    key = {image.tobytes(): int(label) for image, label in zip(images, labels, strict=True)}
    found = [
        (image.numpy().tobytes(), int(data.classes[label]))
        for data in (train, test)
        for image, label in zip(data.images, data.labels, strict=True)
    ]
    assert dict(found) == key
    assert len(found) == 60
    again, other = load_idx(tmp_path)[1], load_idx(tmp_path, seed=1)[1]
    assert again.fingerprint() == test.fingerprint() != other.fingerprint()
    assert len(load_idx(tmp_path, test_share=0.5)[1]) == 30


def test_no_part_of_a_very_small_set_is_empty(tmp_path):
    put(tmp_path, train=(some(2), [0, 1]))
    parts, told = outcome(load_idx, tmp_path)
    assert told.startswith(f"{tmp_path}: ") or all(len(part) for part in parts)


def test_the_unpacked_file_counts_if_both_are_there(tmp_path):
    put(tmp_path, FORMS["gz"], ".gz", train=(some(4), [0, 1, 0, 1]), t10k=(some(2), [0, 1]))
    put(tmp_path, train=(some(4, start=1), None))
    assert load_idx(tmp_path)[0].images.squeeze(1).tolist() == some(4, start=1).tolist()


GOOD = (some(2), [0, 1])
NEITHER = "holds no *train-images-idx3-ubyte or .gz file with its *train-labels-idx1-ubyte."
SHAPES = "images must have shape (n, height, width) and labels (n,) with n above 0; got"
NAMES = f"in train-{IMAGES} and {{}} in train-{LABELS}."
BAD = {
    "nothing": ({}, NEITHER),
    "test alone": ({"t10k": GOOD}, NEITHER),
    "no labels": ({"train": (GOOD[0], None)}, "the train labels file is missing."),
    "no images": ({"train": (None, GOOD[1])}, "the train images file is missing."),
    "no test labels": (
        {"train": GOOD, "test": (GOOD[0], None)},
        "the t10k labels file is missing.",
    ),
    "several": (
        {"a_train": GOOD, "b_train": GOOD},
        f"must hold one train images file; got a-train-{IMAGES}, b-train-{IMAGES}.",
    ),
    "t10k and test": (
        {"train": GOOD, "t10k": GOOD, "test": GOOD},
        f"must hold one t10k images file; got t10k-{IMAGES}, test-{IMAGES}.",
    ),
    "counts": (
        {"train": (some(3), [0, 1])},
        f"{SHAPES} (3, 4, 4) {NAMES.format('(2,)')}",
    ),
    "swapped": ({"train": ([0, 1], some(2))}, f"{SHAPES} (2,) {NAMES.format('(2, 4, 4)')}"),
    "flat": ({"train": (some(2)[0], [0, 1])}, f"{SHAPES} (4, 4) {NAMES.format('(2,)')}"),
    "empty": ({"train": (some(0), [])}, f"{SHAPES} (0, 4, 4) {NAMES.format('(0,)')}"),
    "no height": ({"train": (some(2, 0), [0, 1])}, f"{SHAPES} (2, 0, 4) {NAMES.format('(2,)')}"),
    "label of the test set": (
        {"train": GOOD, "test": (some(2), [1, 2])},
        "label 2 is in the test set only.",
    ),
    "two sizes": (
        {"train": GOOD, "test": (some(2, 3, 3), [0, 1])},
        "train and test images must have one size; got (4, 4) and (3, 3).",
    ),
}


@pytest.mark.parametrize(("arrays", "problem"), BAD.values(), ids=BAD.keys())
def test_a_folder_that_lacks_something(tmp_path, arrays, problem):
    put(tmp_path, **arrays)
    assert refused(RunError, load_idx, tmp_path) == f"{tmp_path}: {problem}"
    assert refused(RunError, load_data, f"idx:{tmp_path}") == f"{tmp_path}: {problem}"


def test_a_directory_in_place_of_a_file_does_not_count(tmp_path):
    (tmp_path / f"train-{IMAGES}").mkdir()
    assert refused(RunError, load_idx, tmp_path) == f"{tmp_path}: {NEITHER}"


@pytest.mark.parametrize("name", ["gone", "file", "n" * 300])
def test_not_a_folder(tmp_path, name):
    (tmp_path / "file").write_text("")
    told = refused(InputError, load_idx, tmp_path / name)
    assert told == f"idx: PATH must be a folder; got {str(tmp_path / name)!r}."


def test_a_damaged_file_in_a_folder_is_named(tmp_path):
    put(tmp_path, train=GOOD, test=GOOD)
    bad = tmp_path / f"test-{LABELS}"
    bad.write_bytes(bad.read_bytes()[:-1])
    values = f"2 values of shape (2,), 1 are there. {HINT}"
    assert (
        refused(RunError, load_idx, tmp_path) == f"{bad}: truncated: its header promises {values}"
    )


# --- MNIST ---


def real(name):
    folder = os.environ.get("XNCAPS_DATA")
    return None if folder is None else Path(folder) / "mnist" / name


needs_mnist = pytest.mark.skipif(
    real("") is None or not real("train-images-idx3-ubyte.gz").is_file(),
    reason="XNCAPS_DATA names no folder with mnist/train-images-idx3-ubyte.gz",
)


@needs_mnist
@pytest.mark.parametrize(
    ("split", "part", "count"), [("train", "train", 60000), ("test", "t10k", 10000)]
)
def test_the_genuine_mnist(split, part, count):
    data = load_mnist(split)
    images = gzip.decompress(real(f"{part}-{IMAGES}.gz").read_bytes())
    labels = gzip.decompress(real(f"{part}-{LABELS}.gz").read_bytes())
    assert (data.images.shape, data.images.dtype) == ((count, 1, 28, 28), torch.uint8)
    assert data.images.numpy().tobytes() == images[16:]
    assert data.labels.tolist() == list(labels[8:])
    assert data.classes == tuple("0123456789")


def test_unknown_split():
    assert refused(InputError, load_mnist, "valid") == (
        "load_mnist: split must be one of train, test; got 'valid'."
    )


def test_fashion_under_the_name_of_mnist(tmp_path):
    fashion = packed(some(5, 28, 28))
    path = tmp_path / f"train-{IMAGES}.gz"
    path.write_bytes(gzip.compress(fashion))
    assert refused(RunError, load_mnist, "train", tmp_path) == (
        f"{path}: not the published MNIST train-images-idx3-ubyte: its content has SHA-256 "
        f"{hashlib.sha256(fashion).hexdigest()[:16]}..., expected ba891046e6505d7a.... Replace the "
        "file or move it away, and it will be looked for elsewhere or downloaded."
    )
    assert gzip.decompress(path.read_bytes()) == fashion


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_no_damaged_file_passes_for_mnist(tmp_path, monkeypatch, form):
    for kind, content in (("images", packed(some(2, 28, 28))), ("labels", packed([4, 2]))):
        name = f"train-{kind}-idx{'3' if kind == 'images' else '1'}-ubyte.gz"
        sums = (name, "", hashlib.sha256(content).hexdigest())
        monkeypatch.setitem(idx.MNIST, ("train", kind), sums)
        (tmp_path / name).write_bytes(form(content))
    assert load_mnist("train", tmp_path).labels.tolist() == [4, 2]
    whole = (tmp_path / f"train-{LABELS}.gz").read_bytes()
    for length in range(len(whole)):
        (tmp_path / f"train-{LABELS}.gz").write_bytes(whole[:length])
        told = refused(RunError, load_mnist, "train", tmp_path)
        assert told.startswith(f"{tmp_path / f'train-{LABELS}.gz'}: ")
        assert REPLACE[:-1] in told
