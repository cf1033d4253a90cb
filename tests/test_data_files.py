"""Where files are looked for, and downloads from a server of the test's own on 127.0.0.1."""

import gzip
import hashlib
import socket
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from checks import refused
from xncaps.data import files, idx, load_mnist
from xncaps.data.files import Archive, fetch, search_folders
from xncaps.errors import InputError, RunError

CONTENT = bytes(range(256)) * 20
MD5 = hashlib.md5(CONTENT).hexdigest()
HINT = (
    "Put the file into one of these folders, or name its folder with --data-dir; a download goes "
    "on where it stopped."
)


class Server(ThreadingHTTPServer):
    """Each path has a function that answers."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.server_address[1]}"
        self.pages, self.asked = {}, []

    def url(self, path, page):
        self.pages[path] = page
        return f"http://{self.host}{path}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append((self.path, self.headers["Range"]))
        self.server.pages[self.path](self)

    def log_message(self, *args):
        pass

    def head(self, code, **headers):
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()


def whole(content=CONTENT, stop=None):
    """A file, or the part asked for; sent up to byte ``stop``, whatever the header promised."""

    def page(handler):
        wanted = handler.headers["Range"]
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        if wanted and start >= len(content):
            return handler.head(416)
        handler.head(206 if wanted else 200, Content_Length=str(len(content) - start))
        return handler.wfile.write(content[start:stop])

    return page


def without_ranges(content, length=True):
    def page(handler):
        handler.head(200, **({"Content_Length": str(len(content))} if length else {}))
        handler.wfile.write(content)

    return page


def status(code):
    return lambda handler: handler.head(code, Content_Length="0")


def raw(reply):
    return lambda handler: handler.wfile.write(reply)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def nowhere(monkeypatch):
    """An address where nobody answers."""
    monkeypatch.setenv("no_proxy", "*")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def start_download(tmp_path, *urls, part=None, progress=None):
    path = tmp_path / "cache/set/a.bin"
    if part is not None:
        path.parent.mkdir(parents=True)
        path.with_name("a.bin.part").write_bytes(part)
    looked = [tmp_path / "own", tmp_path / "cache"]
    return fetch(Archive("a.bin", MD5, urls), path, looked, progress)


def failed(tmp_path, *problems):
    looked = f"{tmp_path / 'own'}, {tmp_path / 'cache'}"
    return f"a.bin: not found in {looked}, and not downloaded ({'; '.join(problems)}). {HINT}"


def left(tmp_path):
    """What lies where downloads go: name and content."""
    return {path.name: path.read_bytes() for path in (tmp_path / "cache/set").iterdir()}


def test_a_download_is_checked_and_told_of(tmp_path, server, monkeypatch):
    monkeypatch.setattr(files, "CHUNK", 1000)
    told = []
    path = start_download(tmp_path, server.url("/a", whole()), progress=lambda *t: told.append(t))
    assert path == tmp_path / "cache/set/a.bin"
    assert left(tmp_path) == {"a.bin": CONTENT}
    assert told == [("a.bin", n, 5120) for n in (1000, 2000, 3000, 4000, 5000, 5120)]
    assert server.asked == [("/a", None)]


@pytest.mark.parametrize("there", [0, 1, 2560, 5119, 5120])
def test_a_download_goes_on_where_it_stopped(tmp_path, server, there):
    told = []
    url = server.url("/a", whole())
    start_download(tmp_path, url, part=CONTENT[:there], progress=lambda *t: told.append(t))
    assert left(tmp_path) == {"a.bin": CONTENT}
    assert server.asked == [("/a", f"bytes={there}-" if there else None)]
    assert told == [("a.bin", 5120, 5120)][: 5120 - there]


@pytest.mark.parametrize("length", [True, False])
def test_a_server_without_ranges_starts_anew(tmp_path, server, length):
    told = []
    url = server.url("/a", without_ranges(CONTENT, length))
    start_download(tmp_path, url, part=b"something", progress=lambda *t: told.append(t))
    assert left(tmp_path) == {"a.bin": CONTENT}
    assert told[-1] == ("a.bin", 5120, 5120 if length else None)


def test_a_lost_connection_keeps_the_part_and_asks_for_the_rest_only(tmp_path, server):
    url = server.url("/a", whole(stop=2000))
    problem = f"{server.host}: the connection ended after 2,000 of 5,120 bytes"
    assert refused(RunError, start_download, tmp_path, url) == failed(tmp_path, problem)
    assert left(tmp_path) == {"a.bin.part": CONTENT[:2000]}
    server.pages["/a"] = whole()
    start_download(tmp_path, url)
    assert left(tmp_path) == {"a.bin": CONTENT}
    assert server.asked == [("/a", None), ("/a", "bytes=2000-")]


def test_the_mirror_gives_what_the_first_address_left_out(tmp_path, server):
    urls = server.url("/a", whole(stop=2000)), server.url("/b", whole())
    start_download(tmp_path, *urls)
    assert left(tmp_path) == {"a.bin": CONTENT}
    assert server.asked == [("/a", None), ("/b", "bytes=2000-")]


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n400\r\nabc"
FAILURES = {
    "404": (status(404), "HTTP 404"),
    "500": (status(500), "HTTP 500"),
    "416 for the whole file": (status(416), "HTTP 416"),
    "no HTTP": (raw(b"welcome\r\n"), "welcome"),
    "no reply": (raw(b""), "Remote end closed connection without response"),
    "cut": (whole(stop=9), "the connection ended after 9 of 5,120 bytes"),
    "cut chunk": (raw(CHUNKED), "IncompleteRead("),
    "endless redirect": (lambda handler: handler.head(302, Location=handler.path), "HTTP 302"),
}


@pytest.mark.parametrize(("page", "reason"), FAILURES.values(), ids=FAILURES.keys())
def test_the_mirror_is_asked_after_any_failure(tmp_path, server, page, reason):
    start_download(tmp_path, server.url("/a", page), server.url("/b", whole()))
    assert left(tmp_path)["a.bin"] == CONTENT
    assert server.asked[-1][0] == "/b"


@pytest.mark.parametrize(("page", "reason"), FAILURES.values(), ids=FAILURES.keys())
def test_every_failure_is_one_line(tmp_path, server, page, reason):
    told = refused(RunError, start_download, tmp_path, server.url("/a", page))
    assert told.startswith(failed(tmp_path, f"{server.host}: {reason}").split("). ")[0])
    assert told.endswith(f"). {HINT}")
    assert "a.bin" not in left(tmp_path)


def test_offline(tmp_path, nowhere):
    urls = f"http://{nowhere}/a", f"http://{nowhere}/b"
    problem = f"{nowhere}: Connection refused"
    assert refused(RunError, start_download, tmp_path, *urls) == failed(tmp_path, problem, problem)
    assert left(tmp_path) == {}


def test_a_server_that_falls_silent(tmp_path, server, monkeypatch):
    monkeypatch.setattr(files, "TIMEOUT", 0.1)
    over = threading.Event()
    url = server.url("/a", lambda handler: over.wait(5))
    told = refused(RunError, start_download, tmp_path, url)
    over.set()
    assert told == failed(tmp_path, f"{server.host}: timed out")


def test_a_wrong_file_is_kept_aside_and_never_used(tmp_path, server):
    url = server.url("/a", whole(b"<html>log in first</html>"))
    wrong = hashlib.md5(b"<html>log in first</html>").hexdigest()
    aside = tmp_path / "cache/set/a.bin.corrupt"
    problem = f"{server.host}: md5 {wrong}, expected {MD5}, kept as {aside}"
    assert refused(RunError, start_download, tmp_path, url) == failed(tmp_path, problem)
    assert left(tmp_path) == {"a.bin.corrupt": b"<html>log in first</html>"}


def test_the_mirror_is_asked_after_a_wrong_file_from_the_start(tmp_path, server):
    start_download(tmp_path, server.url("/a", whole(b"wrong")), server.url("/b", whole()))
    assert left(tmp_path) == {"a.bin": CONTENT, "a.bin.corrupt": b"wrong"}
    assert server.asked == [("/a", None), ("/b", None)]


@pytest.mark.parametrize("part", [b"wrong", CONTENT + b"more"], ids=["wrong start", "too long"])
def test_a_wrong_part_is_not_used_and_the_next_download_is_whole(tmp_path, server, part):
    url = server.url("/a", whole())
    told = refused(RunError, start_download, tmp_path, url, part=part)
    assert f"expected {MD5}, kept as {tmp_path / 'cache/set/a.bin.corrupt'})" in told
    assert left(tmp_path) == {"a.bin.corrupt": part + CONTENT[len(part) :]}
    start_download(tmp_path, url)
    assert left(tmp_path)["a.bin"] == CONTENT


def test_two_wrong_files_are_both_kept(tmp_path, server):
    urls = server.url("/a", whole(b"wrong")), server.url("/b", whole(b"wrong too"))
    refused(RunError, start_download, tmp_path, *urls)
    assert sorted(left(tmp_path).values()) == [b"wrong", b"wrong too"]


@pytest.mark.parametrize("taken", ["cache", "cache/set"])
def test_a_file_in_place_of_the_cache_folder(tmp_path, server, taken):
    (tmp_path / taken).parent.mkdir(exist_ok=True)
    (tmp_path / taken).write_text("a file")
    told = refused(RunError, start_download, tmp_path, server.url("/a", whole()))
    assert told.startswith(f"a.bin: not found in {tmp_path / 'own'}, {tmp_path / 'cache'}, and not")
    assert f"({tmp_path}/cache" in told
    assert server.asked == []
    assert (tmp_path / taken).read_text() == "a file"


@pytest.mark.parametrize("name", ["a.bin", "a.bin.part"])
def test_a_directory_in_place_of_the_file(tmp_path, server, name):
    (tmp_path / "cache/set" / name).mkdir(parents=True)
    problem = f"{tmp_path / 'cache/set/a.bin.part'}: Is a directory"
    told = refused(RunError, start_download, tmp_path, server.url("/a", whole()))
    assert told == failed(tmp_path, problem)


def packed(array):
    """An array as an IDX file."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


