"""Runs experiments: a row for each run that ends, and none is run twice.

What another experiment has trained with the same configuration is taken over from its row.

A campaign may be killed at any moment and started again: runs that have a row are passed over, the
one that was cut off goes on from its checkpoint. It may also be started several times at once; each
process takes runs that no other one holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from xncaps.errors import InputError, message
from xncaps.experiments.experiment import Experiment, Planned
from xncaps.experiments.rows import Row, append_row, read_accuracy, ready, row_of
from xncaps.system import commit
from xncaps.training.config import differences
from xncaps.training.display import Display
from xncaps.training.finish import Result
from xncaps.training.log import read_rows
from xncaps.training.loop import DivergedError
from xncaps.training.processes import LockedError, only_writer
from xncaps.training.run import Folder, read_config
from xncaps.training.stopping import StoppedError, StopRequests
from xncaps.training.train import train


@dataclass
class Outcome:
    """What became of the runs of a campaign."""

    trained: int = 0
    taken_over: int = 0
    before: int = 0
    elsewhere: int = 0
    failed: list[Planned] = field(default_factory=list)

    def __str__(self) -> str:
        """As in ``3 runs trained, 2 had a row, 1 under way elsewhere``."""
        parts = [f"{self.trained} run{'s' * (self.trained != 1)} trained"]
        parts += [f"{self.taken_over} taken over"] if self.taken_over else []
        parts += [f"{self.before} had a row"] if self.before else []
        parts += [f"{self.elsewhere} under way elsewhere"] if self.elsewhere else []
        parts += [f"{len(self.failed)} failed"] if self.failed else []
        return ", ".join(parts)


def run_experiment(
    experiment: Experiment,
    runs: Sequence[Planned],
    results: Path,
    folder: Path,
    *,
    data_dir: Path | None = None,
    display: Display | None = None,
    go_on: str = "",
) -> Outcome:
    """Train what has no row yet.

    Args:
        experiment: the experiment.
        runs: those of its runs that are wanted.
        results: the folder of the rows.
        folder: the folder of the runs; a run's own is ``experiment/variant/seed-N`` in it.
        data_dir: a folder to look for data in first.
        display: told how the runs go.
        go_on: the command that goes on, named when it stops.
    """
    display = display or Display()
    outcome = Outcome()
    commit()  # of the code that is loaded now
    ready(results)
    with StopRequests() as stops:
        for run in runs:
            if stops.asked:
                raise StoppedError(f"stopped before {run}. Go on with: {go_on}")
            path = folder / run.experiment / run.variant / f"seed-{run.seed}"
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with only_writer(path.with_name(f".{path.name}.lock")):
                    if find_row(results, run, experiment.tuning):
                        outcome.before += 1
                        continue
                    display.say(f"-- {run}")
                    row = None if experiment.tuning else _same_elsewhere(results, run)
                    if row is not None:
                        outcome.taken_over += 1
                    else:
                        check_begun(run, path)
                        result = train(
                            run.config,
                            path,
                            resume=(path / "config.json").exists(),
                            data_dir=data_dir,
                            display=display,
                            stops=stops,
                            go_on=go_on,
                            exact=True,
                            test=not experiment.tuning,
                        )
                        row = row_of(run, result.values, _curve(result), experiment.tuning)
                        outcome.trained += 1
                    # Somebody with another folder of runs may have been here meanwhile.
                    if not find_row(results, run, experiment.tuning):
                        append_row(results, row)
                    display.say(f"-- {run}: {told(row)}")
            except LockedError:
                outcome.elsewhere += 1
            except DivergedError as error:  # one run's numbers: the others may go well
                outcome.failed.append(run)
                display.say(f"-- {run}: {error}")
    return outcome


def find_row(results: Path, run: Planned, tuning: bool) -> Row | None:
    """The row of a run, if it has ended; one of the same name that is of another run is refused."""
    row = next((row for row in read_accuracy(results) if row.key == run.key), None)
    if row is None:
        return None
    lines = differences(row.config.to_dict(), run.config.to_dict())
    if (row.accuracy is None) != tuning:
        lines.append(f"tuning: {row.accuracy is None} -> {tuning}")
    if lines:
        requirement = f"be that of its row in {results}"
        hint = "Give the experiment another name, or remove the row."
        raise InputError(message(str(run), "the recipe", requirement, "; ".join(lines), hint))
    return row


def check_begun(run: Planned, path: Path) -> None:
    """Refuse to go on in a folder that was begun with another recipe."""
    if (path / "config.json").exists():
        begun = read_config(Folder(path)).to_dict()
        lines = differences(begun, run.config.to_dict())
        if lines:
            hint = "Remove the folder, or give the experiment another name."
            got = "; ".join(lines)
            raise InputError(message(str(run), "the recipe", f"be that of {path}", got, hint))


def _same_elsewhere(results: Path, run: Planned) -> Row | None:
    """The row of a run if another experiment has trained the very same configuration."""
    for row in read_accuracy(results):
        if row.accuracy is not None and row.config.to_dict() == run.config.to_dict():
            return replace(row, experiment=run.experiment, variant=run.variant)
    return None


def repeat(
    experiment: Experiment,
    runs: Sequence[Planned],
    results: Path,
    *,
    threads: int | None = None,
    data_dir: Path | None = None,
    display: Display | None = None,
    go_on: str = "",
) -> bool:
    """Train runs that have a row once more; returns whether the same came out of each.

    Only the machine, the threads and the versions of a row promise that, so where one of these is
    another, whatever comes out is told and taken.

    Args:
        experiment, runs, results, data_dir, display, go_on: as in :func:`run_experiment`.
        threads: to use; as many as the row tells if not given.
    """
    display = display or Display()
    rows = [find_row(results, run, experiment.tuning) for run in runs]
    missing = [str(run) for run, row in zip(runs, rows, strict=True) if row is None]
    if missing:
        got = f"none of {'; '.join(missing)}"
        raise InputError(message(experiment.name, "again", f"find rows in {results}", got))
    every = True
    for run, row in zip(runs, rows, strict=True):
        if row is None:
            continue
        torch.set_num_threads(threads or row.threads)
        with TemporaryDirectory() as folder:
            path = Path(folder) / "run"
            result = train(
                run.config,
                path,
                data_dir=data_dir,
                display=display,
                go_on=go_on,
                test=not experiment.tuning,
            )
            new = row_of(run, result.values, _curve(result), experiment.tuning)
        same = _figures(new) == _figures(row)
        verdict = "the same" if same else "OTHER"
        display.say(f"-- {run}: row {told(row)}, again {told(new)}: {verdict}")
        lines = [
            f"{name} {getattr(row, name)} -> {getattr(new, name)}"
            for name in ("cpu", "threads", "torch", "kernel")
            if getattr(row, name) != getattr(new, name)
        ]
        if lines and not same:
            display.say(f"the row was measured otherwise, so it may differ: {'; '.join(lines)}")
        if row.commit != new.commit and not same:
            display.say(f"the row is of commit {row.commit}, this is {new.commit}")
        every = every and (same or bool(lines))
    return every


def _figures(row: Row) -> list[str]:
    """What must come out again, as the file has it."""
    values = (row.accuracy, row.per_digit, row.top2, row.validation, *row.curve)
    return [f"{value:.6g}" for value in values if value is not None]


def told(row: Row) -> str:
    """What a run came to, in a few words."""
    if row.accuracy is not None:
        return f"{row.accuracy:.2%} of the test images"
    return "no held-out images" if row.validation is None else f"validation {row.validation:.2%}"


def _curve(result: Result) -> tuple[float, ...]:
    """The accuracy on the held-out images after each epoch."""
    values = (row["validation_accuracy"] for row in read_rows(result.folder.metrics))
    return tuple(value for value in values if value is not None)
