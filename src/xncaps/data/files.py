"""Where the files of a published data set are: looked for, downloaded, and never trusted unchecked.

A file is looked for in the folder the user names, in ``$XNCAPS_DATA``, and in the cache; if it is
in none of them it is downloaded into the cache. A file whose content is not the published one is
neither used nor deleted.
"""

import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from xncaps.errors import InputError, RunError, message

Progress = Callable[[str, int, int | None], None]
"""Called with a file's name, the bytes that are there, and the bytes there will be, if known."""

CHUNK = 1 << 20
TIMEOUT = 30.0


@dataclass(frozen=True)
class Archive:
    """A published file: its name, the md5 its authors publish, and where it lies."""

    name: str
    md5: str
    urls: tuple[str, ...]


def cache_folder() -> Path:
    """Where downloads are kept: ``$XDG_CACHE_HOME/xncaps``, by default ``~/.cache/xncaps``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "xncaps"


def search_folders(data_dir: str | os.PathLike[str] | None) -> list[Path]:
    """The folders data are looked for in, the user's first."""
    folders = []
    if data_dir is not None:
        folder = Path(data_dir)
        if not os.path.isdir(folder):
            raise InputError(message("data", "data_dir", "be a folder", repr(str(folder))))
        folders.append(folder)
    if os.environ.get("XNCAPS_DATA"):
        folders.append(Path(os.environ["XNCAPS_DATA"]))
    return [*folders, cache_folder()]


def find(folders: Iterable[Path], places: Sequence[str]) -> Path | None:
    """The first of these places that is a file, folder by folder."""
    for folder in folders:
        for place in places:
            path = folder / place
            if os.path.isfile(path):
                return path
    return None


def find_or_fetch(
    archive: Archive, folders: Sequence[Path], places: Sequence[str], progress: Progress | None
) -> Path:
    """The path of a published file, downloaded into the last of the folders if need be."""
    path = find(folders, places)
    return path or fetch(archive, folders[-1] / places[0], folders, progress)


def check_content(path: Path, name: str, content: bytes | memoryview, sha256: str) -> None:
    """Refuse content that is not the published one."""
    got = hashlib.sha256(content).hexdigest()
    if got != sha256:
        raise RunError(
            f"{path}: not the published {name}: its content has SHA-256 {got[:16]}..., expected "
            f"{sha256[:16]}.... Replace the file or move it away, and it will be looked for "
            "elsewhere or downloaded."
        )


def fetch(
    archive: Archive, path: Path, searched: Sequence[Path], progress: Progress | None = None
) -> Path:
    """Download a file to ``path``, going on where an earlier download stopped.

    The bytes collect in ``path.part``; they become ``path`` when their md5 is the published one,
    and ``path.corrupt`` when it is not.
    """
    part = path.with_name(path.name + ".part")
    problems = []
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for url in archive.urls:
            try:
                _download(url, part, archive.name, progress)
            except (OSError, HTTPException, ValueError) as error:
                # An HTTPError has a file name too: its address.
                if (
                    isinstance(error, OSError)
                    and not isinstance(error, urllib.error.URLError)
                    and (error.filename is not None)
                ):
                    raise  # the disk, not the network
                problems.append(f"{url.split('/')[2]}: {_reason(error)}")
                continue
            got = _md5(part)
            if got == archive.md5:
                part.replace(path)
                return path
            corrupt = _unused(path.with_name(path.name + ".corrupt"))
            part.replace(corrupt)
            host = url.split("/")[2]
            problems.append(f"{host}: md5 {got}, expected {archive.md5}, kept as {corrupt}")
    except OSError as error:
        problems.append(f"{error.filename}: {_reason(error)}")
    looked = ", ".join(str(folder) for folder in searched)
    raise RunError(
        f"{archive.name}: not found in {looked}, and not downloaded ({'; '.join(problems)}). "
        "Put the file into one of these folders, or name its folder with --data-dir; "
        "a download goes on where it stopped."
    )


def _download(url: str, part: Path, name: str, progress: Progress | None) -> None:
    start = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "xncaps"}
    if start:
        headers["Range"] = f"bytes={start}-"
    request = urllib.request.Request(url, headers=headers)
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416 and start:  # nothing is missing: the checksum decides
            return
        raise
    with response:
        resumed = response.status == 206
        done = start if resumed else 0
        length = response.headers.get("Content-Length")
        total = None if length is None else done + int(length)
        with part.open("ab" if resumed else "wb") as file:
            while chunk := response.read(CHUNK):
                file.write(chunk)
                done += len(chunk)
                if progress:
                    progress(name, done, total)
    if total is not None and done < total:
        raise ValueError(f"the connection ended after {done:,} of {total:,} bytes")


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code}"
    reason = getattr(error, "reason", None) or error
    text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
    return " ".join(str(text).split())


def _unused(path: Path) -> Path:
    """The path, or the next with a number that nothing has yet."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}.{number}")
    return free


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()
