"""One row for each run that has ended: what was trained, how it did, where and with what."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from xncaps.bench import machine
from xncaps.errors import RunError, brief
from xncaps.experiments.experiment import NAMES, Planned
from xncaps.results import append_rows, read_numbered
from xncaps.training import Config

NAME = "accuracy.csv"
MOST = 1e15
"""More than any figure of a run."""


@dataclass(frozen=True)
class Row:
    """A run that has ended.

    Args:
        experiment, variant, seed: which run it was.
        accuracy: on the test images: top-1, or both digits of a pair right; None for a run that
            chose settings.
        per_digit, top2: of pairs: the share of digits that were right, and the paper's top-2.
        validation: accuracy on the held-out training images.
        curve: accuracy on the held-out images after each epoch.
        params, head_params: executed parameters of the network, and of its head.
        minutes: of training, by the clock.
        cpu_minutes: of training, summed over the processor's cores.
        config: of the run.
        date, commit, cpu, threads, python, torch, xncaps, kernel: when, where and with what.
    """

    experiment: str
    variant: str
    seed: int
    accuracy: float | None
    per_digit: float | None
    top2: float | None
    validation: float | None
    curve: tuple[float, ...]
    params: int
    head_params: int
    minutes: float
    cpu_minutes: float
    config: Config
    date: str
    commit: str
    cpu: str
    threads: int
    python: str
    torch: str
    xncaps: str
    kernel: str

    @property
    def key(self) -> tuple[str, str, int]:
        """What tells it from all others."""
        return self.experiment, self.variant, self.seed


COLUMNS = tuple(field.name for field in fields(Row))
FACTS = COLUMNS[-8:]
"""The columns of :func:`facts`."""


def row_of(run: Planned, result: dict[str, Any], curve: tuple[float, ...], tuning: bool) -> Row:
    """The row of a run that has just ended, from what its ``result.json`` says."""
    try:
        test = {} if tuning else result["test"]
        return Row(
            *run.key,
            accuracy=test.get("exact_pair", test.get("top1")),
            per_digit=test.get("per_digit"),
            top2=test.get("paper_top2"),
            validation=result["validation_accuracy"],
            curve=curve,
            params=result["params"],
            head_params=result["head_params"],
            minutes=result["seconds"] / 60,
            cpu_minutes=result["cpu_seconds"] / 60,
            config=run.config,
            # The run may have ended in another process than the one that writes its row.
            **{
                **facts(),
                **{name: result[name] for name in ("threads", "commit", "cpu", "kernel")},
            },
        )
    except KeyError as error:
        hint = "Remove the folder of the run to train it anew."
        raise RunError(f"{run}: its result.json lacks {error}. {hint}") from None


def facts() -> dict[str, Any]:
    """What a figure depends on besides its configuration: when, where and with what it came."""
    known = machine.facts()
    return {name: known[name] for name in FACTS}


def ready(folder: Path) -> None:
    """Make sure that rows can be written there, before hours are spent on them."""
    folder.mkdir(parents=True, exist_ok=True)
    append_rows(folder / NAME, COLUMNS, [])


def append_row(folder: Path, row: Row) -> None:
    """Add a row to the folder's file, in one whole write."""
    values = {name: getattr(row, name) for name in COLUMNS}
    values["curve"] = " ".join(f"{value:.6g}" for value in row.curve)
    values["config"] = json.dumps(row.config.to_dict(), separators=(",", ":"))
    folder.mkdir(parents=True, exist_ok=True)
    append_rows(folder / NAME, COLUMNS, [values])


def read_accuracy(folder: Path) -> list[Row]:
    """The rows of a folder, each run's newest, in the order in which they first came."""
    path = folder / NAME
    if not path.exists():
        return []
    rows: dict[tuple[str, str, int], Row] = {}
    for number, line in read_numbered(path).items():
        try:
            row = _parse(line)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            what = f"line {number} is not what an experiment writes ({error})."
            raise RunError(f"{path}: {what}") from None
        rows[row.key] = row
    return list(rows.values())


def known_rows(folder: Path) -> list[Row]:
    """The rows of a folder, which must have some."""
    rows = read_accuracy(folder)
    if not rows:
        raise RunError(f"{folder}: holds no rows of experiments. Run one of recipes/ first.")
    return rows


def _parse(line: dict[str, str]) -> Row:
    for name, text in line.items():
        if not text.isprintable():
            raise ValueError(f"{name} is {brief(text)}")
    kinds: dict[str, Any] = {
        "variant": _name,
        "experiment": _name,
        "curve": lambda text: tuple(map(_share, text.split())),
        "config": _config,
        **dict.fromkeys(("seed", "params", "head_params", "threads"), _count),
        **dict.fromkeys(("accuracy", "per_digit", "top2", "validation"), _share_or_none),
        **dict.fromkeys(("minutes", "cpu_minutes"), duration),
    }
    return Row(**{name: kinds.get(name, str)(line[name]) for name in COLUMNS})


def _config(text: str) -> Config:
    config = Config.from_dict(json.loads(text))
    for name in (config.data, config.model, config.head or ""):
        if not name.isprintable():
            raise ValueError(f"{brief(name)} is no name")
    return config


def _name(text: str) -> str:
    if not NAMES.fullmatch(text):
        raise ValueError(f"{brief(text)} is no name")
    return text


def _count(text: str) -> int:
    value = int(text)
    if not 0 <= value < MOST:
        raise ValueError(f"{brief(text)} is no count")
    return value


def duration(text: str) -> float:
    """A time, as a text of a file."""
    value = float(text)
    if not 0 <= value < MOST:
        raise ValueError(f"{brief(text)} is no time")
    return value


def _share_or_none(text: str) -> float | None:
    return _share(text) if text else None


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError(f"{text!r} is no share")
    return value
