"""MNIST, and any other data set in its file format (IDX)."""

import gzip
import math
import os
import struct
import zlib
from io import BytesIO
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from xncaps.data.dataset import Dataset, hold_out
from xncaps.data.files import Archive, Progress, check_content, find_or_fetch, search_folders
from xncaps.errors import MOST, InputError, RunError, check_choice, message
from xncaps.images import squares

SPLITS = ("train", "test")
HEADER = 4
MOST_AXES = 4

_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
# The published name, its md5, and the SHA-256 of what is in it.
MNIST = {
    ("train", "images"): (
        "train-images-idx3-ubyte.gz",
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    ),
    ("train", "labels"): (
        "train-labels-idx1-ubyte.gz",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    ),
    ("test", "images"): (
        "t10k-images-idx3-ubyte.gz",
        "9fb629c4189551a2d022fa330f9573f3",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    ),
    ("test", "labels"): (
        "t10k-labels-idx1-ubyte.gz",
        "ec29112dd5afa0611ce80d1b7f02629c",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
}
DIGITS = tuple("0123456789")
MNIST_BYTES = 16 + 60_000 * 28 * 28
"""Of the largest file."""


def load_mnist(
    split: str = "train",
    data_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Dataset:
    """The genuine MNIST of Y. LeCun, C. Cortes and C. J. C. Burges: 60,000 and 10,000 digits.

    Args:
        split: ``train`` or ``test``.
        data_dir: a folder to look in before ``$XNCAPS_DATA`` and the cache.
        progress: told how a download goes.
    """
    check_choice("load_mnist", "split", split, SPLITS)
    folders = search_folders(data_dir)
    parts = []
    for kind in ("images", "labels"):
        name, md5, sha256 = MNIST[split, kind]
        plain = name.removesuffix(".gz")
        places = [
            *(f"mnist/{name}", f"mnist/{plain}", f"MNIST/raw/{name}", f"MNIST/raw/{plain}"),
            *(name, plain),
        ]
        archive = Archive(name, md5, tuple(mirror + name for mirror in _MIRRORS))
        path = find_or_fetch(archive, folders, places, progress)
        content = _content(path)
        check_content(path, f"MNIST {plain}", content, sha256)
        parts.append(_parse(path, BytesIO(content)))
    images, labels = parts
    return Dataset(images.unsqueeze(1), labels.long(), DIGITS)


def read_idx(path: Path) -> Tensor:
    """The array in an IDX file of bytes, gzip'd or not.

    Args:
        path: of the file.

    Shape:
        as the file says; uint8.
    """
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as file:
            return _parse(path, file)
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from None


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as file:
            return file.read(MNIST_BYTES + 1)  # a file that unpacks to more is not MNIST
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> RunError:
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return RunError(f"{path}: cannot be read: {reason}. Replace the file or move it away.")


def _parse(path: Path, file: IO[bytes] | gzip.GzipFile) -> Tensor:
    """Read no more than the header promises, and refuse less or more."""
    hint = "Replace the file or move it away."
    head = file.read(HEADER)
    if len(head) < HEADER or head[:2] != b"\0\0" or not 1 <= head[3] <= MOST_AXES:
        raise RunError(
            f"{path}: not an IDX file: it starts with {head.hex(' ') or 'nothing'}. {hint}"
        )
    if head[2] != 8:
        raise RunError(f"{path}: must hold bytes (IDX type 0x08); got type {head[2]:#04x}.")
    sizes = file.read(4 * head[3])
    if len(sizes) < 4 * head[3]:
        raise RunError(f"{path}: truncated: it ends inside its header. {hint}")
    shape = struct.unpack(f">{head[3]}I", sizes)
    count = math.prod(shape)
    chunks, missing = [], count
    while missing and (chunk := file.read(min(missing, 1 << 24))):
        chunks.append(chunk)
        missing -= len(chunk)
    if missing:
        raise RunError(
            f"{path}: truncated: its header promises {count:,} values of shape {shape}, "
            f"{count - missing:,} are there. {hint}"
        )
    if file.read(1):
        raise RunError(
            f"{path}: longer than the {count:,} values of shape {shape} it promises. {hint}"
        )
    if not count and math.prod(max(size, 1) for size in shape) > MOST:
        raise RunError(f"{path}: not an IDX file: it promises no values, in shape {shape}.")
    content = bytearray(b"".join(chunks))  # writable, as tensors are
    return torch.from_numpy(np.frombuffer(content, np.uint8).reshape(shape))


def load_idx(folder: str | Path, test_share: float = 0.2, seed: int = 0) -> tuple[Dataset, Dataset]:
    """The train and test parts of a folder of IDX files named as MNIST names them.

    The names end in ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte``, and ``t10k-`` or
    ``test-`` likewise, with or without ``.gz``. Without test files, a share of each class is split
    off. Images that are not square get bands that make them so.

    Args:
        folder: the folder.
        test_share: what is split off when there are no test files.
        seed: of that split.
    """
    folder = Path(folder)
    if not os.path.isdir(folder):
        raise InputError(message("idx", "PATH", "be a folder", repr(str(folder))))
    train = _idx_pair(folder, ["train"])
    if train is None:
        raise RunError(
            f"{folder}: holds no *train-images-idx3-ubyte or .gz file with its "
            "*train-labels-idx1-ubyte."
        )
    test = _idx_pair(folder, ["t10k", "test"])
    values = torch.unique(train[1])
    classes = tuple(str(value) for value in values.tolist())
    if test is None:
        whole = Dataset(train[0], torch.searchsorted(values, train[1]), classes)
        counts = whole.labels.bincount()
        if counts.min() < 2:
            rare = classes[int(counts.argmin())]
            raise RunError(f"{folder}: label {rare} has 1 image; without test files it needs 2.")
        count = max(round(len(whole) * test_share), len(classes))
        rest, held = hold_out(whole.labels, min(count, len(whole) - len(classes)), seed)
        return whole.take(rest), whole.take(held)
    strange = test[1][~torch.isin(test[1], values)]
    if len(strange):
        raise RunError(f"{folder}: label {int(strange[0])} is in the test set only.")
    if test[0].shape[1:] != train[0].shape[1:]:
        sizes = f"{tuple(train[0].shape[2:])} and {tuple(test[0].shape[2:])}"
        raise RunError(f"{folder}: train and test images must have one size; got {sizes}.")
    both = [Dataset(x, torch.searchsorted(values, y), classes) for x, y in (train, test)]
    return both[0], both[1]


def _idx_pair(folder: Path, prefixes: list[str]) -> tuple[Tensor, Tensor] | None:
    """Images ``(n, 1, height, width)`` and labels ``(n,)`` of one part, if it is there."""
    paths = []
    for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"):
        found = [
            path
            for prefix in prefixes
            for end in ("", ".gz")
            for path in sorted(folder.glob(f"*{prefix}-{kind}{end}"))
            if path.is_file()
        ]
        paths.append(found)
    if not paths[0] and not paths[1]:
        return None
    for found, kind in zip(paths, ("images", "labels"), strict=True):
        if not found:
            raise RunError(f"{folder}: the {prefixes[0]} {kind} file is missing.")
        if len({path.name.removesuffix(".gz") for path in found}) > 1:
            names = ", ".join(path.name for path in found)
            raise RunError(f"{folder}: must hold one {prefixes[0]} {kind} file; got {names}.")
    images, labels = read_idx(paths[0][0]), read_idx(paths[1][0])
    if images.dim() != 3 or labels.dim() != 1 or len(images) != len(labels) or not images.numel():
        raise RunError(
            f"{folder}: images must have shape (n, height, width) and labels (n,) with n above 0; "
            f"got {tuple(images.shape)} in {paths[0][0].name} and {tuple(labels.shape)} in "
            f"{paths[1][0].name}."
        )
    return squares(images.unsqueeze(1)), labels.long()
