"""Rows of experiments in their file: whole, or not there."""

import resource
import signal
from pathlib import Path

import pytest

from experiment_rows import a_row
from xncaps.errors import RunError
from xncaps.experiments import read_accuracy
from xncaps.experiments.latency import Latency, append_latencies, read_latencies
from xncaps.experiments.rows import append_row


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    rows = [
        a_row(),
        a_row(variant="b", cpu='a, "b"', per_digit=0.75, top2=1.0),
        a_row(seed=3, accuracy=None, validation=None, curve=()),
    ]
    for row in rows:
        append_row(tmp_path, row)
    assert read_accuracy(tmp_path) == rows
    append_row(tmp_path, a_row(accuracy=0.75))  # the newest row of a run counts
    assert read_accuracy(tmp_path) == [a_row(accuracy=0.75), *rows[1:]]
    assert read_accuracy(tmp_path / "none") == []


def test_a_row_that_was_cut_short_is_passed_over(tmp_path: Path) -> None:
    """Wherever it was cut, in a quoted cell too."""
    append_row(tmp_path, a_row())
    path = tmp_path / "accuracy.csv"
    one = path.read_bytes()
    append_row(tmp_path, a_row(seed=1, kernel="portable"))
    two = path.read_bytes()
    for end in [*range(len(one) + 1, len(two), 7), *range(len(two) - 12, len(two))]:
        path.write_bytes(two[:end])
        assert read_accuracy(tmp_path) == [a_row()]
        append_row(tmp_path, a_row(seed=2))
        assert read_accuracy(tmp_path) == [a_row(), a_row(seed=2)]


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    """The first write takes a part of the row, the next one none."""
    append_row(tmp_path, a_row())
    size = (tmp_path / "accuracy.csv").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            append_row(tmp_path, a_row(seed=1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert read_accuracy(tmp_path) == [a_row()]
    append_row(tmp_path, a_row(seed=1))
    assert read_accuracy(tmp_path) == [a_row(), a_row(seed=1)]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *(("0.5", "half"), ("0.5", "nan"), ("0.5", "50"), ("0.125", "-1"), (",7,", ",,")),
        *(('""epochs""', '""epoch""'), ("{", ""), ("{", "[" * 100_000), ("accuracy", "score")),
        *((",7,", ",-7,"), (",7,", f",{'7' * 300},"), ("1.25", "inf"), ("1.25", "nan")),
        *((",dr,", ",../up,"), (",dr,", ",\x1b[31m,"), ('""dr""', '""\\u001b[31m""')),
        *(("1.25", "-1"), (",x,x", ",\u202ex,x")),
    ],
)
def test_a_damaged_row_is_named(tmp_path: Path, old: str, new: str) -> None:
    append_row(tmp_path, a_row())
    path = tmp_path / "accuracy.csv"
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(RunError, match=r"accuracy\.csv: line 2 is not what an experiment writes"):
        read_accuracy(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("mine,dr,", "mine,dr", "line 2 has 20 cells where the first has 21."),
        ("1.25,", "1.25,,", "line 2 has 22 cells where the first has 21."),
        (",kernel\n", "\n", "line 2 has 21 cells where the first has 20."),
        ("mine,", '"mine,', "line 2 cannot be read as CSV (',' expected after '\"')."),
    ],
)
def test_a_line_that_no_crash_has_cut_is_not_passed_over(
    tmp_path: Path, old: str, new: str, says: str
) -> None:
    """It would be missing from a mean, and be trained again."""
    append_row(tmp_path, a_row())
    path = tmp_path / "accuracy.csv"
    path.write_text(path.read_text().replace(old, new, 1) + "\n")
    with pytest.raises(RunError) as caught:
        read_accuracy(tmp_path)
    assert str(caught.value) == f"{path}: {says}"


def test_empty_lines_are_no_rows(tmp_path: Path) -> None:
    append_row(tmp_path, a_row())
    path = tmp_path / "accuracy.csv"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n") + b"\r\n \n\n")
    assert read_accuracy(tmp_path) == [a_row()]


def test_what_is_no_text_is_one_line(tmp_path: Path) -> None:
    append_row(tmp_path, a_row())
    path = tmp_path / "accuracy.csv"
    path.write_bytes(path.read_bytes() + b"\xff\xfe")
    with pytest.raises(RunError, match=r"accuracy\.csv: cannot be read as CSV"):
        read_accuracy(tmp_path)


@pytest.mark.parametrize(
    ("old", "new"), [("12.5", "fast"), ("variant", "head"), (",1,12", ",x,12"), ("12.5", "inf")]
)
def test_a_damaged_latency_is_named(tmp_path: Path, old: str, new: str) -> None:
    append_latencies(tmp_path, [Latency("mine", "fc", 1, 12.5)])
    path = tmp_path / "latency.csv"
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(RunError, match=r"latency\.csv: line 2 is not what bench heads writes"):
        read_latencies(tmp_path)
