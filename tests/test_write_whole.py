"""A file is written whole or not at all: the order of what the disk is told."""

import os
import stat
from pathlib import Path

import pytest

from xncaps.system import write_whole


def test_the_file_is_on_the_disk_before_it_takes_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    sync, rename = os.fsync, Path.replace

    def note_sync(handle: int) -> None:
        kind = "folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file"
        told.append(f"sync {kind}, {len(list(tmp_path.glob('name')))} there")
        sync(handle)

    def note_rename(path: Path, target: Path) -> Path:
        told.append(f"rename {path.parent.name == target.parent.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "replace", note_rename)
    write_whole(tmp_path / "name", b"content")
    assert told == ["sync file, 0 there", "rename True", "sync folder, 1 there"]
    assert (tmp_path / "name").read_bytes() == b"content"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    write_whole(tmp_path / "name", b"old")

    def fail(handle: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(type(error)) as caught:
        write_whole(tmp_path / "name", b"new")
    if isinstance(error, OSError):
        assert str(caught.value) == f"[Errno 28] No space left on device: '{tmp_path / 'name'}'"
    assert [path.name for path in tmp_path.iterdir()] == ["name"]
    assert (tmp_path / "name").read_bytes() == b"old"
