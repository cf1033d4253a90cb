"""Figures in CSV files: a row for each, added as they come."""

import csv
import io
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from xncaps.errors import RunError

CUT = " (cut short)"
"""Put behind a row that a crash has cut short; nothing else tells, if it was in its last cell."""


def append_rows(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    """Add rows to a CSV file, which gets its header when it is made.

    Each row is one whole write to the end of the file, so that runs that end at the same moment do
    not mix; a row that a crash has cut short stays a line of its own, which readers pass over. No
    cell may hold a line break.
    """
    if not path.exists():
        _make(path, columns)
    with path.open("rb") as binary:
        first = binary.readline().decode("utf-8", "replace")
    header = next(csv.reader([first]), [])
    if header != [*columns]:
        raise RunError(f"{path}: has other columns than this version writes. Move it away first.")
    handle = os.open(path, os.O_RDWR | os.O_APPEND)
    try:
        size = os.fstat(handle).st_size
        os.lseek(handle, size - 1, os.SEEK_SET)
        if os.read(handle, 1) != b"\n":
            _write(handle, f"{CUT}\n".encode())
        for row in rows:
            _write(handle, _line([_cell(row[name]) for name in columns]))
        os.fsync(handle)
    finally:
        os.close(handle)


def read_rows(path: Path) -> list[dict[str, str]]:
    """All whole rows of a CSV file, as texts by column."""
    return list(read_numbered(path).values())


def read_numbered(path: Path) -> dict[int, dict[str, str]]:
    """All whole rows of a CSV file, by the numbers of their lines.

    Rows that a crash has cut short are passed over; other lines that are no rows are refused.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise RunError(f"{path}: cannot be read as CSV ({error}).") from None
    header: list[str] = []
    rows: dict[int, dict[str, str]] = {}
    # What follows the last line break is nothing, or a row that was cut short.
    for number, line in enumerate(lines[:-1], start=1):
        if not line.strip() or line.endswith(CUT):
            continue
        try:
            cells = next(csv.reader([line], strict=True))
        except csv.Error as error:
            raise RunError(f"{path}: line {number} cannot be read as CSV ({error}).") from None
        if not header:
            header = cells
        elif len(cells) != len(header):
            what = f"line {number} has {len(cells)} cells where the first has {len(header)}."
            raise RunError(f"{path}: {what}")
        else:
            rows[number] = dict(zip(header, cells, strict=True))
    return rows


def _write(handle: int, content: bytes) -> None:
    """Write all of it: a disk that is nearly full takes a part first, and then complains."""
    while content:
        content = content[os.write(handle, content) :]


def _make(path: Path, columns: Sequence[str]) -> None:
    """Make the file with its header at once: nobody sees it without, and nobody makes it twice."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        os.write(handle, _line(columns))
        os.close(handle)
        os.chmod(name, 0o644)
        with suppress(FileExistsError):
            os.link(name, path)
    finally:
        os.unlink(name)


def _line(cells: Sequence[str]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
