"""CIFAR-10, from its binary version: no pickle is ever opened."""

import gzip
import os
import tarfile
import zlib
from pathlib import Path

import numpy as np
import torch

from xncaps.data.dataset import Dataset
from xncaps.data.files import Archive, Progress, check_content, find, find_or_fetch, search_folders
from xncaps.errors import RunError, check_choice

FOLDER = "cifar-10-batches-bin"
ARCHIVE = Archive(
    "cifar-10-binary.tar.gz",
    "c32a1d4ab5d03f1284b67883e8d87530",
    ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
)
SHA256 = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
FILES = {"train": list(SHA256)[:5], "test": list(SHA256)[5:]}
CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
SIDE = 32
RECORD = 1 + 3 * SIDE * SIDE  # a label, then the red, green and blue planes


def load_cifar10(
    split: str = "train",
    data_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Dataset:
    """The CIFAR-10 of A. Krizhevsky: 50,000 and 10,000 colour images of 32x32.

    The ``.bin`` files are taken from a folder or straight from the published archive.

    Args:
        split: ``train`` or ``test``.
        data_dir: a folder to look in before ``$XNCAPS_DATA`` and the cache.
        progress: told how a download goes.
    """
    check_choice("load_cifar10", "split", split, FILES)
    batches = _read(FILES[split], search_folders(data_dir), progress)
    records = np.concatenate([np.frombuffer(batch, np.uint8) for batch in batches])
    records = records.reshape(-1, RECORD)
    images = torch.from_numpy(records[:, 1:].reshape(-1, 3, SIDE, SIDE).copy())
    return Dataset(images, torch.from_numpy(records[:, 0].astype(np.int64)), CLASSES)


def _read(names: list[str], folders: list[Path], progress: Progress | None) -> list[bytes]:
    """The contents of these files, each the published one."""
    contents = []
    for name in names:
        places = [f"{FOLDER}/{name}", f"cifar10/{FOLDER}/{name}", f"cifar10/{name}", name]
        path = find(folders, places)
        if path is None:
            places = [f"cifar10/{ARCHIVE.name}", ARCHIVE.name]
            return _unpack(find_or_fetch(ARCHIVE, folders, places, progress), names)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise _unreadable(path, error) from None
        check_content(path, f"CIFAR-10 {name}", content, SHA256[name])
        contents.append(content)
    return contents


def _unpack(path: Path, names: list[str]) -> list[bytes]:
    """Files of the archive, read into memory in one pass: nothing is unpacked onto the disk."""
    contents = {}
    try:
        with gzip.open(path) as packed, tarfile.open(fileobj=packed, mode="r|") as archive:
            for member in archive:
                name = member.name.removeprefix(f"{FOLDER}/")
                file = archive.extractfile(member) if name in names else None
                if file is not None:
                    contents[name] = file.read(10_000 * RECORD + 1)
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise _unreadable(path, error) from None
    for name in names:
        if name not in contents:
            raise RunError(f"{path}: not the published archive: {FOLDER}/{name} is not in it.")
        check_content(path, f"CIFAR-10 {name}", contents[name], SHA256[name])
    return [contents[name] for name in names]


def _unreadable(path: Path, error: Exception) -> RunError:
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return RunError(f"{path}: cannot be read: {reason}. Replace the file or move it away.")
