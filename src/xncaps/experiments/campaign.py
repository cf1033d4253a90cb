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

from xncaps.errors import InputError
from xncaps.experiments.experiment import Experiment, Planned
from xncaps.experiments.rows import Row, append_row, read_accuracy, row_of
from xncaps.training.config import differences
from xncaps.training.display import Display
from xncaps.training.finish import Result
from xncaps.training.log import read_rows
from xncaps.training.loop import DivergedError
from xncaps.training.processes import LockedError, only_writer
from xncaps.training.stopping import StoppedError, StopRequests
from xncaps.training.train import train


@dataclass
class Outcome:
    """What became of the runs of a campaign."""

    before: list[Planned] = field(default_factory=list)
    done: list[Row] = field(default_factory=list)
    elsewhere: list[Planned] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """As in ``3 runs trained, 2 had a row, 1 is under way in another process``."""
        parts = [f"{len(self.done)} run{'s' * (len(self.done) != 1)} trained"]
        parts += [f"{len(self.before)} had a row"] if self.before else []
        parts += [f"{len(self.elsewhere)} under way elsewhere"] if self.elsewhere else []
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
    with StopRequests() as stops:
        for run in runs:
            if stops.asked:
                raise StoppedError(f"stopped before {run}. Go on with: {go_on}")
            path = folder / run.experiment / run.variant / f"seed-{run.seed}"
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with only_writer(path.with_name(f".{path.name}.lock")):
                    if has_row(results, run):
                        outcome.before.append(run)
                        continue
                    display.say(f"-- {run}")
                    row = None if experiment.tuning else _same_elsewhere(results, run)
                    if row is None:
                        result = train(
                            run.config,
                            path,
                            resume=(path / "config.json").exists(),
                            data_dir=data_dir,
                            display=display,
                            stops=stops,
                            go_on=go_on,
                        )
                        row = row_of(run, result.values, _curve(result), experiment.tuning)
                    append_row(results, row)
                    outcome.done.append(row)
                    display.say(f"-- {run}: {told(row)}")
            except LockedError:
                outcome.elsewhere.append(run)
            except DivergedError as error:  # one run's numbers: the others may go well
                outcome.failed[str(run)] = str(error)
                display.say(f"-- {run}: {error}")
    return outcome


def has_row(results: Path, run: Planned) -> bool:
    """Whether a run has ended; refuses a row of the same name that was trained otherwise."""
    row = find_row(results, run)
    if row is None:
        return False
    lines = differences(row.config.to_dict(), run.config.to_dict())
    if lines:
        raise InputError(
            f"{run}: its row in {results} was trained otherwise ({'; '.join(lines)}). "
            "Give the experiment another name, or remove the row."
        )
    return True


def find_row(results: Path, run: Planned) -> Row | None:
    """The row of a run, if it has ended."""
    return next((row for row in read_accuracy(results) if row.key == run.key), None)


def _same_elsewhere(results: Path, run: Planned) -> Row | None:
    """The row of a run if another experiment has trained the very same configuration."""
    for row in read_accuracy(results):
        if row.accuracy is not None and row.config == run.config:
            return replace(row, experiment=run.experiment, variant=run.variant)
    return None


def repeat(run: Planned, results: Path, data_dir: Path | None, display: Display) -> bool:
    """Train a run that has a row once more; returns whether the same came out.

    Only the machine, the threads and the versions of the row promise that, so elsewhere whatever
    comes out is told and taken.
    """
    row = find_row(results, run)
    if row is None or not has_row(results, run):
        raise InputError(f"{run}: has no row in {results} yet.")
    with TemporaryDirectory() as folder:
        result = train(run.config, Path(folder) / "run", data_dir=data_dir, display=display)
        new = row_of(run, result.values, _curve(result), tuning=row.accuracy is None)
    same = _figures(new) == _figures(row)
    display.say(f"-- {run}: row {told(row)}, again {told(new)}: {'the same' if same else 'OTHER'}")
    lines = [
        f"{name} {getattr(row, name)} -> {getattr(new, name)}"
        for name in ("cpu", "threads", "torch", "xncaps", "kernel")
        if getattr(row, name) != getattr(new, name)
    ]
    if lines and not same:
        display.say(f"the row was measured otherwise, so it may differ: {'; '.join(lines)}")
    return same or bool(lines)


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
