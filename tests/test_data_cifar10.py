"""CIFAR-10's binary version: from a folder, from the archive, and never a damaged byte of it."""

import functools
import hashlib
import io
import os
import pickle
import tarfile
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from checks import put, refused
from xncaps.data import cifar10, load_cifar10, load_data
from xncaps.errors import InputError, RunError

FOLDER, ARCHIVE = "cifar-10-batches-bin", "cifar-10-binary.tar.gz"
NAMES = [*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]
CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
COUNTS = dict(zip(NAMES, (3, 2, 1, 4, 2, 3), strict=True))


def batch(count, seed):
    """Records of a label and 3072 bytes."""
    records = np.random.default_rng(seed).integers(0, 256, (count, 3073), np.uint8)
    records[:, 0] %= 10
    return records.tobytes()


FILES = {name: batch(count, seed) for seed, (name, count) in enumerate(COUNTS.items())}


def tar(members, mode="w:gz"):
    """An archive of these names and contents; None is a directory."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            if content is None:
                member.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
            else:
                member.size = len(content)
            body = io.BytesIO(content) if isinstance(content, bytes) else None
            archive.addfile(member, body)
    return file.getvalue()


WHOLE = {FOLDER: None, f"{FOLDER}/batches.meta.txt": b"airplane\n", f"{FOLDER}/readme.html": b"<>"}
WHOLE |= {f"{FOLDER}/{name}": content for name, content in FILES.items()}
PUBLISHED = tar(WHOLE)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A small set that counts as CIFAR-10, an empty cache, and no way out."""
    for name, content in FILES.items():
        monkeypatch.setitem(cifar10.SHA256, name, hashlib.sha256(content).hexdigest())
    at(monkeypatch, "http://127.0.0.1:1/")
    monkeypatch.delenv("XNCAPS_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    (tmp_path / "own").mkdir()
    return tmp_path


def at(monkeypatch, *addresses):
    md5 = hashlib.md5(PUBLISHED).hexdigest()
    urls = tuple(address + ARCHIVE for address in addresses)
    monkeypatch.setattr(cifar10, "ARCHIVE", cifar10.Archive(ARCHIVE, md5, urls))


def assert_is_the_small_set(split, data):
    content = b"".join(FILES[name] for name in (NAMES[:5] if split == "train" else NAMES[5:]))
    assert len(data) == len(content) // 3073
    assert (data.images.dtype, data.labels.dtype) == (torch.uint8, torch.int64)
    assert data.classes == CLASSES
    images = data.images.tolist()
    for number in range(len(data)):
        record = content[number * 3073 : (number + 1) * 3073]
        assert data.labels[number] == record[0]
        for channel in range(3):
            for row in range(32):
                start = 1 + channel * 1024 + row * 32
                assert images[number][channel][row] == list(record[start : start + 32])


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("place", [FOLDER, f"cifar10/{FOLDER}", "cifar10", "."])
@pytest.mark.parametrize("where", ["own", "environment", "cache/xncaps"])
def test_files_in_every_place(home, monkeypatch, split, place, where):
    monkeypatch.setenv("XNCAPS_DATA", str(home / "environment"))
    put(home / where / place, FILES)
    assert_is_the_small_set(split, load_cifar10(split, home / "own"))


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("place", ["cifar10", "."])
def test_the_archive_is_read_where_it_lies(home, split, place):
    put(home / "own" / place, {ARCHIVE: PUBLISHED})
    assert_is_the_small_set(split, load_cifar10(split, home / "own"))
    files = [path for path in home.rglob("*") if path.is_file()]
    assert files == [home / "own" / place / ARCHIVE]  # nothing is unpacked


def test_the_first_folder_counts_and_files_come_before_the_archive(home, monkeypatch):
    monkeypatch.setenv("XNCAPS_DATA", str(home / "environment"))
    put(home / "own", FILES | {ARCHIVE: b"bad"})
    put(home / "environment", dict.fromkeys(NAMES, b"bad"))
    assert_is_the_small_set("train", load_cifar10("train", home / "own"))


def test_the_archive_fills_in_for_missing_files(home):
    put(home / "own", {name: FILES[name] for name in NAMES[:3]} | {ARCHIVE: PUBLISHED})
    assert_is_the_small_set("train", load_cifar10("train", home / "own"))


def test_directories_in_place_of_files_are_passed_by(home):
    for name in (*NAMES, ARCHIVE):
        (home / "own" / name).mkdir()
    put(home / "cache/xncaps/cifar10", {ARCHIVE: PUBLISHED})
    assert_is_the_small_set("test", load_cifar10("test", home / "own"))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        FILES["data_batch_2.bin"][:-1],
        FILES["data_batch_2.bin"] + b"\0",
        FILES["data_batch_1.bin"],
        bytes([FILES["data_batch_2.bin"][0] ^ 1]) + FILES["data_batch_2.bin"][1:],
    ],
    ids=["empty", "cut", "longer", "another's", "one bit"],
)
def test_wrong_files_and_wrong_files_in_the_archive(home, content):
    told = (
        "not the published CIFAR-10 data_batch_2.bin: its content has SHA-256 "
        f"{hashlib.sha256(content).hexdigest()[:16]}..., expected "
        f"{hashlib.sha256(FILES['data_batch_2.bin']).hexdigest()[:16]}.... Replace the file or "
        "move it away, and it will be looked for elsewhere or downloaded."
    )
    put(home / "own", FILES | {"data_batch_2.bin": content, ARCHIVE: PUBLISHED})
    path = home / "own/data_batch_2.bin"
    assert refused(RunError, load_cifar10, "train", home / "own") == f"{path}: {told}"
    assert path.read_bytes() == content
    other = home / "other" / ARCHIVE
    put(home / "other", {ARCHIVE: tar(WHOLE | {f"{FOLDER}/data_batch_2.bin": content})})
    assert refused(RunError, load_cifar10, "train", home / "other") == f"{other}: {told}"
    assert_is_the_small_set("test", load_cifar10("test", home / "other"))


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs Linux' /proc/self/mem")
@pytest.mark.parametrize("name", ["data_batch_1.bin", ARCHIVE])
def test_a_file_the_disk_does_not_give(home, name):
    (home / "own" / name).symlink_to("/proc/self/mem")  # its first byte cannot be read
    told = refused(RunError, load_cifar10, "train", home / "own")
    assert told.startswith(f"{home / 'own' / name}: cannot be read: ")
    assert "Input/output error" in told