DIGITS = np.arange(3 * 28 * 28, dtype=np.uint8).reshape(3, 28, 28)
PLAIN = {
    "train-images-idx3-ubyte": packed(DIGITS),
    "train-labels-idx1-ubyte": packed(np.array([3, 1, 9], np.uint8)),
}
PACKED = {f"{name}.gz": gzip.compress(content, mtime=0) for name, content in PLAIN.items()}


@pytest.fixture
def home(tmp_path, monkeypatch, nowhere):
    """Three search folders, and a small set that counts as MNIST."""
    for kind, (name, content) in zip(("images", "labels"), PLAIN.items(), strict=True):
        md5 = hashlib.md5(PACKED[f"{name}.gz"]).hexdigest()
        sums = (f"{name}.gz", md5, hashlib.sha256(content).hexdigest())
        monkeypatch.setitem(idx.MNIST, ("train", kind), sums)
    monkeypatch.setattr(idx, "_MIRRORS", (f"http://{nowhere}/",))
    monkeypatch.setenv("XNCAPS_DATA", str(tmp_path / "environment"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    for name in FOLDERS:
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


FOLDERS = ("own", "environment", "caches/xncaps")


def put(folder, contents, change=b""):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content + change)


def assert_is_the_small_set(data):
    assert data.images.squeeze(1).numpy().tolist() == DIGITS.tolist()
    assert data.labels.tolist() == [3, 1, 9]


def test_the_search_folders_in_their_order(tmp_path, monkeypatch):
    monkeypatch.setenv("XNCAPS_DATA", "/e")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    e, c = (type(tmp_path)(name) for name in ("/e", "/c/xncaps"))
    assert search_folders(tmp_path) == search_folders(str(tmp_path)) == [tmp_path, e, c]
    assert search_folders(None) == [e, c]
    monkeypatch.setenv("XNCAPS_DATA", "")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert search_folders(None) == [tmp_path / ".cache/xncaps"]


@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("form", [PLAIN, PACKED], ids=["plain", "gz"])
def test_the_first_folder_that_has_it_counts(home, first, form):
    put(home / FOLDERS[first], form)
    for later in FOLDERS[first + 1 :]:
        put(home / later / "mnist", form, change=b"?")
    assert_is_the_small_set(load_mnist("train", home / "own"))


@pytest.mark.parametrize("form", [PLAIN, PACKED], ids=["plain", "gz"])
@pytest.mark.parametrize("place", ["mnist", "MNIST/raw", "."])
def test_every_place_in_a_folder(home, place, form):
    put(home / "environment" / place, form)
    assert_is_the_small_set(load_mnist("train"))


def test_a_bad_file_is_refused_and_stays_though_a_good_one_follows(home):
    put(home / "own/mnist", dict.fromkeys(PLAIN, b"bad"))
    put(home / "environment", PLAIN)
    path = home / "own/mnist/train-images-idx3-ubyte"
    assert refused(RunError, load_mnist, "train", home / "own") == (
        f"{path}: not the published MNIST train-images-idx3-ubyte: its content has SHA-256 "
        f"{hashlib.sha256(b'bad').hexdigest()[:16]}..., expected "
        f"{hashlib.sha256(PLAIN['train-images-idx3-ubyte']).hexdigest()[:16]}.... Replace the file "
        "or move it away, and it will be looked for elsewhere or downloaded."
    )
    assert path.read_bytes() == b"bad"


def test_a_directory_with_the_name_of_a_file_is_passed_by(home):
    for name in PACKED:
        (home / "own/mnist" / name).mkdir(parents=True)
    put(home / "environment", PACKED)
    assert_is_the_small_set(load_mnist("train", home / "own"))


@pytest.mark.parametrize("name", ["gone", "a file", "n" * 300])
def test_a_data_dir_that_is_no_folder(home, name):
    (home / "a file").write_text("")
    told = refused(InputError, load_mnist, "train", home / name)
    assert told == f"data: data_dir must be a folder; got {str(home / name)!r}."


@pytest.mark.parametrize("name", ["gone", "a file", "n" * 300])
def test_an_environment_folder_that_is_none_is_passed_by(home, monkeypatch, name):
    (home / "a file").write_text("")
    monkeypatch.setenv("XNCAPS_DATA", str(home / name))
    put(home / "caches/xncaps", PACKED)
    assert_is_the_small_set(load_mnist("train"))


def test_nothing_anywhere(home, nowhere):
    looked = ", ".join(str(home / name) for name in FOLDERS)
    assert refused(RunError, load_mnist, "train", home / "own") == (
        f"train-images-idx3-ubyte.gz: not found in {looked}, and not downloaded ({nowhere}: "
        f"Connection refused). {HINT}"
    )


def test_mnist_is_downloaded_once_into_the_cache(home, server, monkeypatch):
    monkeypatch.setattr(idx, "_MIRRORS", (f"http://{server.host}/x/", f"http://{server.host}/y/"))
    for name, content in PACKED.items():
        server.url(f"/x/{name}", whole(b"wrong"))
        server.url(f"/y/{name}", whole(content))
    for _ in range(2):
        assert_is_the_small_set(load_mnist("train", home / "own"))
    assert [path for path, _ in server.asked] == [f"/{m}/{name}" for name in PACKED for m in "xy"]
    kept = sorted(path.name for path in (home / "caches/xncaps/mnist").iterdir())
    assert kept == sorted([*PACKED, *(f"{name}.corrupt" for name in PACKED)])
    assert list((home / "own").iterdir()) == list((home / "environment").iterdir()) == []
