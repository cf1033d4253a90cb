"""Rows of figures: what a comparison gives, and the CSV file that keeps them."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from xncaps.bench.timing import Task, best_times
from xncaps.errors import RunError
from xncaps.results import append_rows, read_rows

FACTS = (
    *("date", "commit", "cpu", "threads", "python", "torch", "onnxruntime", "xncaps", "kernel"),
)

MAIN = {"inference", "training", "xnor"}
"""The groups that nearly all goals are of."""


@dataclass(frozen=True)
class Row:
    """One figure of one thing.

    Args:
        group: of the comparison.
        shape: sizes of what is compared, by name.
        layer: what is computed.
        batch: samples in a call.
        what: who computes it.
        us_per_sample: microseconds, of the fastest call.
        ratio: how many times as long it takes as ours in the same comparison.
        bound_us: what the machine allows at best for ours, microseconds a sample.
        memory_bytes: of the weights held (inference), or allocated in a step (training).
        difference: the largest difference of an output from the float layer's.
        note: why there is no figure.
    """

    group: str
    shape: str
    layer: str
    batch: int
    what: str
    us_per_sample: float | None = None
    ratio: float | None = None
    bound_us: float | None = None
    memory_bytes: int | None = None
    difference: float | None = None
    note: str = ""

    @property
    def share(self) -> float | None:
        """The part of the machine's own bound that it reaches."""
        if self.bound_us is None or not self.us_per_sample:
            return None
        return self.bound_us / self.us_per_sample

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON and CSV."""
        return {**asdict(self), "share_of_bound": self.share}


COLUMNS = (*FACTS, *(field.name for field in fields(Row)), "share_of_bound")


class Comparison:
    """Several ways to compute one thing, timed in one interleaved run.

    Args:
        group, shape, layer, batch: as in :class:`Row`.
        ours: the one that all ratios are taken of.
    """

    def __init__(self, group: str, shape: str, layer: str, batch: int, ours: str) -> None:
        self.key = (group, shape, layer, batch)
        self.ours = ours
        self.tasks: dict[str, Task] = {}
        self.notes: dict[str, str] = {}
        self.extras: dict[str, dict[str, Any]] = {}

    def add(
        self,
        what: str,
        call: Callable[[], object],
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
        **extras: Any,
    ) -> None:
        """Time this too; the extras are further columns of its row."""
        self.tasks[what] = Task(call, around)
        self.extras[what] = extras
        self.notes[what] = ""

    def skip(self, what: str, note: str, **extras: Any) -> None:
        """Say in place of a time why there is none."""
        self.notes[what] = note
        self.extras[what] = extras

    def rows(self, seconds: float) -> list[Row]:
        """Time all of them for about so many seconds."""
        times = best_times(self.tasks, seconds)
        ours = times.get(self.ours)
        batch = self.key[3]
        rows = []
        for what, note in self.notes.items():
            row = Row(*self.key, what, note=note, **self.extras[what])
            if what in times:
                ratio = None if ours is None else times[what] / ours
                row = replace(row, us_per_sample=1e6 * times[what] / batch, ratio=ratio)
            rows.append(row)
        return rows


def append_csv(path: Path, facts: Mapping[str, Any], rows: Iterable[Row]) -> None:
    """Add rows to a CSV file."""
    append_rows(path, COLUMNS, ({**facts, **row.to_dict()} for row in rows))


def read_newest(path: Path) -> list[tuple[dict[str, str], list[Row]]]:
    """The newest run of each processor and kernel in a CSV file: its facts, and its rows.

    A run of some groups only does not count where there is one of more.
    """
    lines = read_rows(path)
    if not lines:
        raise RunError(f"{path}: has no figures yet. Run: xncaps bench")
    kinds: dict[tuple[str, str], dict[str, list[dict[str, str]]]] = {}
    for line in lines:
        runs = kinds.setdefault((line["kernel"], line["cpu"]), {})
        runs.setdefault(line["date"], []).append(line)
    newest = []
    for _, runs in sorted(kinds.items()):
        most = max(len(MAIN & {line["group"] for line in run}) for run in runs.values())
        whole = [d for d, run in runs.items() if len(MAIN & {e["group"] for e in run}) == most]
        chosen = runs[max(whole)]
        newest.append(({name: chosen[0][name] for name in FACTS}, [_row(line) for line in chosen]))
    return newest


def _row(line: Mapping[str, str]) -> Row:
    kinds: dict[str, Callable[[str], Any]] = {
        **dict.fromkeys(("batch", "memory_bytes"), int),
        **dict.fromkeys(("us_per_sample", "ratio", "bound_us", "difference"), float),
    }
    names = [field.name for field in fields(Row)]
    values = {name: kinds.get(name, str)(line[name]) for name in names if line[name]}
    return Row(**{"shape": "", "layer": "", **values})