class Trap:
    def __reduce__(self):
        return pytest.fail, ("a pickle was opened",)


PICKLED = {f"cifar-10-batches-py/data_batch_{n}": pickle.dumps(Trap()) for n in range(1, 6)}
LACKING = "not the published archive: cifar-10-batches-bin/data_batch_1.bin is not in it."
ARCHIVES = {
    "empty file": (b"", "cannot be read: "),
    "text": (b"<html>not found</html>" * 50, "cannot be read: "),
    "not packed": (tar(WHOLE, "w"), "cannot be read: "),
    "empty archive": (tar({}), LACKING),
    "pickles": (tar(PICKLED), LACKING),
    "a directory": (tar(WHOLE | {f"{FOLDER}/data_batch_1.bin": None}), LACKING),
    "a link": (tar(WHOLE | {f"{FOLDER}/data_batch_1.bin": "/etc/passwd"}), "cannot be read: "),
    "other folder": (tar({f"x/{name}": content for name, content in FILES.items()}), LACKING),
    "outside": (tar({f"../{name}": content for name, content in FILES.items()}), LACKING),
}


@pytest.mark.parametrize(("content", "problem"), ARCHIVES.values(), ids=ARCHIVES.keys())
def test_archives_that_are_not_the_one(home, content, problem):
    put(home / "own", {ARCHIVE: content})
    told = refused(RunError, load_cifar10, "train", home / "own")
    assert told.startswith(f"{home / 'own' / ARCHIVE}: {problem}")
    assert (home / "own" / ARCHIVE).read_bytes() == content
    assert [path.name for path in home.rglob("*") if path.is_file()] == [ARCHIVE]


