"""The same run with several seeds, and what they come to."""

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from xncaps.errors import InputError, RunError, brief, message
from xncaps.system import write_whole
from xncaps.training.config import Config, differences
from xncaps.training.run import read_json
from xncaps.training.stopping import StoppedError, StopRequests

NAME = "seeds.json"


@dataclass(frozen=True)
class SeedsResult:
    """The test accuracies of several seeds.

    >>> str(SeedsResult({0: 0.97, 1: 0.99}))
    '98.00% +- 1.41% over 2 seeds (0: 97.00%, 1: 99.00%)'
    """

    accuracies: dict[int, float]

    @property
    def mean(self) -> float:
        return fmean(self.accuracies.values())

    @property
    def deviation(self) -> float:
        """The sample standard deviation; NaN for one seed."""
        values = list(self.accuracies.values())
        return stdev(values) if len(values) > 1 else math.nan

    def __str__(self) -> str:
        each = ", ".join(f"{seed}: {value:.2%}" for seed, value in self.accuracies.items())
        count = len(self.accuracies)
        spread = f" +- {self.deviation:.2%}" if count > 1 else ""
        return f"{self.mean:.2%}{spread} over {count} seed{'s' * (count > 1)} ({each})"

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        deviation = self.deviation if len(self.accuracies) > 1 else None
        return {"accuracies": self.accuracies, "mean": self.mean, "deviation": deviation}


def parse_seeds(text: str) -> list[int]:
    """The seeds in a text such as ``0-4`` or ``1,3,8``.

    >>> parse_seeds("0-2,7")
    [0, 1, 2, 7]
    """
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        ends = (first, last) if dash else (first,)
        if not all(end.isdecimal() and len(end) <= 10 for end in ends):
            raise InputError(message("train", "seeds", "look like 0-4 or 0,1,2", brief(text)))
        span = range(int(first), int(last or first) + 1)
        if not span or len(span) > 1000:
            raise InputError(
                message("train", "seeds", "be a rising range of up to 1000", repr(text))
            )
        seeds += span
    if len(set(seeds)) < len(seeds):
        raise InputError(message("train", "seeds", "name each seed once", repr(text)))
    return seeds


def train_seeds(
    config: Config,
    seeds: list[int],
    out: Path,
    train_one: Callable[[Config, Path, bool], float],
    *,
    resume: bool = False,
    writer: bool = True,
    stops: StopRequests | None = None,
    go_on: str = "",
) -> SeedsResult:
    """Run each seed in a sub-folder of ``out``; seeds that have ended are not run again.

    Args:
        config: of the runs; its seed is not looked at.
        seeds: the seeds.
        out: the folder.
        train_one: trains one configuration in a folder, going on there if told so; returns the
            test accuracy.
        resume: go on in ``out``.
        writer: whether this process writes ``seeds.json``.
        stops: notes that the process is asked to end; no further seed is begun then.
        go_on: the command that goes on.
    """
    plan = {"seeds": seeds, "config": replace(config, seed=0).to_dict()}
    if writer:
        _ready(out, plan, resume)
    accuracies = {}
    try:
        for seed in seeds:
            if stops is not None and stops.asked:
                raise StoppedError(f"stopped before seed {seed}. Go on with: {go_on}")
            folder = out / f"seed-{seed}"
            going_on = resume and (folder / "config.json").exists()
            accuracies[seed] = train_one(replace(config, seed=seed), folder, going_on)
    except Exception:
        if writer and sorted(os.listdir(out)) == [NAME]:  # nothing has been done yet
            (out / NAME).unlink()
            out.rmdir()
        raise
    result = SeedsResult(accuracies)
    if writer:
        write_whole(out / NAME, _json({**plan, **result.to_dict()}))
    return result


def _ready(out: Path, plan: dict[str, Any], resume: bool) -> None:
    if resume and (out / NAME).exists():
        saved = read_json(out / NAME)
        lines = differences({name: saved.get(name) for name in plan}, plan)
        if lines:
            raise InputError(
                f"train: {out} cannot go on with something else than it began with: "
                f"{'; '.join(lines)}."
            )
        return
    if out.exists() and (not out.is_dir() or any(os.scandir(out))):
        hint = f"Go on with it by --resume {out}, or choose another --out."
        got = f"{str(out)!r}, which exists"
        raise InputError(message("train", "out", "be a new folder", got, hint))
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / NAME, _json(plan))


def read_plan(out: Path) -> tuple[Config, list[int]]:
    """The configuration and the seeds that a folder was begun with."""
    saved = read_json(out / NAME)
    try:
        return Config.from_dict(saved["config"]), [int(seed) for seed in saved["seeds"]]
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{out / NAME}: not what a run writes ({error}).") from None


def _json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()