def test_an_archive_cut_anywhere_or_changed_anywhere(home):
    path = home / "own" / ARCHIVE
    places = np.linspace(0, len(PUBLISHED) - 1, 60).astype(int).tolist()
    for place in [*range(0, 40), *places]:
        changed = bytearray(PUBLISHED)
        changed[place] ^= 0x55
        for content in (PUBLISHED[:place], bytes(changed)):
            path.write_bytes(content)
            try:
                data = load_cifar10("train", home / "own")
            except RunError as error:
                line = str(error)
            else:
                line = f"{path}: "
                assert hashlib.sha256(data.images.numpy().tobytes()).hexdigest() == TRAIN
            assert line.startswith(f"{path}: ")
            assert "\n" not in line


TRAIN = hashlib.sha256(
    b"".join(
        FILES[name][start + 1 : start + 3073]
        for name in NAMES[:5]
        for start in range(0, len(FILES[name]), 3073)
    )
).hexdigest()


def test_nothing_anywhere(home):
    put(home / "own", {name: FILES[name] for name in NAMES[:4]})
    assert refused(RunError, load_cifar10, "train", home / "own") == (
        f"cifar-10-binary.tar.gz: not found in {home / 'own'}, {home / 'cache/xncaps'}, and not "
        "downloaded (127.0.0.1:1: Connection refused). Put the file into one of these folders, or "
        "name its folder with --data-dir; a download goes on where it stopped."
    )


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture
def server(home):
    """A server that gives what is in home/site."""
    handler = functools.partial(Quiet, directory=home / "site")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


def test_the_archive_is_downloaded_once_into_the_cache(home, server, monkeypatch):
    put(home / "site", {ARCHIVE: PUBLISHED})
    at(monkeypatch, server)
    told = []
    assert_is_the_small_set("train", load_cifar10("train", progress=lambda *t: told.append(t)))
    assert told[-1] == (ARCHIVE, len(PUBLISHED), len(PUBLISHED))
    assert (home / "cache/xncaps/cifar10" / ARCHIVE).read_bytes() == PUBLISHED
    at(monkeypatch, "http://127.0.0.1:1/")
    assert_is_the_small_set("test", load_cifar10("test"))


def test_a_wrong_download_is_never_used(home, server, monkeypatch):
    put(home / "site", {ARCHIVE: tar(WHOLE, "w")})
    at(monkeypatch, server)
    told = refused(RunError, load_cifar10, "train")
    assert f"kept as {home / 'cache/xncaps/cifar10' / ARCHIVE}.corrupt)" in told
    assert not (home / "cache/xncaps/cifar10" / ARCHIVE).exists()


def test_load_data_splits_by_classes(home):
    put(home / "own", FILES)
    data = load_data("cifar10", data_dir=home / "own", validation=2)
    assert (len(data.train), len(data.validation), len(data.test)) == (10, 2, 3)
    assert data.train.shape == (3, 32, 32)


def test_unknown_split():
    told = refused(InputError, load_cifar10, "val")
    assert told == "load_cifar10: split must be one of train, test; got 'val'."


BATCHES = Path(os.environ.get("XNCAPS_DATA", "")) / FOLDER


@pytest.mark.skipif(
    "XNCAPS_DATA" not in os.environ or not (BATCHES / "data_batch_1.bin").is_file(),
    reason=f"XNCAPS_DATA names no folder with {FOLDER}/data_batch_1.bin",
)
@pytest.mark.parametrize(("split", "names"), [("train", NAMES[:5]), ("test", NAMES[5:])])
def test_the_genuine_cifar10(split, names):
    data = load_cifar10(split)
    records = np.concatenate([np.fromfile(BATCHES / name, np.uint8) for name in names])
    records = records.reshape(-1, 3073)
    assert data.images.shape == (len(names) * 10000, 3, 32, 32)
    assert (data.images.flatten(1).numpy() == records[:, 1:]).all()
    assert (data.labels.numpy() == records[:, 0]).all()
    assert data.labels.bincount().tolist() == [len(names) * 1000] * 10
    assert (BATCHES / "batches.meta.txt").read_text().split() == list(CLASSES)
